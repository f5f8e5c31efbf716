"""Where the seconds of a step go: kernels by time, launches a layer, and how long the device has nothing to do.

Each part is profiled twice: cold, as in the first step of a run (graphs are captured, libraries load their kernels),
and warm. Decode steps are those of the engine, with its graphs. Scoring and update are of one micro-batch, which stands
for the others. On a CPU torch's operations take the place of kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.step import TrainingStep, load, synchronize
from tinyrl.generation.engines import select_engine
from tinyrl.generation.request import Request

DECODED = 25  # tokens a row: a prefill, and three looks of the engine after eight decode steps each
LISTED = 25  # kernels of a part in its result


@dataclass(frozen=True)
class Span:
    """One kernel: its name, start and end in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Part:
    """seconds: by the clock of the host. busy, gaps: of the time between the first kernel and the last, with and
    without a kernel at work. kernels: (name, seconds, launches), the longest first; host: the same of what the host
    spent most in.
    """

    seconds: float
    busy: float
    gaps: float
    launches: int
    launches_a_layer: float
    kernels: list[tuple[str, float, int]]
    host: list[tuple[str, float, int]]


def busy_seconds(spans: list[Span]) -> float:
    """Return the time that at least one of the spans covers."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def by_name(spans: list[Span]) -> list[tuple[str, float, int]]:
    """Return (name, seconds, count) of spans with one name, the longest first."""
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
        counts[span.name] = counts.get(span.name, 0) + 1
    names = sorted(seconds, key=lambda name: -seconds[name])
    return [(name, seconds[name], counts[name]) for name in names]


def kernels_of(events: Any) -> list[Span]:
    """Return the kernels and copies of a device; where none was used, the operations that no other one called."""
    on_the_device = [event for event in events if event.device_type == DeviceType.CUDA]
    found = [event for event in on_the_device if not getattr(event, "is_user_annotation", False)]
    if not torch.cuda.is_available():
        found = [event for event in events if event.cpu_parent is None]
    return [Span(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in found]


def host_of(profiled: profile) -> list[tuple[str, float, int]]:
    """Return operations and calls of the driver by their own time on the host."""
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return [(row.key, row.self_cpu_time_total / 1e6, row.count) for row in rows[:LISTED]]


def profiled(run: Callable[[], object], *, layers: int, tokens: int = 1) -> Part:
    """Profile one call, in which each layer runs `tokens` times."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    synchronize()
    with profile(activities=activities) as found:
        start = time.perf_counter()
        run()
        synchronize()
        seconds = time.perf_counter() - start
    spans = kernels_of(found.events())
    busy = busy_seconds(spans)
    between = max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0
    return Part(
        seconds=seconds,
        busy=busy,
        gaps=between - busy,
        launches=len(spans),
        launches_a_layer=len(spans) / (layers * tokens),
        kernels=by_name(spans)[:LISTED],
        host=host_of(found),
    )


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    policy = load(settings)
    step = TrainingStep(policy, settings)
    generation = policy.config.generation.model_copy(update={"max_new_tokens": DECODED, "engine": "fused"})
    longest = generation.max_prompt_tokens + settings["recipe"]["generation"]["max_new_tokens"]
    engine: Any = select_engine(generation, policy, policy.tokenizer, longest=longest, tried=longest)[0]
    engine.eos = set[int]()  # every row has all of its tokens
    requests = list[Request]()
    for row, group in enumerate(step.groups):
        requests += engine.requests_for(group[0].prompt, len(group), row=row, seed=0, step=0)
    widest = step.micro_batches[:1]
    number_of_layers = policy.causal.config.get_text_config().num_hidden_layers
    runs: dict[str, tuple[Callable[[], object], int]] = {
        f"{DECODED} tokens a row": (lambda: engine.sample(requests), DECODED),
        "scoring, a micro-batch": (lambda: step.score(widest), 1),
        "update, a micro-batch": (lambda: step.update(widest), 1),
    }
    parts = {}
    for moment in ("first", "then"):
        for name, (run, tokens) in runs.items():
            part = profiled(run, layers=number_of_layers, tokens=tokens)
            parts[f"{name}, {moment}"] = asdict(part)
    return {"parts": parts}
