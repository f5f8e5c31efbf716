"""Exceptions that end a run early, by exit code: 3 a guard, 4 out of memory or disk, 75 interrupted and resumable.

Wrong config or data (exit 2) is a plain ValueError with a sentence; it is found before training.
"""

from __future__ import annotations

import errno

NO_MEMORY = (  # how those say it that have no exception for it: torch's allocators, the loader, threads, C++
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
MAY_BE_MEMORY = (MemoryError, RuntimeError, ImportError, OSError, SystemError)  # the kinds in which they do


class Stop(Exception):
    """A run that ends on purpose, before its last step; the message is for people."""

    exit_code = 1


class GuardStop(Stop):
    """A check failed during training: going on would waste time or ruin the weights."""

    exit_code = 3


class OutOfRoom(Stop):
    """Memory or disk ran out and nothing smaller is left to try."""

    exit_code = 4


def out_of_memory(when: str, error: BaseException) -> OutOfRoom:
    """What to raise when memory ran out and nothing smaller is left to try."""
    said = str(error).strip().splitlines() or [type(error).__name__]
    return OutOfRoom(
        f"out of memory {when} ({said[0][:120]}).\n"
        "What helps: model.gradient_checkpointing=true; a smaller generation.max_new_tokens; "
        "model.quantization=4bit (LoRA)."
    )


def no_memory(error: BaseException) -> str | None:
    """What an error, or one that it was raised from, says of memory that could not be had; None where it is about
    something else.
    """
    if isinstance(error, MemoryError):
        return str(error) or "the system has no more memory"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "Cannot allocate memory"
    text = str(error)
    said = next((each for each in NO_MEMORY if each in text), None)
    if said is not None:
        return (text.partition(said)[2].strip() if said.endswith(": ") else "") or said
    if type(error).__name__ == "OutOfMemoryError":  # torch's own, which is not imported here
        return text.strip() or "the device has no more memory"
    return None if error.__cause__ is None else no_memory(error.__cause__)


class Interrupted(Stop):
    """SIGTERM, SIGINT or SIGUSR1: a checkpoint is written and the run can be resumed."""

    exit_code = 75
