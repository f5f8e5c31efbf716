"""Runs that two processes and one are compared on: small, and of every kind that exchanges something of its own."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tests import running
from tests.tiny_models import tiny_model, tiny_reward_model
from tinyrl.config.schema import Config

STEPS = 3
REPLY = """
def respond(prompts, transcripts, **columns):
    return [None if len(t) > 2 else f"{len(t[-1]['content']) % 3} more" for t in transcripts]

def variety(prompts, completions, **columns):
    return [float(len({c for message in messages for c in message["content"]})) for messages in completions]
"""
PAIRS = [{"prompt": f"{n} of", "chosen": f" {n} and more", "rejected": " no" * (1 + n % 3)} for n in range(40)]
FULL: dict[str, Any] = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-4}}


def sections(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: method, and what is laid over the small configuration of tests/running.py."""
    (folder / "env.py").write_text(REPLY)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    pairs = {"task": {"name": "rows", "data": str(folder / "pairs.jsonl")}}
    judge = str(tiny_reward_model(folder / "judge", "llama"))
    other = str(tiny_model(folder / "other", "qwen2"))
    environment = {
        "environment": {"use": f"{folder / 'env.py'}:respond"},
        "generation": {"max_new_tokens": 24, "stop": list(string.ascii_letters)},
        "reward": {"functions": [{"use": f"{folder / 'env.py'}:variety"}]},
    }
    several = {"num_prompts": 5, "group_size": 3, "num_epochs": 2, "minibatch_size": 5, "kl_coef": 0.05}
    refills = {**several, "num_prompts": 4, "group_size": 2, "minibatch_size": 4, "refill_rounds": 2}
    adaptive = {"target_kl": 1.0}
    steady = {"optim": {"learning_rate": 1e-4}}
    odd = {"num_prompts": 7, "minibatch_size": 7}
    return {
        "grpo": ("grpo", {"grpo": refills}),
        "grpo-environment": ("grpo", {**environment, "grpo": several}),
        "ppo": ("ppo", {"ppo": adaptive, "run": {"micro_batch_tokens": 60}}),
        "ppo-full": ("ppo", {**FULL, "ppo": {"preset": "a2c"}}),
        "ppo-judged": ("ppo", {"reward": {"model": judge}, "critic": {"kind": "shared"}, "ppo": odd}),
        "distill": ("distill", {"distill": {"num_prompts": 5, "group_size": 2}, "teacher": {"path": other}}),
        "sft": ("sft", {"task": {"name": "rows", "data": str(texts(folder))}, "sft": {"batch_size": 5}}),
        "reward": ("reward", {**pairs, **steady, "reward_model": {"batch_size": 6}}),
        "kto": ("dpo", {**pairs, "dpo": {"batch_size": 7, "loss": "kto"}}),
    }


def texts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    rows = [{"prompt": f"{n} and", "completion": " more" * (1 + n % 4)} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cases(folder: Path) -> dict[str, Config]:
    """The configurations, whose files are made in `folder`."""
    model, made = tiny_model(folder / "model", "llama"), {}
    rare = {"num_steps": STEPS, "save_every": 0, "eval_every": 0, "eval_prompts": 5}
    for name, (method, laid_over) in sections(folder).items():
        over = {**laid_over, "run": {**rare, **laid_over.get("run", {})}}
        over["optim"] = {"learning_rate": 1e-3, **laid_over.get("optim", {})}
        if method not in (*running.METHODS, "distill"):  # reads no prompts
            over = {"task": over["task"], "run": over["run"], "optim": over["optim"], **over}
        made[name] = running.config(method, model, **over)
    return made
