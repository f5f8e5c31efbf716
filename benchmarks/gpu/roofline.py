"""The least time a GPU can take: operations over the rate of its matrix products, or bytes over its bandwidth.

The larger of the two, for each decoded token and for a training pass. Rates are measured first (ceilings.py), on random
numbers: products of zeros run faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fixed_work import Grpo
from benchmarks.floor import operations
from benchmarks.gpu.shapes import Work, parameters
from benchmarks.our_recipe import PPO_EPOCHS
from benchmarks.sizes import Shape


@dataclass(frozen=True)
class Ceilings:
    """Operations a second of large matrix products, and bytes a second read and written."""

    rate: float
    bandwidth: float


def counted(shape: Shape, work: Work) -> dict[str, float]:
    """Operations of a GRPO step by part."""
    grpo = Grpo(num_prompts=work.prompts, group_size=work.group)
    return operations(shape, work.new, work=grpo, prompt=work.prompt)


def sampling_bytes(shape: Shape, work: Work, *, weight: float = 2.0, number: float = 2.0) -> float:
    """Fewest bytes that decoding moves: at each token all weights once, each prompt's keys and values once, and those
    of every row so far. weight: bytes of a weight (4-bit: 0.5); number: bytes of a key's or a value's number.
    """
    row = 2 * shape.layers * shape.kv_heads * shape.head_size * number
    own = work.rows * row * work.new * (work.new - 1) / 2
    return work.new * (weight * parameters(shape) + work.prompts * work.prompt * row) + own


def floors(
    shape: Shape, work: Work, ceilings: Ceilings, *, weight: float = 2.0, method: str = "grpo"
) -> dict[str, Any]:
    """Seconds of sampling and of the rest of a step, and what bounds sampling. PPO has a prompt a completion, reads it
    by reference, critic and reward model, and makes PPO_EPOCHS passes with policy and critic.
    """
    ppo = method == "ppo"
    work = replace(work, prompts=work.rows, group=1) if ppo else work
    parts = counted(shape, work)
    arithmetic = parts["sampling"] / ceilings.rate
    moving = sampling_bytes(shape, work, weight=weight) / ceilings.bandwidth
    reads, passes = (3, 2 * PPO_EPOCHS) if ppo else (1, 1)
    learnt = reads * parts["reference"] + passes * (parts["forward"] + parts["backward"])
    rest = learnt / ceilings.rate
    sampling = max(arithmetic, moving)
    bound = "bytes" if moving > arithmetic else "arithmetic"
    return {"sampling": sampling, "rest": rest, "step": sampling + rest, "bound": bound}
