"""Options of a command, and the processes of `accelerate launch` or torchrun: which one this is, which one prints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    """Return the processes of this launch; one where nothing launched several. Raises ValueError for half of the
    variables, and where the launcher would shard the model.
    """
    numbers = {name: int(text) for name in VARIABLES[:4] if (text := os.environ.get(name, "")).isdigit()}
    count = numbers.get("WORLD_SIZE", 1)
    if count <= 1:
        return Launched()
    command = f"--num_processes {count} -m tinyrl ...`"
    if not {"RANK", "LOCAL_RANK"} <= numbers.keys():
        raise ValueError(
            f"WORLD_SIZE={count} is set, but not RANK and LOCAL_RANK: start the processes with `accelerate launch "
            f"{command}, or unset WORLD_SIZE for a single one"
        )
    for name in ("FSDP", "DeepSpeed", "Megatron_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate's configuration asks for {name}, and every process here holds the model: `accelerate "
                f"launch --multi_gpu {command}"
            )
    return Launched(numbers["RANK"], count, numbers["LOCAL_RANK"], numbers.get("LOCAL_WORLD_SIZE", 1))


def launched_rank() -> int:
    """Return the rank of this process; 0 where the launcher's variables are wrong."""
    return int(text) if (text := os.environ.get("RANK", "")).isdigit() else 0


class Voice:
    """Print what every process would print on one only. Before they are connected: on local rank 0 of each machine."""

    connected: Callable[[str], bool] | None = None  # is given the sentence

    def speaks(self, sentence: str) -> bool:
        if self.connected is not None:
            return self.connected(sentence)
        return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("LOCAL_RANK", "0") in ("", "0")


VOICE = Voice()
