"""PPO steps of TRL 1.12's trainer (policy, reference, value and reward model) beside each kind of critic here."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import our_recipe, processes, same_work
from benchmarks.fixed_work import prepare
from benchmarks.grpo import COLUMNS, row
from benchmarks.results import Result, alternate, pooled, time_ratios
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions

PEER_MICRO_BATCH = 8


def results_of(files: Path, *, python: str | None, options: Namespace) -> tuple[list[Result], dict[str, list[Result]]]:
    """(the peer's, ours by kind of critic), in alternation. Without a Python for the peer, ours only."""

    def ours(critic: str):
        def once(pair: int) -> Result:
            recipe = our_recipe.ppo(files, critic=critic, steps=options.steps, options=options, seed=pair)
            return processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)

        return once

    def peer(pair: int) -> Result:
        question = {"files": str(files), "micro_batch": PEER_MICRO_BATCH, "steps": options.steps, "seed": pair}
        return processes.run("peer_ppo", question, options=options, python=python or "")

    sides = {**({"peer": peer} if python else {}), **{critic: ours(critic) for critic in options.critics}}
    results = alternate(sides, options.pairs)
    return results.pop("peer", []), results


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options)
    print(f"\n## PPO, model {size}\n", flush=True)
    peer, ours = results_of(files, python=options.peer_python, options=options)
    print(machine(options))
    first = ours[options.critics[0]]  # other critics sample with the same random numbers
    check = same_work.same_tokens(pooled(first, "tokens"), pooled(peer, "tokens"))
    may_compare = same_work.report([check], options=options)
    rows = [row(f"tinyrl, critic {critic}", results) for critic, results in ours.items()]
    rows.append(row(f"TRL, micro-batch {PEER_MICRO_BATCH}", peer))
    print("\n" + markdown([versions([first[0], peer[0]]), *COLUMNS], rows) + "\n")
    for critic, results in ours.items() if may_compare else ():
        print(f"ratio TRL / tinyrl with critic {critic}, time: **{spread(time_ratios(peer, results))}**")


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
