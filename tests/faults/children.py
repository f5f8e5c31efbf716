"""Runs in processes of their own, which tests kill, starve and cut off from their disk.

A child is forked in milliseconds from a server that has imported everything and computed nothing, so torch starts
afresh in each. The server itself is forked from the test process between collection and the first test, as importing
again would take five seconds. Functions given to a child are at the top level of a module, and return an exit code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from tests import running
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir
from tinyrl.workers import supervisor

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # after which a test says that something never happened
IMPORTED = [
    "tests.tiny_models", "tinyrl.training.dpo", "tinyrl.training.grpo", "tinyrl.training.ppo",
    "transformers.models.llama.modeling_llama", "peft.tuners.lora.model",
]  # fmt: skip
_context = multiprocessing.get_context("forkserver")


class Child:
    """`target(*arguments)` in a process of its own; what it prints goes into the file `output`."""

    def __init__(self, target: Callable[..., None], *arguments: Any, output: Path) -> None:
        self.output = output
        self._process = _context.Process(target=_begin, args=(output, target, arguments), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def said(self) -> str:
        """All that was printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal; a child that has ended already gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE_S) -> int | None:
        """The exit code (minus the signal that ended it), or None when it is still running after `seconds`."""
        self._process.join(seconds)
        return self._process.exitcode

    def end(self) -> int:
        """Wait for the exit code. The test fails where the child never ends."""
        code = self.wait()
        if code is None:
            self.send(signal.SIGKILL)
            raise AssertionError(f"still going on after {PATIENCE_S:g} s:\n{self.said}")
        return code

    def kill(self) -> int:
        """kill -9; the exit code, which is another one when the child ended first."""
        self.send(signal.SIGKILL)
        return self.end()


def start_server() -> None:
    """Fork the server that children are forked from; call it before this process computes, opens files or has threads.

    multiprocessing's server is a new interpreter; all but how it starts is used as it is.
    """
    needed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # as the command sets it: no threads, which would take address space
    }
    for name in IMPORTED:
        importlib.import_module(name)
    _context.set_forkserver_preload([])
    quiet = {"PYTHONWARNINGS": "ignore:resource_tracker"}  # of semaphores that killed children leave
    with mock.patch.dict(os.environ, quiet):
        resource_tracker.ensure_running()  # is a new interpreter, too, and small
    with mock.patch.dict(os.environ, needed), mock.patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(path: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of starting `command` as a new interpreter: run its code in a fork, and return the process ID.

    The fork keeps the standard streams and `descriptors`: the test process ends although a fork still has its pipes.
    Others lead nowhere instead of being closed, since objects of the test process would close their numbers again, by
    then those of other files.
    """
    pid = os.fork()
    if pid > 0:
        return pid
    try:
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # pytest captures the others
        # The test process holds its lock while it forks.
        forkserver._forkserver._lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
        nowhere = os.open(os.devnull, os.O_RDWR)
        kept = {0, 1, 2, nowhere, *descriptors}
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)
        exec(command[-1])
    finally:
        os._exit(0)


def _begin(output: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    running.whole_runs(False)
    target(*arguments)


def train(settings: Config, folder: Path, name: str = "run") -> None:
    """A fresh run; the exit code is the run's."""
    sys.exit(running.train(settings, folder, name=name)[0])


def go_on(path: Path) -> None:
    """Resume a run; the exit code is the run's."""
    sys.exit(running.go_on(RunDir(path)))


def before_call(owner: Any, name: str, number: int, *, do: Callable[[], object], within: Path | None = None) -> None:
    """Have `owner.name` run `do` first when it is called for the number-th time; within: with a path in that folder."""
    plain, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(plain)
    def counting(*arguments: Any, **named: Any) -> Any:
        counts = within is None or Path(arguments[0]).is_relative_to(within)
        if counts and next(calls) == number:
            do()
        return plain(*arguments, **named)

    setattr(owner, name, counting)


def resumed(run: RunDir) -> str:
    """Resume a run in a child, to its end; returns what was printed."""
    child = Child(go_on, run.path, output=run.path.with_name(f"{run.name}-resumed.txt"))
    code = child.end()
    assert code == 0, child.said
    return child.said


def workers_left(pids: set[int]) -> list[int]:
    """Reward workers of these (dead) processes that still exist after a while; they are killed then."""

    def of_them(process: psutil.Process) -> bool:  # a worker's first argument is the process that it works for
        words = process.info["cmdline"] or []
        works = supervisor.__file__ in words[:-1] and process.info["status"] != psutil.STATUS_ZOMBIE
        return works and int(words[words.index(supervisor.__file__) + 1]) in pids

    deadline = time.monotonic() + PATIENCE_S / 4
    while (left := [*filter(of_them, psutil.process_iter(["cmdline", "status"]))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    return [process.pid for process in left]


def wait_for(there: Callable[[], bool], child: Child) -> None:
    """Wait until `something` is true. The test fails where the child ends first, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        code = child.wait(0.005)
        assert code is None, f"ended with {code} before that:\n{child.said}"
        assert time.monotonic() < deadline, f"never happened:\n{child.said}"
