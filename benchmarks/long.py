"""Long texts: peak memory and CPU seconds of an SFT step by length, beside TRL.

A step learns one text of that many tokens; both sides recompute layers in backward (gradient checkpointing). The first
step is warm-up; memory hardly differs between runs, so there is one process of each side.
"""

from __future__ import annotations

import random
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import ours, processes
from benchmarks.tables import Result, above_imports, machine, markdown, versions
from benchmarks.work import SIZES, Grpo, Shape, prepare, random_words, write_rows

PROMPT = 8  # words
RATE = 1e-4
DTYPES = ("float32", "bfloat16")


def prepare_text(files: Path, shape: Shape, length: int) -> Path:
    """Write two rows of `length` tokens, one to learn and one to hold out; return the file of the first."""
    draw, rows = random.Random(length), []
    for _ in range(2):
        prompt = random_words(shape, draw, PROMPT, PROMPT)
        answer = " " + random_words(shape, draw, length, length)
        rows.append({"prompt": prompt, "completion": cut(files / "model", prompt, answer, length=length)})
    write_rows(files / f"long-{length}.jsonl", rows[:1])
    write_rows(files / f"long-{length}.eval.jsonl", rows[1:])
    return files / f"long-{length}.jsonl"


def cut(model: Path, prompt: str, answer: str, *, length: int) -> str:
    """Cut an answer, so that prompt, answer and EOS have `length` tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    room = length - 1 - len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return tokenizer.decode(tokenizer(answer, add_special_tokens=False)["input_ids"][:room])


def recipe_of(files: Path, data: Path, *, dtype: str, options: Namespace) -> dict[str, Any]:
    recipe = ours.common(files, Grpo(learning_rate=RATE), steps=options.steps, options=options, seed=0)
    del recipe["generation"]
    recipe["model"] |= {"dtype": dtype, "gradient_checkpointing": True}
    recipe["task"] = {"data": str(data), "eval_data": str(data.with_suffix(".eval.jsonl")), "chat": False}
    return {"method": "sft", **recipe, "sft": {"batch_size": 1}}


def peer_question(files: Path, data: Path, *, length: int, dtype: str, options: Namespace) -> dict[str, Any]:
    config = {"max_steps": options.steps, "max_length": length, "gradient_checkpointing": True}
    question = {"method": "sft", "files": str(files), "rows": data.name, "samples": 1, "micro_batch": 1}
    return {**question, "learning_rate": RATE, "seed": 0, "dtype": dtype, "config": config}


def line(length: int, dtype: str, results: dict[str, Result]) -> list[str]:
    """A row of the table: GB above imports and CPU seconds of a step, of each side."""
    cells = [f"{length:,}", dtype]
    for result in results.values():
        cells += [f"{above_imports([result])[0] / 1e3:.2f}", f"{statistics.median(result['cpu']):.1f}"]
    return cells


def main(options: Namespace) -> None:
    for size in options.sizes:
        files = prepare(SIZES[size], options=options)
        rows, sides = [], {}
        for dtype in options.dtypes:
            for length in options.lengths:
                data = prepare_text(files, SIZES[size], length)
                mine = {"recipe": recipe_of(files, data, dtype=dtype, options=options), "overrides": options.set}
                theirs = peer_question(files, data, length=length, dtype=dtype, options=options)
                sides = {
                    "tinyrl": processes.run("ours", mine, options=options),
                    "TRL": processes.run("peer", theirs, options=options, python=options.peer_python),
                }
                rows.append(line(length, dtype, sides))
                print(" | ".join(rows[-1]), flush=True)
        header = [versions(list(sides.values())), "dtype"]
        for side in sides:
            header += [f"{side}, GB above imports", "CPU seconds"]
        where = machine(options).removesuffix(", float32")
        print(f"\n## Long texts, SFT, model {size}\n{where}\n\n{markdown(header, rows)}", flush=True)
