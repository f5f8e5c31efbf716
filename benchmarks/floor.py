"""The arithmetic floor of a GRPO step: its fewest operations, at the rates of matrix products measured on this machine.

Counted are products of matrices, a multiplication and an addition as two operations: no token of padding, a group's
prompt once, the head on completion tokens only, a frozen base (its backward pass needs the gradients of inputs, not of
weights) with LoRA.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from benchmarks import measuring, processes
from benchmarks.work import LORA, PROMPT_WORDS, SPEED, Grpo, Shape

BATCH_ROWS = 4096  # rows of a matrix product where a whole batch is scored; decoding has one row a sequence
REPEATS = 30
PROMPT_TOKENS = sum(PROMPT_WORDS) / 2


def operations(
    shape: Shape, completion: float, *, work: Grpo, prompt: float = PROMPT_TOKENS, lora_rank: int = LORA["r"]
) -> dict[str, float]:
    """Operations of one step by part, for completions of `completion` tokens and prompts of `prompt`, on average.

    With W weights in the layers' matrices, A in LoRA's, n completion tokens, N with the prompts, and S pairs of a query
    and a key (each costs 4 * heads * head_size a layer: scores and weighted values):

        sampling = reference = 2 W N + 2 V H n + S      forward = that + 2 A N
        backward = 2 W N + 2 V H n + 2 S + 4 A N        (both factors of attention have gradients; both of LoRA, too)
    """
    base = shape.layers * sum(inputs * outputs for inputs, outputs in shape.matrices)
    lora = shape.layers * lora_rank * sum(inputs + outputs for inputs, outputs in shape.matrices)
    new = work.rows * completion
    tokens = work.num_prompts * prompt + new
    pairs = new * (prompt + completion / 2) + work.num_prompts * prompt**2 / 2
    attention = 4 * shape.heads * shape.head_size * shape.layers * pairs
    linear = 2 * base * tokens + 2 * shape.vocabulary * shape.hidden * new
    forward = linear + attention
    return {
        "sampling": forward,
        "reference": forward,
        "forward": forward + 2 * lora * tokens,
        "backward": linear + 2 * attention + 4 * lora * tokens,
    }


def rate(rows: int, inputs: int, outputs: int) -> float:
    """Operations a second of (rows, inputs) times (inputs, outputs) in float32: the median of some products."""
    import torch

    left, weight, seconds = torch.randn(rows, inputs), torch.randn(outputs, inputs), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.nn.functional.linear(left, weight)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * inputs * outputs / sorted(seconds)[REPEATS // 2]


def floor(shape: Shape, completion: float, *, options: Namespace) -> dict[str, Any]:
    """Seconds of sampling, and of scoring and training, and the rates they assume; measured in a process of its own."""
    question = {"shape": asdict(shape), "completion": completion, "work": asdict(SPEED)}
    return processes.run("floor", question, options=options)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(settings["threads"])
    shape, work = Shape(**settings["shape"]), Grpo(**settings["work"])
    count = operations(shape, settings["completion"], work=work)
    decode, batch = (rate(rows, shape.hidden, shape.intermediate) for rows in (work.rows, BATCH_ROWS))
    sampling = count["sampling"] / decode
    update = (count["reference"] + count["forward"] + count["backward"]) / batch
    rates = {"gflops_decode": decode / 1e9, "gflops_batch": batch / 1e9}
    return {"sampling": sampling, "update": update, "seconds": sampling + update, **rates}


if __name__ == "__main__":
    measuring.serve(measure)
