"""Results of processes put together: pooled over processes, peer over ours pair by pair, memory above imports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
# Two-sided 95 % quantiles of Student's t for 2 to 10 values.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


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


def time_ratios(peer: Sequence[Result], ours: Sequence[Result]) -> list[float]:
    """How many times faster ours is, pair by pair, by the median of each process's seconds."""
    pairs = zip(peer, ours, strict=True)
    return [statistics.median(p["seconds"]) / statistics.median(o["seconds"]) for p, o in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of the mean of 2 to 10 values."""
    mean, half = statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half
