"""GRPO steps of both sides in alternation: seconds, phases, peak memory, ratios, and distance from the floor."""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import our_recipe, processes, same_work
from tests.benchmarks.fixed_work import GROUP_SIZE, NUM_PROMPTS, prepare, shape_of
from tests.benchmarks.floor import floor
from tests.benchmarks.tables import machine, markdown, median_phases, spread

MEMORY_MICRO_BATCH = 8  # the peer's micro-batch whose memory counts; the fastest one's time counts
Result = dict[str, Any]


@dataclass
class Sides:
    """Results of every process: ours, and the peer's by micro-batch."""

    ours: list[Result] = field(default_factory=list)
    peer: dict[int, list[Result]] = field(default_factory=dict)

    @property
    def fastest(self) -> int:
        """The micro-batch with the shortest step."""
        return min(self.peer, key=lambda size: statistics.median(s for r in self.peer[size] for s in r["seconds"]))

    @property
    def ratios(self) -> list[float]:
        """Peer over ours, one a pair, with the peer's fastest micro-batch."""
        pairs = zip(self.peer[self.fastest], self.ours, strict=True)
        return [statistics.median(p["seconds"]) / statistics.median(o["seconds"]) for p, o in pairs]


def ours_once(files: Path, *, pair: int, options: Namespace) -> Result:
    recipe = our_recipe.grpo(files, steps=options.steps, options=options, seed=pair)
    return processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)


def peer_once(files: Path, micro_batch: int, *, pair: int, options: Namespace) -> Result:
    question = {"files": str(files), "micro_batch": micro_batch, "steps": options.steps, "seed": pair}
    return processes.run("peer_grpo", question, options=options, python=options.peer_python)


def measure(files: Path, *, options: Namespace) -> Sides:
    """Pairs in alternation. The first pair tries every micro-batch of the peer, the others go on with the fastest."""
    sides = Sides()
    for pair in range(options.pairs):
        sides.ours.append(ours_once(files, pair=pair, options=options))
        for size in options.micro_batches if pair == 0 else [sides.fastest]:
            sides.peer.setdefault(size, []).append(peer_once(files, size, pair=pair, options=options))
        print(f"pair {pair + 1} of {options.pairs}: done", flush=True)
    sides.peer = {size: results for size, results in sides.peer.items() if len(results) in (1, options.pairs)}
    return sides


def pooled(results: list[Result], key: str) -> list[Any]:
    return [value for result in results for value in result[key]]


def phase_cells(results: list[Result]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in median_phases(pooled(results, "phases")).items())


def row(name: str, results: list[Result]) -> list[str]:
    above = [result["peak_mb"] - result["imports_mb"] for result in results]
    seconds, tokens = pooled(results, "seconds"), pooled(results, "tokens")
    return [name, spread(seconds), phase_cells(results), f"{statistics.mean(tokens):.0f}", spread(above, 0)]


def one_size(size: str, *, options: Namespace) -> None:
    shape = shape_of(size)
    files = prepare(shape, options=options)
    print(f"\n## GRPO, model {size}\n", flush=True)
    checks = [same_work.same_loss(files, options=options)]
    sides = measure(files, options=options)
    peer_tokens = pooled(sides.peer[sides.fastest], "tokens")
    checks.append(same_work.same_tokens(pooled(sides.ours, "tokens"), peer_tokens))
    print(machine(options, sides.ours[0], sides.peer[sides.fastest][0]))
    may_compare = same_work.report(checks, options=options)
    rows = [row("tinyrl", sides.ours)]
    rows += [row(f"TRL, micro-batch {n}", results) for n, results in sorted(sides.peer.items())]
    print("\n" + markdown(["side", "seconds a step", "of them", "tokens a step", "peak MB above imports"], rows) + "\n")
    completion = statistics.mean(pooled(sides.ours, "tokens")) / (NUM_PROMPTS * GROUP_SIZE)
    least = floor(shape, completion, options=options)
    over = statistics.median(pooled(sides.ours, "seconds")) / least["seconds"]
    print(
        f"arithmetic floor {least['seconds']:.2f} s (sampling {least['sampling']:.2f} at {least['gflops_decode']:.0f} "
        f"GFLOP/s, the rest {least['update']:.2f} at {least['gflops_batch']:.0f}); tinyrl is {over:.2f} times that"
    )
    if may_compare:
        print(f"ratio TRL / tinyrl, time: **{spread(sides.ratios)}** (fastest micro-batch, {sides.fastest})")
        if MEMORY_MICRO_BATCH in sides.peer:
            print_memory(sides)


def print_memory(sides: Sides) -> None:
    peer, ours = (
        statistics.median(r["peak_mb"] - r["imports_mb"] for r in results)
        for results in (sides.peer[MEMORY_MICRO_BATCH], sides.ours)
    )
    print(f"ratio TRL / tinyrl, memory above imports: **{peer / ours:.2f}** (micro-batch {MEMORY_MICRO_BATCH})")


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
