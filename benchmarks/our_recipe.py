"""tinyrl's recipes for the benchmarks: the fixed work as settings."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.fixed_work import LORA, SPEED, Grpo

REWARDS = Path(__file__).with_name("rewards.py")
PPO_PROMPTS, PPO_EPOCHS = 64, 4


def common(files: Path, work: Grpo, *, steps: int, options: Namespace, seed: int) -> dict[str, Any]:
    """Sections that GRPO and PPO share. Nothing is saved or evaluated between steps."""
    rate = work.learning_rate
    return {
        "model": {"path": str(files / "model"), "dtype": "float32"},
        "lora": {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": LORA["target_modules"]},
        "task": {"data": str(files / "prompts.jsonl"), "eval_data": str(files / "eval.jsonl")},
        "generation": {"max_new_tokens": work.max_new_tokens, "temperature": 1.0},
        "optim": {"learning_rate": rate, "critic_learning_rate": rate, "schedule": "constant"},
        "run": {
            "num_steps": steps,
            "seed": seed,
            "eval_every": 0,
            "eval_prompts": 1,
            "save_every": 0,
            "threads": options.threads,
        },
    }


def grpo(files: Path, *, steps: int, options: Namespace, seed: int = 0, work: Grpo = SPEED) -> dict[str, Any]:
    """One update a rollout, all tokens of a step weigh the same, KL to the reference by k3."""
    return {
        "method": "grpo",
        **common(files, work, steps=steps, options=options, seed=seed),
        "reward": {"functions": [{"use": f"{REWARDS}:{work.reward}"}]},
        "grpo": {
            "num_prompts": work.num_prompts,
            "group_size": work.group_size,
            "clip_eps": work.clip_eps,
            "clip_eps_high": work.clip_eps,
            "kl_coef": work.kl_coef,
            "kl_estimator": "k3",
        },
    }


def ppo(files: Path, *, critic: str, steps: int, options: Namespace, seed: int) -> dict[str, Any]:
    """64 prompts with one completion each, four epochs of one optimizer step, a reward model of the policy's shape."""
    start = {"path": str(files / "reward_model")} if critic == "separate" else {}
    return {
        "method": "ppo",
        **common(files, SPEED, steps=steps, options=options, seed=seed),
        "reward": {"model": str(files / "reward_model")},
        "critic": {"kind": critic, "warmup": 0, **start},
        "ppo": {"num_prompts": PPO_PROMPTS, "num_epochs": PPO_EPOCHS, "minibatch_size": PPO_PROMPTS},
    }


def write(settings: dict[str, Any]) -> Path:
    """Write a process's recipe into its folder, which is made; returns the file."""
    path = Path(settings["folder"]) / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings["recipe"]))  # JSON is YAML
    return path
