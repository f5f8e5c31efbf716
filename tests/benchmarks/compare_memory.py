"""Peak memory above imports: GRPO beside the peer's micro-batch of 8, and PPO's four roles by kind of critic."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.benchmarks import compare_grpo, compare_ppo
from tests.benchmarks.fixed_work import prepare, shape_of
from tests.benchmarks.tables import machine, markdown, spread

Result = dict[str, Any]
HEADER = ["run", "peak MB above imports", "imports MB", "times ours", "what tinyrl logs, GB"]


def above(results: list[Result]) -> list[float]:
    return [result["peak_mb"] - result["imports_mb"] for result in results]


def row(name: str, results: list[Result], ours: list[Result]) -> list[str]:
    logged = results[-1].get("memory", {})
    ratio = [theirs / mine for theirs, mine in zip(above(results), above(ours), strict=True)]
    parts = ", ".join(f"{key.removeprefix('memory/')} {value:.3f}" for key, value in logged.items())
    imports = spread([result["imports_mb"] for result in results], 0)
    return [name, spread(above(results), 0), imports, spread(ratio), parts or "-"]


def grpo_rows(size: str, files: Path, *, options: Namespace) -> tuple[list[list[str]], list[Result]]:
    ours, peer = [], []
    for pair in range(options.pairs):
        ours.append(compare_grpo.ours_once(files, pair=pair, options=options))
        peer.append(compare_grpo.peer_once(files, compare_grpo.MEMORY_MICRO_BATCH, pair=pair, options=options))
    names = (f"GRPO {size}, tinyrl", f"GRPO {size}, TRL, micro-batch {compare_grpo.MEMORY_MICRO_BATCH}")
    return [row(names[0], ours, ours), row(names[1], peer, ours)], [ours[0], peer[0]]


def ppo_rows(size: str, files: Path, *, options: Namespace) -> list[list[str]]:
    """Without a Python for TRL 1.12, ours only. The ratio is to the first kind of critic named."""
    ours: dict[str, list[Result]] = {critic: [] for critic in options.critics}
    peer: list[Result] = []
    for pair in range(options.pairs):
        for critic, results in ours.items():
            results.append(compare_ppo.ours_once(files, critic, pair=pair, options=options))
        if options.ppo_peer_python:
            python = options.ppo_peer_python
            peer.append(compare_ppo.peer_once(files, pair=pair, python=python, options=options))
    yardstick = ours[options.critics[0]]
    rows = [row(f"PPO {size}, tinyrl, critic {critic}", results, yardstick) for critic, results in ours.items()]
    name = f"PPO {size}, TRL 1.12, micro-batch {compare_ppo.PEER_MICRO_BATCH}"
    return [*rows, *([row(name, peer, yardstick)] if peer else [])]


def main(options: Namespace) -> None:
    rows: list[list[str]] = []
    sample: list[Result] = []
    for size in options.sizes:
        files = prepare(shape_of(size), options=options)
        more, sample = grpo_rows(size, files, options=options)
        rows += more
        print(f"GRPO {size}: done", flush=True)
    rows += ppo_rows("s", prepare(shape_of("s"), options=options), options=options)
    print(f"\n## Memory\n\n{machine(options, *sample)}\n\n{markdown(HEADER, rows)}")
