"""The fixed work of both sides: what a GRPO step does, and folders of files that either side reads.

A folder holds model/ prompts.jsonl eval.jsonl; those of the sizes (sizes.py) an adapter/ and a reward_model/ as well.
Run as a script with settings, it writes the folder of a size. The peer imports it too, so it knows nothing of tinyrl.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import measuring, processes
from benchmarks.sizes import Shape, build, prompt_texts

LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
ROWS = 512  # prompts to train on; one more is held out


@dataclass(frozen=True)
class Grpo:
    """A GRPO step: one update with all tokens weighing the same; a reward of rewards.py by name."""

    num_prompts: int = 8
    group_size: int = 8
    max_new_tokens: int = 128
    kl_coef: float = 0.04
    clip_eps: float = 0.2
    learning_rate: float = 1e-6
    reward: str = "even_words"


SPEED = Grpo()
LEARNING = Grpo(num_prompts=64, max_new_tokens=16, kl_coef=0.0, learning_rate=1e-3, reward="sorted_letters")


def work_of(options: Namespace) -> Grpo:
    """The fixed work, at the size --work gives it."""
    if options.work is None:
        return SPEED
    prompts, group, tokens = options.work
    return replace(SPEED, num_prompts=prompts, group_size=group, max_new_tokens=tokens)


def prepare(shape: Shape, *, options: Namespace) -> Path:
    """The folder of a size's files, made where it is not there yet."""
    folder = options.out / "work" / shape.name
    if not (folder / "done").is_file():
        print(f"building {shape.name} ...", flush=True)
        processes.run("fixed_work", {"shape": asdict(shape), "folder": str(folder)}, options=options)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(files: Path) -> list[str]:
    """The prompts to train on."""
    return [row["prompt"] for row in read_rows(files / "prompts.jsonl")]


def write(folder: Path, shape: Shape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build(shape, folder / "model")
    rows = [{"prompt": text} for text in prompt_texts(shape, ROWS + 1)]
    write_rows(folder / "prompts.jsonl", rows[:ROWS])
    write_rows(folder / "eval.jsonl", rows[ROWS:])
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
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(str(out))
    PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(str(out))


def main() -> None:
    import torch

    settings = measuring.job()
    torch.set_num_threads(settings["threads"])
    write(Path(settings["folder"]), Shape(**settings["shape"]))
    measuring.answer(settings)


if __name__ == "__main__":
    main()
