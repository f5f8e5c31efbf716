"""Exceptions that end a run early, by exit code: 3 a guard, 4 out of memory or disk, 75 interrupted and resumable.

Wrong config or data (exit 2) is a plain ValueError with a sentence; it is found before training.
"""


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


class Interrupted(Stop):
    """SIGTERM, SIGINT or SIGUSR1: a checkpoint is written and the run can be resumed."""

    exit_code = 75
