"""The contract of every loss: micro-batches add up, garbage under False does not leak, metrics are float32 scalars."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tinyrl.algorithms.kl import k1, k3
from tinyrl.algorithms.losses import (
    Metrics,
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
    importance_ratio,
    kl_loss,
)

Batch = dict[str, Tensor]
Loss = Callable[[Batch, float | None, float | None], tuple[Tensor, Metrics]]  # (batch, tokens, sequences) of the step
CONSTANT = 77.0

LOSSES: dict[str, Loss] = {
    "ppo": lambda b, tokens, _: clipped_policy_loss(
        b["x"], b["old"], b["a"], b["mask"], clip_eps=0.2, dual_clip=1.5, token_weights=b["w"], denominator=tokens
    ),
    "ppo, advantage per sequence": lambda b, tokens, _: clipped_policy_loss(
        b["x"], b["old"], b["a"][:, 0], b["mask"], clip_eps=0.2, denominator=tokens
    ),
    "grpo": lambda b, _, sequences: clipped_policy_loss(
        b["x"], b["old"], b["a"], b["mask"], clip_eps=0.2, aggregation="sequence", denominator=sequences
    ),
    "dr_grpo": lambda b, tokens, _: clipped_policy_loss(
        b["x"],
        b["old"],
        b["a"],
        b["mask"],
        clip_eps=0.2,
        aggregation="constant",
        denominator=CONSTANT,
        metric_denominator=tokens,
    ),
    "gspo": lambda b, _, sequences: clipped_policy_loss(
        b["x"],
        b["old"],
        b["a"],
        b["mask"],
        clip_eps=0.02,
        ratio_level="sequence",
        aggregation="sequence",
        denominator=sequences,
    ),
    "cispo": lambda b, tokens, _: cispo_loss(b["x"], b["old"], b["a"], b["mask"], ratio_cap=1.2, denominator=tokens),
    "value": lambda b, tokens, _: clipped_value_loss(
        b["x"], b["old"], b["a"], b["mask"], value_clip_eps=0.3, denominator=tokens
    ),
    "kl, k1": lambda b, tokens, _: kl_loss(k1(b["x"], b["old"]), b["mask"], denominator=tokens),
    "kl, weighted": lambda b, _, sequences: kl_loss(
        k3(b["x"], b["w"]),
        b["mask"],
        aggregation="sequence",
        denominator=sequences,
        ratio=importance_ratio(b["x"], b["old"], b["mask"]),
    ),
    "entropy": lambda b, tokens, _: entropy_bonus(b["x"], b["mask"], denominator=tokens),
}
every_loss = pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES.keys())


def random_batch() -> Batch:
    generator = torch.Generator().manual_seed(11)
    x, noise, a, w = torch.randn(4, 8, 6, generator=generator).unbind()
    mask = torch.rand(8, 6, generator=generator) < 0.6
    mask[3], mask[4] = False, True
    return {"x": x, "old": x + 0.5 * noise, "a": a, "w": w.abs(), "mask": mask}


def run(loss_fn: Loss, batch: Batch, tokens: float | None = None, sequences: float | None = None):
    x = batch["x"].clone().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):  # raises on a NaN anywhere in backward, also one that is masked later
        loss, metrics = loss_fn({**batch, "x": x}, tokens, sequences)
        loss.backward()
    assert x.grad is not None
    return loss, metrics, x.grad


@every_loss
def test_micro_batches_add_up_to_the_step(loss_fn: Loss) -> None:
    batch = random_batch()
    tokens, sequences = float(batch["mask"].sum()), float(batch["mask"].any(dim=1).sum())
    loss, metrics, gradient = run(loss_fn, batch)
    parts = [
        run(loss_fn, {k: v[rows] for k, v in batch.items()}, tokens, sequences)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 8))  # the third has no True token at all
    ]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), gradient, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        assert sum(part[1][name].item() for part in parts) == pytest.approx(metric.item(), rel=1e-5), name
        if name.endswith("clipfrac"):
            assert 0.0 < metric.item() < 1.0, name


@every_loss
def test_padding_to_a_longer_batch_changes_nothing(loss_fn: Loss) -> None:
    batch = random_batch()
    longer = {k: torch.nn.functional.pad(v, (0, 3, 0, 2)) for k, v in batch.items()}
    (loss, metrics, gradient), (padded, padded_metrics, padded_gradient) = run(loss_fn, batch), run(loss_fn, longer)
    assert padded.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(padded_gradient[:8, :6], gradient, rtol=1e-6, atol=1e-8)
    assert {k: v.item() for k, v in padded_metrics.items()} == pytest.approx({k: v.item() for k, v in metrics.items()})


@every_loss
@pytest.mark.parametrize("garbage", [math.nan, 3e38])
def test_garbage_under_false_does_not_leak(loss_fn: Loss, garbage: float) -> None:
    batch = random_batch()
    if loss_fn is LOSSES["ppo, advantage per sequence"]:
        batch["mask"][:, 0] = batch["mask"].any(dim=1)  # its advantages are column 0: garbage for the empty row only
    clean_loss, clean_metrics, clean_gradient = run(loss_fn, batch)
    dirty = {k: v if k == "mask" else v.masked_fill(~batch["mask"], garbage) for k, v in batch.items()}
    loss, metrics, gradient = run(loss_fn, dirty)
    assert loss.item() == clean_loss.item()
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in clean_metrics.items()}
    assert gradient[batch["mask"]].tolist() == clean_gradient[batch["mask"]].tolist()
    assert gradient[~batch["mask"]].abs().sum().item() == 0.0


@every_loss
def test_a_batch_in_which_nothing_counts_gives_zero(loss_fn: Loss) -> None:
    batch = random_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    for counts in ((None, None), (0.0, 0.0), (50.0, 5.0)):
        loss, metrics, gradient = run(loss_fn, batch, *counts)
        assert loss.item() == 0.0
        assert gradient.abs().sum().item() == 0.0
        assert all(metric.item() == 0.0 for metric in metrics.values())


@every_loss
def test_float32_and_detached_scalars(loss_fn: Loss) -> None:
    dtype = torch.bfloat16
    batch = {k: v if k == "mask" else v.to(dtype) for k, v in random_batch().items()}
    loss, metrics, gradient = run(loss_fn, batch)
    assert (loss.dtype, loss.dim(), gradient.dtype) == (torch.float32, 0, dtype)
    for name, metric in metrics.items():
        assert (metric.dtype, metric.dim(), metric.requires_grad) == (torch.float32, 0, False), name
