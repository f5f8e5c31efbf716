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
from tinyrl.generation.decoder import Decoder, Held, can_share
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
from tinyrl.models.lora import POLICY_ADAPTER, adapted_parameter, is_plain_lora
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Roles, weight_bytes
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
        server = ServerClient(config.url)
        sleeps = config.server_sleep
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
    quantized, free = bool(getattr(roles.causal, "is_quantized", False)), free_bytes(roles.device)
    if wanted == "hf":
        return HfEngine(roles, tokenizer, settings), "generation.engine"
    no_fused = "generation.engine" if wanted == "hf-merged" else _why_not_fused(roles, longest)
    if no_fused is None:
        needed, base = _copied_bytes(roles, dtype, quantized=quantized), _base_weights(roles)
        held: Held = "apart" if quantized or dtype != torch.float32 else "merged"
        if needed > free * COPY_SHARE:  # what needs no copy still fits
            held = "packed" if quantized else "apart"
        if needed > free * COPY_SHARE and not quantized and not can_share(base, dtype):
            no_fused = f"a copy of the weights ({needed / 1e9:.1f} GB) would take most of the free memory"
        else:
            engine = FusedEngine(roles, tokenizer, settings, dtype=dtype, held=held)
            fits, trial = _tried(engine, tried)
            if fits:
                return engine, trial
            if wanted == "fused" and not engine.exact and engine.decoders:
                return engine, f"generation.engine; warning: {trial}"
            no_fused = trial
    if wanted == "fused":
        raise ValueError(f"generation.engine=fused: {no_fused}; use auto")
    no_merging = _why_not_merged(roles, quantized=quantized, free=free)
    if no_merging is None:
        return HfEngine(roles, tokenizer, settings, merged=True), no_fused
    if wanted == "hf-merged":
        raise ValueError(f"generation.engine=hf-merged: {no_merging}; use auto")
    return HfEngine(roles, tokenizer, settings), no_fused if no_merging in no_fused else f"{no_fused}; {no_merging}"


def _base_weights(roles: Roles) -> list[Tensor]:
    return [weight for name, weight in roles.causal.named_parameters() if "lora_" not in name]


def _copied_bytes(roles: Roles, dtype: torch.dtype, *, quantized: bool) -> int:
    """Bytes of the weights that the fused engine samples from and that are not the base's own, if there is room."""
    backbone: Any = roles.backbone("policy")
    layers = {id(p) for p in backbone.layers.parameters()}
    shares = dtype != torch.float32 and not quantized
    copied = [w for w in _base_weights(roles) if not ((shares or id(w) not in layers) and can_share([w], dtype))]
    return sum(getattr(weight, "quant_state", weight).shape.numel() * dtype.itemsize for weight in copied)


def _is_plain(roles: Roles) -> bool:
    return all(is_plain_lora(layer) for layer in roles.adapted_layers(POLICY_ADAPTER))


def _why_not_merged(roles: Roles, *, quantized: bool, free: int) -> str | None:
    """Why adapted weights of the library's modules are not copied and merged."""
    copy = weight_bytes(getattr(*adapted_parameter(layer)) for layer in roles.adapted_layers(POLICY_ADAPTER))
    if quantized:
        return "the base is quantised, so LoRA stays unmerged"
    if not _is_plain(roles):
        return NOT_PLAIN
    if roles.peft is not None and roles.causal.dtype != torch.float32:
        base = str(roles.causal.dtype).removeprefix("torch.")
        return f"merged into {base} weights the first updates of LoRA would be rounded away, so it stays unmerged"
    if copy > free * COPY_SHARE:
        return f"a merged copy of the weights ({copy / 1e9:.1f} GB) would take most of the free memory"
    return None


def _why_not_fused(roles: Roles, longest: int) -> str | None:
    model, name = roles.causal, type(roles.causal).__name__
    try:
        if not reads_like_llama(backbone_of(model)):
            return f"{name} is not built like Llama"
        if isinstance(backbone_of(model).embed_tokens, LoraLayer):
            return "the adapter is on the embedding, too"
        if not _is_plain(roles):
            return NOT_PLAIN
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)  # Mistral has none: with a window, every layer looks through it
        windowed = window is not None if kinds is None else any("full" not in kind for kind in kinds)
        if windowed and (window is None or window < longest):
            return f"{name} does not look at all earlier tokens in every layer"
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            return f"the rotary positions of {name} ({rope}) depend on what else is in the batch"
    except RAISED_BY_TRIALS as error:
        return f"{name} cannot be read by it ({type(error).__name__}: {first_line(error)})"
    return None


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
    fits, worst = as_exact(error, library_error), float(gap.max())
    if not engine.exact:
        found = f"{error:.2g} nats from float32 on average, the library's modules {library_error:.2g}"
        return fits, found if fits else f"its numbers are not those of {kind}: {found}"
    if fits:
        return True, f"differs from the model's own forward pass by at most {worst:.1g}"
    return False, f"its numbers are not those of {kind} (by {worst:.2g})"


@torch.no_grad()
def trial_logprobs(engine: FusedEngine, *, longest: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (rows, tokens, V) at the end of texts of different lengths, one of them of `longest` tokens (a
    scale of positions, a window or a mask may go wrong late): by the engine's decoder, by the model's own forward pass
    as it trains, and by one in float32. The engine keeps the decoder. A text's rounding is much the same at all of its
    tokens, so half precision is judged by more texts.
    """
    roles, vocabulary = engine.roles, head_of(engine.roles.causal).weight.shape[0]
    count = 2 if engine.exact else TRIAL_TEXTS
    short = [ordinary_ids(vocabulary, 12 + 8 * (i % 2), start=100 * i) for i in range(count)]
    long = [ordinary_ids(vocabulary, longest)] if longest > max(map(len, short)) else []

    def read(model: PreTrainedModel) -> Tensor:
        texts = [torch.tensor([text], device=roles.device) for text in (*short, *long)]
        found = [model(input_ids=ids).logits[0, -TRIAL_TOKENS - 1 :] for ids in texts[:count]]
        for ids in texts[count:]:  # logits of all its tokens would be as large as those of a step
            states = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -TRIAL_TOKENS - 1 :]
            found.append(head_of(model).logits(states))
        return torch.stack([logits.float() for logits in found]).log_softmax(-1)

    with roles.acting("policy") as model:
        with torch.autocast(roles.device.type, dtype=engine.dtype, enabled=engine.dtype in HALVES):
            library = read(model)
        with in_float32(model):
            exact = library if engine.exact else read(model)
        decoder = engine.decoder(model)
        decoder.sync(roles.adapter_of("policy"))
    ours = torch.cat([_decoded(engine, decoder, texts) for texts in (short, long) if texts])
    engine.keep(decoder)
    return ours, library, exact


def _decoded(engine: FusedEngine, decoder: Decoder, texts: list[list[int]]) -> Tensor:
    """Decode the last tokens of each text one by one: log-probabilities (rows, tokens, V) of the token after each."""
    device, lengths = engine.roles.device, [len(text) - TRIAL_TOKENS for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
    count, width = ids.shape
    rows, cache = [range(i, i + 1) for i in range(count)], decoder.new_cache(count, width)
    position = torch.tensor(lengths, device=device)
    states = [decoder.prefill(ids[:, : max(lengths)], position, cache=cache, rows=rows)]
    for t in range(TRIAL_TOKENS):
        token = ids.gather(1, (position + t).unsqueeze(1)).squeeze(1)
        states.append(decoder.step(token, position + t, cache=cache, width=width))
    return torch.stack([decoder.head.logits(s) for s in states], 1).log_softmax(-1)
