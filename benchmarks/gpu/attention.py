"""Attention of a group of responses behind one prompt: packed blocks, padded rows, and FlexAttention's tree mask.

All three compute the same: a response sees its prompt and itself. Padded, the prompt is computed once a response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.ceilings import seconds_of
from tinyrl.models.packing import attending, pack, packed_attention

Inputs = tuple[Tensor, Tensor, Tensor]  # queries (1, heads, N, d), keys and values (1, kv heads, N, d)


@dataclass(frozen=True)
class Way:
    """arranged: a group's queries, keys and values as a model that trains so has them; attend: their attention, which
    is what is timed; read: of that, a prompt's outputs and those of its responses, (N, heads, d).
    """

    attend: Callable[..., Tensor]
    arranged: Callable[[Inputs], Inputs] = lambda inputs: inputs
    read: Callable[[Tensor], Tensor] = lambda out: out[0]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """From first to last."""
        q, k, v = inputs
        return self.read(self.attend(*self.arranged((q, k, v))))


def packed(prompt: int, responses: list[int], *, device: torch.device) -> Way:
    """As tinyrl trains."""
    packing = pack([(prompt, responses)], device=device)
    backbone: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attending(backbone, packing):
            return packed_attention(torch.nn.Identity(), q, k, v, None)[0]

    return Way(attend)


def padded(prompt: int, responses: list[int], *, device: torch.device) -> Way:
    """Each response a row with the prompt in front of it, padded to the longest."""
    width, rows, start = prompt + max(responses), [], prompt
    for length in responses:
        own = [*range(prompt), *range(start, start + length)]
        rows.append(own + [0] * (width - len(own)))
        start += length
    index = torch.tensor(rows, device=device)
    first = torch.arange(prompt, device=device)
    places = [r * width + prompt + t for r, length in enumerate(responses) for t in range(length)]
    place = torch.cat([first, torch.tensor(places, device=device)])

    def arranged(inputs: Inputs) -> Inputs:
        q, k, v = (x[0][:, index].transpose(0, 1).contiguous() for x in inputs)  # (R, heads, width, d)
        return q, k, v

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1, output_size=q.shape[1]) for x in (k, v))
        return scaled_dot_product_attention(q, keys, values, is_causal=True)

    return Way(attend, arranged, lambda out: out.transpose(1, 2).flatten(0, 1)[place])


def flex(prompt: int, responses: list[int], *, device: torch.device) -> Way:
    """torch's FlexAttention with the tree as a block mask; compiled on a GPU."""
    lengths = torch.tensor([prompt, *responses], device=device)
    part = torch.arange(len(lengths), device=device).repeat_interleave(lengths)  # 0: the prompt

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((part[k] == 0) | (part[q] == part[k]))

    mask = create_block_mask(sees, None, None, len(part), len(part), device=str(device))
    compute: Any = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compute(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return Way(attend)


KINDS: dict[str, Callable[..., Way]] = {"packed": packed, "padded": padded, "flex": flex}


def tensors(heads: int, kv_heads: int, size: int, tokens: int, *, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random queries, keys and values of so many tokens."""
    q, k, v = (torch.randn(1, n, tokens, size, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    return q, k, v


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a layer's attention, forward and backward (on a CPU FlexAttention has no backward: forward), and
    how far its outputs are from the padded ones.
    """
    device, shape = torch.device(settings["device"]), settings["shape"]
    dtype = getattr(torch, settings["dtype"])
    prompt, responses = settings["work"]["prompt"], [settings["work"]["new"]] * settings["work"]["group"]
    inputs = tensors(
        shape["heads"], shape["kv_heads"], shape["head_size"], prompt + sum(responses), device=device, dtype=dtype
    )
    outputs, found = {}, {}
    for name, kind in KINDS.items():
        way = kind(prompt, responses, device=device)
        backward = device.type == "cuda" or name != "flex"
        leaves = [x.clone().requires_grad_(backward) for x in way.arranged(inputs)]
        ahead = torch.ones_like(way.attend(*leaves))

        def once(
            way: Way = way, leaves: list[Tensor] = leaves, ahead: Tensor = ahead, backward: bool = backward
        ) -> Tensor:
            out = way.attend(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, ahead)
            return out

        outputs[name] = way.read(once().detach()).float()
        found[name] = 1e3 * seconds_of(once, device, repeats=settings["repeats"])
    far = {name: float((out - outputs["padded"]).norm() / outputs["padded"].norm()) for name, out in outputs.items()}
    return {"milliseconds": found, "apart": far}
