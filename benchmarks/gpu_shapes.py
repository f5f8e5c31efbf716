"""Models of Qwen2.5's shapes with random weights, and prompts of random words, for a GPU or, tiny, for a CPU.

Built from a config, so nothing is downloaded. Logits are as sharp as a real model's (deviation 4, by the weight of the
last norm), so that samples are drawn from few words and differ. A random model hardly ever ends a completion: each has
all the tokens it may have, and every side does the same work.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sizes import EOS, FIRST_WORD, PAD, Shape

POSITIONS = 32768
ROWS = 512  # prompts to train on; one more is held out
DEVIATION = 4.0  # of logits
MEASURED = (8, 64)  # texts, and tokens of each, on which it is set


@dataclass(frozen=True)
class Work:
    """What is sampled and learnt from in a step: `prompts` of `prompt` tokens, `group` completions each of `new`."""

    prompts: int = 64
    group: int = 8
    prompt: int = 256
    new: int = 512

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group


QWEN = (
    Shape("0.5b", 896, 24, 4864, heads=14, kv_heads=2, head_size=64, vocabulary=151936, early_ends=False),
    Shape("1.5b", 1536, 28, 8960, heads=12, kv_heads=2, head_size=128, vocabulary=151936, early_ends=False),
    Shape("3b", 2048, 36, 11008, heads=16, kv_heads=2, head_size=128, vocabulary=151936, early_ends=False),
    Shape("7b", 3584, 28, 18944, heads=28, kv_heads=4, head_size=128, vocabulary=152064, early_ends=False),
)
TINY = Shape("tiny", 64, 2, 128, heads=4, kv_heads=2, head_size=16, vocabulary=512, early_ends=False)
SHAPES = {shape.name: shape for shape in (*QWEN, TINY)}
UNTIED = ("7b",)  # Qwen2.5's larger models have a head of their own


def parameters(shape: Shape) -> int:
    """Weights in matrices: the layers', the embedding, and a head of its own where there is one."""
    layers = shape.layers * sum(inputs * outputs for inputs, outputs in shape.matrices)
    return layers + shape.vocabulary * shape.hidden * (2 if shape.name in UNTIED else 1)


def prompt_rows(shape: Shape, tokens: int) -> list[dict[str, str]]:
    """Prompts of so many random words, each one token."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(f"w{draw.randrange(FIRST_WORD, shape.vocabulary)}" for _ in range(tokens))

    return [{"prompt": text()} for _ in range(ROWS + 1)]


def sharpen(model: Any) -> None:
    """Set the deviation of the logits, on random words."""
    import torch

    head, norm = model.get_output_embeddings().weight, model.get_decoder().norm.weight
    ids = torch.randint(FIRST_WORD, len(head), MEASURED, generator=torch.Generator().manual_seed(0)).to(head.device)
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids).last_hidden_state
        norm.mul_(DEVIATION / (states @ head.T).float().std())


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Write the folder of a shape, in bfloat16 (on a CPU float32): prompts, model/, reward_model/ if asked for."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen2ForCausalLM

    from tests.tiny_models import tiny_tokenizer

    folder, shape = Path(settings["files"]), Shape(**settings["shape"])
    device = torch.device(settings["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shape.qwen2(
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=shape.name not in UNTIED,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype=dtype,
    )
    config.num_labels = 1
    tokenizer = tiny_tokenizer(vocabulary=[f"w{i}" for i in range(FIRST_WORD, shape.vocabulary)])
    tokenizer.model_max_length = POSITIONS
    makers: dict[str, Any] = {"model": Qwen2ForCausalLM}
    if settings["with_reward_model"]:
        makers["reward_model"] = AutoModelForSequenceClassification.from_config
    for name, make in makers.items():
        torch.manual_seed(0)
        with device:
            model = make(config).to(dtype)
        if name == "model":
            sharpen(model)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        del model
    rows = prompt_rows(shape, settings["prompt"])
    for name, part in (("prompts", rows[:ROWS]), ("eval", rows[ROWS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "done").touch()
    return {"parameters": parameters(shape)}


def main() -> None:
    from benchmarks import measuring

    settings = measuring.job()
    measuring.answer(settings, **measure(settings))


if __name__ == "__main__":
    main()
