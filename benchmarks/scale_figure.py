"""The figure and the tables of docs/scale.md, from the model of a step's time in scale.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale import (
    DEVICES,
    LENGTHS,
    Device,
    Link,
    Step,
    break_even,
    exchange_s,
    parallel_s,
    pays_until,
    sampling_s,
    training_s,
)
from benchmarks.tables import markdown

PCIE = Link("PCIe, 20 GB/s", 20e9, 30e-6)
ETHERNET = Link("10 Gbit Ethernet", 1.1e9, 100e-6)
SERVED = (2, 4, 8)  # devices, one of which is the server
PARTS = ("sampling, shared", "sampling, not shared", "reference and update", "exchange", "rank 0 alone")
COLOURS = ("#56a5dc", "#1f5f94", "#b5629e", "#e09f3e", "#8a8f98")


def parts_s(device: Device, step: Step, devices: int, link: Link) -> list[float]:
    """Seconds of a step by PARTS; together they are parallel_s."""
    steady = step.longest * device.decode_s
    return [
        sampling_s(device, step, devices) - steady,
        steady,
        training_s(device, step, devices),
        exchange_s(device, step, devices, link),
        device.alone_s,
    ]


def tables(devices: list[Device]) -> str:
    """Markdown: what was measured, how fast a step gets, and what a server must do to be worth its device."""
    measured = [
        ["", "a decoding step, ms", "each of its rows, us", "a token read, us", "a token learnt, us", "gradient, MB"],
        *(
            [
                d.name,
                f"{d.decode_s * 1e3:.2f}",
                f"{d.decode_row_s * 1e6:.1f}",
                f"{d.read_s * 1e6:.1f}",
                f"{d.learn_s * 1e6:.1f}",
                f"{d.gradient_bytes / 1e6:.1f}",
            ]
            for d in devices
        ),
    ]
    faster = [["times faster", "longest response", *(f"{n} devices" for n in DEVICES[1:]), "worth doubling up to"]]
    served = [["a server must sample so many times as fast", "longest response", *(f"{n} devices" for n in SERVED)]]
    for device in devices:
        for longest in LENGTHS:
            step = replace(Step(), longest=longest)
            alone = parallel_s(device, step, 1, ETHERNET)
            ratios = [f"{alone / parallel_s(device, step, n, ETHERNET):.1f}" for n in DEVICES[1:]]
            faster.append([device.name, f"{longest:,}", *ratios, f"{pays_until(device, step, ETHERNET)}"])
            needed = [break_even(device, step, n, ETHERNET) for n in SERVED]
            served.append(
                [device.name, f"{longest:,}", *("no speed is enough" if x == math.inf else f"{x:.1f}" for x in needed)]
            )
    return "\n\n".join(markdown(rows[0], rows[1:]) for rows in (measured, faster, served))


def draw(devices: list[Device], picture: Path) -> None:
    """Three panels, of the largest model measured: where a step's time goes, how much faster it gets, and how fast a
    server must be, were a decoding step to cost more than it does here, as it does on a GPU.
    """
    import matplotlib.pyplot as plt

    device, step = devices[-1], Step()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    _shares(left, device, step)
    for shade, longest in enumerate(LENGTHS):
        longer = replace(step, longest=longest)
        alone = parallel_s(device, longer, 1, ETHERNET)
        ratios = [alone / parallel_s(device, longer, n, ETHERNET) for n in DEVICES]
        middle.plot(DEVICES, ratios, marker="o", markersize=3, color=plt.cm.viridis(shade / 4), label=f"{longest:,}")
    middle.plot(DEVICES, DEVICES, color="#8a8f98", linestyle=":", label="one for one")
    middle.set(title="Times faster than one device", xlabel="devices", xscale="log", yscale="log")
    middle.legend(title="longest response", frameon=False)
    rows = [2**k for k in range(3, 15)]
    for shade, count in enumerate(SERVED):
        steadier = [replace(device, decode_s=x * device.decode_row_s) for x in rows]
        needed = [break_even(one, step, count, ETHERNET) for one in steadier]
        right.plot(rows, needed, marker="o", markersize=3, color=plt.cm.viridis(shade / 3), label=f"{count} devices")
    right.axvline(device.decode_s / device.decode_row_s, color="#8a8f98", linestyle=":", label="measured")
    right.set(title="How many times faster a server must sample", xscale="log", yscale="log")
    right.set(xlabel="a decoding step costs as much as so many of its rows")
    right.legend(title="one of them the server", frameon=False)
    for axes in (left, middle):
        axes.set_xticks(range(len(DEVICES)) if axes is left else DEVICES, [str(n) for n in DEVICES])
        axes.minorticks_off()
    middle.set_yticks(DEVICES, [str(n) for n in DEVICES])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
    figure.suptitle(f"{device.name}: {step.rows} completions a step, {step.longest} tokens at most", fontsize=11)
    figure.savefig(picture, dpi=110)


def _shares(axes: Any, device: Device, step: Step) -> None:
    """Stacked bars, as shares of a step's time."""
    rows = [parts_s(device, step, n, ETHERNET) for n in DEVICES]
    below = [0.0] * len(DEVICES)
    for name, colour, values in zip(PARTS, COLOURS, zip(*rows, strict=True), strict=True):
        shares = [100 * value / sum(row) for value, row in zip(values, rows, strict=True)]
        axes.bar(range(len(DEVICES)), shares, bottom=below, color=colour, label=name, width=0.7)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.set(title="Where a step's time goes, %", xlabel="devices")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3)
