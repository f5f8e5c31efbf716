"""The markdown table of what has been measured so far: a section a subject, ratios where both sides are there."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.cells import FOUR_BIT, Cell, Profile
from benchmarks.gpu.roofline import Ceilings, floors
from benchmarks.gpu.shapes import DEVIATION, Work
from benchmarks.sizes import Shape
from benchmarks.tables import exponent, markdown, median_phases, spread, versions


@dataclass(frozen=True)
class Results:
    """What is there of the cells of a profile."""

    profile: Profile
    cells: list[Cell]
    by_name: dict[str, dict[str, Any]]

    def of(self, name: str) -> dict[str, Any] | None:
        """The result of a cell that is done."""
        record = self.by_name.get(name)
        return record["result"] if record is not None and record["status"] == "done" else None

    def done(self, section: str) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """The cells of a section that are done, in their order."""
        for cell in self.cells:
            result = self.of(cell.name)
            if cell.section == section and result is not None:
                yield cell, result

    @property
    def ceilings(self) -> Ceilings | None:
        """Of the machine, once they are measured."""
        found = self.of("ceilings")
        return None if found is None else Ceilings(found["rate"], found["bandwidth"])

    def floors(self, shape: Shape, result: dict[str, Any], work: Work, method: str = "grpo") -> dict[str, Any] | None:
        """The least seconds of a step whose completions have as many tokens as they had on average."""
        if result.get("tokens"):
            work = replace(work, new=max(1, round(statistics.mean(result["tokens"]) / work.rows)))
        weight = 0.5 if shape.name in FOUR_BIT else 2.0 if self.profile.dtype == "bfloat16" else 4.0
        return None if self.ceilings is None else floors(shape, work, self.ceilings, weight=weight, method=method)


def speeds(result: dict[str, Any]) -> list[float]:
    """Tokens a second of each call."""
    return [tokens / seconds for tokens, seconds in zip(result["tokens"], result["seconds"], strict=True)]


def times(seconds: float, least: dict[str, Any] | None, part: str = "step") -> str:
    """How many times the floor of a part."""
    return "-" if least is None else f"{seconds / least[part]:.1f}x of {least[part]:.3g}"


def suite(results: Results) -> str:
    """Tests of the device."""
    rows = []
    for cell, result in results.done("tests"):
        failed = "; ".join(f"{name}: {said}" for name, said in result["failed"].items()).replace("|", "/")
        rows.append(
            [cell.name.removeprefix("tests of "), result["passed"], result["skipped"], failed.replace("\n", " ")]
        )
    return markdown(["tests of", "passed", "skipped", "failed"], rows) if rows else ""


def sampling(results: Results) -> str:
    """Tokens a second of every engine, beside the library's generate."""
    rows = []
    for cell, result in results.done("sampling"):
        assert cell.shape is not None
        beside = results.of(f"sampling {cell.shape.name} generate")
        ratio = (
            "-" if beside is None else f"{statistics.median(speeds(result)) / statistics.median(speeds(beside)):.2f}"
        )
        least = results.floors(cell.shape, result, results.profile.work)
        seconds = statistics.median(result["seconds"])
        own = {"sampling": "tinyrl, ", "library": "transformers, "}.get(cell.module, "")
        bound = "" if least is None else f" ({least['bound']})"
        rows.append(
            [
                cell.shape.name, own + cell.settings["engine"], spread(speeds(result), 0), f"{seconds:.2f}", ratio,
                times(seconds, least, "sampling") + bound, f"{result['peak_gb']:.1f}" if "peak_gb" in result else "-",
                result.get("graphs", "-"),
            ]
        )  # fmt: skip
    header = ["model", "engine", "tokens a second", "seconds", "times generate", "floor, s", "peak GB", "graphs"]
    return markdown(header, rows) if rows else ""


def steps(results: Results, method: str) -> str:
    """Seconds a step and peak memory, of both sides."""
    rows = []
    for cell, result in results.done(method):
        assert cell.shape is not None
        side = cell.name.rpartition(" ")[2]
        other = results.of(f"{method} {cell.shape.name} TRL")
        seconds = statistics.median(result["seconds"])
        ratio = "-" if other is None else f"{statistics.median(other['seconds']) / seconds:.2f}"
        phases = ", ".join(f"{name} {part:.2f}" for name, part in median_phases(result["phases"]).items())
        least = results.floors(cell.shape, result, results.profile.work, method)
        gap = result.get("policy/sampling_gap")
        rows.append(
            [
                cell.shape.name, side, spread(result["seconds"]), phases, times(seconds, least),
                f"{result['peak_gb']:.1f}", planned(result), ratio, "-" if gap is None else f"{gap:.2g}",
                *[f"{result[key]:.2g}" if key in result else "-" for key in ("policy/capped_weights",)],
            ]
        )  # fmt: skip
    header = [
        "model",
        "side",
        "seconds a step",
        "of them",
        "floor, s",
        "peak GB",
        "planned / measured GB",
        "times TRL's speed",
    ]
    return markdown([*header, "sampling gap", "capped weights"], rows) if rows else ""


def planned(result: dict[str, Any]) -> str:
    """The peak that `tinyrl plan` says, and what the process came to."""
    if result.get("planned_gb") is None:
        return "-"
    return f"{result['planned_gb']:.2f} / {result['measured_gb']:.2f}"


def scaling(results: Results) -> str:
    """Seconds a step along each axis, and the exponent of it and of its floor."""
    rows, along = [], {}
    done = sorted(results.done("scaling"), key=lambda pair: (pair[0].settings["axis"], pair[0].settings["x"]))
    for cell, result in done:
        assert cell.shape is not None
        axis, x, seconds = cell.settings["axis"], cell.settings["x"], statistics.median(result["seconds"])
        least = results.floors(cell.shape, result, Work(**cell.settings["work"]))
        along.setdefault(axis, []).append((x, seconds, least and least["step"]))
        phases = ", ".join(f"{name} {part:.2f}" for name, part in median_phases(result["phases"]).items())
        peak = f"{result['peak_gb']:.1f}"
        rows.append([axis, x, f"{seconds:.2f}", phases, times(seconds, least), peak, planned(result)])
    for axis, points in along.items():
        if len(points) > 1:
            xs, seconds, least = zip(*points, strict=True)
            floor = f"{exponent(xs, least):.2f}" if all(least) else "-"
            rows.append([axis, "exponent", f"**{exponent(xs, seconds):.2f}**", "", floor, "", ""])
    header = ["axis", "x", "seconds a step", "of them", "floor, s", "peak GB", "planned / measured GB"]
    return markdown(header, rows) if rows else ""


def attention(results: Results) -> str:
    """A layer's attention in three ways."""
    rows = [
        [
            f"{cell.settings['work']['group']} x {cell.settings['work']['new']}",
            *(f"{result['milliseconds'][kind]:.3g} ({result['apart'][kind]:.0e})" for kind in result["milliseconds"]),
        ]
        for cell, result in results.done("attention")
    ]
    return markdown(["group", "packed, ms (apart)", "padded", "FlexAttention"], rows) if rows else ""


def launches(results: Results) -> str:
    """Kernels of a decoded token, which a graph launches at once."""
    rows = [
        [
            cell.name.removeprefix("launches "),
            *(of[side] for of in result["kernels"].values() for side in ("decoder", "library")),
        ]
        for cell, result in results.done("launches")
    ]
    header = ["model", "float32, tinyrl", "float32, library", "bfloat16, tinyrl", "bfloat16, library"]
    return markdown(header, rows) if rows else ""


def real(results: Results) -> str:
    """What a real model learnt of sums."""
    rows = [
        [
            cell.name.removeprefix("real model, "), *(f"{result[when]['exact']:.3f}" for when in ("before", "after")),
            spread(result["seconds"]), f"{result['gap']:.2g}",
        ]
        for cell, result in results.done("real")
    ]  # fmt: skip
    header = ["", "probability of the right equation, before", "after", "seconds a step", "sampling gap"]
    return markdown(header, rows) if rows else ""


def learning(results: Results) -> str:
    """Outcomes by task and arm."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell, result in results.done("learning"):
        found.setdefault((cell.settings["task"], cell.settings["arm"]), []).append(result)
    rows = [
        [
            task, arm, len(of), f"{statistics.mean(r['outcome'] for r in of):.3f}",
            spread([r["outcome"] for r in of], 3), f"{statistics.mean(r['gap'] for r in of):.2g}",
        ]
        for (task, arm), of in found.items()
    ]  # fmt: skip
    header = ["task", "trained in", "seeds", "mean outcome", "median (range)", "sampling gap"]
    return markdown(header, rows) if rows else ""


def missing(results: Results) -> str:
    """Cells without a result, and why."""
    rows = []
    for cell in results.cells:
        record = results.by_name.get(cell.name)
        if record is None or record["status"] != "done":
            rows.append(
                [cell.name, *(("not yet", "") if record is None else (record["status"], record.get("why", "")))]
            )
    return markdown(["cell", "", "why"], rows) if rows else ""


def table(results: Results) -> str:
    """All that there is."""
    work, ran = results.profile.work, [r["result"] for r in results.by_name.values() if r["status"] == "done"]
    machine = next((record["machine"] for record in results.by_name.values()), "nothing yet")
    ceilings = results.ceilings
    said = "" if ceilings is None else (
        f"; matrix products {ceilings.rate / 1e12:.3g} TFLOP/s, copies {ceilings.bandwidth / 1e12:.3g} TB/s, measured"
    )  # fmt: skip
    intro = (
        f"{machine}{said}. {versions(ran) if ran else ''}\n\n{work.prompts} prompts of {work.prompt} tokens x "
        f"{work.group}, at most {work.new} new tokens each, {results.profile.dtype}, LoRA r 16 on all linear layers, "
        f"random weights with logits of deviation {DEVIATION:g}; {', '.join(FOUR_BIT)} on a base in 4 bits."
    )
    parts = {
        "Tests": suite(results),
        "Sampling": sampling(results),
        "GRPO": steps(results, "grpo"),
        "PPO": steps(results, "ppo"),
        "Cost along an axis": scaling(results),
        "Attention of a group, forward and backward of a layer": attention(results),
        "Kernels of a token": launches(results),
        "A real model": real(results),
        "Learning in bfloat16": learning(results),
        "Without a result": missing(results),
    }
    return (
        "\n\n".join([f"## On {machine}", intro, *(f"### {name}\n\n{text}" for name, text in parts.items() if text)])
        + "\n"
    )
