"""Bytes of each role's weights (shared ones once, at the base) and of a computation, counted on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.roles import Roles

STATE_BYTES = 32_000  # of a checkpoint that are no weights: random numbers, configuration, where the run stands


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr() or id(tensor): tensor for tensor in tensors}  # on the meta device all are at 0
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(roles: Roles, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """`base`: the weights that roles share; then what each role adds to them (an adapter, a head, a model of its own).
    Roles that add nothing (a reference that is the base without adapters) are left out.
    """
    adapters = {name: roles.adapter_parameters(name) for name in (POLICY_ADAPTER, "reference", "critic", "reward")}
    branches = {id(p) for adapter in adapters.values() for p in adapter.values()}
    parts: dict[str, list[Tensor]] = {
        "base": [p for p in roles.causal.parameters() if id(p) not in branches],
        "policy": [*adapters[POLICY_ADAPTER].values()],
        "reference": [*adapters["reference"].values(), *_of(roles.reference_model)],
        "critic": [*adapters["critic"].values(), *_of(roles.critic_model), *_of(roles.value_head)],
        "reward": [*adapters["reward"].values(), *_of(reward_model), *_of(roles.score_head)],
    }
    return {role: weight_bytes(tensors) for role, tensors in parts.items() if tensors}


def _of(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(module.parameters())


def checkpoint_bytes(roles: Roles) -> int:
    """Bytes of a checkpoint, about: trained weights and Adam's two moments in float32, and the run's state."""
    trained = sum(p.numel() for role in roles.parameters.values() for p in role.values())
    return 3 * 4 * trained + STATE_BYTES


# ---- Bytes that a computation would take, counted on the meta device ----
# What autograd keeps, what gradient checkpointing leaves out and what a chunk frees again are thus counted by running
# the run's own code, not by a formula. Not seen: what a kernel takes for itself while it runs, and an allocator's gaps.


PRODUCTS = ("linear", "matmul", "__matmul__", "bmm", "addmm", "baddbmm")  # what autocast computes in its own dtype
MATH = 0  # torch's number for attention by plain products


class LiveBytes(TorchDispatchMode):
    """Counts tensors made on the meta device inside. `now`: bytes alive; `most`: the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((*args, *kwargs.values())):
            self._known.setdefault(storage, 0)  # made outside: a view of it is nothing new
        out = func(*args, **kwargs)
        for storage in _storages((out,)):
            if storage not in self._known:
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        self.now -= size


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Of the tensors among values, and in lists of them: what operators of torch take and give."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == "meta":
                yield value.untyped_storage()
        elif isinstance(value, list | tuple):
            yield from _storages(value)


class AsOn(TorchFunctionMode):
    """Inside, the meta device computes as `device` would: attention by one kernel where the device has one for it,
    and products in autocast's dtype (None: there is no autocast).
    """

    def __init__(self, device: torch.device, *, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.device, self.autocast = device, autocast
        self._fused: dict[tuple[Any, ...], bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if self.autocast is not None and name in PRODUCTS:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.device.type == "meta" and x.dtype == torch.float32
        return x.to(self.autocast) if floats else x

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        masked = attn_mask is not None
        if enable_gqa and self.device.type == "cuda":  # packing.py, which needs no mask there
            masked = False
        if query.device.type != "meta" or not self._has_kernel(query, key, masked, enable_gqa):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
        # CUDA's kernels keep the same: queries, keys, values, outputs, and a number a query.
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    def _has_kernel(self, query: Tensor, key: Tensor, masked: bool, enable_gqa: bool) -> bool:
        """Asked of torch with small real tensors of the same heads."""
        heads, key_heads, size = query.shape[1], key.shape[1], query.shape[3]
        case = (heads, key_heads, size, query.dtype, masked, enable_gqa)
        if case not in self._fused:
            q, k = (torch.zeros(1, n, 2, size, dtype=query.dtype, device=self.device) for n in (heads, key_heads))
            mask = torch.zeros(2, 2, dtype=query.dtype, device=self.device) if masked else None
            choose: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009 (not exported)
            choice = choose(q, k, k, mask, 0.0, not masked, enable_gqa=enable_gqa)
            self._fused[case] = choice != MATH
        return self._fused[case]
