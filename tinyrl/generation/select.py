"""The choice of a sampling engine for a model, with its reason.

A server where one is named. Else the fused engine where its numbers agree with the model's own forward pass; else the
library's modules with merged weights; else (a quantised or bfloat16 base, or no room for the copy) the library's
modules with LoRA branches.
"""

from __future__ import annotations

from typing import Literal

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import SamplingEngine, SamplingSettings
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.hf import HfEngine, HfMergedEngine
from tinyrl.generation.server import ServerEngine
from tinyrl.generation.server_client import ServerClient
from tinyrl.models.batches import trunk_of
from tinyrl.models.device import free_bytes, resolve_dtype
from tinyrl.models.fused_trunk import reads_like_llama
from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora_merge import is_plain_lora
from tinyrl.models.roles import Roles
from tinyrl.text import first_line, masked

EngineName = Literal["auto", "fused", "hf-merged", "hf"]  # of this process
COPY_SHARE = 0.5  # of the free memory that a private copy of the weights may take
# The largest difference allowed to a log-probability in float32; bfloat16 rounds every state, so there the mean counts.
MOST_IN_FLOAT32, MEAN_IN_BFLOAT16 = 1e-4, 0.05
RAISED_BY_TRIALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def engine_of(
    config: GenerationConfig,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: list[str],
    longest_response: int,
) -> tuple[SamplingEngine, str]:
    """The sampling engine of `generation.engine` over the policy's model, and why it is that one.

    stop: texts that end a completion, or a turn of it; longest_response: in tokens, what is read between turns too.
    """
    settings = SamplingSettings(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        stop=stop,
        top_p=config.top_p,
        top_k=config.top_k,
        max_rows=config.max_rows,
    )
    longest = config.max_prompt_tokens + longest_response
    if config.engine == "server":
        assert config.url is not None, "the configuration has checked it"
        server = ServerClient(config.url, timeout_s=config.timeout_s)
        engine = ServerEngine(roles, tokenizer, settings, server=server, longest=longest)
        return engine, f"generation.url={masked(config.url)}"
    dtype = roles.causal.dtype if config.dtype == "auto" else resolve_dtype(config.dtype, on_cpu=False)
    return select_engine(roles, tokenizer, settings, wanted=config.engine, dtype=dtype, longest=longest)


def select_engine(
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    *,
    wanted: EngineName,
    dtype: torch.dtype,
    longest: int,
) -> tuple[SamplingEngine, str]:
    """The engine, and why it is that one. `longest`: tokens of the longest sequence there can be.

    Raises ValueError when the engine asked for by name cannot sample from this model correctly.
    """
    if wanted == "hf":
        return HfEngine(roles, tokenizer, settings), "generation.engine"
    no_copy = why_no_copy(roles, dtype)
    if wanted != "hf-merged" and no_copy is None:
        engine = FusedEngine(roles, tokenizer, settings, dtype=dtype)
        no_fused, gap = tried(engine, longest)
        if no_fused is None:
            return engine, f"differs from the model's own forward pass by at most {gap:.1g}"
    else:
        no_fused = no_copy or "generation.engine"
    if wanted == "fused":
        raise ValueError(f"generation.engine=fused: {no_fused}; use auto")
    if dtype != roles.causal.dtype:
        raise ValueError(
            f"generation.dtype={str(dtype).removeprefix('torch.')} needs the fused engine, but {no_fused}; use auto"
        )
    no_merging = no_copy or why_not_merged(roles)
    if no_merging is None:
        return HfMergedEngine(roles, tokenizer, settings), no_fused
    if wanted == "hf-merged":
        raise ValueError(f"generation.engine=hf-merged: {no_merging}; use auto")
    return HfEngine(roles, tokenizer, settings), no_fused if no_merging in no_fused else f"{no_fused}; {no_merging}"


def why_no_copy(roles: Roles, dtype: torch.dtype) -> str | None:
    """Why copies of the weights with the adapter in them cannot be made; None where they can."""
    if getattr(roles.causal, "is_quantized", False):
        return "the base is quantised, so LoRA stays unmerged"
    if not all(is_plain_lora(layer) for layer in roles.adapted_layers(POLICY_ADAPTER)):
        return "the adapter is more than W + B A (DoRA, or with a bias), so it stays unmerged"
    needed = sum(p.numel() for p in roles.causal.parameters()) * dtype.itemsize
    if needed > free_bytes(roles.device) * COPY_SHARE:
        return f"a merged copy of the weights ({needed / 1e9:.1f} GB) would take most of the free memory"
    return None


def why_not_merged(roles: Roles) -> str | None:
    """Why the library's modules should not compute with merged weights; None where they may."""
    if roles.peft is None or roles.causal.dtype == torch.float32:
        return None
    dtype = str(roles.causal.dtype).removeprefix("torch.")
    return f"merged into {dtype} weights the first updates of LoRA would be rounded away, so it stays unmerged"


def tried(engine: FusedEngine, longest: int) -> tuple[str | None, float]:
    """As `why_not_fused`; a trial that raises is a reason too, as what a strange model's parts do is not known."""
    try:
        return why_not_fused(engine, longest)
    except torch.OutOfMemoryError:
        raise
    except RAISED_BY_TRIALS as error:
        kind = type(engine.roles.causal).__name__
        return f"its trial with {kind} ended in {type(error).__name__}: {first_line(error)}", 0.0


def why_not_fused(engine: FusedEngine, longest: int) -> tuple[str | None, float]:
    """Why the fused engine is not for this model (None where it is), and how far its log-probabilities are off."""
    model = engine.roles.causal
    if not reads_like_llama(trunk_of(model)):
        return f"{type(model).__name__} is not built like Llama", 0.0
    if isinstance(trunk_of(model).embed_tokens, LoraLayer):
        return "the adapter is on the embedding, too", 0.0
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)  # Mistral has none: with a window, every layer looks through it
    windowed = window is not None if kinds is None else any("full" not in kind for kind in kinds)
    if windowed and (window is None or window < longest):
        return f"{type(model).__name__} does not look at all earlier tokens in every layer", 0.0
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"the rotary positions of {type(model).__name__} ({rope}) depend on what else is in the batch", 0.0
    most, mean = differences(engine)
    fits = most < MOST_IN_FLOAT32 if engine.exact else mean < MEAN_IN_BFLOAT16
    return (None if fits else f"its numbers are not those of {type(model).__name__} (by {most:.2g})"), most


@torch.inference_mode()
def differences(engine: FusedEngine) -> tuple[float, float]:
    """Largest and mean difference of log-probabilities from the model's own forward pass, on two prompts of different
    length and three tokens after each.
    """
    roles, vocabulary = engine.roles, head_of(engine.roles.causal).weight.shape[0]
    sequences = [[(7 * i + 3 * j + 1) % vocabulary for i in range(n)] for j, n in enumerate((8, 14))]
    lengths = torch.tensor([len(s) - 3 for s in sequences], device=roles.device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True).to(roles.device)
    with roles.acting("policy") as model:
        own = [model(input_ids=ids[i : i + 1, : len(s)]).logits[0, -4:].float() for i, s in enumerate(sequences)]
        decoder = Decoder(model, dtype=engine.dtype)
        decoder.sync(roles.adapter_of("policy"))
    cache = decoder.new_cache(2, ids.shape[1])
    states = [decoder.prefill(ids[:, : int(lengths.max())], lengths, cache=cache, rows=[range(1), range(1, 2)])]
    for t in range(3):
        token = ids.gather(1, (lengths + t).unsqueeze(1)).squeeze(1)
        states.append(decoder.step(token, lengths + t, cache=cache, width=ids.shape[1]))
    ours = torch.stack([decoder.head.logits(s) for s in states], 1)
    gap = (ours.log_softmax(-1) - torch.stack(own).log_softmax(-1)).abs()
    engine.adopt(decoder)
    return float(gap.max()), float(gap.mean())
