"""How a command was launched: its options, and the processes of `accelerate launch` or torchrun; this one is which."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHARDED = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron": "ACCELERATE_USE_MEGATRON_LM",
}


@dataclass
class Options:
    """Command-line options that are not part of the configuration, and so not of what defines a run."""

    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Launched:
    """world_size processes, local_world_size of them on this machine; this one has the number `rank`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def launched() -> Launched:
    """The processes of this launch; one where nothing launched several. Raises ValueError for half of the variables,
    and where the launcher is told to shard a model.
    """
    world_size = _number("WORLD_SIZE", 1)
    if world_size <= 1:
        return Launched()
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={world_size} is set, but not RANK and LOCAL_RANK: start the processes with `accelerate launch "
            f"--num_processes {world_size} -m tinyrl ...`, or unset WORLD_SIZE for a single one"
        )
    for name, variable in SHARDED.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate's configuration asks for {name}, and here every process holds the whole model: "
                f"`accelerate launch --multi_gpu --num_processes {world_size} -m tinyrl ...`"
            )
    rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
    return Launched(rank, world_size, local_rank, _number("LOCAL_WORLD_SIZE", 1))


def launched_rank() -> int:
    """Return the rank of this process; 0 where the launcher's variables are wrong."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def forget_launcher() -> None:
    """Go on as a single process."""
    for name in VARIABLES:
        os.environ.pop(name, None)


class Voice:
    """Print what every process would print on one only. Before they are connected: on local rank 0 of each machine."""

    def __init__(self) -> None:
        self.connected: Callable[[str], bool] | None = None  # is given the sentence

    def speaks(self, sentence: str) -> bool:
        if self.connected is not None:
            return self.connected(sentence)
        return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("LOCAL_RANK", "0") in ("", "0")


VOICE = Voice()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdigit():
        raise ValueError(f"{name}={text!r} in the environment is no number")
    return int(text or default)
