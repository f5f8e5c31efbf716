"""PPO steps of TRL 1.12's trainer (policy, reference, value and reward model) beside each kind of critic here."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import ours, processes
from benchmarks.tables import Result, alternate, comparison, machine, pooled, report, same_tokens
from benchmarks.work import PPO_EPOCHS, PPO_PROMPTS, SIZES, SPEED, prepare

PEER_MICRO_BATCH = 8


def peer_question(
    files: Path,
    *,
    steps: int,
    seed: int,
    micro_batch: int,
    prompts: int = PPO_PROMPTS,
    new: int = SPEED.max_new_tokens,
    scored: int = PPO_PROMPTS,
) -> dict[str, Any]:
    """The same step by TRL 1.12. stop_token is `eos`, as a user would set it: `generate` ends when all rows have."""
    config = {"total_episodes": prompts * steps, "num_mini_batches": 1, "num_ppo_epochs": PPO_EPOCHS}
    config |= {"local_rollout_forward_batch_size": scored, "response_length": new, "stop_token": "eos"}
    config |= {"kl_coef": 0.05, "cliprange": SPEED.clip_eps, "temperature": 1.0, "num_sample_generations": 0}
    question = {"method": "ppo", "files": str(files), "rows": "prompts.jsonl", "samples": prompts}
    question |= {"learning_rate": SPEED.learning_rate, "micro_batch": micro_batch, "seed": seed}
    return {**question, "config": config}


def one_size(size: str, *, options: Namespace) -> None:
    files = prepare(SIZES[size], options=options, reward_model=True)
    print(f"\n## PPO, model {size}\n", flush=True)

    def mine(critic: str):
        def once(pair: int) -> Result:
            recipe = ours.ppo(files, critic=critic, steps=options.steps, options=options, seed=pair)
            return processes.run("ours", {"recipe": recipe, "overrides": options.set}, options=options)

        return once

    def theirs(pair: int) -> Result:
        question = peer_question(files, steps=options.steps, seed=pair, micro_batch=PEER_MICRO_BATCH)
        return processes.run("peer", question, options=options, python=options.peer_python)

    sides = {f"tinyrl, critic {critic}": mine(critic) for critic in options.critics}
    trl = f"TRL, micro-batch {PEER_MICRO_BATCH}"
    results = alternate({trl: theirs, **sides}, options.pairs)
    print(machine(options))
    first = results[next(iter(sides))]  # other critics sample with the same random numbers
    may_compare = report([same_tokens(pooled(first, "tokens"), pooled(results[trl], "tokens"))], options=options)
    print("\n" + comparison(results, base=trl, may_compare=may_compare))


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
