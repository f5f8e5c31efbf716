"""The clipped policy loss against hand-computed literals and a scalar loop over Python floats."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyrl.algorithms.losses import clipped_surrogate, importance_ratio

NAN, INF = math.nan, math.inf


def random_batch() -> dict[str, Tensor]:
    """Six rows of up to eight tokens: a full one, an empty one, the rest with holes; the policies are far apart."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -2.0 * torch.rand(6, 8, generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    mask[0], mask[1] = True, False
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(6, 8, generator=generator),
        "advantages": torch.randn(6, 8, generator=generator),
        "mask": mask,
        "token_weights": 2.0 * torch.rand(6, 8, generator=generator),
    }


def by_loop(
    batch: dict[str, Tensor],
    *,
    clip_eps: float,
    clip_eps_high: float | None = None,
    ratio_level: str = "token",
    aggregation: str = "token",
    denominator: float | None = None,
) -> dict[str, float]:
    """PPO's clipped objective written as the paper does: minus min(r A, clip(r) A), token by token."""
    names = ["loss", "clipfrac", "approx_kl", "ratio"]
    terms: dict[str, list[list[float]]] = {name: [] for name in names}
    high = clip_eps if clip_eps_high is None else clip_eps_high
    for b in range(6):
        true = [t for t in range(8) if batch["mask"][b, t]]
        log_ratios = [float(batch["logprobs"][b, t]) - float(batch["old_logprobs"][b, t]) for t in true]
        for name in names if true else ():
            terms[name].append([])
        for t, own in zip(true, log_ratios, strict=True):
            advantages = batch["advantages"]
            advantage = float(advantages[b] if advantages.dim() == 1 else advantages[b, t])
            ratio = math.exp(sum(log_ratios) / len(log_ratios) if ratio_level != "token" else own)
            objective = min(ratio * advantage, min(max(ratio, 1 - clip_eps), 1 + high) * advantage)
            found = {"clipfrac": float(objective != ratio * advantage)}
            weight = float(batch["token_weights"][b, t]) if "token_weights" in batch else 1.0
            found |= {"loss": -weight * objective, "ratio": ratio, "approx_kl": math.exp(own) - 1 - own}
            for name, value in found.items():
                terms[name][-1].append(value)

    def average(rows: list[list[float]], count: float | None) -> float:
        if aggregation == "sequence":
            return sum(sum(row) / len(row) for row in rows) / len(rows)
        return sum(map(sum, rows)) / (count or sum(map(len, rows)))

    return {f"policy/{name}": average(rows, denominator if name == "loss" else None) for name, rows in terms.items()}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_eps": 0.2},
        {"clip_eps": 0.2, "clip_eps_high": 0.28},
        {"clip_eps": 0.2, "aggregation": "sequence"},
        {"clip_eps": 0.2, "aggregation": "constant", "denominator": 96.0},
        {"clip_eps": 0.03, "clip_eps_high": 0.04, "ratio_level": "sequence", "aggregation": "sequence"},
        {"clip_eps": 0.03, "ratio_level": "sequence", "aggregation": "token"},
    ],
)
def test_policy_loss_is_the_scalar_loop(settings: dict[str, Any], weighted: bool) -> None:
    """With importance weights and an advantage of each token, or without and with one of each sequence."""
    batch = random_batch()
    if not weighted:
        del batch["token_weights"]
        batch["advantages"] = batch["advantages"][:, 0]
    want = by_loop(batch, **settings)
    loss, metrics = clipped_surrogate(**batch, **settings)
    assert loss.item() == pytest.approx(want["policy/loss"], rel=1e-5)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(want, rel=1e-5)
    assert 0.0 < metrics["policy/clipfrac"].item() < 1.0  # the batch does exercise the clip


def policy_gradient(log_ratio: float, advantage: float, **settings: Any) -> float:
    """d loss / d logprob of one token."""
    logprobs = torch.tensor([[log_ratio - 1.0]], requires_grad=True)
    loss, _ = clipped_surrogate(
        logprobs,
        torch.tensor([[-1.0]]),
        torch.tensor([advantage]),
        torch.tensor([[True]]),
        **{"clip_eps": 0.2, **settings},
    )
    loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad.item()


def test_where_the_clip_stops_the_gradient() -> None:
    up, down = math.log(1.5), math.log(0.5)
    assert policy_gradient(0.0, 2.0) == pytest.approx(-2.0)
    assert policy_gradient(up, 2.0) == 0.0  # good and already likelier
    assert policy_gradient(up, -2.0) == pytest.approx(3.0)  # bad and likelier: pushed back
    assert policy_gradient(down, 2.0) == pytest.approx(-1.0)  # good and less likely: pushed back
    assert policy_gradient(down, -2.0) == 0.0  # bad and already less likely
    assert policy_gradient(up, 2.0, clip_eps_high=0.6) == pytest.approx(-3.0)  # the upper clip alone is wider
    assert policy_gradient(down, -2.0, clip_eps_high=0.6) == 0.0


def test_log_ratio_is_clamped_before_exp() -> None:
    logprobs = torch.tensor([[-1.0, -900.0, -INF]], requires_grad=True)
    old_logprobs = torch.tensor([[-1000.0, -1.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    assert ratio[0].tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(-20)], rel=1e-5)
    loss, metrics = clipped_surrogate(logprobs, old_logprobs, torch.tensor([-1.0]), mask, clip_eps=0.2)
    loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert metrics["policy/approx_kl"].item() == pytest.approx((math.exp(20) - 21 + 2 * 19) / 3, rel=1e-5)


def test_gspo_value_and_gradient_by_hand() -> None:
    # Row 0: log ratios 0.1 and 0.3 around a tool token: s = exp(0.2). Row 1: one token, log ratio -0.1.
    logprobs = torch.tensor([[-0.9, NAN, -0.7], [-1.1, -5.0, INF]], requires_grad=True)
    old_logprobs = torch.tensor([[-1.0, 0.0, -1.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    s, t = math.exp(0.2), math.exp(-0.1)
    ratio = importance_ratio(logprobs, old_logprobs, mask, ratio_level="sequence")
    assert ratio.flatten().tolist() == pytest.approx([s, 1.0, s, t, 1.0, 1.0])
    loss, _ = clipped_surrogate(
        logprobs,
        old_logprobs,
        torch.tensor([-3.0, 2.0]),
        mask,
        clip_eps=0.15,
        ratio_level="sequence",
        aggregation="sequence",
    )
    loss.backward()
    # d loss / d logprob[t] = -(1 / sequences) s A[t] / |y|, where the clip does not bind (the paper's Eq. 10)
    assert loss.item() == pytest.approx((3.0 * s - 2.0 * t) / 2)
    assert logprobs.grad is not None
    want = [3.0 * s / 4, 0.0, 3.0 * s / 4, -2.0 * t / 2, 0.0, 0.0]
    assert logprobs.grad.flatten().tolist() == pytest.approx(want)


def test_an_advantage_of_one_token_moves_all_of_a_sequence_under_gspo() -> None:
    old = torch.tensor([[-0.9, -0.7]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs = old.clone().requires_grad_()
    advantages = torch.tensor([[-3.0, -1.0]])
    loss, _ = clipped_surrogate(logprobs, old, advantages, mask, clip_eps=0.2, ratio_level="sequence")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([1.0, 1.0])  # token by token it would be 1.5 and 0.5


def test_refusals() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    for name, value in (
        ("aggregation", "constant"),
        ("aggregation", "mean"),
        ("ratio_level", "word"),
    ):
        with pytest.raises(AssertionError, match=name):
            clipped_surrogate(zeros, zeros, zeros, mask, **{"clip_eps": 0.2, name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError, match="advantages"):
        clipped_surrogate(zeros, zeros, torch.zeros(3), mask, clip_eps=0.2)
