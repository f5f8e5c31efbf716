"""The choice of a sampling engine for a model, with its reason, by its shape and by a trial of its numbers.

A server where one is named. Else the fused engine where its numbers agree with the model's own forward pass; else the
library's modules with merged weights; else (a quantised or bfloat16 base, or no room for the copy) the library's
modules with LoRA branches.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import can_share
from tinyrl.generation.engine import SamplingEngine, SamplingSettings
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.hf import HfEngine
from tinyrl.generation.server import ServerEngine
from tinyrl.generation.server_client import ServerClient
from tinyrl.models.batches import backbone_of
from tinyrl.models.checks import as_exact, in_float32, ordinary_ids
from tinyrl.models.device import HALVES, free_bytes
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora import POLICY_ADAPTER, is_plain_lora
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Roles
from tinyrl.text import first_line, masked

COPY_SHARE = 0.5  # of the free memory that a copy of the weights may take
EngineName = Literal["auto", "fused", "hf-merged", "hf"]  # of this process
TRIAL_TEXTS, TRIAL_TOKENS = 8, 7  # texts of the trial in half precision, and tokens of each that it decodes one by one
NOT_PLAIN = "the adapter is more than W + B A (DoRA, or with a bias), so it stays unmerged"
RAISED_BY_TRIALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def engine_of(
    config: GenerationConfig,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: list[str],
    longest_response: int,
    longest_prompt: int = 0,
) -> tuple[SamplingEngine, str]:
    """The sampling engine of `generation.engine` over the policy's model, and why it is that one.

    stop: texts that end a completion, or a turn of it; longest_response: in tokens, what is read between turns too;
    longest_prompt: in tokens, of those there are, for the trial of the engine.
    """
    settings = SamplingSettings(
        config.temperature, config.max_new_tokens, stop, config.top_p, config.top_k, config.max_rows
    )
    longest = config.max_prompt_tokens + longest_response
    if config.engine == "server":
        assert config.url is not None, "the configuration has checked it"
        server, sleeps = ServerClient(config.url), config.server_sleep
        engine = ServerEngine(roles, tokenizer, settings, server=server, longest=longest, sleeps=sleeps)
        return engine, f"generation.url={masked(config.url)}"
    tried = min(longest_prompt + longest_response, positions_of(roles.causal.config.get_text_config()))
    return select_engine(
        roles, tokenizer, settings, wanted=config.engine, dtype=roles.dtype, longest=longest, tried=tried
    )


def select_engine(
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    *,
    wanted: EngineName,
    dtype: torch.dtype,
    longest: int,
    tried: int = 0,
) -> tuple[SamplingEngine, str]:
    """The engine, and why it is that one. `longest`: tokens of the longest sequence there can be; `tried`: of the
    longest sequence of the trial.

    Raises ValueError when the engine asked for by name cannot sample from this model correctly.
    """
    why = "generation.engine"
    if wanted == "hf":
        return HfEngine(roles, tokenizer, settings), why
    if wanted != "hf-merged":
        engine = _fused(roles, tokenizer, settings, dtype=dtype, longest=longest)
        fits, why = (False, engine) if isinstance(engine, str) else _tried(engine, tried)
        if not isinstance(engine, str):
            if fits:
                return engine, why
            if wanted == "fused" and engine.decoders and not engine.exact:  # the trial came to its end
                return engine, f"generation.engine; warning: {why}"
        if wanted == "fused":
            raise ValueError(f"generation.engine=fused: {why}; use auto")
    merged = HfEngine(roles, tokenizer, settings, merged=True)
    if (no_merging := _why_not_merged(merged)) is None:
        return merged, why
    if wanted == "hf-merged":
        raise ValueError(f"generation.engine=hf-merged: {no_merging}; use auto")
    return HfEngine(roles, tokenizer, settings), why if no_merging in why else f"{why}; {no_merging}"


def _why_not_merged(engine: HfEngine) -> str | None:
    """Why adapted weights of the library's modules are not copied and merged."""
    roles = engine.roles
    if getattr(roles.causal, "is_quantized", False):
        return "the base is quantised, so LoRA stays unmerged"
    if not all(map(is_plain_lora, roles.adapted_layers(POLICY_ADAPTER))):
        return NOT_PLAIN
    if roles.peft is not None and roles.causal.dtype != torch.float32:
        base = str(roles.causal.dtype).removeprefix("torch.")
        return f"merged into {base} weights the first updates of LoRA would be rounded away, so it stays unmerged"
    if engine.copy_bytes > free_bytes(roles.device) * COPY_SHARE:
        return f"a merged copy of the weights ({engine.copy_bytes / 1e9:.1f} GB) would take most of the free memory"
    return None


def _fused(
    roles: Roles, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, *, dtype: torch.dtype, longest: int
) -> FusedEngine | str:
    """The fused engine, or why this model's shape, or the memory there is, rules it out."""
    model, name = roles.causal, type(roles.causal).__name__
    try:
        backbone: Any = backbone_of(model)
        config = model.config.get_text_config()
        if not reads_like_llama(backbone):
            return f"{name} is not built like Llama"
        if isinstance(backbone.embed_tokens, LoraLayer):
            return "the adapter is on the embedding, too"
        if not all(map(is_plain_lora, roles.adapted_layers(POLICY_ADAPTER))):
            return NOT_PLAIN
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        # Mistral has no kinds of layers: with a window, every one looks through it
        windowed = window is not None if kinds is None else any("full" not in kind for kind in kinds)
        if windowed and (window is None or window < longest):
            return f"{name} does not look at all earlier tokens in every layer"
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            return f"the rotary positions of {name} ({rope}) depend on what else is in the batch"
    except RAISED_BY_TRIALS as error:
        return f"{name} cannot be read by it ({type(error).__name__}: {first_line(error)})"
    quantized, layers = bool(getattr(model, "is_quantized", False)), {id(p) for p in backbone.layers.parameters()}
    base, merges = [w for n, w in model.named_parameters() if "lora_" not in n], quantized or dtype == torch.float32
    copied = [w for w in base if (merges and id(w) in layers) or not can_share([w], dtype)]
    needed: int = sum(getattr(w, "quant_state", w).shape.numel() * dtype.itemsize for w in copied)
    held: Any = "merged" if merges and not quantized else "apart"
    if needed > free_bytes(roles.device) * COPY_SHARE:  # what needs no copy still fits
        held = "packed" if quantized else "apart"
        if not quantized and not can_share(base, dtype):
            return f"a copy of the weights ({needed / 1e9:.1f} GB) would take most of the free memory"
    return FusedEngine(roles, tokenizer, settings, dtype=dtype, held=held)


def _tried(engine: FusedEngine, longest: int) -> tuple[bool, str]:
    """Whether the engine's numbers are those of the model, and how far they are off: in float32 from the model's own
    forward pass, in half precision both from a float32 pass of the same weights. A trial that raises is a reason too,
    as what a strange model's parts do is not known.
    """
    kind = type(engine.roles.causal).__name__
    try:
        ours, library, exact = trial_logprobs(engine, longest=longest)
    except torch.OutOfMemoryError:
        raise
    except RAISED_BY_TRIALS as error:
        return False, f"its trial with {kind} ended in {type(error).__name__}: {first_line(error)}"
    gap, of_library = (torch.where(x == exact, 0.0, x - exact).abs() for x in (ours, library))  # both may be -inf
    error, library_error = float(gap.mean()), float(of_library.mean())
    fits = as_exact(error, library_error)
    found = f"differs from the model's own forward pass by at most {float(gap.max()):.1g}"
    if not engine.exact:
        found = f"{error:.2g} nats from float32 on average, the library's modules {library_error:.2g}"
    return fits, found if fits else f"its numbers are not those of {kind}: {found}"


@torch.no_grad()
def trial_logprobs(engine: FusedEngine, *, longest: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (rows, tokens, V) at the end of texts of different lengths, one of them of `longest` tokens (a
    scale of positions, a window or a mask may go wrong late): by the engine's decoder, by the model's own forward pass
    as it trains, and by one in float32. The engine keeps the decoder. A text's rounding is much the same at all of its
    tokens, so half precision is judged by more texts.
    """
    roles, vocabulary, device = engine.roles, head_of(engine.roles.causal).weight.shape[0], engine.roles.device
    short = [
        ordinary_ids(vocabulary, 12 + 8 * (i % 2), start=100 * i) for i in range(2 if engine.exact else TRIAL_TEXTS)
    ]
    long = [ordinary_ids(vocabulary, longest)] if longest > max(map(len, short)) else []

    def read(model: PreTrainedModel) -> Tensor:
        found = [model(input_ids=torch.tensor([text], device=device)).logits[0, -TRIAL_TOKENS - 1 :] for text in short]
        for text in long:  # logits of all its tokens would be as large as those of a step
            output = backbone_of(model)(input_ids=torch.tensor([text], device=device), use_cache=False)
            found.append(head_of(model).logits(output.last_hidden_state[0, -TRIAL_TOKENS - 1 :]))
        return torch.stack([logits.float() for logits in found]).log_softmax(-1)

    with roles.acting("policy") as model:
        with torch.autocast(device.type, dtype=engine.dtype, enabled=engine.dtype in HALVES):
            library = read(model)
        with in_float32(model):
            exact = library if engine.exact else read(model)
        decoder = engine.decoder(model)
        decoder.sync(roles.adapter_of("policy"))
    ours = []
    for texts in filter(None, (short, long)):  # prefilled, and the last tokens decoded one by one
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
        (count, width), position = ids.shape, torch.tensor([len(text) - TRIAL_TOKENS for text in texts], device=device)
        cache = decoder.new_cache(count, width)
        start, rows = ids[:, : int(position.max())], [range(i, i + 1) for i in range(count)]
        states = [decoder.prefill(start, position, cache=cache, rows=rows)]
        for t in range(TRIAL_TOKENS):
            token = ids.gather(1, (position + t).unsqueeze(1)).squeeze(1)
            states.append(decoder.step(token, position + t, cache=cache, width=width))
        ours.append(torch.stack([decoder.head.logits(s) for s in states], 1).log_softmax(-1))
    engine.keep(decoder)
    return torch.cat(ours), library, exact
