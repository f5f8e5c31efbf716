"""Markdown of the results of all cells, a section a subject."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.tables import markdown, median_phases, spread

SHOWN_KERNELS = 12
STEPS = ("seconds a step", "of them", "peak GB", "sampling gap")


class Named(Protocol):
    """A cell, as far as its table is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def section(self) -> str: ...
    @property
    def needs(self) -> str | None: ...


Found = list[tuple[str, dict[str, Any]]]  # names of cells and their results
Records = dict[str, dict[str, Any]]


def table(every: Sequence[Named], records: Records) -> str:
    parts = {
        "Tests": tests(results(every, records, "tests")),
        "Where the time goes": profile(results(every, records, "profile")),
        "Variants": variants(results(every, records, "variants")),
        "A real model": real(results(every, records, "real")),
        "GRPO": trainings(results(every, records, "grpo")),
        "PPO": trainings(results(every, records, "ppo")),
        "Sampling": sampling(results(every, records, "sampling")),
        "Without a result": missing(every, records),
    }
    return "\n\n".join(f"### {name}\n\n{text}" for name, text in parts.items() if text) + "\n"


def results(every: Sequence[Named], records: Records, section: str) -> Found:
    names = [cell.name for cell in every if cell.section == section]
    return [(name, records[name]["result"]) for name in names if "result" in records.get(name, {})]


def tests(found: Found) -> str:
    rows = [[name, result["outcome"], "; ".join(result["failed"])] for name, result in found]
    return markdown(["", "outcome", "failed"], rows) if rows else ""


def profile(found: Found) -> str:
    """A row for each part, then its kernels; of what ran first, what the host spent most in."""
    texts = []
    for _, result in found:
        rows = []
        for name, part in result["parts"].items():
            share = part["gaps"] / (part["busy"] + part["gaps"]) if part["launches"] else 0.0
            cells = [f"{part['seconds']:.3f}", f"{part['busy']:.3f}", f"{share:.0%}"]
            rows.append([name, *cells, part["launches"], f"{part['launches_a_layer']:.1f}"])
        header = ["", "seconds", "kernels at work", "gaps between them", "launches", "a layer (and token)"]
        texts.append(markdown(header, rows))
        for name, part in result["parts"].items():
            first = name.endswith("first")
            named, what = (part["host"], "operation") if first else (part["kernels"], "kernel")
            texts.append(f"{name}:\n\n{most(named, what)}")
    return "\n\n".join(texts)


def most(named: Sequence[tuple[str, float, int]], what: str) -> str:
    rows = [[f"`{name[:100]}`", f"{1e3 * seconds:.2f}", count] for name, seconds, count in named[:SHOWN_KERNELS]]
    return markdown([what, "ms", "times"], rows)


def variants(found: Found) -> str:
    """A row for each part of each variant, with the median beside that of the cell's first row."""
    rows = []
    for cell, result in found:
        first: dict[str, float] = {}
        for name, row in result["rows"].items():
            gaps = ", ".join(f"{part} {gap:.2g}" for part, gap in row["gaps"].items())
            for part, timing in row["parts"].items():
                middle = statistics.median(timing["seconds"])
                ratio = middle / first.setdefault(part, middle)
                times = spread(timing["seconds"], 4)
                rows.append([cell, name, part, times, f"{ratio:.2f}", f"{timing['peak_gb']:.1f}", gaps])
        rows += [[cell, name, "**wrong**", "", "", "", why] for name, why in result["wrong"].items()]
        rows += [[cell, name, "skipped", "", "", "", why] for name, why in result["skipped"].items()]
    header = ["cell", "", "of", "seconds", "of the first row's", "peak GB", "distance from float32"]
    return markdown(header, rows) if rows else ""


def real(found: Found) -> str:
    header = ["", "probability of the right equation, before", "after", "seconds a step"]
    rows = []
    for name, result in found:
        rows.append([name, f"{result['before']:.3f}", f"{result['after']:.3f}", spread(result["seconds"])])
    return markdown(header, rows) if rows else ""


def trainings(found: Found) -> str:
    rows = []
    for name, result in found:
        phases = ", ".join(f"{phase} {part:.2f}" for phase, part in median_phases(result["phases"]).items())
        peak, gap = number(result["peak_gb"]), number(result.get("gap"))
        rows.append([name, spread(result["seconds"]), phases, peak, gap])
    return markdown(["", *STEPS], rows) if rows else ""


def sampling(found: Found) -> str:
    rows = []
    for name, result in found:
        pairs = zip(result["tokens"], result["seconds"], strict=True)
        speeds = [tokens / seconds for tokens, seconds in pairs]
        rows.append([name, spread(speeds, 0), number(result["peak_gb"])])
    return markdown(["", "tokens a second", "peak GB"], rows) if rows else ""


def missing(every: Sequence[Named], records: Records) -> str:
    rows = []
    for cell in every:
        record = records.get(cell.name, {})
        if "result" not in record:
            why = record.get("why") or (f"needs {cell.needs}" if cell.needs else "not yet")
            rows.append([cell.name, why.splitlines()[0]])
    return markdown(["", "why"], rows) if rows else ""


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
