"""PPO steps of TRL 1.12's trainer (policy, reference, value and reward model) beside each kind of critic here."""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.benchmarks import our_recipe, processes, same_work
from tests.benchmarks.compare_grpo import pooled, row
from tests.benchmarks.fixed_work import prepare, shape_of
from tests.benchmarks.tables import machine, markdown, spread

PEER_MICRO_BATCH = 8
Result = dict[str, Any]


def ours_once(files: Path, critic: str, *, pair: int, options: Namespace) -> Result:
    recipe = our_recipe.ppo(files, critic=critic, steps=options.steps, options=options, seed=pair)
    return processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)


def peer_once(files: Path, *, pair: int, python: str, options: Namespace) -> Result:
    question = {"files": str(files), "micro_batch": PEER_MICRO_BATCH, "steps": options.steps, "seed": pair}
    return processes.run("peer_ppo", question, options=options, python=python)


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(shape_of(size), options=options)
    print(f"\n## PPO, model {size}\n", flush=True)
    peer: list[Result] = []
    ours: dict[str, list[Result]] = {critic: [] for critic in options.critics}
    for pair in range(options.pairs):
        peer.append(peer_once(files, pair=pair, python=options.peer_python, options=options))
        for critic, results in ours.items():
            results.append(ours_once(files, critic, pair=pair, options=options))
        print(f"pair {pair + 1} of {options.pairs}: done", flush=True)
    print(machine(options, *(results[0] for results in ours.values()), peer[0]))
    tokens = pooled(ours[options.critics[0]], "tokens")  # other critics sample with the same random numbers
    may_compare = same_work.report([same_work.same_tokens(tokens, pooled(peer, "tokens"))], options=options)
    rows = [row(f"tinyrl, critic {critic}", results) for critic, results in ours.items()]
    rows.append(row(f"TRL, micro-batch {PEER_MICRO_BATCH}", peer))
    print("\n" + markdown(["side", "seconds a step", "of them", "tokens a step", "peak MB above imports"], rows) + "\n")
    if may_compare:
        for critic, results in ours.items():
            pairs = zip(peer, results, strict=True)
            ratios = [statistics.median(p["seconds"]) / statistics.median(o["seconds"]) for p, o in pairs]
            print(f"ratio TRL / tinyrl with critic {critic}, time: **{spread(ratios)}**")


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
