"""Learning curves of both sides on the sorting task of the embedded model, and what their policies can do at the end.

Same model, LoRA, constant learning rate, clip 0.2, no KL, one update of 64 x 8 samples a step; nothing is tuned for
either side. A pair is a seed. What a policy can do is the exact probability of the right answer (judge.py).
"""

from __future__ import annotations

import shutil
import statistics
from argparse import Namespace
from pathlib import Path

from benchmarks import grpo
from benchmarks.judge import judged
from benchmarks.tables import Result, alternate, interval, machine, markdown, versions
from benchmarks.work import LEARNING, write_rows
from tinyrl.starter import starter_path
from tinyrl.starter.sort import sort_completion
from tinyrl.tasks import load_task

PEER_MICRO_BATCH = 64
STEPS_TOGETHER = 10  # of a curve, in a table
SIDES = ("tinyrl", "TRL")


def prepare_sorting(options: Namespace) -> Path:
    """A folder as work.py's: the embedded model, rows to train on and 512 held out."""
    folder = options.out / "work" / "sorting"
    embedded = starter_path("starter")
    assert embedded is not None
    shutil.copytree(embedded, folder / "model", dirs_exist_ok=True)
    for split, file in (("train", "prompts.jsonl"), ("eval", "eval.jsonl")):
        rows = load_task("sort").rows(split)
        write_rows(folder / file, [{**row, "completion": sort_completion(row["answer"])} for row in rows])
    return folder


def curve_table(results: dict[str, list[Result]], *, steps: int) -> str:
    starts = range(0, steps, STEPS_TOGETHER)
    header = ["steps", *(f"{i + 1}-{min(i + STEPS_TOGETHER, steps)}" for i in starts)]
    rows = []
    for name, of_side in results.items():
        parts = [[reward for r in of_side for reward in r["rewards"][i : i + STEPS_TOGETHER]] for i in starts]
        rows.append([name, *(f"{statistics.mean(part):.3f}" for part in parts)])
    return markdown(header, rows)


def main(options: Namespace) -> None:
    files = prepare_sorting(options)
    results = alternate(
        {
            "tinyrl": lambda seed: grpo.ours_once(files, pair=seed, options=options, work=LEARNING),
            "TRL": lambda seed: grpo.peer_once(files, PEER_MICRO_BATCH, pair=seed, options=options, work=LEARNING),
        },
        options.pairs,
    )
    before = judged(files, None, options=options)
    after = {name: [judged(files, r["adapter"], options=options) for r in of] for name, of in results.items()}
    print(f"\n## Learning\n\n{machine(options)}\n")
    print(f"right answers to held-out prompts before: exact {before['exact']:.4f}, greedy {before['greedy']:.4f}\n")
    measures = ("exact", "greedy")
    header = [versions([results[name][0] for name in SIDES]), *(f"{name} {m}" for m in measures for name in SIDES)]
    cells = [[f"{after[name][s][m]:.4f}" for m in measures for name in SIDES] for s in range(options.pairs)]
    print(markdown(header, [[f"seed {seed}", *row] for seed, row in enumerate(cells)]) + "\n")
    for measure in measures if options.pairs > 1 else ():
        pairs = zip(*(after[name] for name in SIDES), strict=True)
        apart = [ours[measure] - theirs[measure] for ours, theirs in pairs]
        low, high = interval(apart)
        print(f"{measure}: tinyrl - TRL = {statistics.mean(apart):+.4f} (95 % interval {low:+.4f} to {high:+.4f})")
    print("\n" + curve_table(results, steps=options.steps))
