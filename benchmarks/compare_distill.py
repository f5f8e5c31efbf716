"""Steps of on-policy distillation on both sides in alternation: seconds, phases, peak memory, ratios.

The teacher is a model of its own, of the student's size; the distance is the reverse KL over the vocabulary.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import asdict

from benchmarks import our_recipe, processes
from benchmarks.compare_grpo import COLUMNS, row
from benchmarks.fixed_work import Grpo, prepare
from benchmarks.results import Result, above_imports, pooled, time_ratios
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions

WORK = Grpo(num_prompts=64, group_size=1, kl_coef=0.0)


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options)
    ours: list[Result] = []
    peer: dict[int, list[Result]] = {}
    for pair in range(options.pairs):
        recipe = our_recipe.distill(files, steps=options.steps, options=options, seed=pair, work=WORK)
        ours.append(processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options))
        fastest = min(peer, key=lambda n: statistics.median(pooled(peer[n], "seconds")), default=0)
        for micro_batch in options.micro_batches if pair == 0 else [fastest]:
            question = {"files": str(files), "work": asdict(WORK), "micro_batch": micro_batch}
            question |= {"steps": options.steps, "seed": pair}
            result = processes.run("peer_distill", question, options=options, python=options.peer_python)
            peer.setdefault(micro_batch, []).append(result)
        print(f"pair {pair + 1} of {options.pairs}: done", flush=True)
    fastest = min(peer, key=lambda n: statistics.median(pooled(peer[n], "seconds")))
    print(f"\n## Distillation, model {size}\n\n{machine(options)}")
    rows = [row("tinyrl", ours), *(row(f"TRL, micro-batch {n}", results) for n, results in sorted(peer.items()))]
    print("\n" + markdown([versions([ours[0], peer[fastest][0]]), *COLUMNS], rows) + "\n")
    theirs = peer[fastest]
    memory = statistics.median(above_imports(theirs)) / statistics.median(above_imports(ours))
    print(f"ratio TRL / tinyrl, time: **{spread(time_ratios(theirs, ours))}** (fastest micro-batch, {fastest})")
    print(f"ratio TRL / tinyrl, memory above imports: **{memory:.2f}** (the same)")


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
