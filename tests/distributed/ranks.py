"""Processes that are connected as a launcher connects them, forked in milliseconds (tests/faults/children.py)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.children import PATIENCE_S, Child


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def be_rank(rank: int, size: int, port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Set what a launcher sets, then call the target."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    target(*arguments)


class Ranks:
    """`target(*arguments)` in `size` connected processes; what each prints goes into a file of its own."""

    def __init__(self, target: Callable[..., None], *arguments: Any, folder: Path, size: int = 2) -> None:
        port = free_port()
        self.all = [
            Child(be_rank, rank, size, port, target, arguments, output=folder / f"rank-{rank}-{port}.txt")
            for rank in range(size)
        ]

    def __getitem__(self, rank: int) -> Child:
        return self.all[rank]

    @property
    def said(self) -> str:
        """What all of them printed, by rank."""
        return "\n".join(f"--- rank {rank}\n{child.said}" for rank, child in enumerate(self.all))

    def end(self) -> list[int]:
        """Wait for the exit codes. The test fails where one never ends."""
        until = time.monotonic() + PATIENCE_S
        codes = [child.wait(max(0.1, until - time.monotonic())) for child in self.all]
        if None in codes:
            for child in self.all:
                child.send(9)
            raise AssertionError(f"exit codes {codes}, where None is still going on:\n{self.said}")
        return [code for code in codes if code is not None]
