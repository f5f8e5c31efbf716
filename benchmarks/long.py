"""Long texts: peak memory and CPU seconds by length of an SFT step and of a GRPO update, beside TRL.

An SFT step learns one text of that many tokens. A GRPO update learns a group of two such texts, whose completions are
given: nothing is sampled, and there is no KL. Both sides recompute layers in backward (gradient checkpointing) and
learn one text at a time. The first step of a process is warm-up, on a short text; memory hardly differs between runs,
so there is one process of each side.
"""

from __future__ import annotations

import json
import random
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import grpo, ours, processes
from benchmarks.tables import Result, above_imports, machine, markdown, versions
from benchmarks.work import SIZES, Grpo, Shape, prepare, random_words, write_rows

PROMPT = 8  # words
WARM_UP = 64  # tokens of the texts of the first step, and of those that are held out
SEED = 1  # with it tinyrl takes two rows in the order of their file, and TRL is asked for that order
RATE = 1e-4
METHODS = ("sft", "grpo")
DTYPES = ("float32", "bfloat16")


def work_of(length: int) -> Grpo:
    """A GRPO update of two texts of `length` tokens, prompt included."""
    return Grpo(
        num_prompts=1, group_size=2, max_new_tokens=length, kl_coef=0.0, learning_rate=RATE, reward="zero_and_one"
    )


def prepare_texts(files: Path, shape: Shape, length: int) -> str:
    """Write a group of texts of each step, and one to hold out, for both methods; return what the files' names begin
    with. NAME.jsonl: rows of SFT, NAME.prompts.jsonl: prompts of GRPO, NAME.eval.jsonl, NAME.prompts.eval.jsonl: held
    out, NAME.given.jsonl: prompts with the token ids of their completions.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(files / "model")
    draw = random.Random(length)
    rows: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    for tokens in (WARM_UP, length, WARM_UP):
        prompt = random_words(shape, draw, PROMPT, PROMPT)
        completions: list[list[int]] = []
        for _ in range(work_of(length).group_size):
            answer = " " + random_words(shape, draw, length, length)
            completions.append(completion_of(tokenizer, prompt, answer, length=tokens))
        rows.append({"prompt": prompt, "completion": tokenizer.decode(completions[0][:-1])})
        given.append({"prompt": prompt, "completions": completions})
    name = f"long-{length}"
    prompts = [{"prompt": row["prompt"]} for row in rows]
    write_rows(files / f"{name}.jsonl", rows[:2])
    write_rows(files / f"{name}.eval.jsonl", rows[2:])
    write_rows(files / f"{name}.prompts.jsonl", prompts[:2])
    write_rows(files / f"{name}.prompts.eval.jsonl", prompts[2:])
    write_rows(files / f"{name}.given.jsonl", given)
    return name


def completion_of(tokenizer: Any, prompt: str, answer: str, *, length: int) -> list[int]:
    """Return the token ids of an answer, cut so that prompt, answer and EOS have `length` tokens."""
    room = length - 1 - len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"][:room], tokenizer.eos_token_id]


def raise_positions(model: Path, longest: int) -> None:
    """Allow texts of `longest` tokens, and prompts beside them, whatever the model was trained for."""
    file = model / "config.json"
    config = json.loads(file.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], 2 * longest)
    file.write_text(json.dumps(config))


def our_question(files: Path, name: str, *, method: str, length: int, dtype: str, options: Namespace) -> dict[str, Any]:
    work = work_of(length)
    common = {"steps": options.steps, "options": options, "seed": SEED}
    if method == "sft":
        recipe = {"method": "sft", **ours.common(files, work, **common), "sft": {"batch_size": 1}}
        del recipe["generation"]
        rows = files / f"{name}.jsonl"
    else:
        recipe = ours.grpo(files, work=work, **common)
        recipe["grpo"]["importance_correction"] = "none"  # nothing has sampled the completions
        rows = files / f"{name}.prompts.jsonl"
    recipe["model"] |= {"dtype": dtype, "gradient_checkpointing": True}
    recipe["run"]["eval_prompts"] = 0  # a step that is evaluated scores its texts again, for tokens.jsonl
    recipe["task"] = {"data": str(rows), "eval_data": str(rows.with_suffix(".eval.jsonl")), "chat": False}
    question = {"recipe": recipe, "overrides": options.set}
    return question if method == "sft" else {**question, "given": str(files / f"{name}.given.jsonl")}


def peer_question(
    files: Path, name: str, *, method: str, length: int, dtype: str, options: Namespace
) -> dict[str, Any]:
    if method == "sft":
        question = {"method": "sft", "files": str(files), "rows": f"{name}.jsonl", "samples": 1, "micro_batch": 1}
        question |= {"learning_rate": RATE, "seed": SEED}
        config = {"max_steps": options.steps, "max_length": length, "train_sampling_strategy": "sequential"}
    else:
        question = grpo.peer_question(files, work_of(length), steps=options.steps, seed=SEED, micro_batch=1)
        question |= {"rows": f"{name}.prompts.jsonl", "given": f"{name}.given.jsonl"}
        config = {**question["config"], "shuffle_dataset": False}
    return {**question, "dtype": dtype, "config": {**config, "gradient_checkpointing": True}}


def cells(result: Result | None) -> list[str]:
    """GB above imports and CPU seconds of the steps after the first; dashes for a side that did not run."""
    if result is None:
        return ["-", "-"]
    return [f"{above_imports([result])[0] / 1e3:.2f}", f"{statistics.median(result['cpu']):.1f}"]


def measure(files: Path, shape: Shape, *, method: str, length: int, dtype: str, options: Namespace) -> dict[str, Any]:
    """Run both sides on texts of one length, TRL where its lengths have that one."""
    name = prepare_texts(files, shape, length)
    mine = our_question(files, name, method=method, length=length, dtype=dtype, options=options)
    sides: dict[str, Result | None] = {"tinyrl": processes.run("ours", mine, options=options), "TRL": None}
    if options.peer_lengths is None or length in options.peer_lengths:
        theirs = peer_question(files, name, method=method, length=length, dtype=dtype, options=options)
        sides["TRL"] = processes.run("peer", theirs, options=options, python=options.peer_python)
    return sides


def main(options: Namespace) -> None:
    for size in options.sizes:
        files = prepare(SIZES[size], options=options)
        raise_positions(files / "model", max(options.lengths))
        rows: list[list[str]] = []
        found: list[Result] = []
        for method in options.methods:
            for dtype in options.dtypes:
                for length in options.lengths:
                    sides = measure(files, SIZES[size], method=method, length=length, dtype=dtype, options=options)
                    row = [f"{length:,}", method, dtype]
                    for result in sides.values():
                        row += cells(result)
                    rows.append(row)
                    found += [result for result in sides.values() if result is not None]
                    print(" | ".join(row), flush=True)
        columns = ["method", "dtype", "tinyrl, GB above imports", "CPU seconds", "TRL, GB above imports", "CPU seconds"]
        where = machine(options).removesuffix(", float32")
        table = markdown([versions(found), *columns], rows)
        print(f"\n## Long texts, model {size}\n{where}\n\n{table}", flush=True)
