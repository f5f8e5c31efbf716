"""kill -9 and SIGTERM in every turn of an episode, while the policy writes and while the environment answers.

The resumed run ends, to the bit, as the one that was never stopped.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.children import Child, before_call, resumed, train, wait_for, workers_left
from tests.faults.lookup_runs import PROMPTS, answered_by
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.generation.turns import Episodes
from tinyrl.runs.checkpoint import newest_sound
from tinyrl.runs.run_dir import RunDir

STEPS = 3
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"preset": "reinforce++", "num_prompts": PROMPTS, "group_size": 2, "minibatch_size": 6}},
    "ppo": {"ppo": {"num_prompts": PROMPTS, "num_epochs": 2, "minibatch_size": 3}},
}
# Two answers, each with a reward for the turn. In the second step's training it may hang once, at a turn's answer.
SLOW_TO_ANSWER = """
    import time
    from pathlib import Path

    folder = Path(__file__).parent
    batches = 0

    class Reply:
        def __init__(self, text, reward):
            self.text, self.done, self.reward = text, False, reward

    def respond(prompts, transcripts, seed, **columns):
        global batches
        turns = [sum(turn["role"] == "assistant" for turn in episode) for episode in transcripts]
        batches += 1 in turns
        if {sleepy} in turns and batches > 3 and not (folder / "asleep").exists():
            (folder / "asleep").touch()
            time.sleep(1000)
        return [
            Reply(f"found Amy {{['Berg', 'Blum'][number % 2]}} ;", len(set(episode[-1]["content"])) / 10 + turn)
            for episode, turn, number in zip(transcripts, turns, seed)
        ]
"""
PLACES = (("grpo", "SIGKILL", "turn 2"), ("ppo", "SIGTERM", "answer 2"), ("ppo", "SIGTERM", "update"))


def settings_for(method: str, folder: Path, *, sleepy: int = 0) -> Config:
    often = {"num_steps": STEPS, "save_every": 1, "eval_every": 0}
    code = SLOW_TO_ANSWER.format(sleepy=sleepy)
    more = {"environment": {"timeout_s": 900.0}, "generation": {"max_new_tokens": 60}}
    return answered_by(folder, code, method, run=often, **METHODS[method], **more)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """The undisturbed run of each method."""
    runs = {}
    for method in METHODS:
        folder = tmp_path_factory.mktemp(method)
        child = Child(train, settings_for(method, folder), folder, output=folder / "said.txt")
        assert child.end() == 0, child.said
        runs[method] = RunDir(folder / "run")
    return runs


def train_until_turn(settings: Config, folder: Path, number: int, turn: int) -> None:
    """Train, and send a signal to this process when an episode of the second step ends this turn."""
    ended, calls = Episodes.ended, 0

    def noted(self: Episodes, sample: int, *arguments: Any) -> None:
        nonlocal calls
        ended(self, sample, *arguments)
        if len(self.prompts) > 4 and len(self.episodes[sample].turn_ends) == turn:  # in training
            calls += 1
            if calls == len(self.prompts) + 2:  # of the second step
                os.kill(os.getpid(), number)

    Episodes.ended = noted  # pyright: ignore[reportAttributeAccessIssue]
    train(settings, folder)


def train_until_update(settings: Config, folder: Path, number: int) -> None:
    """Train, and send a signal to this process inside the update of the second step."""
    before_call(torch.Tensor, "backward", 7 if settings.method == "ppo" else 3, do=lambda: os.kill(os.getpid(), number))
    train(settings, folder)


def stopped_run(method: str, number: int, place: str, folder: Path) -> tuple[Child, int]:
    """(process, exit code) of a run that got a signal in a place of its second step."""
    kind, _, turn = place.partition(" ")
    settings = settings_for(method, folder, sleepy=int(turn) if kind == "answer" else 0)
    said = folder / "said.txt"
    if kind == "turn":
        child = Child(train_until_turn, settings, folder, number, int(turn), output=said)
    elif kind == "update":
        child = Child(train_until_update, settings, folder, number, output=said)
    else:
        child = Child(train, settings, folder, output=said)
        wait_for((folder / "asleep").exists, child)
        child.send(number)
    return child, child.end()


@pytest.mark.parametrize(("method", "name", "place"), PLACES)
def test_a_run_stopped_in_any_turn_ends_as_if_it_had_not_been(
    method: str, name: str, place: str, wholes: dict[str, RunDir], tmp_path: Path
) -> None:
    number = signal.Signals[name]
    child, code = stopped_run(method, number, place, tmp_path)
    assert code == (75 if name == "SIGTERM" else -signal.SIGKILL), child.said
    run = RunDir(tmp_path / "run")
    folder, warnings = newest_sound(run.checkpoints)
    assert warnings == []
    assert folder is not None
    assert folder.name == "step-000001"
    resumed(run)
    assert_same(wholes[method], run, STEPS)
    assert workers_left({child.pid}) == []
