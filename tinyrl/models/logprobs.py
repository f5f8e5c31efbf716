"""Log-probabilities and entropy from hidden states, chunk by chunk, through a model's own head; and value heads.

The (tokens, vocabulary) matrix of logits would be the largest tensor of a step (159 GB for 64 x 8 responses of 512
tokens at Qwen's vocabulary); nothing of that size outlives its chunk, forward or backward. With a frozen head (LoRA)
the derivatives with respect to the state, (N, H) each, are formed while a chunk's probabilities are at hand, so
backward needs no logits. With a trainable head (full fine-tuning) backward recomputes each chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tinyrl.algorithms.distillation import LOWEST
from tinyrl.models.device import CHUNK_ELEMENTS, autocast_dtype

WIDENED_ELEMENTS = 1 << 19  # of a half-precision head on a CPU, widened to float32 at a time: 2 MB


@dataclass(frozen=True)
class Head:
    """A language-model head as its model applies it: z = softcap(scale * (h W^T + b)), softcap(x) = c tanh(x / c)."""

    weight: Tensor  # (V, H)
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, states: Tensor) -> Tensor:
        """(N, H) -> (N, V) float32 logits before the temperature, in autocast's dtype, else the wider of the two."""
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
    def forward(ctx, states: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(states, weight)
        if weight.device.type == "cuda":
            return torch.mm(states, weight.t(), out_dtype=torch.float32)
        out = states.new_empty(len(states), len(weight), dtype=torch.float32)
        size, wide = max(1, WIDENED_ELEMENTS // weight.shape[1]), states.float()
        with torch.autocast(weight.device.type, enabled=False):
            for start in range(0, len(weight), size):  # rows that, widened, fit into a cache
                rows = weight[start : start + size].float()
                torch.mm(wide, rows.t(), out=out[:, start : start + len(rows)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        states, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.t() @ states if ctx.needs_input_grad[1] else None


def head_of(model: nn.Module) -> Head:
    """Return a causal LM's head with its soft-cap (Gemma-2) or scale (Cohere, Granite)."""
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if hasattr(output, "base_layer"):
        raise ValueError("lora.target_modules names the language-model head, which has to stay as it is; leave it out")
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if hasattr(embedding, "base_layer") and embedding.base_layer.weight is output.weight:
        raise ValueError(
            "lora.target_modules names the embedding, which is the language-model head of this model as well (tied "
            "weights), so the adapter could not be merged; leave it out"
        )
    if not isinstance(output, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear language-model head (found {type(output).__name__})")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config  # pyright: ignore
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(output.weight, output.bias, scale, getattr(config, "final_logit_softcapping", None))


def token_logprobs(
    states: Tensor, head: Head, *, targets: Tensor, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (N,), and entropy, under softmax(logits / temperature) of states (N, H); both (N,)
    float32. The entropy has a gradient only with entropy_grad.
    """
    if not (head.weight.requires_grad and torch.is_grad_enabled()):
        return _FrozenHeadLogprobs.apply(states, head, targets, temperature, entropy_grad)  # pyright: ignore[reportReturnType]
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
    """Return slices of tokens whose logits are at most CHUNK_ELEMENTS; for no tokens one empty slice."""
    size = max(1, CHUNK_ELEMENTS[device.type] // vocabulary)
    return [slice(i, min(i + size, num_tokens)) for i in range(0, max(1, num_tokens), size)]


class _FrozenHeadLogprobs(torch.autograd.Function):
    """Forward keeps d logprob / d state (and d entropy / d state): two products a chunk, none in backward.

    With z the logits over the temperature and p = softmax(z):
        d logprob / d z_j = [j = target] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(ctx, states: Tensor, head: Head, targets: Tensor, temperature: float, entropy_grad: bool):  # pyright: ignore
        n, h = states.shape
        want = states.requires_grad
        logprobs, entropy = states.new_empty(n, dtype=torch.float32), states.new_empty(n, dtype=torch.float32)
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
            index, log_total = targets[chunk].unsqueeze(-1), highest + total.log()
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
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        d_logprobs, d_entropy = ctx.saved_tensors
        grad = grad_logprobs.unsqueeze(-1).to(d_logprobs.dtype) * d_logprobs
        if d_entropy is not None:
            grad = grad + grad_entropy.unsqueeze(-1).to(d_entropy.dtype) * d_entropy
        return grad, None, None, None, None


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
