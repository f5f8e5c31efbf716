"""Log-probabilities and entropy from hidden states, chunk by chunk, through a model's own head; and value heads.

The (tokens, vocabulary) matrix of logits would be the largest tensor of a step (159 GB for 64 x 8 responses of 512
tokens at Qwen's vocabulary); nothing of that size outlives its chunk, forward or backward. With a frozen head (LoRA)
the derivatives with respect to the state, (N, H) each, are formed while a chunk's probabilities are at hand, so
backward needs no logits. With a trainable head (full fine-tuning) backward recomputes each chunk.

Distances to a teacher are chunked alike. It is given by its states (N, H), 896 numbers a token where the vocabulary has
151,936, or by its K most likely tokens. With z the student's logits over the temperature, p = softmax(z), and
G_v = dD / dp_v (where a tail bin's G is that of every token in it):
    dD / dz_v = p_v (G_v - sum_u p_u G_u)
    forward KL: G = -q / p        reverse KL: G = log p - log q        between: G = (1 - beta) (log p - log m)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tinyrl.algorithms.distillation import LOWEST, jensen_shannon, mixture, top_bins
from tinyrl.models.autograd import once_differentiable
from tinyrl.models.device import autocast_dtype, chunk_tokens

WIDENED_ELEMENTS = 1 << 19  # of a half-precision head on a CPU, widened to float32 at a time: 2 MB


@dataclass(frozen=True)
class Head:
    """A language-model head as its model applies it: z = softcap(scale * (h W^T + b)), softcap(x) = c tanh(x / c)."""

    weight: Tensor  # (V, H)
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def cast(self) -> Head:
        """Return the head with its weight in autocast's dtype, if any, for calls that would each cast it."""
        dtype = autocast_dtype(self.weight.device.type)
        return self if dtype is None else replace(self, weight=self.weight.to(dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Compute float32 logits (N, V) before the temperature, in autocast's dtype, else the wider of the two."""
        dtype = autocast_dtype(self.weight.device.type) or torch.promote_types(states.dtype, self.weight.dtype)
        if dtype == torch.float32:
            bias = None if self.bias is None else self.bias.to(dtype)
            z = nn.functional.linear(states.to(dtype), self.weight.to(dtype), bias)
        else:
            z = HalfProduct.apply(states.to(dtype), self.weight.to(dtype))
            z = z if self.bias is None else z + self.bias.float()
        z = z if self.scale == 1.0 else z * self.scale  # no copy where there is no scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


class HalfProduct(torch.autograd.Function):
    """h W^T of half-precision operands, (N, H), (V, H) -> (N, V), kept in float32 as it is summed: a bfloat16 logit of
    20 is rounded by 0.06.
    """

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        if weight.device.type == "cuda":
            return torch.mm(states, weight.t(), out_dtype=torch.float32)
        out = states.new_empty(len(states), len(weight), dtype=torch.float32)
        size = max(1, WIDENED_ELEMENTS // weight.shape[1])
        wide = states.float()
        with torch.autocast(weight.device.type, enabled=False):
            for start in range(0, len(weight), size):  # rows that, widened, fit into a cache
                rows = weight[start : start + size].float()
                torch.mm(wide, rows.t(), out=out[:, start : start + len(rows)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        states, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.t() @ states if ctx.needs_input_grad[1] else None


def head_of(model: PreTrainedModel) -> Head:
    """Return a causal LM's head with its soft-cap (Gemma-2) or scale (Cohere, Granite)."""
    output = model.get_output_embeddings()
    if hasattr(output, "base_layer"):
        raise ValueError("lora.target_modules names the language-model head, which has to stay as it is; leave it out")
    if not isinstance(output, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear language-model head (found {type(output).__name__})")
    inside_adapter = getattr(model.get_input_embeddings(), "base_layer", None)
    if inside_adapter is not None and inside_adapter.weight is output.weight:
        raise ValueError(
            "lora.target_modules names the embedding, which is the language-model head of this model as well (tied "
            "weights), so the adapter could not be merged; leave it out"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(output.weight, output.bias, scale, getattr(config, "final_logit_softcapping", None))


def token_logprobs(
    states: Tensor,
    head: Head,
    *,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    one_pass: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target (N,), and the entropy, under softmax(logits / temperature) of states
    (N, H); both (N,) float32. The entropy has a gradient only with entropy_grad. one_pass: by
    `_OnePassLogprobs`, where it computes this head and that is frozen.
    """
    if not (head.weight.requires_grad and torch.is_grad_enabled()):
        if one_pass and head.bias is None and head.softcap is None and not entropy_grad:
            return _OnePassLogprobs.apply(states, head, targets, temperature)
        return _FrozenHeadLogprobs.apply(states, head, targets, temperature, entropy_grad)
    logprobs, entropy = recomputed(dense_logprobs, states, head, targets, temperature)
    return logprobs, entropy if entropy_grad else entropy.detach()


def recomputed(dense: Callable[..., Any], states: Tensor, head: Head, rows: Any, *settings: float) -> list[Tensor]:
    """Apply dense(states, head, rows, *settings), of one chunk each, to all of them; backward computes chunks again."""
    parts: list[Any] = [
        checkpoint(dense, states[c], head, rows[c], *settings, use_reentrant=False, preserve_rng_state=False)
        for c in chunks_of(len(states), head.weight.shape[0], device=states.device)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def dense_logprobs(states: Tensor, head: Head, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute one chunk by the plain formula: (log-probabilities (n,), entropies (n,))."""
    log_p = (head.logits(states) / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * finite(log_p, head)).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def finite(log_p: Tensor, head: Head) -> Tensor:
    """Replace -inf, which only the bias of a head can give, by a number: its probability of 0 then multiplies to 0."""
    return log_p if head.bias is None else log_p.clamp(min=LOWEST)


def chunks_of(num_tokens: int, vocabulary: int, *, device: torch.device) -> list[slice]:
    """Return slices of at most `chunk_tokens` tokens; for no tokens one empty slice."""
    size = chunk_tokens(vocabulary, device)
    return [slice(i, min(i + size, num_tokens)) for i in range(0, max(1, num_tokens), size)]


class _FrozenHeadLogprobs(torch.autograd.Function):
    """Forward keeps d logprob / d state (and d entropy / d state): two products a chunk, none in backward.

    With z the logits over the temperature and p = softmax(z):
        d logprob / d z_j = [j = target] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(ctx, states: Tensor, head: Head, targets: Tensor, temperature: float, entropy_grad: bool):
        n, h = states.shape
        want = states.requires_grad
        logprobs = states.new_empty(n, dtype=torch.float32)
        entropy = states.new_empty(n, dtype=torch.float32)
        d_logprobs = states.new_empty(n, h) if want else None
        d_entropy = states.new_empty(n, h) if want and entropy_grad else None
        chunks = chunks_of(n, head.weight.shape[0], device=states.device)
        room = states.new_empty(chunks[0].stop, head.weight.shape[0], dtype=torch.float32)
        for chunk in chunks:
            z = head.logits(states[chunk])
            z = z.div_(temperature) if temperature != 1.0 else z
            # Derivative of these with respect to h W^T + b: the scale, then the soft-cap by the chain rule.
            slope = head.scale / temperature
            bent = None if head.softcap is None else 1 - (z * (temperature / head.softcap)) ** 2
            # Two matrices of a chunk's size are alive at a time, z and e^z; each line is one pass over them.
            highest = z.amax(-1, keepdim=True)
            e = torch.sub(z, highest, out=room[: len(z)]).exp_()
            total = e.sum(-1, keepdim=True)
            index = targets[chunk].unsqueeze(-1)
            log_total = highest + total.log()
            logprobs[chunk] = (z.gather(-1, index) - log_total).squeeze(-1)
            z = finite(z, head)
            weighted = (z if d_entropy is None else z.clone()).mul_(e)
            entropy[chunk] = (log_total - weighted.sum(-1, keepdim=True) / total).squeeze(-1)
            if d_entropy is not None:
                g = (log_total - z - entropy[chunk].unsqueeze(-1)).mul_(e).mul_(slope / total)
                g = g if bent is None else g.mul_(bent)
                d_entropy[chunk] = (g.to(head.weight.dtype) @ head.weight).to(states.dtype)
            if d_logprobs is not None:
                g = e.mul_(-slope / total).scatter_add_(-1, index, torch.full_like(total, slope))
                g = g if bent is None else g.mul_(bent)
                d_logprobs[chunk] = (g.to(head.weight.dtype) @ head.weight).to(states.dtype)
        ctx.save_for_backward(d_logprobs, d_entropy)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        d_logprobs, d_entropy = ctx.saved_tensors
        grad = grad_logprobs.unsqueeze(-1).to(d_logprobs.dtype) * d_logprobs
        if d_entropy is not None:
            grad = grad + grad_entropy.unsqueeze(-1).to(d_entropy.dtype) * d_entropy
        return grad, None, None, None, None


class _OnePassLogprobs(torch.autograd.Function):
    """The same by two Triton kernels on a GPU: apply(states, head, targets, temperature) -> log-probabilities and
    entropies (N,). One pass over a chunk's logits gives both, and another writes the derivative with respect to the
    logits in the dtype of the head, where `_FrozenHeadLogprobs` reads and writes matrices of that size eleven times, in
    an update fourteen. A bias, a soft-cap and a gradient of the entropy are not computed here.
    """

    @staticmethod
    def forward(ctx, states: Tensor, head: Head, targets: Tensor, temperature: float):
        from tinyrl.models import logit_kernels  # which needs triton

        logprobs = states.new_empty(len(states), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        d_states = torch.empty_like(states) if states.requires_grad else None
        slope = head.scale / temperature
        for chunk in chunks_of(len(states), len(head.weight), device=states.device):
            if chunk.start == chunk.stop:  # no token is listed
                continue
            z = head.logits(states[chunk])
            found = logit_kernels.log_probabilities(z, targets[chunk], temperature=temperature)
            logprobs[chunk] = found.logprobs
            entropies[chunk] = found.entropies
            if d_states is not None:
                of_rows = {"temperature": temperature, "slope": slope, "dtype": head.weight.dtype}
                g = logit_kernels.gradient(z, targets[chunk], found.log_totals, **of_rows)
                d_states[chunk] = (g @ head.weight).to(states.dtype)
        ctx.save_for_backward(d_states)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):
        (d_states,) = ctx.saved_tensors
        return grad.unsqueeze(-1).to(d_states.dtype) * d_states, None, None, None


class ValueHead(nn.Linear):
    """states (N, H) in any float dtype -> values (N,) in float32. Zero at the start, so the first advantages are the
    rewards themselves.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(device_type=input.device.type, enabled=False):
            return super().forward(input.float()).squeeze(-1)


# ---- distances to a teacher ----


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
    """Compute divergences of the student's distributions, softmax(logits / temperature), to the teacher's, in nats.

    states (N, H) of the student; both heads are of the same tokens. `beta`: algorithms/distillation.py.
    """
    if not (head.weight.requires_grad and torch.is_grad_enabled()):
        return Distance(*_FrozenHeadDistances.apply(states, head, teacher, temperature, beta))
    return Distance(*recomputed(dense_distances, states, head, teacher, temperature, beta))


def top_k_of(states: Tensor, head: Head, *, top_k: int, temperature: float) -> TeacherTopK:
    """Return the K most likely tokens of the distributions at states (N, H)."""
    ids = torch.empty(len(states), top_k, dtype=torch.int32, device=states.device)
    logprobs = torch.empty(len(states), top_k + 1, device=states.device)
    for chunk in chunks_of(len(states), head.weight.shape[0], device=states.device):
        log_p = log_softmax(states[chunk], head, temperature)
        likeliest = log_p.topk(top_k).indices
        ids[chunk] = likeliest.int()
        logprobs[chunk] = top_bins(log_p, likeliest)
    return TeacherTopK(ids, logprobs)


def log_softmax(states: Tensor, head: Head, temperature: float) -> Tensor:
    """Compute log-probabilities (N, V) of the next token from states (N, H), in the dtype of the head's logits."""
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
    def forward(ctx, states: Tensor, head: Head, teacher: Teaching, temperature: float, beta: float):
        n = len(states)
        vocabulary = head.weight.shape[0]
        want = states.requires_grad
        out = Distance(*(states.new_empty(n, dtype=torch.float32) for _ in Distance._fields))
        d_states = torch.empty_like(states) if want else None
        for chunk in chunks_of(n, vocabulary, device=states.device):
            log_p = log_softmax(states[chunk], head, temperature)
            bent = None
            if head.softcap is not None and want:
                z = head.logits(states[chunk])
                bent = 1 - (z / head.softcap) ** 2
            p = log_p.exp()
            out.entropy[chunk] = -torch.linalg.vecdot(p, finite(log_p, head))
            part = teacher[chunk]
            if isinstance(part, TeacherTopK):
                out.divergence[chunk], slope = _over_bins(p, log_p, part, beta=beta)
            else:
                log_q = log_softmax(part.states, part.head, temperature)
                masks = head.bias is not None
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
    def backward(ctx, grad: Tensor, *_: Tensor):
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
    log_m = mixture(log_p, log_q, beta=beta)
    q = log_q.exp()
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
