"""Losses of PPO and the GRPO family: tensors of one micro-batch in, (loss to minimise, metrics) out.

GRPO, DAPO, Dr. GRPO and GSPO are `clipped_surrogate` with other arguments:

              ratio_level  aggregation  clip_eps, clip_eps_high  denominator of the step
    PPO       token        token        0.2                      True tokens
    GRPO      token        sequence     0.2                      sequences with a True token
    DAPO      token        token        0.2, 0.28                True tokens
    Dr. GRPO  token        constant     0.2                      sequences * max_new_tokens
    GSPO      sequence     sequence     3e-4, 4e-4               sequences with a True token
    RLOO      token        sequence-sum 0.2                      sequences with a True token

mask (B, T): True for response tokens that the policy sampled (no tool output, no padding), in rows that are in the
loss; T is the longest response. Losses are 0-dim.
What differs from the papers: the log-ratio is clamped to +-20 before exp; the clip may differ above and below for all;
the KL term is a loss of its own, with any weight, estimator and aggregation; old_logprobs, old_values, advantages,
returns and token_weights are detached here, in case the caller forgot.
Denominators. A loss is a sum over this micro-batch divided by `denominator`, the count of the whole optimizer step
(None: of this batch; see `aggregate`), so the gradients of micro-batches add up to the gradient of the step.
Metrics. Detached 0-dim tensors that add up: with the step's denominator, the sum of a metric over the micro-batches is
its mean over the step. They are averaged as the loss is: over tokens ("token"), or within each sequence and then over
sequences ("sequence"). With "constant" and "sequence-sum" the loss's divisor is not a count of tokens, so metrics are
means over tokens, divided by `metric_denominator` (the True tokens of the step; None: of this batch; ignored by the
other aggregations). A fraction thus stays within [0, 1] under every aggregation.
"""

from typing import Literal

import torch
from torch import Tensor

from tinyrl.algorithms.kl import MAX_LOG_RATIO
from tinyrl.algorithms.masking import assert_shapes, keep_true, masked_mean, masked_sum

Aggregation = Literal["token", "sequence", "sequence-sum", "constant"]
Metrics = dict[str, Tensor]
RatioLevel = Literal["token", "sequence"]
Mismatch = Literal["token", "sequence", "token-mask", "sequence-mask"]


def aggregate(x: Tensor, mask: Tensor, *, aggregation: Aggregation, denominator: float | None = None) -> Tensor:
    """Reduce per-token terms (B, T) to one number (0-dim float32). No other place of a loss chooses its denominator D.

        token         (sum_b sum_t m[b, t] x[b, t]) / D          D: True tokens of the optimizer step
        sequence      (sum_b mean over True t of x[b, t]) / D    D: sequences of the step with at least one True token
        sequence-sum  (sum_b sum_t m[b, t] x[b, t]) / D          D: the same
        constant      (sum_b sum_t m[b, t] x[b, t]) / D          D: any number, the same for every step; required

    With the same D in every micro-batch of a step, the results of the micro-batches add up to that of the whole batch.
    A sequence without a True token counts neither in the sum nor in the default D. D None: counted in this batch.
    D = 0 is the count of a step in which nothing counts: the result is 0, not NaN.
    """
    assert_shapes(mask, x=x)
    assert denominator is None or denominator >= 0, f"denominator is {denominator}"
    assert aggregation in ("token", "sequence", "sequence-sum", "constant"), f"aggregation is {aggregation!r}"
    total = masked_mean(x, mask, dim=1).sum() if aggregation == "sequence" else masked_sum(x, mask)
    if denominator is not None:
        return total / (denominator or 1)
    assert aggregation != "constant", "aggregation 'constant' needs a denominator, say sequences * max_new_tokens"
    count = mask.sum() if aggregation == "token" else mask.any(dim=1).sum()
    return total / count.clamp(min=1)


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, ratio_level: RatioLevel = "token"
) -> Tensor:
    """Return the importance ratio, policy over old policy; 1 on False tokens. Only logprobs gets a gradient.

        token      r[t] = exp(logprobs[t] - old_logprobs[t])                                  PPO (1707.06347) section 3
        sequence   s = exp(mean over True t of (logprobs[t] - old_logprobs[t])), for every t  GSPO (2507.18071) Eq. 7

    Exponents are clamped to +-20 and carry no gradient beyond.
    logprobs, old_logprobs, mask: (B, T) -> (B, T).
    """
    assert ratio_level in ("token", "sequence"), f"ratio_level is {ratio_level!r}"
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    if ratio_level == "sequence":
        mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
        log_ratio = keep_true(mean.expand_as(mask), mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float,
    clip_eps_high: float | None = None,
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "token",
    denominator: float | None = None,
    token_weights: Tensor | None = None,
    metric_denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate: aggregate of w[t] * max(-r[t] A[t], -clip(r[t], 1 - clip_eps, 1 + clip_eps_high) A[t]).

    PPO (1707.06347) Eq. 7; per sequence GRPO (2402.03300) Eq. 3 without its KL; over tokens and with clip_eps_high
    (None: clip_eps) DAPO (2503.14476) Eq. 8; with "constant" Dr. GRPO (2503.20783); with ratio_level "sequence" GSPO
    (2507.18071) Eq. 5.
    token_weights w (None: 1) are importance weights, such as between sampling and training; no denominator counts them.
    Metrics: policy/loss, policy/clipfrac (where the clip binds), policy/approx_kl (mean of (r - 1) - log r over token
    ratios) and policy/ratio.
    logprobs, old_logprobs, mask, token_weights: (B, T); advantages: (B,) or (B, T).
    """
    ratio = importance_ratio(logprobs, old_logprobs, mask, ratio_level=ratio_level)
    advantages = _per_token(advantages, mask)
    high = 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_eps, high)
    losses = torch.maximum(unclipped, clipped)
    terms = {
        "policy/clipfrac": clipped > unclipped,
        "policy/ratio": ratio,
        "policy/approx_kl": _approx_kl(logprobs, old_logprobs, mask),
    }
    return _aggregated(losses, terms, mask, aggregation, denominator, token_weights, metric_denominator)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_cap: float,
    aggregation: Aggregation = "token",
    denominator: float | None = None,
    token_weights: Tensor | None = None,
    metric_denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """REINFORCE with a capped importance weight: aggregate of -stop_gradient(min(r[t], ratio_cap)) A[t] logprobs[t].

    CISPO, MiniMax-M1 (2506.13585) Eq. 4 and 5. The cap is on the ratio itself (not on 1 + eps), and there is none
    below, as the paper runs it. No token loses its gradient.
    Metrics: policy/loss, policy/clipfrac (ratios above the cap), policy/approx_kl, policy/ratio (before the cap).
    Shapes and token_weights are as in `clipped_surrogate`.
    """
    assert ratio_cap > 0, f"ratio_cap is {ratio_cap}"
    ratio = importance_ratio(logprobs, old_logprobs, mask).detach()
    losses = -ratio.clamp(max=ratio_cap) * _per_token(advantages, mask) * keep_true(logprobs, mask)
    terms = {
        "policy/clipfrac": ratio > ratio_cap,
        "policy/ratio": ratio,
        "policy/approx_kl": _approx_kl(logprobs, old_logprobs, mask),
    }
    return _aggregated(losses, terms, mask, aggregation, denominator, token_weights, metric_denominator)


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip_eps: float | None,
    denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The value's regression: mean over tokens of 0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2).

    eps is value_clip_eps. From PPO's reference implementation; None is the paper's Eq. 9, the unclipped 0.5 (V - R)^2.
    Metrics: value/loss, and with a clip value/clipfrac (where the clipped square is the larger one, which has no
    gradient). values, old_values, returns, mask: (B, T).
    """
    assert_shapes(mask, values=values, old_values=old_values, returns=returns)
    assert value_clip_eps is None or value_clip_eps >= 0, f"value_clip_eps is {value_clip_eps}"
    values = keep_true(values, mask)
    old_values = keep_true(old_values.detach(), mask)
    returns = keep_true(returns.detach(), mask)
    squares = (values - returns).square()
    fractions: dict[str, Tensor] = {}
    if value_clip_eps is not None:
        near = values.clamp(old_values - value_clip_eps, old_values + value_clip_eps)
        unclipped = squares
        clipped = (near - returns).square()
        squares = torch.maximum(unclipped, clipped)
        fractions["value/clipfrac"] = clipped > unclipped
    loss = aggregate(0.5 * squares, mask, aggregation="token", denominator=denominator)
    means = {k: aggregate(x, mask, aggregation="token", denominator=denominator) for k, x in fractions.items()}
    return loss, {"value/loss": loss.detach(), **means}


def kl_loss(
    kl: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token",
    denominator: float | None = None,
    ratio: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The KL term of the loss, before the caller's kl_coef: aggregate of kl[t], or of ratio[t] * kl[t].

    GRPO (2402.03300) Eq. 3 and 4 with kl = k3 (algorithms/kl.py). With `ratio` (from `importance_ratio`, not detached:
    on-policy it is 1, but its gradient is not 0) the gradient is that of KL(policy || reference), for tokens sampled
    from the old policy.
    Metrics: policy/kl_loss, the term before its coefficient, divided as the loss is (by the constant too).
    kl, mask, ratio: (B, T).
    """
    assert_shapes(mask, kl=kl)
    kl = keep_true(kl, mask)
    if ratio is not None:
        assert_shapes(mask, ratio=ratio)
        kl = kl * keep_true(ratio, mask)
    loss = aggregate(kl, mask, aggregation=aggregation, denominator=denominator)
    return loss, {"policy/kl_loss": loss.detach()}


def entropy_bonus(entropy: Tensor, mask: Tensor, *, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Mean entropy over tokens, to be subtracted: loss - entropy_coef * bonus. PPO (1707.06347) Eq. 9, S.

    Metrics: policy/entropy (nats per token). entropy, mask: (B, T).
    """
    bonus = aggregate(entropy, mask, aggregation="token", denominator=denominator)
    return bonus, {"policy/entropy": bonus.detach()}


@torch.no_grad()
def mismatch_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, mode: Mismatch, cap: float
) -> tuple[Tensor, Tensor]:
    """Return importance weights between sampling and training, and where a bound set them.

    Other kernels, bfloat16 or merged weights make the sampling policy another one than the one that is trained.

        w[t] = exp(old_logprobs[t] - sampling_logprobs[t]),   W = product of w[t] over True t, for every t

        token          min(w[t], cap)                          truncated importance sampling, Yao et al. 2025
        sequence       min(W, cap)                             the same by sequence, unbiased but for the cap:
                                                               Liu et al. 2025, "When speed kills stability"
        token-mask     w[t] where w[t] <= cap else 0           the upper side of IcePop, Ring-1T (2510.18855), which
                                                               also masks tokens with a small w[t]
        sequence-mask  W where W <= cap else 0                 masked importance sampling, Liu et al. 2025

    old_logprobs are training's numbers for the policy before its update. Exponents are clamped to at most 20.
    (B, T) each -> (B, T) and (B, T) bool, defined on True tokens, without gradient.
    """
    assert mode in ("token", "sequence", "token-mask", "sequence-mask"), f"mode is {mode!r}"
    assert_shapes(mask, old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs)
    assert cap > 0, f"cap is {cap}"
    log_ratio = keep_true(old_logprobs, mask) - keep_true(sampling_logprobs, mask)
    if mode in ("sequence", "sequence-mask"):
        log_ratio = masked_sum(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    weights = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if mode in ("token", "sequence"):
        return weights.clamp(max=cap), weights > cap
    return torch.where(weights > cap, 0.0, weights), weights > cap


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    assert_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return keep_true(logprobs, mask) - keep_true(old_logprobs.detach(), mask)


@torch.no_grad()
def _approx_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL(old || policy) per token, the k3 estimate from tokens the old policy sampled: (r - 1) - log r."""
    log_ratio = _log_ratio(logprobs, old_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages (B,) or (B, T) as (B, T), without gradient, 0 on False tokens."""
    if advantages.dim() == 1:
        assert advantages.shape == mask.shape[:1], f"advantages is {tuple(advantages.shape)}, mask {tuple(mask.shape)}"
        advantages = advantages.unsqueeze(1).expand_as(mask)
    assert_shapes(mask, advantages=advantages)
    return keep_true(advantages.detach(), mask)


def _aggregated(
    losses: Tensor,
    terms: dict[str, Tensor],
    mask: Tensor,
    aggregation: Aggregation,
    denominator: float | None,
    token_weights: Tensor | None,
    metric_denominator: float | None,
) -> tuple[Tensor, Metrics]:
    """Aggregate weighted losses, and average `terms` for the metrics; the module docstring gives their counts."""
    if token_weights is not None:
        losses = losses * keep_true(token_weights.detach(), mask)
    loss = aggregate(losses, mask, aggregation=aggregation, denominator=denominator)
    if aggregation in ("constant", "sequence-sum"):
        aggregation = "token"
        denominator = metric_denominator
    means = {k: aggregate(x.detach(), mask, aggregation=aggregation, denominator=denominator) for k, x in terms.items()}
    return loss, {"policy/loss": loss.detach(), **means}
