"""The arithmetic floor of a GRPO step: its fewest operations, at the best rates seen here for products of its shapes.

Counted are products of matrices, a multiplication and an addition as two operations: no token of padding, a group's
prompt once, the head on completion tokens only, a frozen base (its backward pass needs the gradients of inputs, not of
weights) with LoRA.

A product's rate depends on its shape, and on what else the machine does meanwhile: each is measured by the fastest of
many calls. A floor that is above the step that was measured is not a floor, and is refused.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks import measuring, processes
from benchmarks.work import LORA, PROMPT_WORDS, SPEED, Grpo, Shape

PACKED_TOKENS = 1024  # of a micro-batch on a CPU
SECONDS_A_PRODUCT = 0.5  # of calls, and at least
LEAST_CALLS = 3
PROMPT_TOKENS = sum(PROMPT_WORDS) / 2
Operations = dict[str, float]  # by kind of product: layers, head, attention, lora


def operations(
    shape: Shape, completion: float, *, work: Grpo, prompt: float = PROMPT_TOKENS, lora_rank: int = LORA["r"]
) -> dict[str, Operations]:
    """Operations of one step, by phase and kind of product, for completions of `completion` tokens and prompts of
    `prompt`, on average.

    With W weights in the layers' matrices, A in LoRA's, n completion tokens, N with the prompts, and S pairs of a query
    and a key (each costs 4 * heads * head_size a layer: scores and weighted values):

        sampling = reference = 2 W N + 2 V H n + S      forward = that + 2 A N
        backward = 2 W N + 2 V H n + 2 S + 4 A N        (both factors of attention have gradients; both of LoRA, too)
    """
    base = shape.layers * sum(inputs * outputs for inputs, outputs in shape.matrices)
    low_rank = shape.layers * lora_rank * sum(inputs + outputs for inputs, outputs in shape.matrices)
    new = work.rows * completion
    tokens = work.num_prompts * prompt + new
    pairs = new * (prompt + completion / 2) + work.num_prompts * prompt**2 / 2
    attention = 4 * shape.heads * shape.head_size * shape.layers * pairs
    layers = 2 * base * tokens
    head = 2 * shape.vocabulary * shape.hidden * new
    lora = 2 * low_rank * tokens
    frozen = {"layers": layers, "head": head, "attention": attention}
    return {
        "sampling": frozen,
        "reference": frozen,
        "forward": {**frozen, "lora": lora},
        "backward": {"layers": layers, "head": head, "attention": 2 * attention, "lora": 2 * lora},
    }


def fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    best, calls, end = float("inf"), 0, time.perf_counter() + SECONDS_A_PRODUCT
    while calls < LEAST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def linear_rate(rows: int, matrices: list[tuple[int, int]]) -> float:
    """Operations a second of rows times these matrices (inputs, outputs), one after another."""
    import torch

    seconds = 0.0
    for inputs, outputs in matrices:
        left = torch.randn(rows, inputs)
        # A matrix stands in memory by its inputs or by its outputs, whichever is faster for these rows.
        by_outputs = torch.randn(outputs, inputs)
        by_inputs = torch.randn(inputs, outputs)
        seconds += min(fastest(lambda a=left, w=by_outputs: a @ w.t()), fastest(lambda a=left, w=by_inputs: a @ w))
    return 2 * rows * sum(inputs * outputs for inputs, outputs in matrices) / seconds


def attention_rate(batch: int, queries: int, keys: int, size: int) -> float:
    """Operations a second of scores and of weighted values, of as many heads of all rows together."""
    import torch

    q = torch.randn(batch, queries, size)
    k = torch.randn(batch, keys, size)
    scores = torch.randn(batch, queries, keys)
    seconds = fastest(lambda: torch.bmm(q, k.transpose(1, 2))) + fastest(lambda: torch.bmm(scores, k))
    return 4 * batch * queries * keys * size / seconds


def rates(shape: Shape, completion: float, *, work: Grpo) -> dict[str, Operations]:
    """Operations a second of each kind of product: of decoding, one token a row, and of packed tokens."""
    own = dict.fromkeys(shape.matrices)
    head = [(shape.hidden, shape.vocabulary)]
    rank = LORA["r"]
    low_rank = [pair for inputs, outputs in own for pair in ((inputs, rank), (rank, outputs))]
    keys = round(PROMPT_TOKENS + completion / 2)
    shared = shape.heads // shape.kv_heads
    longest = max(1, round(completion))
    return {
        "decode": {
            "layers": linear_rate(work.rows, shape.matrices),
            "head": linear_rate(work.rows, head),
            "attention": attention_rate(work.rows * shape.kv_heads, shared, keys, shape.head_size),
        },
        "packed": {
            "layers": linear_rate(PACKED_TOKENS, shape.matrices),
            "head": linear_rate(PACKED_TOKENS, head),
            "attention": attention_rate(work.group_size * shape.heads, longest, keys, shape.head_size),
            "lora": linear_rate(PACKED_TOKENS, low_rank),
        },
    }


def seconds_of(count: dict[str, Operations], found: dict[str, Operations]) -> dict[str, float]:
    """Seconds of sampling, and of scoring and training, at these rates."""
    sampling = sum(number / found["decode"][kind] for kind, number in count["sampling"].items())
    update = 0.0
    for phase in ("reference", "forward", "backward"):
        update += sum(number / found["packed"][kind] for kind, number in count[phase].items())
    return {"sampling": sampling, "update": update, "seconds": sampling + update}


def sentence(floor: dict[str, Any], measured: list[float]) -> str:
    """The floor beside the steps that were measured; where it is above the fastest of them, why there is none."""
    decode, packed = (floor["rates"][kind]["layers"] / 1e9 for kind in ("decode", "packed"))
    if floor["seconds"] > min(measured):
        return (
            f"no arithmetic floor: {floor['seconds']:.2f} s is more than a step took ({min(measured):.2f}), so the "
            f"products ({decode:.0f} and {packed:.0f} GFLOP/s) were measured while the machine did something else"
        )
    middle = sorted(measured)[len(measured) // 2]
    return (
        f"arithmetic floor {floor['seconds']:.2f} s (sampling {floor['sampling']:.2f}, layers at {decode:.0f} GFLOP/s; "
        f"the rest {floor['update']:.2f}, at {packed:.0f}); tinyrl is {middle / floor['seconds']:.2f} times that"
    )


def floor(shape: Shape, completion: float, *, options: Namespace) -> dict[str, Any]:
    """Seconds by part and the rates they assume, measured in a process of its own."""
    question = {"shape": asdict(shape), "completion": completion, "work": asdict(SPEED)}
    return processes.run("floor", question, options=options)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(settings["threads"])
    shape, work = Shape(**settings["shape"]), Grpo(**settings["work"])
    completion = settings["completion"]
    found = rates(shape, completion, work=work)
    return {**seconds_of(operations(shape, completion, work=work), found), "rates": found}


if __name__ == "__main__":
    measuring.serve(measure)
