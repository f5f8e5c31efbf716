"""Cleanup of workers: none, and nothing one started, outlives a run that is closed or killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tinyrl.rewards.functions import FunctionReward

PATIENCE_S = 20.0  # how long a process may take to be gone before the test says it never will be

REWARDS = """
    import os, re, signal, subprocess, sys, time

    def note(*pids):
        with open("pids.new", "w") as file:
            file.write(" ".join(map(str, pids)))
        os.rename("pids.new", "pids")

    def idle(prompts, completions, **columns):
        note(os.getpid())
        return [1.0] * len(prompts)

    def hang_with_lock(prompts, completions, **columns):
        note(os.getpid())
        re.match("(a+)+b", "a" * 60)

    def hang_in_child(prompts, completions, **columns):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        note(os.getpid(), child.pid)
        child.wait()

    hang_in_child.whole_batch = True

    def leave_session(prompts, completions, **columns):
        # one child in a session of its own, and one whose parent is gone as well
        own = dict(start_new_session=True, stdout=subprocess.PIPE, text=True)
        idle = [sys.executable, "-c", "import time; time.sleep(1000)"]
        child = subprocess.Popen(idle, **own)
        code = f"import subprocess; print(subprocess.Popen({idle}, start_new_session=True).pid, flush=True)"
        parent = subprocess.Popen([sys.executable, "-c", code], **own)
        grandchild = int(parent.stdout.readline())
        parent.wait()
        note(os.getpid(), child.pid, grandchild)
        return [1.0] * len(prompts)

    def kill_its_group(prompts, completions, **columns):
        leave_session(prompts, completions)
        os.killpg(0, signal.SIGKILL)

    kill_its_group.whole_batch = True

    def fork_and_die(prompts, completions, **columns):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        note(os.getpid(), child)
        os._exit(1)
"""

PARENT = """
    import sys, time
    from tinyrl.rewards.functions import FunctionReward
    reward = FunctionReward(f"rewards.py:{sys.argv[1]}", timeout_s=1000)
    reward(["p"], ["c"], {})
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(pid: int) -> bool:
    """Whether a process is running; a dead one that nothing has waited for is not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those that still exist after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def noted_pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline, "the function was never called"
        time.sleep(0.02)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("function", ["leave_session", "idle", "hang_in_child", "hang_with_lock"])
@pytest.mark.wide
def test_nothing_outlives_a_killed_parent(folder: Path, function: str):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(PARENT), function]
    parent = subprocess.Popen(command, env=environment)
    try:
        pids = noted_pids(folder)
        assert all(runs(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_gone(pids) == []


def test_nothing_outlives_close(folder: Path):
    with FunctionReward("rewards.py:leave_session") as reward:
        assert reward(["p"], ["c"], {}).scores == [1.0]
        pids = noted_pids(folder)
        pids.append(psutil.Process(pids[0]).ppid())
        assert all(runs(pid) for pid in pids)
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("function", "timeout_s", "reason"),
    [
        ("hang_in_child", 1, "gave no answer within 1 s (rewards.py, line 20)"),
        ("fork_and_die", 10, "ended its process with exit code 1"),
        ("kill_its_group", 10, "died of SIGKILL"),
    ],
)
@pytest.mark.wide
def test_nothing_outlives_a_lost_call(folder: Path, function: str, timeout_s: float, reason: str):
    with FunctionReward(f"rewards.py:{function}", timeout_s=timeout_s) as reward:
        call = reward(["p"], ["c"], {})
        assert [failure.reason for failure in call.failures] == [f"`{function}` {reason}"]
        assert wait_until_gone(noted_pids(folder)) == []


def test_an_idle_worker_that_was_killed_is_replaced(folder: Path):
    with FunctionReward("rewards.py:idle") as reward:
        assert reward(["p"], ["c"], {}).scores == [1.0]
        [pid] = noted_pids(folder)
        supervisor = psutil.Process(pid).ppid()
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid, supervisor]) == []
        call = reward(["p"], ["c"], {})
        assert (call.scores, call.failures, call.retried) == ([1.0], [], None)


def test_a_reward_is_none_of_the_launched_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in it would wait for the other processes."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    code = "any(name in os.environ for name in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK', 'MASTER_ADDR'))"
    (folder / "launched.py").write_text(f"import os\ndef launched(completions):\n    return [{code}]\n")
    with FunctionReward("launched.py:launched") as reward:
        assert reward(["?"], ["a"], {}).scores == [0.0]
