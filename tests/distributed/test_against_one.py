"""Two processes against one: the same samples, metrics and weights, for every method and whatever they exchange."""

from __future__ import annotations

import json
import math
import string
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.distributed.ranks import Ranks
from tests.faults.children import Child
from tests.tiny_models import tiny_model, tiny_reward_model
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir

pytestmark = pytest.mark.slow
STEPS = 3
RELATIVE, ABSOLUTE, OF_WEIGHTS = 1e-5, 1e-6, 1e-4
OF_KL = 1e-5  # nats of a response: a difference of two sums of log-probabilities, a hundred times as large
REPLY = """
def respond(prompts, transcripts, **columns):
    return [None if len(t) > 2 else f"{len(t[-1]['content']) % 3} more" for t in transcripts]

def variety(prompts, completions, **columns):
    return [float(len({c for message in messages for c in message["content"]})) for messages in completions]
"""


def cases(folder: Path) -> dict[str, Config]:
    """Small runs, of every kind that exchanges something of its own; their files are made in `folder`."""
    model, judge = tiny_model(folder / "model", "llama"), str(tiny_reward_model(folder / "judge", "llama"))
    (folder / "env.py").write_text(REPLY)
    pairs = [{"prompt": f"{n} of", "chosen": f" {n} and more", "rejected": " no" * (1 + n % 3)} for n in range(40)]
    texts = [{"prompt": f"{n} and", "completion": " more" * (1 + n % 4)} for n in range(40)]
    for name, rows in (("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        "environment": {"name": f"{folder / 'env.py'}:respond"},
        "generation": {"max_new_tokens": 24, "stop": list(string.ascii_letters)},
        "reward": {"functions": [{"use": f"{folder / 'env.py'}:variety"}]},
    }
    several = {"num_prompts": 5, "group_size": 3, "num_epochs": 2, "minibatch_size": 5, "kl_coef": 0.05}
    refills = {**several, "num_prompts": 4, "group_size": 2, "minibatch_size": 4, "dynamic_sampling_rounds": 2}
    full = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-4}}
    odd = {"preset": "a2c", "num_prompts": 7, "minibatch_size": 7}
    teacher = {"path": str(tiny_model(folder / "other", "qwen2"))}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("grpo", {"grpo": refills}),
        "grpo-environment": ("grpo", {**environment, "grpo": several}),
        "ppo": ("ppo", {"ppo": {"target_kl": 1.0}, "run": {"micro_batch_tokens": 60}}),
        "ppo-judged": ("ppo", {**full, "reward": {"model": judge}, "critic": {"kind": "shared"}, "ppo": odd}),
        "distill": ("distill", {"distill": {"num_prompts": 5, "group_size": 2}, "teacher": teacher}),
        "sft": ("sft", {"task": {"name": "rows", "data": str(folder / "texts.jsonl")}, "sft": {"batch_size": 5}}),
        "kto": ("dpo", {"task": {"name": "rows", "data": str(folder / "pairs.jsonl")},
                        "dpo": {"batch_size": 7, "loss": "kto"}}),
    }  # fmt: skip
    rare = {"num_steps": STEPS, "save_every": 0, "eval_every": 0, "eval_prompts": 5}
    for sections in (sections for _, sections in made.values()):
        sections["run"] = rare | sections.get("run", {})
        sections.setdefault("optim", {"learning_rate": 1e-3})
    return {name: running.config(method, model, **sections) for name, (method, sections) in made.items()}


SAMPLED, TEXT = ("grpo", "grpo-environment", "ppo", "ppo-judged", "distill"), ("sft", "kto")


def train_all(settings: dict[str, Config], folder: Path) -> None:
    for name, config in settings.items():
        code, *_ = running.train(config, folder, name=name)
        if code:
            sys.exit(code)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the runs of one process, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    settings = cases(folder)
    assert set(settings) == {*SAMPLED, *TEXT}
    alone = Child(train_all, settings, folder / "one", output=folder / "one.txt")
    together = Ranks(train_all, settings, folder / "two", folder=folder)
    assert together.end() == [0, 0], together.said
    assert alone.end() == 0, alone.said
    return folder / "one", folder / "two"


def samples(run: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    kept = ("kind", "prompt_index", "sample", "completion", "finish_reason", "episode")
    return [{key: line.get(key) for key in kept} for line in lines if line["step"] == 1]


@pytest.mark.parametrize("name", [*SAMPLED, *TEXT])
def test_samples_metrics_and_weights_agree(name: str, both: tuple[Path, Path]) -> None:
    runs = [RunDir(folder / name) for folder in both]
    if name in SAMPLED:
        one, two = map(samples, runs)
        assert len(one) > 1
        assert two == one
    one, two = map(running.lasting, runs)
    assert [line["step"] for line in two] == [*range(STEPS + 1)]
    for ours, theirs in zip(one, two, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            if isinstance(value, float) and not math.isnan(value):
                absolute = OF_KL if key.endswith("/kl") else ABSOLUTE
                assert theirs[key] == pytest.approx(value, rel=RELATIVE, abs=absolute), (ours["step"], key)
            elif not isinstance(value, list | float):
                assert theirs[key] == value, (ours["step"], key)
    one, two = (running.weights(run, STEPS) for run in runs)
    assert set(one) == set(two)
    for key, tensor in one.items():
        assert float((two[key].double() - tensor.double()).abs().max()) < OF_WEIGHTS, key
