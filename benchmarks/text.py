"""SFT, reward model and DPO steps of both sides in alternation: the same losses and gradients, seconds, memory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import processes, same_work
from benchmarks.fixed_work import Grpo, prepare
from benchmarks.our_recipe import common
from benchmarks.results import Result, above_imports, alternate, pooled, time_ratios
from benchmarks.same_work import LOSS_APART, Check
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions
from benchmarks.text_work import BETA, METHODS, RATE, ROWS, prepare_text, rows_file

COLUMNS = ["seconds a step", "peak MB above imports", "times faster"]


def recipe_of(files: Path, method: str, *, pair: int, options: Namespace) -> dict[str, Any]:
    """The same rows, LoRA weights, rate and batch as the peer's."""
    recipe = common(files, Grpo(learning_rate=RATE), steps=options.steps, options=options, seed=pair)
    del recipe["generation"], recipe["optim"]["critic_learning_rate"]
    data = rows_file(files, method)
    recipe["task"] = {"data": str(data), "eval_data": str(data.with_suffix(".eval.jsonl"))}
    recipe["model"]["adapter"] = str(files / "start")
    recipe["optim"]["max_grad_norm"] = 1e6
    own = {"sft": {}, "reward": {"center": False}, "dpo": {"beta": BETA}}[method]
    section = "reward_model" if method == "reward" else method
    return {"method": method, **recipe, section: {"batch_size": ROWS, **own}}


def same_steps(ours: Result, peer: Result, gradients: tuple[Path, Path]) -> Check:
    """Losses of every step, and the gradient of one, apart as shares."""
    import torch
    from safetensors.torch import load_file

    apart = max(abs(a / b - 1) for a, b in zip(ours["losses"], peer["losses"], strict=True))
    left, right = (load_file(path) for path in gradients)
    assert set(left) == set(right), sorted(set(left) ^ set(right))[:4]
    difference = torch.cat([(left[name] - right[name]).flatten() for name in sorted(left)]).norm()
    gap = float(difference / torch.cat([right[name].flatten() for name in sorted(right)]).norm())
    first, last = ours["losses"][0], ours["losses"][-1]
    sentence = (
        f"losses of {len(ours['losses'])} steps ({first:.4f} to {last:.4f}) at most {apart:.1e} apart, gradients "
        f"{gap:.1e} of their norm apart (allowed {LOSS_APART:.0e})"
    )
    return Check(max(apart, gap) <= LOSS_APART, sentence)


def one_method(files: Path, method: str, *, options: Namespace) -> list[list[str]]:
    ours_file, peer_file = (options.out / f"{files.name}-{method}-{side}.safetensors" for side in ("ours", "peer"))

    def ours(pair: int) -> Result:
        recipe = recipe_of(files, method, pair=pair, options=options)
        question = {"recipe": recipe, "overrides": options.set, "gradients": str(ours_file)}
        return processes.run("our_text", question, options=options)

    def peer(micro_batch: int):
        def once(pair: int) -> Result:
            question = {"files": str(files), "method": method, "micro_batch": micro_batch, "steps": options.steps}
            question |= {"seed": pair, "gradients": str(peer_file)}
            return processes.run("peer_text", question, options=options, python=options.peer_python)

        return once

    sizes = [size for size in options.micro_batches if ROWS % size == 0]
    results = alternate({"tinyrl": ours, **{f"TRL, micro-batch {n}": peer(n) for n in sizes}}, options.pairs)
    mine = results["tinyrl"]
    others = {name: found for name, found in results.items() if name != "tinyrl"}
    checks = [same_steps(mine[-1], next(reversed(others.values()))[-1], (ours_file, peer_file))]
    may_compare = same_work.report(checks, options=options)
    rows = [[f"{method}: tinyrl", spread(pooled(mine, "seconds"), 3), spread(above_imports(mine), 0), "-"]]
    for name, found in others.items():
        ratio = f"**{spread(time_ratios(found, mine))}**" if may_compare else "-"
        cells = [spread(pooled(found, "seconds"), 3), spread(above_imports(found), 0), ratio]
        rows.append([f"{method}: {name} ({versions(found[:1])})", *cells])
    return rows


def main(options: Namespace) -> None:
    for size in options.sizes:
        files = prepare(SIZES[size], options=options)
        prepare_text(files, SIZES[size])
        print(f"\n## Text, model {size}: {ROWS} rows or pairs a step\n{machine(options)}", flush=True)
        rows = [row for method in METHODS for row in one_method(files, method, options=options)]
        print("\n" + markdown(["", *COLUMNS], rows))
