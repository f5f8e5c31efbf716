"""Signals to a run, wherever it is: sampling, waiting for a reward, in the update, evaluating.

It ends with 75, leaves a sound checkpoint and no process, and resumes as if nothing had happened.
A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests import running
from tests.faults.children import PATIENCE_S, ROOT, Child, before_call, resumed, train, wait_for, workers_left
from tests.training.test_resume import assert_same
from tinyrl.config.recipe import dump_config
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
CASES = (("SIGTERM", "update"), ("SIGINT", "evaluation"), ("SIGUSR1", "sampling"), ("SIGTERM", "reward"))
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
# As `SLEEPER`, but it makes samples.jsonl a pipe without a reader: a disk that hangs at the next write.
HANGING_DISK = """
    import os
    from pathlib import Path

    calls = 0

    def variety(prompts, completions, **columns):
        global calls
        calls += 1
        if calls == 3:  # after the trial and the sampled half of the evaluation
            os.mkfifo(Path(__file__).with_name("run") / "samples.jsonl")
        return [float(len(set(completion))) for completion in completions]
"""


def settings_for(model: Path, folder: Path, *, reward: str | None = None) -> Config:
    sections: dict[str, Any] = {}
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


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_signal_in_any_phase_leaves_a_checkpoint_and_loses_nothing(
    name: str, phase: str, model: Path, whole: RunDir, tmp_path: Path
) -> None:
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
    assert f"{name}: saving step" in child.said
    assert "stopped; nothing is lost" in child.said
    assert workers_left({child.pid}) == []
    folder, warnings = newest_sound(run.checkpoints)
    assert folder is not None
    assert warnings == []
    resumed(run)
    assert_same(whole, run, STEPS)


# The real command, in a process started for it


def command(*words: str, **options: Any) -> subprocess.Popen[Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    return subprocess.Popen([sys.executable, "-m", "tinyrl", *words], env=environment, **options)


def recipe(settings: Config, folder: Path) -> str:
    path = folder / "recipe.yaml"
    path.write_text(dump_config(settings))
    return str(path)


def wait_until(there: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert process.poll() is None, "ended before that"
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


@contextlib.contextmanager
def at_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """The command in the foreground of a terminal of its own; the process and our end of the terminal."""
    ours, theirs = pty.openpty()
    process = command(
        *words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_take_terminal
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(terminal: int, text: bytes) -> bytes:
    """What a terminal shows up to and including `text`. The test fails where that never comes."""
    os.set_blocking(terminal, False)
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while text not in shown:
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        with contextlib.suppress(BlockingIOError):
            shown += os.read(terminal, 1 << 16)
        time.sleep(0.01)
    return shown


def wait_until_idle(process: subprocess.Popen[Any]) -> None:
    """Until the main thread has not run for a second (others may: what draws the bar)."""
    main, before, since = psutil.Process(process.pid), -1.0, time.monotonic()
    deadline = since + PATIENCE_S
    while time.monotonic() - since < 1.0:
        now = next(t.user_time + t.system_time for t in main.threads() if t.id == process.pid)
        if now != before:
            before, since = now, time.monotonic()
        assert time.monotonic() < deadline, "never idle"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_though_the_disk_hangs(model: Path, tmp_path: Path) -> None:
    """Typed at a terminal. The first is noted and acknowledged, but what it waits for never comes."""
    words = ("train", "ppo", recipe(settings_for(model, tmp_path, reward=HANGING_DISK), tmp_path), "--name", "run")
    with at_terminal(*words, "--output-dir", str(tmp_path)) as (process, terminal):
        wait_until((tmp_path / "run" / "samples.jsonl").exists, process)
        wait_until_idle(process)
        os.write(terminal, b"\x03")
        read_until(terminal, b"Ctrl-C again leaves at once")
        assert process.poll() is None
        os.write(terminal, b"\x03")
        assert process.wait(PATIENCE_S) == 130
        assert b"\x1b[?25h" in read_until(terminal, b"\x1b[?25h")  # the cursor is shown again
    assert workers_left({process.pid}) == []
