"""GRPO steps of both sides in alternation: seconds, phases, peak memory, ratios, and distance from the floor."""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import our_recipe, processes, same_work
from benchmarks.fixed_work import SPEED, Grpo, prepare, work_of
from benchmarks.floor import floor
from benchmarks.results import Result, above_imports, pooled, time_ratios
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, median_phases, spread, versions

MEMORY_MICRO_BATCH = 8  # the peer's micro-batch whose memory counts; the fastest one's time counts
COLUMNS = ["seconds a step", "of CPU time", "of them", "tokens a step", "peak MB above imports"]


@dataclass
class Sides:
    """Results of every process: ours, and the peer's by micro-batch."""

    ours: list[Result] = field(default_factory=list)
    peer: dict[int, list[Result]] = field(default_factory=dict)

    @property
    def fastest(self) -> int:
        """The micro-batch with the shortest step."""
        return min(self.peer, key=lambda size: statistics.median(pooled(self.peer[size], "seconds")))


def ours_once(files: Path, *, pair: int, options: Namespace, work: Grpo = SPEED) -> Result:
    recipe = our_recipe.grpo(files, steps=options.steps, options=options, seed=pair, work=work)
    return processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)


def peer_once(files: Path, micro_batch: int, *, pair: int, options: Namespace, work: Grpo = SPEED) -> Result:
    question = {"files": str(files), "work": asdict(work), "micro_batch": micro_batch}
    question |= {"steps": options.steps, "seed": pair}
    return processes.run("peer_grpo", question, options=options, python=options.peer_python)


def measure(files: Path, *, options: Namespace) -> Sides:
    """Pairs in alternation. The first pair tries every micro-batch of the peer, the others go on with the fastest."""
    sides = Sides()
    for pair in range(options.pairs):
        sides.ours.append(ours_once(files, pair=pair, options=options, work=work_of(options)))
        for size in options.micro_batches if pair == 0 else [sides.fastest]:
            sides.peer.setdefault(size, []).append(
                peer_once(files, size, pair=pair, options=options, work=work_of(options))
            )
        print(f"pair {pair + 1} of {options.pairs}: done", flush=True)
    sides.peer = {size: results for size, results in sides.peer.items() if len(results) in (1, options.pairs)}
    return sides


def row(name: str, results: list[Result]) -> list[str]:
    """The cells of COLUMNS, after a name."""
    seconds, tokens = pooled(results, "seconds"), pooled(results, "tokens")
    phases = ", ".join(f"{name} {part:.2f}" for name, part in median_phases(pooled(results, "phases")).items())
    cpu = spread(pooled(results, "cpu"))
    return [name, spread(seconds), cpu, phases, f"{statistics.mean(tokens):.0f}", spread(above_imports(results), 0)]


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options)
    print(f"\n## GRPO, model {size}\n", flush=True)
    sides = measure(files, options=options)
    peer = sides.peer[sides.fastest]
    checks = [same_work.same_tokens(pooled(sides.ours, "tokens"), pooled(peer, "tokens"))]
    print(machine(options))
    may_compare = same_work.report(checks, options=options)
    rows = [row("tinyrl", sides.ours)]
    rows += [row(f"TRL, micro-batch {n}", results) for n, results in sorted(sides.peer.items())]
    print("\n" + markdown([versions([sides.ours[0], peer[0]]), *COLUMNS], rows) + "\n")
    print_floor(size, sides.ours, options=options)
    if may_compare:
        ratios = spread(time_ratios(peer, sides.ours))
        print(f"ratio TRL / tinyrl, time: **{ratios}** (fastest micro-batch, {sides.fastest})")
        if MEMORY_MICRO_BATCH in sides.peer:
            print_memory(sides)


def print_floor(size: str, ours: list[Result], *, options: Namespace) -> None:
    work = work_of(options)
    completion = statistics.mean(pooled(ours, "tokens")) / (work.num_prompts * work.group_size)
    least = floor(SIZES[size], completion, options=options, work=work)
    over = statistics.median(pooled(ours, "seconds")) / least["seconds"]
    print(
        f"arithmetic floor {least['seconds']:.2f} s (sampling {least['sampling']:.2f} at {least['gflops_decode']:.0f} "
        f"GFLOP/s, the rest {least['update']:.2f} at {least['gflops_batch']:.0f}); tinyrl is {over:.2f} times that"
    )


def print_memory(sides: Sides) -> None:
    peer, ours = (statistics.median(above_imports(results)) for results in (sides.peer[MEMORY_MICRO_BATCH], sides.ours))
    print(f"ratio TRL / tinyrl, memory above imports: **{peer / ours:.2f}** (micro-batch {MEMORY_MICRO_BATCH})")


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
