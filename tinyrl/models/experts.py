"""Experts with adapters: each token's product with the matrices of its experts, and a low-rank branch beside it.

The experts of a layer are one parameter of three dimensions, a matrix an expert, which PEFT adapts by a wrapper
(`target_parameters`). At every call PEFT adds B A to the matrices of all experts, and its backward pass makes gradients
of whole matrices. Here B A h is a product of its own, of the experts that a token goes to. The numbers are PEFT's
(tests/models/test_experts.py), with one deviation: in half precision W h and its branch are added in float32, since a
first update is smaller than the steps between weights of half precision, to which PEFT rounds W + B A.

What is computed between the products is the library's (transformers/integrations/moe.py). Experts of another form stay
with PEFT's wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad
from transformers import PreTrainedModel

from tinyrl.models.device import states_at

EXPERTS = "experts"  # of lora.target_parameters: all of them
FORM = ("is_transposed", "has_gate", "has_bias", "has_post_expert_norm", "_apply_gate")  # of the library's experts
INSIDE_WRAPPER = ".base_layer"  # what PEFT adds to the names of what it wraps
RANK_MULTIPLE = 8  # rows of 16 bytes, which grouped products need
GROUPED_SINCE = (8, 0)  # compute capability of GPUs with a kernel for grouped products


# ---- which parameters are experts ----


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts as parameters of three dimensions."""
    has_form = all(hasattr(module, name) for name in FORM)
    is_named = type(module).__name__.endswith("Experts")
    return (has_form or is_named) and any(True for _ in _matrices(module))


def _matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            yield name, parameter


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices of all experts of a model, by the names that they have without adapters."""
    found = dict[str, nn.Parameter]()
    for name, module in model.named_modules():
        if is_experts(module):
            plain = name.replace(INSIDE_WRAPPER, "")
            found |= {f"{plain}.{own}": parameter for own, parameter in _matrices(module)}
    return found


def routers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers beside experts that score them, an output an expert."""
    modules = dict(model.named_modules())
    found = set[str]()
    for name, module in modules.items():
        if not is_experts(module):
            continue
        block = name.replace(INSIDE_WRAPPER, "").rpartition(".")[0]
        count = next(len(matrices) for _, matrices in _matrices(module))
        for inside, layer in modules[block].named_modules(prefix=block):
            if isinstance(layer, nn.Linear) and layer.out_features == count:
                found.add(inside.replace(INSIDE_WRAPPER, ""))
    return sorted(found)


def expert_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> list[str]:
    """Return names for PEFT's target_parameters: those of all experts (`experts`), or the `wanted` ones. Raises
    ValueError where a name is of no experts: routers and other weights stay as they are.
    """
    there = expert_parameters(model)
    ends = sorted({".".join(name.split(".")[-3:]) for name in there})
    if wanted == EXPERTS and ends:
        return ends
    known = f"its experts: {', '.join(ends)}" if ends else f"a {type(model).__name__} has no experts in parameters"
    if wanted == EXPERTS:
        raise ValueError(f"lora.target_parameters={EXPERTS}: {known}")
    for name in wanted:
        if not any(f".{whole}".endswith(f".{name}") for whole in there):
            raise ValueError(f"lora.target_parameters names {name!r}, which is not a parameter of experts; {known}")
        plain = {n.replace(INSIDE_WRAPPER, "") for n, _ in model.named_parameters()}
        others = sorted(n for n in plain - {*there} if f".{n}".endswith(f".{name}"))
        if others:
            raise ValueError(f"lora.target_parameters names {name!r}, which is {others[0]} as well; {known}")
    return sorted(wanted)


# ---- branches ----


@dataclass(frozen=True)
class Branch:
    """The low-rank branch of a layer's experts: h -> scale (h first) second, of an expert each, first (E, in, k) and
    second (E, k, out).
    """

    first: Tensor
    second: Tensor
    scale: float


def wrappers_of(outer: ParamWrapper) -> list[ParamWrapper]:
    """Return the wrappers around a layer's experts, one a parameter, from the outermost on."""
    found = [outer]
    while isinstance(inner := found[-1].base_layer, ParamWrapper):
        found.append(inner)
    return found


def factors(wrapper: ParamWrapper, adapter: str) -> tuple[Tensor, Tensor]:
    """Return what the matrices of experts (E, d1, d2) are changed by, without its scale: the product of two tensors,
    (E, d1, r) and (E, r, d2).
    """
    a = wrapper.lora_A[adapter].get_parameter("weight")  # (E r, in), an expert behind the other
    b = wrapper.lora_B[adapter].get_parameter("weight")  # (out, r E), a column an expert
    of_a = a.unflatten(0, (wrapper.num_experts, -1))
    of_b = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1)
    if getattr(wrapper, "_did_swap_in_out_features", False):  # which end A reads depends on PEFT's version
        return of_b, of_a
    return of_a.transpose(1, 2), of_b.transpose(1, 2)


def branch_of(
    wrapper: ParamWrapper, adapter: str, *, is_transposed: bool, dtype: torch.dtype, rank: int | None = None
) -> Branch:
    """Return the branch of an adapter in `dtype`, of at least `rank` columns; those that the adapter lacks are zero."""
    left, right = factors(wrapper, adapter)
    first, second = (left, right) if is_transposed else (right.transpose(1, 2), left.transpose(1, 2))
    columns = max(rank or 0, -(-first.shape[2] // RANK_MULTIPLE) * RANK_MULTIPLE)
    missing = columns - first.shape[2]
    first = pad(first.to(dtype), (0, missing)).contiguous()
    second = pad(second.to(dtype), (0, 0, 0, missing)).contiguous()
    return Branch(first, second, scale=wrapper.scaling[adapter])


def acting_branches(outer: ParamWrapper) -> dict[str, Branch]:
    """Return the branches of the acting adapter, by the parameter that they are of; none while adapters are off."""
    experts: Any = outer.get_base_layer()
    found = dict[str, Branch]()
    for wrapper in wrappers_of(outer):
        name = next((each for each in wrapper._active_adapter[:1] if each in wrapper.lora_A), None)
        if name is None or wrapper._disable_adapters:
            continue
        dtype = wrapper.get_param().dtype
        found[wrapper.parameter_name] = branch_of(wrapper, name, is_transposed=experts.is_transposed, dtype=dtype)
    return found


def merged_experts(wrapper: ParamWrapper, adapter: str | None) -> Tensor:
    """Return a copy of the matrices of experts under an adapter, W + (alpha / r) B A, added in float32."""
    weight = wrapper.get_param().detach().float()
    if adapter is None or adapter not in wrapper.lora_A:
        return weight.clone()
    left, right = factors(wrapper, adapter)
    return torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])


def sampled_branch(wrapper: ParamWrapper, adapter: str | None, *, dtype: torch.dtype) -> Branch:
    """Return a copy of an adapter's branch, with its scale inside. Its shape is that of the largest adapter, whichever
    is asked for (None: zeros), since a CUDA graph is captured once for all of them.
    """
    experts: Any = wrapper.get_base_layer()
    rank = -(-max(wrapper.r.values()) // RANK_MULTIPLE) * RANK_MULTIPLE
    own = None if adapter is None or adapter not in wrapper.lora_A else adapter
    some = own or next(iter(wrapper.lora_A))
    branch = branch_of(wrapper, some, is_transposed=experts.is_transposed, dtype=torch.float32, rank=rank)
    scale = 0.0 if own is None else branch.scale
    return Branch(branch.first.to(dtype), (branch.second * scale).to(dtype), scale=1.0)


# ---- the pass ----


@dataclass(frozen=True)
class Routing:
    """Tokens in the order of their experts. order (N k): number of each pair of a token and one of its k experts;
    expert (N k): of each pair; ends (E,): where the pairs of each expert end.
    """

    order: Tensor
    expert: Tensor
    ends: Tensor


def routing_of(index: Tensor, count: int) -> Routing:
    """Sort pairs of tokens and experts, from index (N, k), by expert."""
    expert, order = torch.sort(index.reshape(-1))
    counted = expert.float() if index.device.type == "cpu" else expert.int()
    pairs = torch.histc(counted, bins=count, min=0, max=count - 1)  # bincount would wait for a GPU
    return Routing(order=order, expert=expert, ends=torch.cumsum(pairs, dim=0, dtype=torch.int32))


def _product(h: Tensor, experts: Any, name: str, routing: Routing, branch: Branch | None) -> Tensor:
    """Multiply h (N k, in) by the matrices of its experts and add branch and bias, in float32."""
    weight: Tensor = getattr(experts, name)
    h = h.to(weight.dtype)
    out = grouped_mm(h, weight if experts.is_transposed else weight.transpose(1, 2), offs=routing.ends).float()
    if branch is not None:
        low = grouped_mm(h, branch.first, offs=routing.ends)
        out = out.add(grouped_mm(low, branch.second, offs=routing.ends), alpha=branch.scale)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[routing.expert]
    return out


def experts_output(
    experts: Any, states: Tensor, index: Tensor, weights: Tensor, *, branches: Mapping[str, Branch]
) -> Tensor:
    """Return the sum of what the experts index (N, k) of each token make of its state (N, H), by weights (N, k)."""
    k = index.shape[1]
    routing = routing_of(index, experts.num_experts)
    h = states_at(states, routing.order // k)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    h = _product(h, experts, name, routing, branches.get(name))
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    h = _product(h, experts, "down_proj", routing, branches.get("down_proj"))
    if experts.has_post_expert_norm:
        h = experts.post_expert_norm(h)
    h = h * weights.reshape(-1)[routing.order].unsqueeze(1)
    place = torch.empty_like(routing.order)
    place[routing.order] = torch.arange(len(place), device=place.device)
    return h[place].unflatten(0, (-1, k)).sum(1).to(states.dtype)


def _forward(outer: ParamWrapper, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute in place of PEFT's wrapper, adapters on or off: with B = 0 policy and reference then have the same bits,
    in half precision too.
    """
    return experts_output(outer.get_base_layer(), x, index, weights, branches=acting_branches(outer))


def computes_experts(module: nn.Module) -> TypeGuard[ParamWrapper]:
    """Return whether a module is the outermost wrapper of experts that `experts_output` can compute."""
    if not isinstance(module, ParamWrapper):
        return False
    experts: Any = module.get_base_layer()
    if not is_experts(experts) or not all(hasattr(experts, name) for name in FORM):
        return False
    device = module.get_param().device
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= GROUPED_SINCE


def compute_experts(model: PreTrainedModel | PeftModel) -> None:
    """Have the experts of a model with adapters compute by `experts_output`. PEFT's wrappers stay, with their weights:
    they save, load and merge them.
    """
    inner = set[nn.Module]()
    for module in model.modules():
        if computes_experts(module) and module not in inner:
            inner |= {*wrappers_of(module)[1:]}
            module.forward = partial(_forward, module)
