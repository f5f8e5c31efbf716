"""The fixed work of both sides: models s, m and v, prompts, a reward, an adapter, as files that either side reads.

The models, prompts and reward are those of the file `work.py` (option --work). Run as a script with settings, it
writes one folder: model/ prompts.jsonl eval.jsonl reward.py adapter/ reward_model/.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from tests.benchmarks import measuring, processes

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS, KL_COEF, CLIP_EPS, LEARNING_RATE = 8, 8, 128, 0.04, 0.2, 1e-6
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
ROWS = 512  # prompts written


@dataclass(frozen=True)
class Shape:
    """A model of work.py: `size`, with another vocabulary or without early ends where a measurement needs it."""

    size: str
    vocabulary: int | None = None
    early_ends: bool = True

    @property
    def name(self) -> str:
        words = "" if self.vocabulary is None else f"-{self.vocabulary}"
        return self.size + words + ("" if self.early_ends else "-full")


def shape_of(size: str) -> Shape:
    """Completions of s and m end by themselves; those of v do not."""
    return Shape(size, early_ends=size != "v")


def prepare(shape: Shape, *, options: Namespace) -> Path:
    """The folder of a shape's files, made where it is not there yet."""
    folder = options.out / "work" / shape.name
    if not (folder / "done").is_file():
        print(f"building {shape.name} ...", flush=True)
        processes.run("fixed_work", {"shape": asdict(shape), "folder": str(folder)}, options=options)
    return folder


def load_work(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def registered(work: ModuleType, shape: Shape) -> str:
    """The shape's name in work.SHAPES, where it is added if it is not one of work.py's own."""
    work.SHAPES[shape.name] = (*work.SHAPES[shape.size][:-1], shape.vocabulary or work.SHAPES[shape.size][-1])
    return shape.name


def read_words_beside_qwen2() -> None:
    """transformers reads any tokenizer of a Qwen2 model as Qwen's own BPE; the models of work.py have words."""
    from transformers.models.auto import tokenization_auto

    tokenization_auto.TOKENIZER_MAPPING_NAMES["qwen2"] = "TokenizersBackend"


def write(folder: Path, shape: Shape, work: ModuleType) -> None:
    name = registered(work, shape)
    folder.mkdir(parents=True, exist_ok=True)
    training = {} if shape.early_ends else {"hazard": 0.0, "steps": 0}  # steps only teach when to end
    work.build(name, str(folder / "model"), **training)
    texts = work.prompts(name, ROWS + 1)
    for file, rows in (("prompts.jsonl", texts[:ROWS]), ("eval.jsonl", texts[ROWS:])):
        (folder / file).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    source = inspect.getsource(work.reward)  # a file of its own: work.py would load torch where rewards are computed
    (folder / "reward.py").write_text(source)
    write_adapter(folder / "model", folder / "adapter")
    write_reward_model(folder / "model", folder / "reward_model")
    (folder / "done").touch()


def write_adapter(model: Path, out: Path) -> None:
    """A LoRA adapter whose B is not zero, so that both A and B have a gradient."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    wrapped.save_pretrained(str(out))


def write_reward_model(model: Path, out: Path) -> None:
    """A classification model of the same shape with one label, and the tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    read_words_beside_qwen2()
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(str(out))
    AutoTokenizer.from_pretrained(model).save_pretrained(str(out))


def main() -> None:
    import torch

    settings = measuring.job()
    torch.set_num_threads(settings["threads"])
    write(Path(settings["folder"]), Shape(**settings["shape"]), load_work(settings["work"]))
    measuring.answer(settings)


if __name__ == "__main__":
    main()
