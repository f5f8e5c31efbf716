"""Cleanup of workers: none, and nothing one started, outlives a run that is closed or killed."""

import contextlib
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

IDLE = [sys.executable, "-c", "import time; time.sleep(1000)"]
PATIENCE_S = 20.0  # how long a process may take to be gone before the test says it never will be

REWARDS = """
    import os, re, signal, subprocess, sys, time

    IDLE = [sys.executable, "-c", "import time; time.sleep(1000)"]

    def note(*pids):
        with open("pids.new", "w") as file:
            file.write(" ".join(map(str, [os.getpid(), *pids])))
        os.rename("pids.new", "pids")

    def hang_with_lock(prompts, completions, **columns):
        note()
        re.match("(a+)+b", "a" * 60)

    def hang_in_child(prompts, completions, **columns):
        child = subprocess.Popen(IDLE)
        note(child.pid)
        child.wait()

    def leave_session(prompts, completions, **columns):
        # one child without our environment, one in a session of its own, and one whose parent is gone as well
        bare, child = subprocess.Popen(IDLE, env={}), subprocess.Popen(IDLE, start_new_session=True)
        code = f"import subprocess; print(subprocess.Popen({IDLE}, start_new_session=True, stdout=-3).pid)"
        grandchild = int(subprocess.check_output([sys.executable, "-c", code], start_new_session=True))
        note(bare.pid, child.pid, grandchild)
        return [1.0] * len(prompts)

    def start_daemon(prompts, completions, **columns):
        daemon = subprocess.Popen(IDLE, env={}, start_new_session=True)
        code = f"import subprocess; print(subprocess.Popen({IDLE}, env={{}}, start_new_session=True, stdout=-3).pid)"
        orphan = int(subprocess.check_output([sys.executable, "-c", code], start_new_session=True))
        note(daemon.pid, orphan)
        return [1.0] * len(prompts)

    def kill_its_supervisor(prompts, completions, **columns):
        note(subprocess.Popen(IDLE, start_new_session=True).pid, subprocess.Popen(IDLE, env={}).pid)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def kill_its_group(prompts, completions, **columns):
        leave_session(prompts, completions)
        os.killpg(0, signal.SIGKILL)

    def fork_and_die(prompts, completions, **columns):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        note(child)
        os._exit(1)
"""

PARENT = """
    import sys, time
    from tinyrl.rewards.functions import FunctionReward
    reward = FunctionReward(f"rewards.py:{sys.argv[1]}", timeout_s=float(sys.argv[2]))
    reward(["p"], ["c"], {})
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(pid: int) -> bool:
    """Return whether a process is running; a dead one that nothing has waited for is not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone(pids: list[int]) -> list[int]:
    """Return those that still exist after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def noted_pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline, "the function was never called"
        time.sleep(0.02)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    ("function", "timeout_s"),
    [("leave_session", 999), ("start_daemon", 999), ("hang_in_child", 999), ("hang_with_lock", 3)],
)
@pytest.mark.wide
def test_nothing_outlives_a_killed_parent(folder: Path, function: str, timeout_s: float):
    """A function that holds the interpreter's lock ends at its time limit."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(PARENT), function, str(timeout_s)]
    parent = subprocess.Popen(command, env=environment)
    try:
        pids = noted_pids(folder)
        assert all(runs(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("function", "timeout_s", "reason"),
    [
        ("leave_session", 10, None),
        ("start_daemon", 10, None),
        ("hang_in_child", 1, "gave no answer within 1 s (rewards.py, line 18)"),
        ("fork_and_die", 10, "ended its process with exit code 1"),
        ("kill_its_group", 10, "died of SIGKILL"),
        ("kill_its_supervisor", 10, "died of SIGKILL"),
    ],
)
@pytest.mark.wide
def test_nothing_outlives_close_or_a_lost_call(folder: Path, function: str, timeout_s: float, reason: str | None):
    with FunctionReward(f"rewards.py:{function}", timeout_s=timeout_s) as reward:
        call = reward(["p"], ["c"], {})
        assert [failure.reason for failure in call.failures] == ([f"`{function}` {reason}"] if reason else [])
    assert wait_until_gone(noted_pids(folder)) == []


def test_an_idle_worker_that_was_killed_is_replaced_and_is_none_of_the_launched_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A library in it would wait for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    (folder / "rewards.py").write_text(textwrap.dedent(REWARDS) + "assert 'WORLD_SIZE' not in os.environ\n")
    with FunctionReward("rewards.py:leave_session") as reward:
        assert reward(["p"], ["c"], {}).values == [1.0]
        os.kill(noted_pids(folder)[0], signal.SIGKILL)
        call = reward(["p"], ["c"], {})
        assert (call.values, call.failures) == ([1.0], [])


def test_the_run_adopts_no_orphans_of_its_own(folder: Path):
    """A notebook has other children, which are none of ours to wait for or to end."""
    with FunctionReward("rewards.py:start_daemon") as reward:
        assert reward(["p"], ["c"], {}).values == [1.0]
        code = f"import subprocess, sys; print(subprocess.Popen({IDLE}, start_new_session=True, stdout=-3).pid)"
        orphan = psutil.Process(int(subprocess.check_output([sys.executable, "-c", code])))
        assert orphan.ppid() != os.getpid()
    assert orphan.is_running()
    orphan.kill()
