"""GRPO on prompts with pictures beside TRL: the loss of one batch, images through the tower, CPU seconds and memory.

The model and rows are those of examples/digits_images.py, barely trained: what a step costs does not depend on it.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import ours, processes
from benchmarks.grpo import peer_question
from benchmarks.tables import Result, alternate, comparison, machine, pooled, report, same_tokens
from benchmarks.work import Grpo

WORK = Grpo(max_new_tokens=8, learning_rate=1e-4)
TRAINING_STEPS = 100  # of the example's model: its answers end


def prepare_digits(options: Namespace) -> Path:
    folder = options.out / "work" / "digits"
    if not (folder / "model" / "config.json").is_file():
        example = str(processes.ROOT / "examples" / "digits_images.py")
        subprocess.run([sys.executable, example, str(folder), "--num-steps", str(TRAINING_STEPS)], check=True)
    return folder


def ours_once(files: Path, *, pair: int, options: Namespace) -> Result:
    recipe = ours.grpo(files, steps=options.steps, options=options, seed=pair, work=WORK)
    recipe["task"]["data"] = str(files / "rows.jsonl")
    recipe["reward"] = {}  # the answer of the row
    return processes.run("ours", {"recipe": recipe, "overrides": options.set, "images": True}, options=options)


def peer_once(files: Path, micro_batch: int, *, pair: int, options: Namespace) -> Result:
    question: dict[str, Any] = peer_question(files, WORK, steps=options.steps, seed=pair, micro_batch=micro_batch)
    return processes.run("peer_images", question, options=options, python=options.peer_python)


def show_losses(options: Namespace) -> None:
    from tests.training.test_peer_loss_on_images import TRL, write_batch

    folder = options.out / "work" / "batch"
    folder.mkdir(parents=True, exist_ok=True)
    write_batch(folder)
    found = processes.run("peer_images", {"batch": str(folder)}, options=options, python=options.peer_python)["losses"]
    print("TRL's loss and gradient of one batch, and what tests/training/test_peer_loss_on_images.py has ours equal:")
    for old, kept in TRL.items():
        print(f"- old log-probability {old}: {found[str(old)]}, {[*kept]}")


def main(options: Namespace) -> None:
    files = prepare_digits(options)
    show_losses(options)
    sides = {"tinyrl": lambda pair: ours_once(files, pair=pair, options=options)}
    for size in options.micro_batches:
        sides[f"TRL, micro-batch {size}"] = lambda pair, size=size: peer_once(files, size, pair=pair, options=options)
    results = alternate(sides, options.pairs)
    print(f"\n## GRPO on pictures, {WORK.num_prompts} prompts x {WORK.group_size}\n\n{machine(options)}")
    found = results["tinyrl"]
    checks = [same_tokens(pooled(found, "tokens"), pooled(peer, "tokens")) for peer in [*results.values()][1:]]
    may_compare = report(checks, options=options)
    print("\n" + comparison(results, base="tinyrl", may_compare=may_compare) + "\n")
    for name, of_side in results.items():
        counts = ", ".join(f"{result['tower_images'] / options.steps:.1f}" for result in of_side)
        print(f"- {name}: images through the tower, a step: {counts}")
