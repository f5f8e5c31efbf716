"""The growth of a GRPO step's cost with one dimension, as an exponent, beside that of the arithmetic floor.

Group size runs on a model as it is (the first of --sizes, as length and vocabulary); the others on models whose
completions never end early but have full length.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks import our_recipe, processes
from benchmarks.fixed_work import SPEED, Grpo, prepare
from benchmarks.floor import floor
from benchmarks.results import Result, pooled
from benchmarks.sizes import SIZES, Shape
from benchmarks.tables import exponent, machine, markdown, median_phases, versions

VOCABULARY_LENGTH = 64  # new tokens where the vocabulary grows: enough to tell, and the largest takes a minute a step


@dataclass(frozen=True)
class Point:
    """One measurement; x is the dimension that grows."""

    x: float
    shape: Shape
    work: Grpo = SPEED


def group_points(options: Namespace) -> list[Point]:
    shape = SIZES[options.sizes[0]]
    return [Point(group, shape, replace(SPEED, group_size=group)) for group in (4, 8, 16, 32)]


def length_points(options: Namespace) -> list[Point]:
    shape = full_length(SIZES[options.sizes[0]])
    return [Point(length, shape, replace(SPEED, max_new_tokens=length)) for length in (32, 64, 128, 256)]


def vocabulary_points(options: Namespace) -> list[Point]:
    shape, work = full_length(SIZES[options.sizes[0]]), replace(SPEED, max_new_tokens=VOCABULARY_LENGTH)
    return [
        Point(words, replace(shape, name=f"{shape.name}-{words}", vocabulary=words), work)
        for words in (4096, 32768, 131072)
    ]


def size_points(options: Namespace) -> list[Point]:
    """x: multiplications of one token in the layers' matrices."""
    shapes = [full_length(SIZES[size]) for size in options.sizes]
    return [Point(shape.layers * sum(a * b for a, b in shape.matrices), shape) for shape in shapes]


def full_length(shape: Shape) -> Shape:
    """The same model, never taught when to end."""
    return replace(shape, name=f"{shape.name}-full", early_ends=False)


AXES: dict[str, Callable[[Namespace], list[Point]]] = {
    "group": group_points,
    "length": length_points,
    "vocabulary": vocabulary_points,
    "size": size_points,
}


def measure(point: Point, *, options: Namespace) -> tuple[dict[str, float], Result]:
    """Seconds of sampling, of all the rest and of the whole step, with their floor; and the raw result."""
    files = prepare(point.shape, options=options)
    recipe = our_recipe.grpo(files, steps=options.steps, options=options, work=point.work)
    result = processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)
    phases = median_phases(pooled([result], "phases"))
    completion = statistics.mean(result["tokens"]) / (point.work.num_prompts * point.work.group_size)
    least = floor(point.shape, completion, options=options, work=point.work)
    seconds = {
        "rollout": phases["rollout"],
        "reference and update": phases["reference"] + phases["update"],
        "step": statistics.median(result["seconds"]),
        "floor rollout": least["sampling"],
        "floor reference and update": least["update"],
        "floor step": least["seconds"],
    }
    return seconds, result


def table(points: Sequence[Point], seconds: Sequence[dict[str, float]], *, axis: str) -> str:
    """A row for each point, and the exponents below."""
    names = list(seconds[0])
    rows = [[f"{p.x:g}", *(f"{s[name]:.2f}" for name in names)] for p, s in zip(points, seconds, strict=True)]
    if len(points) > 1:
        slopes = [exponent([p.x for p in points], [s[name] for s in seconds]) for name in names]
        rows.append(["exponent", *(f"**{slope:.2f}**" for slope in slopes)])
    return markdown([axis, *names], rows)


def main(options: Namespace) -> None:
    for axis in options.axes:
        points = AXES[axis](options)
        measured = [measure(point, options=options) for point in points]
        print(f"\n## Scaling with {axis}: seconds\n\n{machine(options)}\n")
        named = f"{axis}; {versions([measured[0][1]])}"
        print(table(points, [seconds for seconds, _ in measured], axis=named), flush=True)
