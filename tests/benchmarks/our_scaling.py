"""The growth of a GRPO step's cost with one dimension, as an exponent, beside that of the arithmetic floor.

Group size runs on the model s as it is; the others on models whose completions never end early but have full length.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import our_recipe, processes
from tests.benchmarks.compare_grpo import pooled
from tests.benchmarks.fixed_work import GROUP_SIZE, MAX_NEW_TOKENS, NUM_PROMPTS, Shape, load_work, prepare
from tests.benchmarks.floor import floor
from tests.benchmarks.tables import exponent, machine, markdown, median_phases

VOCABULARY_LENGTH = 64  # new tokens where the vocabulary grows: enough to tell, and the largest takes a minute a step


@dataclass(frozen=True)
class Point:
    """One measurement; x is the dimension that grows."""

    x: float
    shape: Shape
    group_size: int = GROUP_SIZE
    max_new_tokens: int = MAX_NEW_TOKENS


def group_points(options: Namespace) -> list[Point]:
    return [Point(group, Shape("s"), group_size=group) for group in (4, 8, 16, 32)]


def length_points(options: Namespace) -> list[Point]:
    return [Point(length, Shape("s", early_ends=False), max_new_tokens=length) for length in (32, 64, 128, 256)]


def vocabulary_points(options: Namespace) -> list[Point]:
    return [
        Point(words, Shape("s", vocabulary=words, early_ends=False), max_new_tokens=VOCABULARY_LENGTH)
        for words in (4096, 32768, 131072)
    ]


def size_points(options: Namespace) -> list[Point]:
    """x: multiplications of one token in the layers' matrices."""
    shapes = load_work(str(options.work)).SHAPES
    points = []
    for size in options.sizes:
        hidden, layers, intermediate, heads, kv_heads, head, _ = shapes[size]
        matrices = 2 * hidden * heads * head + 2 * hidden * kv_heads * head + 3 * hidden * intermediate
        points.append(Point(layers * matrices, Shape(size, early_ends=False)))
    return points


AXES: dict[str, Callable[[Namespace], list[Point]]] = {
    "group": group_points,
    "length": length_points,
    "vocabulary": vocabulary_points,
    "size": size_points,
}


def measure(point: Point, *, options: Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of sampling, of all the rest and of the whole step, with their floor; and the raw result."""
    files = prepare(point.shape, options=options)
    recipe = our_recipe.grpo(
        files,
        steps=options.steps,
        options=options,
        group_size=point.group_size,
        max_new_tokens=point.max_new_tokens,
    )
    result = processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)
    phases = median_phases(pooled([result], "phases"))
    completion = statistics.mean(result["tokens"]) / (NUM_PROMPTS * point.group_size)
    least = floor(point.shape, completion, options=options, group_size=point.group_size)
    seconds = {
        "rollout": phases["rollout"],
        "reference and update": phases["reference"] + phases["update"],
        "step": statistics.median(result["seconds"]),
        "floor rollout": least["sampling"],
        "floor reference and update": least["update"],
        "floor step": least["seconds"],
    }
    return seconds, result


def table(points: Sequence[Point], seconds: Sequence[dict[str, float]]) -> str:
    """A row for each point, and the exponents below."""
    names = list(seconds[0])
    rows = [[f"{p.x:g}", *(f"{s[name]:.2f}" for name in names)] for p, s in zip(points, seconds, strict=True)]
    if len(points) > 1:
        slopes = [exponent([p.x for p in points], [s[name] for s in seconds]) for name in names]
        rows.append(["exponent", *(f"**{slope:.2f}**" for slope in slopes)])
    return markdown(["x", *names], rows)


def main(options: Namespace) -> None:
    for axis in options.axes:
        points = AXES[axis](options)
        measured = [measure(point, options=options) for point in points]
        print(f"\n## Scaling with {axis}: seconds\n\n{machine(options, measured[0][1])}\n")
        print(table(points, [seconds for seconds, _ in measured]), flush=True)
