"""CUDA graphs in name only, so that a CPU can follow the path a GPU takes: a recording notes calls and repeats them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tinyrl.generation.scheduler import Scheduler


class Recording:
    """Replaces a CUDA graph: while one is captured a step is noted and not run; replaying runs it."""

    capturing: Recording | None = None

    def __init__(self) -> None:
        self.noted: list[Callable[[], None]] = []

    def replay(self) -> None:
        for run in self.noted:
            run()


def recordable(step: Callable[..., None]) -> Callable[..., None]:
    def call(*shape: Any) -> None:
        if Recording.capturing is None:
            step(*shape)
        else:
            Recording.capturing.noted.append(lambda: step(*shape))

    return call


def pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    """From here on graphs are recordings."""

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def capture(recording: Recording, pool: object, stream: object) -> Iterator[None]:
        Recording.capturing = recording
        yield
        Recording.capturing = None

    fakes = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: nullcontext(),
        "graph": capture,
        "CUDAGraph": Recording,
        "graph_pool_handle": lambda: None,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)


def record_steps(patch: pytest.MonkeyPatch) -> None:
    """From here on every step of a scheduler can be recorded."""
    step = Scheduler._step
    patch.setattr(Scheduler, "_step", lambda self, *shape: recordable(lambda *s: step(self, *s))(*shape))
