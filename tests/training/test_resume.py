"""Stopping anywhere and resuming: to the bit the run that was not stopped (on a CPU)."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir
from tinyrl.training import run as training_run
from tinyrl.training.state import read_state
from tinyrl.training.step import Updater

TEXT = {"ptx_coef": 0.5, "ptx_data": str(Path(__file__).parents[1] / "text_rows.jsonl")}
EVERY_WEIGHT = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, epochs and minibatches": ("grpo", {"grpo": {"num_epochs": 2, "minibatch_size": 8, "kl_coef": 0.1}}),
    "grpo, refilled groups, across an epoch of the data": (
        "grpo",
        {"grpo": {"dynamic_sampling_rounds": 2}, "task": {"max_samples": 6}},
    ),
    "grpo, full": ("grpo", EVERY_WEIGHT),
    "ppo, adaptive KL, text, micro-batches": (
        "ppo",
        {
            "ppo": {"target_kl": 6.0, **TEXT},
            "critic": {"warmup_steps": 0},
            "run": {"micro_batch_tokens": 40},
        },
    ),
    "ppo, full": ("ppo", {**EVERY_WEIGHT, "ppo": {"preset": "a2c"}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def assert_same(one: running.RunDir, other: running.RunDir, step: int) -> None:
    assert running.lasting(one) == running.lasting(other)
    assert one.samples.read_bytes() == other.samples.read_bytes()
    for ours, theirs in ((one.tokens, other.tokens), (one.prompts, other.prompts)):
        assert ours.exists() == theirs.exists()
        assert not ours.exists() or ours.read_bytes() == theirs.read_bytes()
    mine, its = running.weights(one, step), running.weights(other, step)
    assert mine.keys() == its.keys()
    different = [name for name in mine if not torch.equal(mine[name], its[name])]
    assert not different


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.wide
def test_stopped_and_resumed_is_bit_equal(name: str, model: Path, tmp_path: Path) -> None:
    """Stopped by SIGTERM at moments spread over the whole run: in sampling, in the update, in evaluations."""
    method, sections = VARIANTS[name]
    settings = running.config(method, model, **sections)
    code, whole, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    for number, share in enumerate((0.15, 0.62, 0.9)):
        code, stopped, _ = running.train(
            settings, tmp_path, name=f"stopped-{number}", stop_at=max(1, int(looks * share))
        )
        assert code == 75
        assert running.go_on(stopped) == 0
        assert_same(whole, stopped, settings.run.num_steps)


def test_stopped_inside_an_update(model: Path, tmp_path: Path) -> None:
    """A stop inside an update puts back what the step has changed, the prompt sampler's record too."""
    reward = {"functions": [{"use": f"{Path(running.__file__).parent / 'varied_reward.py'}:partly_solved"}]}
    task = {"sampler": "difficulty", "max_samples": 21}
    ppo = {"num_epochs": 3, **TEXT}
    settings = running.config("ppo", model, ppo=ppo, critic={"warmup_steps": 0}, task=task, reward=reward)
    _, whole, _ = running.train(settings, tmp_path, name="whole")
    code, stopped = stopped_in_the_update(settings, tmp_path)
    assert code == 75
    folder = sorted(stopped.checkpoints.iterdir())[-1]
    assert (folder.name, read_state(folder).run.phase) == ("step-000001", "rollout")
    assert [line["step"] for line in running.metrics(stopped)] == [0, 1]
    assert running.go_on(stopped, stop_at=2) == 75
    assert running.go_on(stopped) == 0
    assert_same(whole, stopped, settings.run.num_steps)


def stopped_in_the_update(settings: Config, folder: Path, *, name: str = "stopped") -> tuple[int, RunDir]:
    """A run that gets a SIGTERM before the second optimizer step of its second step."""
    plain, steps = Updater.step, [0]

    def step(updater: Updater, *args: Any, **named: Any) -> dict[str, float]:
        steps[0] += 1
        if steps[0] == settings.on_policy.num_epochs * settings.on_policy.batch_size // 4 + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(updater, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "step", step)
        code, run, _ = running.train(settings, folder, name=name)
    return code, run


def test_a_stop_waits_for_an_update_whose_weights_are_too_large_to_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "MOST_COPIED", 0)
    settings = running.config(
        "ppo", model, ppo={"num_epochs": 3}, lora={"enabled": False}, optim={"learning_rate": 1e-3}
    )
    _, whole, _ = running.train(settings, tmp_path, name="whole")
    code, stopped = stopped_in_the_update(settings, tmp_path)
    assert code == 75
    folder = sorted(stopped.checkpoints.iterdir())[-1]
    assert (folder.name, read_state(folder).run.phase) == ("step-000002", "evaluation")
    assert running.go_on(stopped) == 0
    assert_same(whole, stopped, settings.run.num_steps)


def test_a_finished_run_says_so(model: Path, tmp_path: Path) -> None:
    settings = running.config("grpo", model, run={"num_steps": 1})
    _, run, _ = running.train(settings, tmp_path)
    before = run.metrics.read_bytes()
    assert running.go_on(run) == 0
    assert run.metrics.read_bytes() == before
