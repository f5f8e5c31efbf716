"""Results of both sides: taken in alternation, checked for the same work, pooled, and written as markdown."""

from __future__ import annotations

import math
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
# Two-sided 95 % quantiles of Student's t for 2 to 10 values.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
NAMES = {"trl": "TRL"}
TOKENS_APART, LOSS_APART = 0.05, 1e-4


def alternate(sides: dict[str, Callable[[int], Result]], pairs: int) -> dict[str, list[Result]]:
    """Run each side once a pair, one after the other, so that a machine's slow hour falls on all of them."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name, once in sides.items():
            results[name].append(once(pair))
        print(f"pair {pair + 1} of {pairs}: done", flush=True)
    return results


def pooled(results: Sequence[Result], key: str) -> list[Any]:
    """The values of all processes in one list."""
    return [value for result in results for value in result[key]]


def above_imports(results: Sequence[Result]) -> list[float]:
    """Peak MB of each process beyond what its imports take."""
    return [result["peak_mb"] - result["imports_mb"] for result in results]


def time_ratios(peer: Sequence[Result], ours: Sequence[Result], key: str = "seconds") -> list[float]:
    """How many times faster ours is, pair by pair, by the median of each process's seconds (or seconds of CPU)."""
    return [statistics.median(p[key]) / statistics.median(o[key]) for p, o in zip(peer, ours, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of the mean of 2 to 10 values."""
    mean, half = statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


# ---- whether both sides do the same work: ratios of times mean nothing without it ----


@dataclass(frozen=True)
class Check:
    """One comparison: a sentence with the result, and whether it passed."""

    passed: bool
    sentence: str


def within(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two means are at most a twentieth apart."""
    return abs(statistics.mean(ours) / statistics.mean(theirs) - 1) <= TOKENS_APART


def same_tokens(ours: Sequence[float], theirs: Sequence[float]) -> Check:
    """Tokens of a step. Lengths are random: where a few steps cannot resolve 5 %, two standard errors count instead."""
    means = statistics.mean(ours), statistics.mean(theirs)
    errors = [statistics.stdev(x) / math.sqrt(len(x)) if len(x) > 1 else math.inf for x in (ours, theirs)]
    error = math.hypot(*errors)
    apart = means[0] / means[1] - 1
    sentence = f"tokens a step: tinyrl {means[0]:.0f}, peer {means[1]:.0f} ({apart:+.1%}; allowed 5 %)"
    if within(ours, theirs):
        return Check(True, sentence)
    if error > TOKENS_APART / 2 * means[1] and abs(means[0] - means[1]) <= 2 * error:
        return Check(True, f"{sentence}; within the noise of {len(ours)} and {len(theirs)} steps, too few to tell 5 %")
    return Check(False, sentence)


def report(checks: Sequence[Check], *, options: Namespace) -> bool:
    """Print the checks; returns whether ratios may be shown."""
    for check in checks:
        print(f"- same work, {'passed' if check.passed else 'FAILED'}: {check.sentence}")
    passed = all(check.passed for check in checks)
    if not passed:
        print(f"- the sides do not do the same work: ratios {'shown by --force' if options.force else 'not shown'}")
    return passed or options.force


# ---- text of numbers ----


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the range where there is one; a dash for none (a run of one step, which is warm-up)."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def median_phases(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each phase over steps, in the order they came."""
    names = dict.fromkeys(name for step in phases for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in phases) for name in names}


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def comparison(results: dict[str, list[Result]], *, base: str, may_compare: bool = True, digits: int = 2) -> str:
    """A row for each side, with how many times TRL takes of tinyrl's time (pair by pair) and memory where they may be
    compared; `base` is the one side of every such ratio.
    """
    rows = []
    for name, found in results.items():
        times = memory = "-"
        if may_compare and name != base:
            peer, ours = (found, results[base]) if name.startswith("TRL") else (results[base], found)
            times, least = spread(time_ratios(peer, ours)), statistics.median(above_imports(ours))
            memory = f"{statistics.median(above_imports(peer)) / least:.2f}"
        phases = ", ".join(f"{part} {s:.2f}" for part, s in median_phases(pooled(found, "phases")).items())
        cells = [spread(pooled(found, "seconds"), digits), spread(pooled(found, "cpu"), digits), phases]
        cells += [f"{statistics.mean(pooled(found, 'tokens')):.0f}", spread(above_imports(found), 0), times, memory]
        rows.append([name, *cells])
    header = ["seconds a step", "of CPU time", "of them", "tokens a step", "peak MB above imports"]
    sides = versions([found[0] for found in results.values()])
    return markdown([sides, *header, "TRL / tinyrl, time", "memory"], rows)


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
