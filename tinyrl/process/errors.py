"""Exceptions that end a run early, by exit code: 3 a guard, 4 out of memory or disk, or the run's folder lost, 75
interrupted and resumable.

Wrong config or data (exit 2) is a plain ValueError, found before training.
"""

import contextlib
import errno
from pathlib import Path

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
NO_MEMORY = (  # messages of errors without a type of their own: torch's allocators, the loader, threads, C++
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "Cannot allocate memory",
    "cannot allocate memory",
    "failed to map segment from shared object",
    "can't start new thread",
    "unable to mmap",
)
MAY_BE_MEMORY = (MemoryError, RuntimeError, ImportError, OSError)  # the exceptions that carry them


class UnknownSettings(ValueError):
    """Settings that there are not: an answer to each, in a line of its own."""


class Stop(Exception):
    """End a run on purpose before its last step; the message is for people."""

    exit_code = 1


class GuardStop(Stop):
    """A check failed during training: going on would waste time or ruin the weights."""

    exit_code = 3


class OutOfRoom(Stop):
    """Memory or disk ran out and nothing smaller is left to try."""

    exit_code = 4


class FolderLost(Stop):
    """The folder of a run was renamed or deleted while it trained, or its lock was."""

    exit_code = 4


class Interrupted(Stop):
    """A signal arrived: a checkpoint is written and the run can be resumed."""

    exit_code = 75


class Signalled(Interrupted):
    """A signal of this name arrived."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class CodeChanged(Interrupted):
    """A user's file was edited after it was loaded, and it has to be loaded again."""


class ExplainedByCheck(ValueError):
    """A refusal at the start of a run about which `tinyrl check` says more."""


def out_of_memory(when: str, error: BaseException) -> OutOfRoom:
    """Return the exception to raise when memory ran out and nothing smaller is left to try."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    return OutOfRoom(
        f"out of memory {when} ({reason}).\n"
        "What helps: model.gradient_checkpointing=true; a smaller generation.max_new_tokens; "
        "model.quantization=4bit (LoRA)."
    )


def no_memory(error: BaseException) -> str | None:
    """Return the message of an error (or its cause) about memory that could not be allocated; None for other errors."""
    text = str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return text.strip() or "there is no more memory"
    for message in NO_MEMORY:
        if message in text:
            return text.partition("DefaultCPUAllocator: ")[2].strip() or message
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "Cannot allocate memory"
    return None if error.__cause__ is None else no_memory(error.__cause__)


def machine_memory() -> int:
    """Return the bytes of memory that the machine, or the container that limits us, has in all."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # there is no container, or its limit is "max"
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return total
