"""Runtime options of a command, and the processes of `accelerate launch` or torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Options:
    """Command-line options that are not part of the configuration, and so not of what defines a run."""

    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Launched:
    """This process among world_size ones, local_world_size of them on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def _integer(name: str) -> int | None:
    return int(text) if (text := os.environ.get(name, "")).isdigit() else None


def launched() -> Launched:
    """Read the launcher's variables. Raises ValueError for half of them."""
    count, rank, local, local_count = map(_integer, VARIABLES[:4])
    if count is None or count <= 1:
        return Launched()
    if rank is None or local is None:
        command = f"`accelerate launch --num_processes {count} -m tinyrl ...`"
        raise ValueError(f"WORLD_SIZE={count} is set, but not RANK and LOCAL_RANK: use {command}, or unset WORLD_SIZE")
    return Launched(rank, count, local, local_count or 1)
