"""The fixed work of training on text: 16 rows of SFT, 16 pairs for a reward model and DPO, LoRA weights to start from.

Every step takes all rows, so both sides learn from the same batch in whatever order. Known to the peer's processes.
"""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.fixed_work import LORA, write_rows
from benchmarks.sizes import PROMPT_WORDS, Shape, prompt_texts

METHODS = ("sft", "reward", "dpo")
ROWS, ANSWER_WORDS = 16, (32, 128)
RATE, BETA = 1e-3, 0.1
CHECKED_STEP = 3  # counted from 1: gradients are compared there, when no LoRA matrix is zero any more


def rows_file(files: Path, method: str) -> Path:
    return files / ("answers.jsonl" if method == "sft" else "pairs.jsonl")


def prepare_text(files: Path, shape: Shape) -> None:
    """Write both sides' rows, one row more to hold out, and the adapter that training starts from."""
    prompts = prompt_texts(shape, ROWS + 1)
    draw = random.Random(1)

    def answer() -> str:
        return " " + " ".join(f"w{draw.randrange(3, shape.vocabulary)}" for _ in range(draw.randint(*ANSWER_WORDS)))

    answers = [{"prompt": prompt, "completion": answer()} for prompt in prompts]
    pairs = [{"prompt": prompt, "chosen": answer(), "rejected": answer()} for prompt in prompts]
    for method, rows in (("sft", answers), ("reward", pairs)):
        path = rows_file(files, method)
        write_rows(path, rows[:ROWS])
        write_rows(path.with_suffix(".eval.jsonl"), rows[ROWS:])
    if not (files / "start").is_dir():
        write_start(files / "model", files / "start")


def write_start(model: Path, out: Path) -> None:
    """A fresh LoRA adapter, A random and B zero, as both sides make them; saved, so that A is the same on both."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    wrapped.save_pretrained(str(out))


LONGEST_ROW = PROMPT_WORDS[1] + ANSWER_WORDS[1] + 1  # tokens, EOS included
