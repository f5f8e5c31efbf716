"""The arithmetic floor of a GRPO step: work.py's operation counts at this machine's measured matrix-product rates."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from tests.benchmarks import measuring, processes
from tests.benchmarks.fixed_work import GROUP_SIZE, NUM_PROMPTS, Shape, load_work, registered

BATCH_ROWS = 4096  # rows of a matrix product where a whole batch is scored; decoding has one row a sequence


def floor(shape: Shape, mean_tokens: float, *, options: Namespace, group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """Seconds of sampling and of scoring and training at `mean_tokens` a completion, and the rates they assume."""
    question = {"shape": asdict(shape), "mean_tokens": mean_tokens, "group_size": group_size}
    return processes.run("floor", question, options=options)


def main() -> None:
    import torch

    settings = measuring.job()
    torch.set_num_threads(settings["threads"])
    work, group = load_work(settings["work"]), settings["group_size"]
    name = registered(work, Shape(**settings["shape"]))
    hidden, _, intermediate, *_ = work.SHAPES[name]
    operations = work.operations(name, settings["mean_tokens"], num_prompts=NUM_PROMPTS, group_size=group)
    decode = work.rate(NUM_PROMPTS * group, hidden, intermediate)
    batch = work.rate(BATCH_ROWS, hidden, intermediate)
    sampling = operations["sampling"] / decode
    update = sum(operations[part] for part in ("reference", "forward", "backward")) / batch
    measuring.answer(
        settings,
        sampling=sampling,
        update=update,
        seconds=sampling + update,
        gflops_decode=decode / 1e9,
        gflops_batch=batch / 1e9,
    )


if __name__ == "__main__":
    main()
