"""Distances of a student's next-token distribution to a teacher's: KL both ways, and Jensen-Shannon between them.

Distributions are log-probabilities over bins: the whole vocabulary, or a teacher's most likely tokens and one bin for
all others. Without that bin a student could put its mass where the teacher says nothing, and a reverse KL over few
tokens is unbounded below; with it the distance is a divergence of its own (never negative, 0 where the bins agree), and
never larger than that over the whole vocabulary (data processing inequality).
"""

import math

import torch
from torch import Tensor

from tinyrl.algorithms.masking import assert_shapes

SMALLEST_TAIL = 1e-7  # mass of the bin of all other tokens: float32 knows no smaller difference from 1
LOWEST = -1e30  # in place of log 0: 0 * -inf and -inf - -inf would be NaN


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of student p and teacher q (GKD, 2306.13649, Eq. 1), in nats.

    JSD_beta = beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p. Its ends are its limits divided
    by beta and by 1 - beta, as in GKD's own code: beta 0 is the forward KL(q || p), which covers all that the teacher
    does, beta 1 the reverse KL(p || q), which keeps to what the teacher finds likely.
    log_p, log_q: (N, V) -> (N,).
    """
    assert log_p.shape == log_q.shape, f"{tuple(log_p.shape)} and {tuple(log_q.shape)}"
    assert log_p.dim() == 2, f"log_p must be (N, V), not {tuple(log_p.shape)}"
    assert 0.0 <= beta <= 1.0, f"beta is {beta}"
    if beta == 0.0:
        return kl_divergence(log_q, log_p)
    if beta == 1.0:
        return kl_divergence(log_p, log_q)
    log_m = mixture(log_p.clamp(min=LOWEST), log_q, beta=beta)
    return beta * kl_divergence(log_q, log_m) + (1 - beta) * kl_divergence(log_p, log_m)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), in nats: (N, V), (N, V) -> (N,). Bins without mass under p add 0,
    also to the gradient. Infinite where p has mass and q has none.
    """
    p = log_p.exp()
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(-1)


def mixture(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """log(beta q + (1 - beta) p): (N, V), (N, V) -> (N, V), for 0 < beta < 1."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def top_bins(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of K tokens and of all others together (SDPO, 2601.20802, Sec. 3): (N, V), ids (N, K) -> (N, K
    + 1). The last bin is the logsumexp of the others: of a confident model 1 - sum_k p_k is mostly rounding.
    """
    others = log_p.scatter(-1, ids, LOWEST).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), others], -1)


def with_tail(logprobs: Tensor) -> Tensor:
    """The same bins from the log-probabilities of the K tokens alone (a server's): (N, K) -> (N, K + 1).

    The last bin is log(1 - sum_k p_k), at least log 1e-7: the probabilities of the K add up to 1 only up to rounding.
    """
    others = 1.0 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, others.clamp(min=SMALLEST_TAIL).log()], -1)


def token_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Advantage of each sampled token to a student of a teacher: A = log q(x_t) - log p(x_t), 0 where the mask is
    False. The reward is minus k1 (kl.py), each token's own, without discount: the policy gradient of the reverse KL at
    each position (thinkingmachines.ai/blog/on-policy-distillation). (B, T) each -> (B, T).
    """
    assert_shapes(mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    return torch.where(mask, teacher_logprobs - old_logprobs, 0.0)
