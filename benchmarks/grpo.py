"""GRPO steps of both sides in alternation: seconds, phases, peak memory, ratios, and distance from the floor."""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import ours, processes
from benchmarks.floor import floor, sentence
from benchmarks.tables import Result, alternate, comparison, machine, pooled, report, same_tokens
from benchmarks.work import SIZES, SPEED, Grpo, prepare


def ours_once(files: Path, *, pair: int, options: Namespace, work: Grpo = SPEED) -> Result:
    recipe = ours.grpo(files, steps=options.steps, options=options, seed=pair, work=work)
    return processes.run("ours", {"recipe": recipe, "overrides": options.set}, options=options)


def peer_question(files: Path, work: Grpo, *, steps: int, seed: int, micro_batch: int) -> dict[str, Any]:
    """The same step by TRL, without its `use_bias_correction_kl`, which weights the KL term by the ratio."""
    config = {"max_steps": steps, "num_generations": work.group_size, "max_completion_length": work.max_new_tokens}
    config |= {"beta": work.kl_coef, "use_bias_correction_kl": False, "epsilon": work.clip_eps, "temperature": 1.0}
    config |= {"loss_type": "dapo", "scale_rewards": "group"}
    question = {"method": "grpo", "files": str(files), "rows": "prompts.jsonl", "reward": work.reward}
    question |= {"samples": work.rows, "learning_rate": work.learning_rate, "micro_batch": micro_batch}
    return {**question, "seed": seed, "config": config}


def peer_once(files: Path, micro_batch: int, *, pair: int, options: Namespace, work: Grpo = SPEED) -> Result:
    question = peer_question(files, work, steps=options.steps, seed=pair, micro_batch=micro_batch)
    return processes.run("peer", question, options=options, python=options.peer_python)


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options)
    print(f"\n## GRPO, model {size}\n", flush=True)

    def mine(pair: int) -> Result:
        return ours_once(files, pair=pair, options=options)

    def theirs(micro_batch: int):
        return lambda pair: peer_once(files, micro_batch, pair=pair, options=options)

    sides = {"tinyrl": mine, **{f"TRL, micro-batch {n}": theirs(n) for n in options.micro_batches}}
    results = alternate(sides, options.pairs)
    found = results["tinyrl"]
    print(machine(options))
    checks = [same_tokens(pooled(found, "tokens"), pooled(peer, "tokens")) for peer in [*results.values()][1:]]
    may_compare = report(checks, options=options)
    print("\n" + comparison(results, base="tinyrl", may_compare=may_compare) + "\n")
    completion = statistics.mean(pooled(found, "tokens")) / SPEED.rows
    least = floor(SIZES[size], completion, options=options)
    print(sentence(least, pooled(found, "seconds")))


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
