"""What data-parallel processes exchange in a step of training, and whether they are still alike.

Losses divide by the counts of the whole minibatch already, so gradients and metrics of the processes' shares add up to
those of a single process, to rounding. All of them get the same sums, clip them and step alike; a checksum of their
weights says now and then whether they do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tinyrl.config.schema import Config
from tinyrl.errors import GuardStop
from tinyrl.models.distributed import World
from tinyrl.rollout.components import Parts, SamplingParts

BUCKET_ELEMENTS = 1 << 24  # of a gradient buffer: 64 MB
CHECK_EVERY = 25  # steps


def sum_step(world: World, metrics: dict[str, float], parameters: Sequence[nn.Parameter]) -> dict[str, float]:
    """Add up gradients, in place, and metrics over the processes. What has no gradient anywhere is left without one."""
    if world.size == 1:
        return metrics
    there = "".join("1" if p.grad is not None else "0" for p in parameters)
    told: list[tuple[dict[str, float], str]] = world.gather((metrics, there))
    learning = [p for p, *has in zip(parameters, *(mask for _, mask in told), strict=True) if "1" in has]
    for bucket in _buckets(learning):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        buffer = torch.cat([grad.reshape(-1) for grad in grads])
        world.sum(buffer)
        for p, summed in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
            p.grad = summed.view_as(p).clone() if p.grad is None else p.grad.copy_(summed.view_as(p))
    names = dict.fromkeys(name for theirs, _ in told for name in theirs)
    return {name: sum(theirs.get(name, 0.0) for theirs, _ in told) for name in names}


def check_alike(parts: Parts, also: str = "") -> None:
    """Raise ValueError, on every process, where one has read other settings, rows or prompts than rank 0."""
    world = parts.world
    if world.size == 1:
        return
    check_settings(world, parts.config)
    world.agree("the rows", json.dumps(getattr(parts, "row_fingerprints", {}), sort_keys=True))
    if isinstance(parts, SamplingParts):
        prompts = [p.tokens for p in (*parts.train_prompts, *parts.eval_prompts)]
        world.agree("the prompts", hashlib.sha256(json.dumps(prompts).encode()).hexdigest())
        world.agree("the sampling engine", parts.engine.name)
    world.agree("the checkpoint", also)


def check_settings(world: World, config: Config) -> None:
    """Raise ValueError, on every process, that names the settings in which one differs from rank 0."""
    sections = {name: value for name, value in config.written().items() if isinstance(value, dict)}
    own = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    first, *others = world.gather({"method": config.method, **own})
    for rank, other in enumerate(others, start=1):
        differing = [key for key in dict.fromkeys((*first, *other)) if first.get(key) != other.get(key)]
        if differing:
            each = (f"{key} ({json.dumps(first.get(key))} and {json.dumps(other.get(key))})" for key in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ValueError(
                f"processes 0 and {rank} were started with different settings: {', '.join(each)}{more}. "
                "Start all of them with the same command"
            )


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one kind in buffers of a bounded size, so that a large model's gradients are not there twice."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for p in parameters:
        other_kind = bucket and (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)
        if other_kind or (bucket and filled + p.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, filled = [], 0
        bucket.append(p)
        filled += p.numel()
    if bucket:
        yield bucket


def check_replicas(world: World, parameters: dict[str, dict[str, nn.Parameter]]) -> None:
    """Raise GuardStop, on every process, where trained weights differ from rank 0's in a single bit."""
    if world.size == 1:
        return
    named = {f"{role} {name}": p for role, of_role in parameters.items() for name, p in of_role.items()}
    told = world.gather([_bits(p.detach()) for p in named.values()])
    for rank, sums in enumerate(told):
        differing = [name for name, ours, theirs in zip(named, told[0], sums, strict=True) if ours != theirs]
        if differing:
            raise GuardStop(
                f"weights of process {rank} are no longer those of process 0: {len(differing)} of {len(named)} "
                f"parameters differ, the first {differing[0]}. Are the processes on unlike devices or versions? The "
                "last checkpoint is that of process 0"
            )


def _bits(x: Tensor) -> int:
    """The sum of a tensor's bits, read as whole numbers; each counts by its place, so that two cannot be swapped."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = x.contiguous().view(kinds[x.element_size()]).reshape(-1).long()
    places = torch.arange(1, len(whole) + 1, device=x.device)
    return int((whole * places).sum())
