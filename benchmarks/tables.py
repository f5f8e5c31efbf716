"""Text of numbers: medians and ranges, ratios, log-log slopes, markdown tables, and the machine they came from."""

from __future__ import annotations

import math
import os
import statistics
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = {"trl": "TRL"}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the range where there is one; a dash for none (a run of one step, which is warm-up)."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """k of y = c * x^k by least squares of log y on log x."""
    log_x, log_y = [math.log(v) for v in x], [math.log(v) for v in y]
    return statistics.linear_regression(log_x, log_y).slope


def median_phases(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each phase over steps, in the order they came."""
    names = dict.fromkeys(name for step in phases for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in phases) for name in names}


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def versions(results: Sequence[dict[str, Any]]) -> str:
    """What ran, for a table's first line: 'tinyrl 0.1, TRL 1.16.0, torch 2.13.0'; several where sides differ."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, version in result["versions"].items():
            found.setdefault(name, []).append(version)
    return ", ".join(f"{NAMES.get(name, name)} {' and '.join(dict.fromkeys(of))}" for name, of in found.items())


def machine(options: Namespace) -> str:
    """Cores, CPU and threads."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else "unknown CPU"
    return f"{os.cpu_count()} cores ({cpu}), {options.threads} threads a side, float32"
