"""Measurements inside a process: seconds of steps and of their phases, tokens, memory above imports.

Runs inside both sides' processes, so it needs nothing beyond the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONS = ("tinyrl", "trl", "torch", "transformers", "peft")  # named in the tables


def serve(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the settings this process was started with (see processes.py)."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    result = measure(settings)
    Path(settings["answer"]).write_text(json.dumps({"versions": versions(), **result}))


def versions() -> dict[str, str]:
    """Of the packages that a table names, as far as this process runs them: what else is installed did not run."""
    loaded = {name: sys.modules[name] for name in VERSIONS if name in sys.modules}
    return {name: getattr(module, "__version__", None) or metadata.version(name) for name, module in loaded.items()}


def resident_mb() -> float:
    """Memory of this process now."""
    return _status("VmRSS")


def peak_mb() -> float:
    """Most memory this process ever held. (ru_maxrss would be the same, but starts from the parent's.)"""
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


@contextmanager
def tower_images() -> Iterator[list[None]]:
    """Add an element for each image that goes through SmolVLM's vision tower."""
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMModel

    original, images = SmolVLMModel.get_image_features, list[None]()

    def counted(self: Any, pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        images.extend([None] * (pixel_values.shape[0] * pixel_values.shape[1]))
        return original(self, pixel_values, *args, **kwargs)

    SmolVLMModel.get_image_features = counted
    try:
        yield images
    finally:
        SmolVLMModel.get_image_features = original


class Steps:
    """Seconds between the ends of successive steps, and of the phases within each; the first step is warm-up.

    `phases` is a list a step of seconds by phase, `tokens` what was sampled in it, `cpu` seconds of all threads, which
    a machine that does other things too hardly changes.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self._now: dict[str, float] = {}
        self._sampled = 0
        self._end: float | None = None
        self._cpu = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._now[name] = self._now.get(name, 0.0) + time.perf_counter() - start

    def wrap(self, owner: Any, name: str, phase_of: Callable[..., str | None]) -> None:
        """Time every call of `owner.name` as the phase that phase_of(*args) names; None: not counted."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            phase = phase_of(*args)
            if phase is None:
                return original(*args, **kwargs)
            with self.phase(phase):
                return original(*args, **kwargs)

        setattr(owner, name, timed)

    def sampled(self, tokens: int) -> None:
        self._sampled += tokens

    def end(self) -> None:
        """A step is over."""
        now, cpu = time.perf_counter(), time.process_time()
        if self._end is not None:
            self.seconds.append(now - self._end)
            self.cpu.append(cpu - self._cpu)
            self.phases.append(self._now)
            self.tokens.append(self._sampled)
        self._end, self._cpu, self._now, self._sampled = now, cpu, {}, 0

    def result(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "cpu": self.cpu, "phases": self.phases, "tokens": self.tokens}
