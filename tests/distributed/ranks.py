"""Processes that are connected as a launcher connects them, forked in milliseconds (tests/faults/children.py)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.children import PATIENCE_S, Child


def be_rank(rank: int, size: int, port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Set what a launcher sets, then call the target."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    target(*arguments)


class Ranks:
    """`target(*arguments)` in two connected processes; what each prints goes into a file of its own."""

    def __init__(self, target: Callable[..., None], *arguments: Any, folder: Path) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        self.all = [
            Child(be_rank, rank, 2, port, target, arguments, output=folder / f"rank-{rank}-{port}.txt")
            for rank in range(2)
        ]

    def __getitem__(self, rank: int) -> Child:
        return self.all[rank]

    @property
    def said(self) -> str:
        """What both of them printed, by rank."""
        return "\n".join(f"--- rank {rank}\n{child.said}" for rank, child in enumerate(self.all))

    def end(self) -> list[int | None]:
        """Wait for the exit codes; None for one that is killed here, since it never ended."""
        until = time.monotonic() + PATIENCE_S
        codes = [child.wait(max(0.1, until - time.monotonic())) for child in self.all]
        for child, code in zip(self.all, codes, strict=True):
            if code is None:
                child.send(9)
        return codes
