"""Sampling only: every engine of generation.engine beside transformers' generate as TRL calls it."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import get_args

from benchmarks import our_recipe, processes, same_work
from benchmarks.fixed_work import SPEED, prepare
from benchmarks.results import Result, above_imports, alternate, pooled, time_ratios
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions
from tinyrl.config.sections import GenerationConfig

COLUMNS = ["seconds", "tokens a second", "tokens", "peak MB above imports", "times faster"]
PEER = "transformers, as TRL calls it"


def engines() -> list[str]:
    """The values that generation.engine allows: `auto` is one of the others, and `server` needs one that is started."""
    named = get_args(GenerationConfig.model_fields["engine"].annotation)
    return [name for name in named if name not in ("auto", "server")]


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
    ratio = f"**{spread(time_ratios(peer, results))}**" if show_ratio else "-"
    mean = f"{statistics.mean(tokens):.0f}"
    return [name, spread(seconds), spread(speeds, 0), mean, spread(above_imports(results), 0), ratio]


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options)
    of = f"{SPEED.num_prompts} prompts x {SPEED.group_size}, at most {SPEED.max_new_tokens} new tokens"
    print(f"\n## Sampling, model {size}: {of}\n", flush=True)
    ours = {
        f"tinyrl, {engine}": lambda pair, engine=engine: ours_once(files, engine, pair=pair, options=options)
        for engine in engines()
    }
    results = alternate({PEER: lambda pair: peer_once(files, pair=pair, options=options), **ours}, options.pairs)
    print(machine(options))
    peer = results.pop(PEER)
    first = next(iter(results.values()))  # other engines sample with the same random numbers
    check = same_work.same_tokens(pooled(first, "tokens"), pooled(peer, "tokens"))
    may_compare = same_work.report([check], options=options)
    rows = [row(name, of_engine, peer, show_ratio=may_compare) for name, of_engine in results.items()]
    rows.append(row(PEER, peer, peer, show_ratio=False))
    print("\n" + markdown([versions([first[0], peer[0]]), *COLUMNS], rows))


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
