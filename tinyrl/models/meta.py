"""Models without numbers, on the meta device, and memory in bytes: of weights, and of what is computed with them.

A computation is counted by running the run's own code on the meta device, every tensor from its making to its last use:
what autograd keeps, what gradient checkpointing leaves out and what a chunk frees again. Not seen: what a kernel takes
for itself while it runs, and an allocator's gaps.

Shapes of the models that recipes name are listed here, so that `tinyrl plan` answers where the hub cannot be reached;
what stands in for the rest is an embedded tokenizer, and rows as long as they may be.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.models.build import build_roles
from tinyrl.models.loading import load_model_config, load_tokenizer
from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.reward_model import attach_reward_adapter, is_reward_adapter
from tinyrl.models.roles import Roles

META = torch.device("meta")
# Bytes a weight: NF4 with its scales, which are quantised again (2305.14314, section 3), and LLM.int8 (2208.07339).
BYTES_A_WEIGHT = {"4bit": 0.5 + 0.127 / 8, "8bit": 1.0}
STATE_BYTES = 32_000  # of a checkpoint that are no weights: random numbers, configuration, where the run stands
PRODUCTS = ("linear", "matmul", "__matmul__", "bmm", "addmm", "baddbmm")  # what autocast computes in its own dtype
ADAPTERS = (POLICY_ADAPTER, "reference", "critic", "reward", "teacher")
MATH = 0  # torch's number for attention by plain products
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
TEXT_TOKENS = 512  # of a prompt, and of an answer, in rows that nobody has seen


def meta_roles(config: Config, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Roles:
    """Policy, reference, critic and reward adapter without numbers. Draws no random number.

    Raises ValueError for a model that cannot be read.
    """
    with _without_numbers():
        roles = build_roles(config, device=META, dtype=dtype, trust_remote_code=trust_remote_code, teacher=True)
        path = config.reward.model if config.uses("reward") else None
        if path is not None and is_reward_adapter(path):
            attach_reward_adapter(roles, path)
        if config.trains.rows == "judged":
            roles.train_score_head()
        if config.lora.dropout > 0:
            roles.use_lora_dropout()
    return roles


def meta_reward_model(config: Config, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The reward model where it is a model of its own, without numbers; None where there is none."""
    path = config.reward.model if config.uses("reward") else None
    if path is None or is_reward_adapter(path):
        return None
    described = load_model_config(path, trust_remote_code=trust_remote_code)
    with _without_numbers():
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        return AutoModelForSequenceClassification.from_config(described, **options)


def four_bit_bytes(roles: Roles) -> int:
    """Bytes that a base held in 4 bits has."""
    return quantized_bytes(roles.causal, _base_parameters(roles), "4bit")


def quantized_bytes(model: PreTrainedModel, parameters: list[Tensor], quantization: str) -> int:
    """Bytes of a model's parameters with its linear layers, the head excepted, in few bits, and the rest as it is."""
    head, weights = model.get_output_embeddings(), {id(p) for p in parameters}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    packed = {id(m.weight): m.weight.numel() for m in layers if id(m.weight) in weights}
    rest = [p for p in parameters if id(p) not in packed]
    return int(BYTES_A_WEIGHT[quantization] * sum(packed.values())) + sum(p.numel() * p.itemsize for p in rest)


@contextmanager
def _without_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), META:
        yield


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr() or id(tensor): tensor for tensor in tensors}  # on the meta device all are at 0
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(roles: Roles, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """`base`: the weights that roles share; then what each role adds to them (an adapter, a head, a model of its own).
    Roles that add nothing (a reference that is the base without adapters) are left out.
    """
    adapters = {name: roles.adapter_parameters(name) for name in ADAPTERS}
    parts: dict[str, list[Tensor]] = {
        "base": _base_parameters(roles),
        "policy": [*adapters[POLICY_ADAPTER].values()],
        "reference": [*adapters["reference"].values(), *_of(roles.reference_model)],
        "critic": [*adapters["critic"].values(), *_of(roles.critic_model), *_of(roles.value_head)],
        "reward": [*adapters["reward"].values(), *_of(reward_model), *_of(roles.score_head)],
        "teacher": [*adapters["teacher"].values(), *_of(roles.teacher_model)],
    }
    return {role: weight_bytes(tensors) for role, tensors in parts.items() if tensors}


def _base_parameters(roles: Roles) -> list[Tensor]:
    branches = {id(p) for name in ADAPTERS for p in roles.adapter_parameters(name).values()}
    return [p for p in roles.causal.parameters() if id(p) not in branches]


def _of(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(module.parameters())


def checkpoint_bytes(roles: Roles) -> int:
    """Bytes of a checkpoint, about: trained weights and Adam's two moments in float32, and the run's state."""
    trained = sum(p.numel() for role in roles.parameters.values() for p in role.values())
    return 3 * 4 * trained + STATE_BYTES


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
                size = self._known[storage] = storage.nbytes()
                self._count(size)
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._count, -size).atexit = False
        return out

    def _count(self, size: int) -> None:
        self.now += size


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


QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
SHAPES: dict[str, tuple[dict[str, Any], tuple[int | bool, ...]]] = {
    "Qwen/Qwen2.5-0.5B": (QWEN2, (896, 4864, 24, 14, 2, 64, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN2, (896, 4864, 24, 14, 2, 64, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN2, (1536, 8960, 28, 12, 2, 128, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-3B-Instruct": (QWEN2, (2048, 11_008, 36, 16, 2, 128, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN2, (3584, 18_944, 28, 28, 4, 128, 152_064, 32_768, False)),
    "Qwen/Qwen3-1.7B-Base": (QWEN3, (2048, 6144, 28, 16, 8, 128, 151_936, 32_768, True)),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3, (2560, 9728, 36, 32, 8, 128, 151_936, 262_144, True)),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, (2048, 8192, 16, 32, 8, 64, 128_256, 131_072, True)),
}


def described(name: str) -> dict[str, Any]:
    """The config.json of a model as far as shapes go; all of these were saved in bfloat16."""
    family, figures = SHAPES[name]
    return {**family, **dict(zip(FIELDS, figures, strict=True)), "dtype": "bfloat16"}


def stand_in(config: Config, folder: Path) -> Config:
    """The configuration with a model of the same shapes, without weights, and rows as long as they may be, in `folder`.

    An environment's turns are a longer response. Raises KeyError for a model whose shapes are not known.
    """
    model, rows, starter = folder / "model", folder / "rows.jsonl", starter_path("starter")
    assert starter is not None
    facts = described(config.model.path)
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter / name, model / name)
    (model / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    samples, environment = config.samples, config.environment
    prompt = _text(model, config.generation.max_prompt_tokens if samples else TEXT_TOKENS)
    answer = prompt if samples else _text(model, TEXT_TOKENS)
    row = {"completion": answer, "chosen": answer, "rejected": answer[::-1], "label": True, "score": 1.0}
    row = {} if samples else {name: row[name] for name in _columns(config)}
    count = max(config.run.eval_prompts, config.on_policy.num_prompts if samples else config.own.batch_size)
    rows.write_text((json.dumps({"prompt": prompt, **row}) + "\n") * count, encoding="utf-8")
    values = config.model_dump()
    values["model"] |= {"path": str(model), "revision": None}
    values["task"] = {"name": "rows", "data": str(rows), "eval_data": str(rows), "chat": False}
    values["reward"] |= {"functions": []}
    values["environment"] = {}
    if environment.use or environment.tools:
        values["generation"]["max_new_tokens"] += (environment.max_turns - 1) * environment.max_observation_tokens
    return build_config(values)


def _columns(config: Config) -> tuple[str, ...]:
    """What a row of a method that learns from rows has beside its prompt."""
    if config.trains.rows == "judged":
        of = {"labels": ("completion", "label"), "ratings": ("completion", "score")}
        return of.get(config.reward_model.objective, ("chosen", "rejected"))
    return ("chosen", "rejected") if config.trains.rows == "pairs" else ("completion",)


def _text(model: Path, tokens: int) -> str:
    """A text of so many tokens, or a few less where joints melt."""
    tokenizer = load_tokenizer(str(model))
    return str(tokenizer.decode(tokenizer("sort: q w e r " * tokens, add_special_tokens=False)["input_ids"][:tokens]))
