"""Sampling only: every engine of generation.engine beside transformers' generate as TRL calls it."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args

from tests.benchmarks import our_recipe, processes, same_work
from tests.benchmarks.compare_grpo import pooled
from tests.benchmarks.fixed_work import prepare, shape_of
from tests.benchmarks.tables import machine, markdown, spread
from tinyrl.config.schema import GenerationConfig

Result = dict[str, Any]


def engines() -> list[str]:
    """The values that generation.engine allows; `auto` is one of the others."""
    return [name for name in get_args(GenerationConfig.model_fields["engine"].annotation) if name != "auto"]


def ours_once(files: Path, engine: str, *, pair: int, options: Namespace) -> Result:
    recipe = our_recipe.grpo(files, steps=1, options=options, seed=pair)
    overrides = [*options.set, f"generation.engine={engine}"]
    question = {"files": str(files), "steps": options.steps, "recipe": recipe, "overrides": overrides}
    return processes.run("our_sampling", question, options=options)


def peer_once(files: Path, *, pair: int, options: Namespace) -> Result:
    question = {"files": str(files), "steps": options.steps, "seed": pair}
    return processes.run("peer_sampling", question, options=options, python=options.peer_python or sys.executable)


def row(name: str, results: list[Result], peer: list[Result], *, show_ratio: bool) -> list[str]:
    seconds, tokens = pooled(results, "seconds"), pooled(results, "tokens")
    speeds = [t / s for t, s in zip(tokens, seconds, strict=True)]
    pairs = zip(peer, results, strict=True)
    ratios = [statistics.median(p["seconds"]) / statistics.median(o["seconds"]) for p, o in pairs]
    above = [result["peak_mb"] - result["imports_mb"] for result in results]
    ratio = f"**{spread(ratios)}**" if show_ratio else "-"
    return [name, spread(seconds), spread(speeds, 0), f"{statistics.mean(tokens):.0f}", spread(above, 0), ratio]


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(shape_of(size), options=options)
    print(f"\n## Sampling, model {size}: 8 prompts x 8, at most 128 new tokens\n", flush=True)
    peer: list[Result] = []
    ours: dict[str, list[Result]] = {engine: [] for engine in engines()}
    for pair in range(options.pairs):
        peer.append(peer_once(files, pair=pair, options=options))
        for engine, results in ours.items():
            results.append(ours_once(files, engine, pair=pair, options=options))
        print(f"pair {pair + 1} of {options.pairs}: done", flush=True)
    print(machine(options, *(results[0] for results in ours.values()), peer[0]))
    tokens = pooled(next(iter(ours.values())), "tokens")  # other engines sample with the same random numbers
    may_compare = same_work.report([same_work.same_tokens(tokens, pooled(peer, "tokens"))], options=options)
    rows = [row(f"tinyrl, {engine}", results, peer, show_ratio=may_compare) for engine, results in ours.items()]
    rows.append(row("transformers, as TRL calls it", peer, peer, show_ratio=False))
    header = ["side", "seconds", "tokens a second", "tokens", "peak MB above imports", "times faster"]
    print("\n" + markdown(header, rows))


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
