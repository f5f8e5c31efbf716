"""Learning curves of both sides on the sorting task of the embedded model, and what their policies can do at the end.

Same model, LoRA, constant learning rate, clip 0.2, no KL, one update of 64 x 8 samples a step; nothing is tuned for
either side. A pair is a seed. What a policy can do is the exact probability of the right answer (judge.py).
"""

from __future__ import annotations

import shutil
import statistics
from argparse import Namespace
from pathlib import Path

from benchmarks import grpo, processes
from benchmarks.fixed_work import LEARNING, write_rows
from benchmarks.results import Result, alternate, interval
from benchmarks.tables import machine, markdown, versions
from tinyrl.starter import starter_path
from tinyrl.tasks import load_rows, load_task
from tinyrl.tasks.sort import sort_completion

PEER_MICRO_BATCH = 64
STEPS_TOGETHER = 10  # of a curve, in a table
SIDES = {"tinyrl": "#1f6aa5", "TRL": "#c8500f"}  # with their colours


def prepare_sorting(options: Namespace) -> Path:
    """A folder as fixed_work.py's: the embedded model, rows to train on and 512 held out."""
    folder = options.out / "work" / "sorting"
    embedded = starter_path("starter")
    assert embedded is not None
    shutil.copytree(embedded, folder / "model", dirs_exist_ok=True)
    for split, file in (("train", "prompts.jsonl"), ("eval", "eval.jsonl")):
        rows = load_rows(load_task("sort"), split)
        write_rows(folder / file, [{**row, "completion": sort_completion(row["answer"])} for row in rows])
    return folder


def judged(files: Path, adapter: str | None, *, options: Namespace) -> Result:
    return processes.run("judge", {"files": str(files), "adapter": adapter}, options=options)


def in_parts(curve: list[float]) -> list[float]:
    """Means of ten steps each."""
    return [statistics.mean(curve[i : i + STEPS_TOGETHER]) for i in range(0, len(curve), STEPS_TOGETHER)]


def curve_table(results: dict[str, list[Result]], *, steps: int) -> str:
    starts = range(0, steps, STEPS_TOGETHER)
    header = ["steps", *(f"{i + 1}-{min(i + STEPS_TOGETHER, steps)}" for i in starts)]
    rows = []
    for name, of_side in results.items():
        parts = zip(*(in_parts(result["rewards"]) for result in of_side), strict=True)
        rows.append([name, *(f"{statistics.mean(part):.3f}" for part in parts)])
    return markdown(header, rows)


def draw(results: dict[str, list[Result]], path: Path) -> None:
    """Training reward by step: each seed thin, the mean thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2))
    axes = figure.subplots()
    for name, of_side in results.items():
        curves = [result["rewards"] for result in of_side]
        steps = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(steps, curve, color=SIDES[name], alpha=0.25, linewidth=1)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, mean, color=SIDES[name], linewidth=2.2, label=name)
    axes.set(xlabel=f"step ({LEARNING.num_prompts} prompts x {LEARNING.group_size} samples)", ylabel="training reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


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
    rows = []
    for seed in range(options.pairs):
        cells = [f"{after[name][seed][measure]:.4f}" for measure in measures for name in SIDES]
        rows.append([f"seed {seed}", *cells])
    print(markdown(header, rows) + "\n")
    for measure in measures if options.pairs > 1 else ():
        pairs = zip(*(after[name] for name in SIDES), strict=True)
        apart = [ours[measure] - theirs[measure] for ours, theirs in pairs]
        low, high = interval(apart)
        print(f"{measure}: tinyrl - TRL = {statistics.mean(apart):+.4f} (95 % interval {low:+.4f} to {high:+.4f})")
    print("\n" + curve_table(results, steps=options.steps))
    draw(results, options.out / "learning.png")
    print(f"\ncurves drawn in {options.out / 'learning.png'}")
