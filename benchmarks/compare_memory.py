"""Peak memory above imports: GRPO beside the peer's micro-batch of 8, and PPO's four roles by kind of critic."""

from __future__ import annotations

from argparse import Namespace

from benchmarks import compare_grpo, compare_ppo
from benchmarks.fixed_work import prepare
from benchmarks.results import Result, above_imports, alternate
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions

COLUMNS = ["peak MB above imports", "imports MB", "times ours", "what tinyrl logs, GB"]


def row(name: str, results: list[Result], ours: list[Result]) -> list[str]:
    logged = results[-1].get("memory", {})
    ratio = [theirs / mine for theirs, mine in zip(above_imports(results), above_imports(ours), strict=True)]
    parts = ", ".join(f"{key.removeprefix('memory/')} {value:.3f}" for key, value in logged.items())
    imports = spread([result["imports_mb"] for result in results], 0)
    return [name, spread(above_imports(results), 0), imports, spread(ratio), parts or "-"]


def table(results: dict[str, list[Result]], *, ours: list[Result]) -> str:
    """Every side's memory, as multiples of one of ours."""
    header = [versions([of_side[0] for of_side in results.values()]), *COLUMNS]
    return markdown(header, [row(name, of_side, ours) for name, of_side in results.items()])


def grpo_table(size: str, *, options: Namespace) -> str:
    files, micro_batch = prepare(SIZES[size], options=options), compare_grpo.MEMORY_MICRO_BATCH
    name = f"GRPO {size}, tinyrl"
    results = alternate(
        {
            name: lambda pair: compare_grpo.ours_once(files, pair=pair, options=options),
            f"GRPO {size}, TRL, micro-batch {micro_batch}": lambda pair: compare_grpo.peer_once(
                files, micro_batch, pair=pair, options=options
            ),
        },
        options.pairs,
    )
    return table(results, ours=results[name])


def ppo_table(size: str, *, options: Namespace) -> str:
    """Without a Python for TRL 1.12, ours only. The ratio is to the first kind of critic named."""
    files = prepare(SIZES[size], options=options)
    peer, ours = compare_ppo.results_of(files, python=options.ppo_peer_python, options=options)
    named = {f"PPO {size}, tinyrl, critic {critic}": results for critic, results in ours.items()}
    theirs = {f"PPO {size}, TRL, micro-batch {compare_ppo.PEER_MICRO_BATCH}": peer} if peer else {}
    return table({**named, **theirs}, ours=ours[options.critics[0]])


def main(options: Namespace) -> None:
    tables = [grpo_table(size, options=options) for size in options.sizes]
    tables.append(ppo_table(options.sizes[0], options=options))
    print(f"\n## Memory\n\n{machine(options)}\n\n" + "\n\n".join(tables))
