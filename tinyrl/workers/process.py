"""Processes under a supervisor (worker.py): their command line, end and limits, and what they wrote as a line."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tinyrl.text import one_line, redact
from tinyrl.workers import worker

END_S = 2 * worker.PATIENCE_S  # for a supervisor to end all that its command started
MEMORY_SHARE = 0.5  # of the machine's memory, which a reward may use by default
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
MAX_SHOWN_CHARS = 300


def memory_limit() -> int:
    """Return the bytes that each process of a reward may use: half of what the machine or its container has."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return int(total * MEMORY_SHARE)


def supervised(command: list[str], *, memory_bytes: int) -> list[str]:
    """Return the command line of a supervisor (worker.py) that runs a command, or without one answers requests."""
    # -P keeps our folder off sys.path, where loading.py would hide the user's
    return [sys.executable, "-P", worker.__file__, str(os.getpid()), str(memory_bytes), *command]


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that its command has started."""
    process.terminate()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:  # a process stuck in the kernel must not hold us as well
        process.kill()


def ending(code: int) -> str:
    """Return how a supervised process ended, by its supervisor's exit code."""
    signals = {128 + each.value: each.name for each in signal.Signals}
    return f"died of {signals[code]}" if code in signals else f"ended its process with exit code {code}"


def said(reply: dict[str, Any]) -> str:
    """Return what a function raised, by the worker's reply, as one line, and where."""
    return f"{quoted(reply['error'])}{reply['at']}"


def quoted(text: str) -> str:
    """Return what people's code wrote as a line that may be kept and shown."""
    return one_line(redact(text), MAX_SHOWN_CHARS)
