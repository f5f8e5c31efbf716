"""tinyrl's recipes for the benchmarks: the fixed work as settings."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.benchmarks.fixed_work import CLIP_EPS, GROUP_SIZE, KL_COEF, LEARNING_RATE, LORA, MAX_NEW_TOKENS, NUM_PROMPTS

PPO_PROMPTS, PPO_EPOCHS = 64, 4


def common(
    files: Path, *, steps: int, options: Namespace, seed: int, max_new_tokens: int = MAX_NEW_TOKENS
) -> dict[str, Any]:
    """Sections that GRPO and PPO share. Nothing is saved or evaluated between steps."""
    return {
        "model": {"path": str(files / "model"), "dtype": "float32"},
        "lora": {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": LORA["target_modules"]},
        "task": {"data": str(files / "prompts.jsonl"), "eval_data": str(files / "eval.jsonl")},
        "generation": {"max_new_tokens": max_new_tokens, "temperature": 1.0},
        "optim": {"learning_rate": LEARNING_RATE, "critic_learning_rate": LEARNING_RATE, "schedule": "constant"},
        "run": {
            "num_steps": steps,
            "seed": seed,
            "eval_every": 0,
            "eval_prompts": 1,
            "save_every": 0,
            "threads": options.threads,
        },
    }


def grpo(
    files: Path,
    *,
    steps: int,
    options: Namespace,
    seed: int = 0,
    group_size: int = GROUP_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, Any]:
    """One update a rollout, all tokens of a step weigh the same, KL to the reference by k3."""
    return {
        "method": "grpo",
        **common(files, steps=steps, options=options, seed=seed, max_new_tokens=max_new_tokens),
        "reward": {"functions": [{"use": f"{files / 'reward.py'}:reward"}]},
        "grpo": {
            "num_prompts": NUM_PROMPTS,
            "group_size": group_size,
            "clip_eps": CLIP_EPS,
            "clip_eps_high": CLIP_EPS,
            "kl_coef": KL_COEF,
            "kl_estimator": "k3",
        },
    }


def ppo(files: Path, *, critic: str, steps: int, options: Namespace, seed: int) -> dict[str, Any]:
    """64 prompts with one completion each, four epochs of one optimizer step, a reward model of the policy's shape."""
    start = {"path": str(files / "reward_model")} if critic == "separate" else {}
    return {
        "method": "ppo",
        **common(files, steps=steps, options=options, seed=seed),
        "reward": {"model": str(files / "reward_model")},
        "critic": {"kind": critic, "warmup": 0, **start},
        "ppo": {"num_prompts": PPO_PROMPTS, "num_epochs": PPO_EPOCHS, "minibatch_size": PPO_PROMPTS},
    }
