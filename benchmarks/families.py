"""Models that our own decoder does not know, beside Qwen3: sampling over rows of a cache and in plain batches, and GRPO
steps beside TRL. CPU seconds, which other work on the machine hardly changes. All prompts have the same length, so
that a plain batch takes all of them.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import grpo, ours, processes
from benchmarks.tables import (
    Result,
    above_imports,
    alternate,
    machine,
    markdown,
    pooled,
    report,
    same_tokens,
    spread,
    time_ratios,
    versions,
)
from benchmarks.work import FAMILIES, Grpo, Shape, prepare

SAMPLING = Grpo(num_prompts=8, group_size=4, max_new_tokens=64)
MICRO_BATCH = 16  # rows, the peer's
WORDS = (56, 56)  # fewest and most of a prompt
CALLS = 2  # of a sampling process, after a first


def sampled_once(files: Path, engine: str, *, pair: int, options: Namespace) -> Result:
    recipe = ours.grpo(files, steps=1, options=options, seed=pair, work=SAMPLING)
    settings: dict[str, Any] = {"kind": "sample", "engine": engine, "graphs": False, "device": "cpu"}
    settings |= {"recipe": recipe, "overrides": options.set, "repeats": CALLS}
    return processes.run("gpu.runs", settings, options=options)


def per_second(results: list[Result]) -> float:
    """The tokens per second of CPU time."""
    return sum(pooled(results, "tokens")) / sum(pooled(results, "cpu"))


def sampling(files: Path, *, options: Namespace) -> list[str]:
    """Tokens per second in plain batches and over rows of a cache, and how many times faster in each pair."""
    found = alternate(
        {
            name: lambda pair, name=name: sampled_once(files, name, pair=pair, options=options)
            for name in ("plain", "hf")
        },
        options.pairs,
    )
    for results in found.values():
        wrong = [sentence for result in results for sentence in result["wrong"].values()]
        if wrong:
            return [f"wrong: {wrong[0]}", ""]
    pairs = zip(found["plain"], found["hf"], strict=True)
    ratios = [per_second([hf]) / per_second([plain]) for plain, hf in pairs]
    return [f"{per_second(found['plain']):,.0f} / {per_second(found['hf']):,.0f}", spread(ratios)]


def steps(shape: Shape, files: Path, *, options: Namespace) -> list[str]:
    """CPU seconds and memory of a GRPO step of ours and of TRL's, and the ratios where both do the same work."""
    found = alternate(
        {
            "tinyrl": lambda pair: grpo.ours_once(files, pair=pair, options=options),
            "TRL": lambda pair: grpo.peer_once(files, MICRO_BATCH, pair=pair, options=options),
        },
        options.pairs,
    )
    mine = found["tinyrl"]
    theirs = found["TRL"]
    print(f"{shape.name}: {versions([mine[0], theirs[0]])}")
    may_compare = report([same_tokens(pooled(mine, "tokens"), pooled(theirs, "tokens"))], options=options)
    seconds = [statistics.median(pooled(results, "cpu")) for results in (mine, theirs)]
    peaks = [statistics.median(above_imports(results)) for results in (mine, theirs)]
    times = spread(time_ratios(theirs, mine, "cpu")) if may_compare else "-"
    return [f"{seconds[0]:.1f} / {seconds[1]:.1f}", times, f"{peaks[0]:,.0f} / {peaks[1]:,.0f}"]


def main(options: Namespace) -> None:
    rows = []
    for name in options.families:
        shape = FAMILIES[name]
        files = prepare(shape, options=options, words=WORDS)
        rows.append([name, *sampling(files, options=options), *steps(shape, files, options=options)])
        header = ["family", "tokens a second, plain / hf", "times"]
        header += ["GRPO step, CPU seconds, tinyrl / TRL", "times", "peak MB above imports"]
        print(f"\n{machine(options)}\n\n{markdown(header, rows)}\n", flush=True)
