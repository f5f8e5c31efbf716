"""Sampling engines of this process, and the choice of one by the model's shape and a trial of its numbers.

A server (server.py) where one is named. Else `fused`, a scheduler over our own decoder for models built like Llama,
where its numbers agree with the model's own forward pass. Else `hf`, the library's modules: simple, so the others are
tested against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import Decoder, WeightLayout, can_share
from tinyrl.generation.engine import (
    BatchScheduler,
    SampledRole,
    SamplingEngine,
    Sequence,
    advanced,
    draw,
    row_params,
    truncate_probs,
    uniforms,
)
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.generation.server import ServerEngine
from tinyrl.models.checks import decodes_exactly
from tinyrl.models.device import chunk_tokens, free_bytes, to_device
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora import POLICY_ADAPTER, is_plain_lora
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of
from tinyrl.text import first_line, mask_url

CACHE_SHARE = 0.4  # of the free memory that the cache may take
COPY_SHARE = 0.5  # of the free memory that a copy of the weights may take
WIDTH_BUCKET = 256  # graphs outlive a call whose longest row is a little longer
COMPACT_BELOW = 0.8  # share of a batch still going below which HfEngine drops ended rows: a copy costs about a token


class FusedEngine(SamplingEngine):
    """Samples through a `Decoder`, whose weights are copied from the acting role at every call.

    by_graphs: whether steps are replayed from graphs, as on CUDA; deterministic algorithms may copy from the host,
    which no graph can.
    overlaps: whether rows go on while others wait for their environment. Which rows are decoded together then depends
    on the clock, and with it the rounding, so not where the same run is to give the same bits.
    """

    name = "fused"

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig, *, layout: WeightLayout
    ) -> None:
        super().__init__(policy, tokenizer, settings)
        self.layout: WeightLayout = layout
        self.exact = policy.dtype == torch.float32
        self.by_graphs = policy.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.overlaps = self.by_graphs
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Scheduler | None = None  # outlives a call
        self._wanted = 0  # rows that it was made for
        self._serves: SampledRole | None = None  # whose weights it has for serving calls

    @contextmanager
    def synced(self, role: SampledRole) -> Iterator[Decoder]:
        """Yield the decoder of the role's model with its weights as they are now. The copy is freed afterwards, as it
        is quickly made again, unless a scheduler that outlives the call reads it.
        """
        with self.policy.acting(role) as model:
            if id(model) not in self.decoders:
                self.decoders[id(model)] = Decoder(model, dtype=self.policy.dtype, layout=self.layout)
            decoder = self.decoders[id(model)]
            decoder.sync(self.policy.adapter_of(role))
            yield decoder
        self.copy_bytes = decoder.weight_bytes
        if self._kept is None:
            decoder.release()

    @contextmanager
    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Iterator[Scheduler]:
        kept = self._kept
        width = width + self.look_every - 1
        if kept is not None and (self._wanted < rows or kept.width < width):
            kept = None
        if kept is not None and serving and self._serves == role:
            yield kept
            return
        with self.synced(role) as decoder:
            if kept is None or kept.decoder is not decoder:
                kept = self._kept = None  # its memory serves the next
                width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if self.by_graphs else width
                self.capacity = min(rows, self._most_rows(decoder, width))
                shape = {"capacity": self.capacity, "width": width, "look_every": self.look_every}
                kept = Scheduler(decoder, self.tokenizer, self.eos, **shape, by_graphs=self.by_graphs)
                self._wanted = rows
            kept.clear(admit_below=1.0 if serving else ADMIT_BELOW)
            self.capacity = kept.capacity
            self._serves = role if serving else None
            self._kept = kept if serving or self.by_graphs else None
            yield kept

    def _most_rows(self, decoder: Decoder, width: int) -> int:
        """Return how many rows of `width` tokens are decoded together at most: by the free memory, but on a GPU not
        where the same run is to give the same bits, since products of other shapes round differently.
        """
        device = self.policy.device
        if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
            return chunk_tokens(len(decoder.embedding), device)  # whose logits are one chunk
        room = free_bytes(device) * CACHE_SHARE
        return max(1, int(room / decoder.row_bytes(width)))

    def forget(self) -> None:
        self._serves = None
        if not self.by_graphs:
            self.release()

    def release(self) -> bool:
        """Free the cache, the graphs and the copies of the weights; the next call makes them again."""
        kept = self._kept is not None
        self._kept = None
        for decoder in self.decoders.values():
            decoder.release()
        return kept


# ---- the library's modules ----


class HfEngine(SamplingEngine):
    """Samples through the library's own modules and cache, with LoRA as branches, for models of any shape. look_every:
    tokens between two looks at which rows have ended; None: by the device.

    It computes in the dtype of training passes, under autocast. There trained weights are in float32: they are cast
    once per call where memory allows, else at every token.
    """

    name = "hf"

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationConfig,
        *,
        look_every: int | None = None,
    ) -> None:
        super().__init__(policy, tokenizer, settings)
        self.exact = policy.dtype == torch.float32
        if look_every is not None:
            self.look_every = look_every

    @contextmanager
    def scheduler(
        self, role: SampledRole, *, rows: int, width: int, serving: bool = False
    ) -> Iterator[LibraryScheduler]:
        with self.policy.acting(role) as model, self._computing(model):
            yield LibraryScheduler(self, model, capacity=rows)

    @contextmanager
    def _computing(self, model: PreTrainedModel) -> Iterator[None]:
        """Compute as training passes do. Autocast keeps what it has cast, but not in inference mode."""
        if self.policy.run_device.dtype == torch.float32:
            yield
            return
        keeps = self._casts_fit(model)
        with torch.inference_mode(False), torch.no_grad(), self.policy.run_device.autocast(keeps_casts=keeps):
            yield

    def _casts_fit(self, model: PreTrainedModel) -> bool:
        """Return whether float32 weights cast to half precision take at most COPY_SHARE of the free memory."""
        numbers = sum(w.numel() for w in model.parameters() if w.dtype == torch.float32)
        needed = numbers * self.policy.run_device.dtype.itemsize
        return needed <= free_bytes(self.policy.device) * COPY_SHARE


class LibraryScheduler(BatchScheduler):
    """Batches of `capacity` sequences, in the library's own cache, which grows."""

    def __init__(self, engine: HfEngine, model: PreTrainedModel, *, capacity: int) -> None:
        super().__init__()
        self.engine = engine
        self.capacity = capacity
        self.device = engine.policy.device
        self.backbone = backbone_of(model)
        head = head_of(model)
        self.head = head.cast() if torch.is_autocast_cache_enabled() else head

    def step(self) -> list[Sequence]:
        """Decode every row by one token, or on a GPU by a few; return the sequences that have ended."""
        if not self.busy:
            return []
        begins = not self.rows
        if begins:
            self.rows = [self.waiting.popleft() for _ in range(min(self.capacity, len(self.waiting)))]
            self.params = row_params([s.params for s in self.rows], self.device)
            self.last_position = max(s.room for s in self.rows) - 1
        going = [s for s in self.rows if not s.over]
        look = min(self.engine.look_every, max((s.limit - len(s.tokens) for s in going), default=1))
        keys = np.array([s.key for s in self.rows], dtype=np.uint64)
        counts = [len(s.tokens) for s in self.rows]
        u = to_device(uniforms(advanced(keys, np.array(counts)), num_tokens=look), self.device)
        drawn = [self._draw(self._prefill() if begins and t == 0 else self._next(), u[:, t]) for t in range(look)]
        tokens, logprobs = (torch.stack(columns, 1).tolist() for columns in zip(*drawn, strict=True))
        for sequence, t, p in zip(self.rows, tokens, logprobs, strict=True):
            sequence.append(t, p, eos=self.engine.eos, tokenizer=self.engine.tokenizer)
        stay = [i for i, s in enumerate(self.rows) if not s.over]
        if not stay:
            self.rows = []
        elif len(stay) < COMPACT_BELOW * len(self.rows):
            self.rows = [self.rows[i] for i in stay]
            self.token = self.token[self._take(stay)]
            self.params = row_params([s.params for s in self.rows], self.device)
        return [s for s in going if s.over]

    def _take(self, rows: list[int]) -> Tensor:
        """Take these rows of the cache and mask, in this order and as often as named; return their indices."""
        index = to_device(torch.tensor(rows), self.device)
        self.cache.reorder_cache(index)  # pyright: ignore # all kinds of layers have it (Qwen3.5's are recurrent)
        self.mask = self.mask[index]
        return index

    def _prefill(self) -> Tensor:
        """Return logits (R, V) after the prompts; one that several rows have in common is prefilled once."""
        prompts = list[list[int]]()
        source = list[int]()
        for row in self.rows:
            if not prompts or row.prompt != prompts[-1]:
                prompts.append(row.prompt)
            source.append(len(prompts) - 1)
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        self.cache = DynamicCache(config=self.backbone.config)  # pyright: ignore[reportArgumentType]
        self.mask = to_device(mask, self.device)
        logits = self._forward(to_device(ids, self.device))
        return logits[self._take(source)]

    def _next(self) -> Tensor:
        """Return logits (R, V) after the last token of each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)
        return self._forward(self.token.unsqueeze(-1))

    def _forward(self, ids: Tensor) -> Tensor:
        positions = self.mask.cumsum(-1) - 1
        # A row that has ended is decoded on beside the others; learned positions have a last one.
        positions = positions.clamp(min=0, max=self.last_position)[:, -ids.shape[1] :]
        output = self.backbone(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return self.head.logits(output.last_hidden_state[:, -1])

    def _draw(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token a row; return it and its log-probability under the distribution that training scores."""
        params = self.params
        z = logits / params["temperature"].unsqueeze(-1) if "temperature" in params else logits
        log_p = z.log_softmax(-1)
        probs = log_p.exp()
        likeliest = log_p.argmax(-1)
        if "top_p" in params:
            probs = truncate_probs(probs, top_k=params["top_k"], top_p=params["top_p"])
        self.token = likeliest if "all greedy" in params else draw(probs, u)[0]
        if "greedy" in params:
            self.token = torch.where(params["greedy"], likeliest, self.token)
        return self.token, log_p.gather(-1, self.token.unsqueeze(-1)).squeeze(-1)


# ---- choice of an engine ----

RAISED_BY_TRIALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def select_engine(
    config: GenerationConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, *, longest: int, tried: int = 0
) -> tuple[SamplingEngine, str]:
    """Return the sampling engine of `generation.engine` over the policy's model, and why it is that one.

    longest: tokens of the longest sequence there can be; tried: of the longest on which numbers are compared. Raises
    ValueError when the engine asked for by name cannot sample from this model correctly.
    """
    if config.engine == "server":
        return ServerEngine(policy, tokenizer, config, longest=longest), f"generation.url={mask_url(str(config.url))}"
    why = "generation.engine"
    kind = type(policy.causal).__name__
    if config.engine != "hf":
        try:
            layout, why = _layout(policy, longest)
            if layout is not None:
                engine = FusedEngine(policy, tokenizer, config, layout=layout)
                with engine.synced("policy") as decoder:
                    agrees = decodes_exactly(decoder.backbone, decoder, longest=tried)
                if agrees:
                    return engine, "it matches the model's own forward pass"
                why = f"its numbers are not those of {kind}"
                if config.engine == "fused" and not engine.exact:
                    return engine, f"generation.engine; warning: {why}"
        except torch.OutOfMemoryError:
            raise
        except RAISED_BY_TRIALS as error:
            why = f"its trial with {kind} ended in {type(error).__name__}: {first_line(error)}"
        if config.engine == "fused":
            raise ValueError(f"generation.engine=fused: {why}; use auto")
    return HfEngine(policy, tokenizer, config), why


def _layout(policy: Policy, longest: int) -> tuple[WeightLayout | None, str]:
    """Return the layout of the fused engine's weights, or None and why the model's shape, or memory, rules it out."""
    model = policy.causal
    name = type(policy.causal).__name__
    config = policy.causal.config.get_text_config()
    dtype = policy.dtype
    room = free_bytes(policy.device) * COPY_SHARE
    backbone: Any = backbone_of(model)
    if not reads_like_llama(backbone):
        return None, f"{name} is not built like Llama"
    if isinstance(backbone.embed_tokens, LoraLayer):
        return None, "the adapter is on the embedding, too"
    if not all(map(is_plain_lora, policy.adapted_layers(POLICY_ADAPTER))):
        return None, "the adapter is more than W + B A (DoRA, or with a bias)"
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    # Mistral has no kinds of layers: with a window, every one looks through it
    windowed = window is not None if kinds is None else any("full" not in kind for kind in kinds)
    if windowed and (window is None or window < longest):
        return None, f"{name} does not look at all earlier tokens in every layer"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return None, f"the rotary positions of {name} ({rope}) depend on what else is in the batch"
    quantized = bool(getattr(model, "is_quantized", False))
    layers = {id(p) for p in backbone.layers.parameters()}
    base = [w for n, w in model.named_parameters() if "lora_" not in n]
    merges = quantized or dtype == torch.float32
    copied = [w for w in base if (merges and id(w) in layers) or not can_share([w], dtype)]
    needed: int = sum(getattr(w, "quant_state", w).shape.numel() * dtype.itemsize for w in copied)
    if needed <= room:
        return "merged" if merges and not quantized else "separate_lora", ""
    if quantized or can_share(base, dtype):  # needs no copy
        return "quantized" if quantized else "separate_lora", ""
    return None, f"a copy of the weights ({needed / 1e9:.1f} GB) would take most of the free memory"
