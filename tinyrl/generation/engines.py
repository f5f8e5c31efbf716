"""The choice of a sampling engine, by the model's shape and a trial of numbers.

A server (server.py) where one is named. Else `fused`, our own decoder for models built like Llama, where its numbers
agree with the model's own forward pass. Else `hf`, the library's modules over the same cache of rows and through the
same scheduler, by the same trial. What fails it is sampled in plain batches (plain.py), and named at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.decoder import WeightLayout, can_share
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.library_decoder import own_weights
from tinyrl.generation.plain import PlainEngine, next_states
from tinyrl.generation.server import ServerEngine
from tinyrl.models.checks import continues_exactly, decodes_exactly
from tinyrl.models.device import free_bytes
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.loading import embedding_rows
from tinyrl.models.lora import POLICY_ADAPTER, is_plain_lora
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of
from tinyrl.text import first_line
from tinyrl.urls import mask_url

COPY_SHARE = 0.5  # of the free memory that a copy of the weights may take
RAISED_BY_TRIALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


OTHER_NUMBERS = "the numbers are not those of the model's own forward pass"


class DoesNotFit(ValueError):
    """A model's shape, or memory, rules a decoder out; the message says why."""


@dataclass(frozen=True)
class EngineTrial:
    """An engine that was tried, if it could be made; whether its numbers are right (None: they could not be compared);
    and a sentence on that.
    """

    engine: CachedEngine | None
    agrees: bool | None
    why: str


def select_engine(
    config: GenerationConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, *, longest: int, tried: int = 0
) -> tuple[SamplingEngine, str]:
    """Return the sampling engine of `generation.engine` over the policy's model, and why it is that one: the first of
    `fused`, `hf` and plain batches whose numbers are those of the model's own forward pass.

    longest: tokens of the longest sequence there can be; tried: of the longest on which numbers are compared. Raises
    ValueError when the engine asked for by name, or each of them, cannot sample from this model correctly; a model that
    reads images is sampled by `hf` alone.
    """
    if config.engine == "server":
        return ServerEngine(policy, tokenizer, config, longest=longest), f"generation.url={mask_url(str(config.url))}"
    engine = partial(CachedEngine, policy, tokenizer, config)
    why = "generation.engine"
    if config.engine != "hf":
        fused = try_engine(lambda: engine(name="fused", layout=fused_layout(policy, longest)), tried=tried)
        if fused.engine is not None and fused.agrees:
            return fused.engine, fused.why
        by_name = config.engine == "fused"
        if by_name and fused.engine is not None and not fused.engine.exact:
            return fused.engine, f"generation.engine; warning: {fused.why}"
        if by_name:
            raise ValueError(f"generation.engine=fused: {fused.why}; use auto")
        why = fused.why
    library = try_engine(lambda: engine(name="hf", layout=library_layout(policy)), tried=tried)
    if library.engine is not None and library.agrees:
        library.engine.try_graphs()
        return library.engine, why
    if policy.images is not None:  # which plain batches do not read
        raise ValueError(f"{type(policy.causal).__name__} cannot be sampled from with images: {library.why}")
    plain = try_plain(policy, tried=tried)
    if plain.agrees is False or (plain.agrees is None and policy.dtype == torch.float32):
        raise ValueError(f"{type(policy.causal).__name__} cannot be sampled from: {plain.why}")
    words = f"warning: in plain batches, since of `hf` {library.why}"
    return PlainEngine(policy, tokenizer, config), words if plain.agrees else f"{words}; {plain.why}"


def try_engine(make: Callable[[], CachedEngine], *, tried: int) -> EngineTrial:
    """Make an engine and compare its decoder with the model's own forward pass. Raises torch.OutOfMemoryError."""
    engine: CachedEngine | None = None
    try:
        engine = make()
        with engine.synced("policy") as decoder:
            if decodes_exactly(backbone_of(decoder.model), decoder, longest=tried, images=engine.policy.images):
                return EngineTrial(engine, agrees=True, why="it matches the model's own forward pass")
        return EngineTrial(engine, agrees=False, why=OTHER_NUMBERS)
    except torch.OutOfMemoryError:
        raise
    except DoesNotFit as error:
        return EngineTrial(None, agrees=False, why=str(error))
    except RAISED_BY_TRIALS as error:
        return EngineTrial(None, agrees=None, why=f"a trial ended in {type(error).__name__}: {first_line(error)}")


def try_plain(policy: Policy, *, tried: int) -> EngineTrial:
    """Compare plain batches with the model's own forward pass. Raises torch.OutOfMemoryError."""
    try:
        with policy.acting("policy") as model:
            backbone = backbone_of(model)
            forward = partial(next_states, backbone)
            agrees = continues_exactly(backbone, forward, vocabulary=embedding_rows(model), longest=tried)
        return EngineTrial(None, agrees=agrees, why=OTHER_NUMBERS)
    except torch.OutOfMemoryError:
        raise
    except RAISED_BY_TRIALS as error:
        return EngineTrial(None, agrees=None, why=f"a trial ended in {type(error).__name__}: {first_line(error)}")


def fused_layout(policy: Policy, longest: int) -> WeightLayout:
    """Return the layout of the weights of our own decoder. Raises DoesNotFit."""
    model = policy.causal
    name = type(policy.causal).__name__
    config = policy.causal.config.get_text_config()
    dtype = policy.dtype
    room = free_bytes(policy.device) * COPY_SHARE
    backbone: Any = backbone_of(model)
    if not reads_like_llama(backbone):
        raise DoesNotFit(f"{name} is not built like Llama")
    if isinstance(backbone.embed_tokens, LoraLayer):
        raise DoesNotFit("the adapter is on the embedding, too")
    if not all(map(is_plain_lora, policy.adapters.layers(POLICY_ADAPTER))):
        raise DoesNotFit("the adapter is more than W + B A (DoRA, or with a bias)")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    # Mistral has no kinds of layers: with a window, every one looks through it
    windowed = window is not None if kinds is None else any("full" not in kind for kind in kinds)
    if windowed and (window is None or window < longest):
        raise DoesNotFit(f"{name} does not look at all earlier tokens in every layer")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise DoesNotFit(f"the rotary positions of {name} ({rope}) depend on what else is in the batch")
    quantized = bool(getattr(model, "is_quantized", False))
    layers = {id(p) for p in backbone.layers.parameters()}
    base = [w for n, w in model.named_parameters() if "lora_" not in n]
    merges = quantized or dtype == torch.float32
    copied = [w for w in base if (merges and id(w) in layers) or not can_share([w], dtype)]
    needed: int = sum(getattr(w, "quant_state", w).shape.numel() * dtype.itemsize for w in copied)
    if needed <= room:
        return "merged" if merges and not quantized else "separate_lora"
    if quantized or can_share(base, dtype):  # needs no copy
        return "quantized" if quantized else "separate_lora"
    raise DoesNotFit(f"a copy of the weights ({needed / 1e9:.1f} GB) would take most of the free memory")


def library_layout(policy: Policy) -> WeightLayout | None:
    """Return the layout of the weights that the library's modules sample with: None where no copy of them fits, and
    trained ones are cast at every use.
    """
    room = free_bytes(policy.device) * COPY_SHARE
    dtype = policy.dtype
    quantized = bool(getattr(policy.causal, "is_quantized", False))
    merges = dtype == torch.float32 and not quantized
    layers: list[Any] = [*policy.adapters.layers(POLICY_ADAPTER)]
    adapted = [layer.get_base_layer().weight for layer in layers if own_weights(layer, dtype=dtype)]
    adapted += [layer.get_param() for layer in layers if isinstance(layer, ParamWrapper) and merges]
    trained = [w for w in policy.causal.parameters() if w.dtype == torch.float32 and dtype != torch.float32]
    copied = adapted if merges or quantized else trained
    needed: int = sum(getattr(w, "quant_state", w).shape.numel() * dtype.itemsize for w in copied)
    if needed <= room:
        return "merged" if merges else "separate_lora"
    if quantized:
        return "quantized"
    return "separate_lora" if merges else None
