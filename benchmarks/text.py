"""SFT, reward model and DPO steps of both sides in alternation: the same losses and gradients, seconds, memory."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import ours, processes
from benchmarks.tables import LOSS_APART, Check, Result, alternate, comparison, machine, report
from benchmarks.work import (
    PROMPT_WORDS,
    SIZES,
    Grpo,
    Shape,
    prepare,
    prompt_texts,
    random_words,
    write_rows,
    write_start,
)

METHODS = ("sft", "reward", "dpo")
ROWS, ANSWER_WORDS = 16, (32, 128)  # every step takes all rows, so both sides learn from the same batch
RATE, BETA = 1e-3, 0.1
LONGEST_ROW = PROMPT_WORDS[1] + ANSWER_WORDS[1] + 1  # tokens, EOS included


def prepare_text(files: Path, shape: Shape) -> None:
    """Write both sides' rows, one row more to hold out, and the adapter that training starts from."""
    prompts, draw = prompt_texts(shape, ROWS + 1), random.Random(1)

    def answer() -> str:
        return " " + random_words(shape, draw, *ANSWER_WORDS)

    answers = [{"prompt": prompt, "completion": answer()} for prompt in prompts]
    pairs = [{"prompt": prompt, "chosen": answer(), "rejected": answer()} for prompt in prompts]
    for name, rows in (("answers", answers), ("pairs", pairs)):
        write_rows(files / f"{name}.jsonl", rows[:ROWS])
        write_rows(files / f"{name}.eval.jsonl", rows[ROWS:])
    if not (files / "start").is_dir():
        write_start(files / "model", files / "start")


def rows_of(method: str) -> str:
    return "answers" if method == "sft" else "pairs"


def recipe_of(files: Path, method: str, *, pair: int, options: Namespace) -> dict[str, Any]:
    """The same rows, LoRA weights, rate and batch as the peer's."""
    recipe = ours.common(files, Grpo(learning_rate=RATE), steps=options.steps, options=options, seed=pair)
    del recipe["generation"]
    data = files / rows_of(method)
    recipe["task"] = {"data": f"{data}.jsonl", "eval_data": f"{data}.eval.jsonl"}
    recipe["model"]["adapter"] = str(files / "start")
    recipe["optim"]["max_grad_norm"] = 1e6
    own = {"sft": {}, "reward": {}, "dpo": {"beta": BETA}}[method]
    section = "reward_model" if method == "reward" else method
    return {"method": method, **recipe, section: {"batch_size": ROWS, **own}}


def peer_question(files: Path, method: str, *, micro_batch: int, steps: int, seed: int) -> dict[str, Any]:
    config = {"max_steps": steps, "max_grad_norm": 1e6, "max_length": LONGEST_ROW}
    config |= {"beta": BETA, "precompute_ref_log_probs": True} if method == "dpo" else {}
    question = {
        "method": method,
        "files": str(files),
        "rows": f"{rows_of(method)}.jsonl",
        "start": str(files / "start"),
    }
    return question | {
        "samples": ROWS,
        "learning_rate": RATE,
        "micro_batch": micro_batch,
        "seed": seed,
        "config": config,
    }


def same_steps(mine: Result, peer: Result, gradients: tuple[Path, Path]) -> Check:
    """Losses of every step, and the gradient of one, apart as shares."""
    import torch
    from safetensors.torch import load_file

    apart = max(abs(a / b - 1) for a, b in zip(mine["losses"], peer["losses"], strict=True))
    left, right = (load_file(path) for path in gradients)
    assert set(left) == set(right), sorted(set(left) ^ set(right))[:4]
    difference = torch.cat([(left[name] - right[name]).flatten() for name in sorted(left)]).norm()
    gap = float(difference / torch.cat([right[name].flatten() for name in sorted(right)]).norm())
    first, last = mine["losses"][0], mine["losses"][-1]
    sentence = (
        f"losses of {len(mine['losses'])} steps ({first:.4f} to {last:.4f}) at most {apart:.1e} apart, gradients "
        f"{gap:.1e} of their norm apart (allowed {LOSS_APART:.0e})"
    )
    return Check(max(apart, gap) <= LOSS_APART, sentence)


def one_method(files: Path, method: str, *, options: Namespace) -> None:
    ours_file, peer_file = (options.out / f"{files.name}-{method}-{side}.safetensors" for side in ("ours", "peer"))

    def mine(pair: int) -> Result:
        question = {"recipe": recipe_of(files, method, pair=pair, options=options), "overrides": options.set}
        return processes.run("ours", {**question, "gradients": str(ours_file)}, options=options)

    def theirs(micro_batch: int):
        def once(pair: int) -> Result:
            question = peer_question(files, method, micro_batch=micro_batch, steps=options.steps, seed=pair)
            question |= {"gradients": str(peer_file)}
            return processes.run("peer", question, options=options, python=options.peer_python)

        return once

    sizes = [size for size in options.micro_batches if ROWS % size == 0]
    results = alternate({"tinyrl": mine, **{f"TRL, micro-batch {n}": theirs(n) for n in sizes}}, options.pairs)
    last = [found[-1] for found in results.values()]
    may_compare = report([same_steps(last[0], last[-1], (ours_file, peer_file))], options=options)
    print(f"\n### {method}\n\n{comparison(results, base='tinyrl', may_compare=may_compare, digits=3)}", flush=True)


def main(options: Namespace) -> None:
    for size in options.sizes:
        files = prepare(SIZES[size], options=options)
        prepare_text(files, SIZES[size])
        print(f"\n## Text, model {size}: {ROWS} rows or pairs a step\n{machine(options)}", flush=True)
        for method in METHODS:
            one_method(files, method, options=options)
