"""Chunked distances between a student's and a teacher's distributions, from hidden states.

Neither (tokens, vocabulary) matrix outlives its chunk. A teacher is given by its states (N, H), not its logits: they
are exact, and 896 numbers a token where the vocabulary has 151,936; one on a server gives its K most likely tokens.
With a frozen head the derivative with respect to the student's state, (N, H), is formed while a chunk is at hand; with
a trainable one (full fine-tuning) backward recomputes each chunk. No gradient reaches the teacher.

With z the student's logits over the temperature, p = softmax(z), and G_v = dD / dp_v:
    dD / dz_v = p_v (G_v - sum_u p_u G_u)
    forward KL: G = -q / p        reverse KL: G = log p - log q        between: G = (1 - beta) (log p - log m)
where a tail bin's G is that of every token in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyrl.algorithms.distillation import LOWEST, jensen_shannon, mixture, top_bins
from tinyrl.models.logprobs import Head, chunks_of, finite, recomputed


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's distributions at N tokens, as its hidden states (N, H) and its head."""

    states: Tensor
    head: Head

    def __getitem__(self, chunk: slice) -> TeacherStates:
        return TeacherStates(self.states[chunk], self.head)


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's K most likely next tokens at N tokens: int ids (N, K), and log-probabilities (N, K + 1) of these and
    of all others together, at the temperature of the distance.
    """

    ids: Tensor
    logprobs: Tensor

    def __getitem__(self, chunk: slice) -> TeacherTopK:
        return TeacherTopK(self.ids[chunk], self.logprobs[chunk])


Teaching = TeacherStates | TeacherTopK


class Distance(NamedTuple):
    """The divergence at each of N tokens, and the student's entropy, which has no gradient; both (N,) float32."""

    divergence: Tensor
    entropy: Tensor


def distances(states: Tensor, head: Head, teacher: Teaching, *, temperature: float, beta: float) -> Distance:
    """Divergences of the student's distributions, softmax(logits / temperature), to the teacher's, in nats.

    states (N, H) of the student; both heads are of the same tokens. `beta`: algorithms/distillation.py.
    """
    if not (head.weight.requires_grad and torch.is_grad_enabled()):
        return Distance(*_FrozenHeadDistances.apply(states, head, teacher, temperature, beta))  # pyright: ignore
    return Distance(*recomputed(dense_distances, states, head, teacher, temperature, beta))


def top_k_of(states: Tensor, head: Head, *, top_k: int, temperature: float) -> TeacherTopK:
    """Return the K most likely tokens of the distributions at states (N, H)."""
    ids = torch.empty(len(states), top_k, dtype=torch.int32, device=states.device)
    logprobs = torch.empty(len(states), top_k + 1, device=states.device)
    for chunk in chunks_of(len(states), head.weight.shape[0], device=states.device):
        log_p = log_softmax(states[chunk], head, temperature)
        likeliest = log_p.topk(top_k).indices
        ids[chunk], logprobs[chunk] = likeliest.int(), top_bins(log_p, likeliest)
    return TeacherTopK(ids, logprobs)


def log_softmax(states: Tensor, head: Head, temperature: float) -> Tensor:
    z = head.logits(states)
    return (z if temperature == 1.0 else z / temperature).log_softmax(-1)


def dense_distances(states: Tensor, head: Head, teacher: Teaching, temperature: float, beta: float) -> Distance:
    """Compute one chunk by the plain formula."""
    log_p = log_softmax(states, head, temperature)
    if isinstance(teacher, TeacherTopK):
        divergence = jensen_shannon(top_bins(log_p, teacher.ids.long()), teacher.logprobs, beta=beta)
    else:
        with torch.no_grad():  # its head may be the one that is trained
            log_q = log_softmax(teacher.states, teacher.head, temperature)
        divergence = jensen_shannon(log_p, log_q, beta=beta)
    return Distance(divergence, -(log_p.exp() * finite(log_p, head)).sum(-1).detach())


class _FrozenHeadDistances(torch.autograd.Function):
    """Forward saves d divergence / d state, formed chunk by chunk; backward is one product by row."""

    @staticmethod
    def forward(ctx, states: Tensor, head: Head, teacher: Teaching, temperature: float, beta: float):  # pyright: ignore
        n, vocabulary = len(states), head.weight.shape[0]
        want = states.requires_grad
        out = Distance(*(states.new_empty(n, dtype=torch.float32) for _ in Distance._fields))
        d_states = torch.empty_like(states) if want else None
        for chunk in chunks_of(n, vocabulary, device=states.device):
            log_p, bent = log_softmax(states[chunk], head, temperature), None
            if head.softcap is not None and want:
                z = head.logits(states[chunk])
                bent = 1 - (z / head.softcap) ** 2
            p = log_p.exp()
            out.entropy[chunk] = -torch.linalg.vecdot(p, finite(log_p, head))
            part = teacher[chunk]
            if isinstance(part, TeacherTopK):
                out.divergence[chunk], slope = _over_bins(p, log_p, part, beta=beta)
            else:
                log_q, masks = log_softmax(part.states, part.head, temperature), head.bias is not None
                masks = masks or part.head.bias is not None  # which alone can be -inf
                out.divergence[chunk], slope = _over_vocabulary(p, log_p, log_q, beta=beta, masks=masks)
            if d_states is not None:
                slope = slope.mul_(head.scale / temperature)
                slope = slope if bent is None else slope.mul_(bent)
                d_states[chunk] = (slope.to(head.weight.dtype) @ head.weight).to(states.dtype)
        ctx.save_for_backward(d_states)
        ctx.mark_non_differentiable(*out[1:])
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *_: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_states,) = ctx.saved_tensors
        return grad.unsqueeze(-1).to(d_states.dtype) * d_states, None, None, None, None


def _over_vocabulary(p: Tensor, log_p: Tensor, log_q: Tensor, *, beta: float, masks: bool) -> tuple[Tensor, Tensor]:
    """Return divergences (n,) and their derivatives with respect to the logits (n, V), and overwrite the arguments.
    masks: some tokens may have probability 0, and add nothing.
    """

    def gap(mass: Tensor, of: Tensor, other: Tensor) -> Tensor:
        found = of.sub_(other)
        return found.masked_fill_(mass == 0, 0.0) if masks else found

    if beta == 0.0:
        q = log_q.exp()
        return torch.linalg.vecdot(q, gap(q, log_q, log_p)), p.sub_(q)
    if beta == 1.0:
        apart = gap(p, log_p, log_q)
        divergence = torch.linalg.vecdot(p, apart)
        return divergence, apart.sub_(divergence.unsqueeze(-1)).mul_(p)
    log_m, q = mixture(log_p, log_q, beta=beta), log_q.exp()
    of_teacher = torch.linalg.vecdot(q, gap(q, log_q, log_m))
    apart = gap(p, log_p, log_m)
    of_student = torch.linalg.vecdot(p, apart)
    slope = apart.sub_(of_student.unsqueeze(-1)).mul_(p).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, slope


def _over_bins(p: Tensor, log_p: Tensor, teacher: TeacherTopK, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return the same over K tokens and a tail of mass t. With c = dD / d log of a bin, dD / dz_v is c_v - p_v sum c
    for one of the K, and (p_v / t) c_tail - p_v sum c for the others.
    """
    ids = teacher.ids.long()
    with torch.enable_grad():
        bins = top_bins(log_p, ids).requires_grad_()
        divergence = jensen_shannon(bins, teacher.logprobs, beta=beta)
        (c,) = torch.autograd.grad(divergence.sum(), bins)
    of_tail = log_p.scatter_(-1, ids, LOWEST).sub_(bins.detach()[:, -1:]).exp_().mul_(c[:, -1:])
    slope = p.mul_(-c.sum(-1, keepdim=True)).add_(of_tail)
    return divergence.detach(), slope.scatter_add_(-1, ids, c[:, :-1])
