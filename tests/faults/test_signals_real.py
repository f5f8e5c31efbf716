"""Signals to a run, wherever it is: sampling, waiting for a reward, in the update, evaluating.

It ends with 75, leaves a sound checkpoint and no process, and resumes as if nothing had happened.
"""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.faults.children import Child, before_call, resumed, train, wait_for, workers_left
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.evaluation import evaluate as evaluation
from tinyrl.generation.scheduler import Scheduler
from tinyrl.runs.checkpoint import newest_sound
from tinyrl.runs.run_dir import RunDir

STEPS, BATCH = 3, 8
PHASES: dict[str, tuple[Any, str, int]] = {  # what is called in a phase, and at which call the signal comes
    "sampling": (Scheduler, "step", 20),
    "update": (torch.Tensor, "backward", 7),
    "evaluation": (evaluation, "_divergence", 2),
}
CASES = (("SIGTERM", "reward"), ("SIGTERM", "update"), ("SIGINT", "evaluation"), ("SIGUSR1", "sampling"))
SLEEPER = f"""
    import time
    from pathlib import Path

    batches, asleep = 0, Path(__file__).with_name("asleep")

    def variety(prompts, completions, **columns):
        global batches
        batches += len(prompts) == {BATCH}
        if batches == 2 and not asleep.exists():
            asleep.touch()
            time.sleep(1000)
        return [float(len(set(completion))) for completion in completions]
"""


def settings_for(model: Path, folder: Path, *, reward: str | None = None) -> Config:
    sections: dict[str, Any] = {"reward": running.IN_A_WORKER}
    if reward is not None:
        (folder / "rewards.py").write_text(textwrap.dedent(reward))
        sections["reward"] = {"functions": [{"use": f"{folder / 'rewards.py'}:variety"}], "timeout_s": 1000.0}
    often = {"num_steps": STEPS, "save_every": 0, "eval_every": 2, "eval_prompts": 4, "micro_batch_tokens": 60}
    return running.config("ppo", model, ppo={"num_prompts": BATCH, "minibatch_size": 4}, run=often, **sections)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("whole")
    child = Child(train, settings_for(model, folder), folder, output=folder / "said.txt")
    assert child.end() == 0, child.said
    return RunDir(folder / "run")


def train_until(settings: Config, folder: Path, number: int, phase: str) -> None:
    """Train, and send a signal to this process in a phase."""
    owner, name, at = PHASES[phase]
    before_call(owner, name, at, do=lambda: os.kill(os.getpid(), number))
    train(settings, folder)


@pytest.mark.slow  # Fast: test_kill.py; signals to the test's own process in test_resume.py, test_saver.py, api/.
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_signal_in_any_phase_leaves_a_checkpoint_and_loses_nothing(
    name: str, phase: str, model: Path, whole: RunDir, tmp_path: Path
) -> None:
    """The fast case waits for a worker. tests/training/test_resume.py sends its own process signals in other phases."""
    number, said = signal.Signals[name], tmp_path / "said.txt"
    if phase == "reward":
        settings = settings_for(model, tmp_path, reward=SLEEPER)
        child = Child(train, settings, tmp_path, output=said)
        wait_for((tmp_path / "asleep").exists, child)
        child.send(number)
    else:
        child = Child(train_until, settings_for(model, tmp_path), tmp_path, number, phase, output=said)
    run = RunDir(tmp_path / "run")
    assert child.end() == 75, child.said
    assert workers_left({child.pid}) == []
    folder, warnings = newest_sound(run.checkpoints)
    assert folder is not None
    assert warnings == []
    resumed(run)
    assert_same(whole, run, STEPS)
