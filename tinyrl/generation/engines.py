"""The sampling engine with a cache of rows, and the choice of an engine by the model's shape and a trial of numbers.

A server (server.py) where one is named. Else `fused`, our own decoder for models built like Llama, where its numbers
agree with the model's own forward pass. Else `hf`, the library's modules over the same cache of rows and through the
same scheduler, by the same trial. What fails it is sampled in plain batches (plain.py), and named at the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import Decoder, WeightLayout, can_share
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.library_decoder import LibraryDecoder, own_weights
from tinyrl.generation.plain import PlainEngine, next_states
from tinyrl.generation.request import DecodedSequence, SampledRole
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.generation.server import ServerEngine
from tinyrl.models.checks import continues_exactly, decodes_exactly, ordinary_ids
from tinyrl.models.device import chunk_tokens, free_bytes
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.loading import embedding_rows
from tinyrl.models.lora import POLICY_ADAPTER, is_plain_lora
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of
from tinyrl.text import first_line, mask_url

CACHE_SHARE = 0.4  # of the free memory that the cache may take
COPY_SHARE = 0.5  # of the free memory that a copy of the weights may take
WIDTH_BUCKET = 256  # graphs outlive a call whose longest row is a little longer
AnyDecoder = Decoder | LibraryDecoder


class CachedEngine(SamplingEngine):
    """Samples through a decoder with a cache of rows, whose weights are copied from the acting role at every call:
    `fused` is our own (decoder.py), `hf` the library's modules (library_decoder.py).

    layout: of the decoder's weights. by_graphs: whether steps are replayed from graphs, as on CUDA; deterministic
    algorithms may copy from the host, which no graph can.
    overlaps: whether rows go on while others wait for their environment. Which rows are decoded together then depends
    on the clock, and with it the rounding, so not where the same run is to give the same bits.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationConfig,
        *,
        name: Literal["fused", "hf"],
        layout: WeightLayout | None,
    ) -> None:
        super().__init__(policy, tokenizer, settings)
        self.name: str = name
        self.layout: WeightLayout | None = layout
        self.exact = policy.dtype == torch.float32
        self.by_graphs = policy.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.overlaps = self.by_graphs
        self.decoders: dict[int, AnyDecoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Scheduler | None = None  # outlives a call
        self._wanted = 0  # rows that it was made for
        self._serves: SampledRole | None = None  # whose weights it has for serving calls

    def _decoder_of(self, model: PreTrainedModel) -> AnyDecoder:
        if self.name == "hf":
            return LibraryDecoder(model, dtype=self.policy.dtype, layout=self.layout)
        assert self.layout is not None
        return Decoder(model, dtype=self.policy.dtype, layout=self.layout)

    @contextmanager
    def synced(self, role: SampledRole) -> Iterator[AnyDecoder]:
        """Yield the decoder of the role's model with its weights as they are now. The copy is freed afterwards, as it
        is quickly made again, unless a scheduler that outlives the call reads it.
        """
        with self.policy.acting(role) as model:
            if id(model) not in self.decoders:
                self.decoders[id(model)] = self._decoder_of(model)
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
            with self.policy.acting(role):
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

    def _most_rows(self, decoder: AnyDecoder, width: int) -> int:
        """Return how many rows of `width` tokens are decoded together at most: by the free memory, but on a GPU not
        where the same run is to give the same bits, since products of other shapes round differently.
        """
        device = self.policy.device
        if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
            return chunk_tokens(len(decoder.embedding), device)  # whose logits are one chunk
        room = free_bytes(device) * CACHE_SHARE
        return max(1, int(room / decoder.row_bytes(width)))

    def try_graphs(self) -> None:
        """Keep graphs over the library's modules only where a trial at the start of a run shows that they draw what
        eager steps do; else warn. Models with recurrent states always run eagerly: a graph computes rows behind the
        live ones as well, which advances the states of cached rows. So do adapters that stay with the model's own
        modules, as a graph holds the one that acted at its capture.
        """
        if not self.by_graphs:
            return
        with self.synced("policy") as decoder:
            eager = isinstance(decoder, LibraryDecoder) and (decoder.has_states or decoder.adapts)
        self.by_graphs = not eager and graphs_agree(self)
        self.release()

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


# ---- graphs over the library's modules ----

TRIAL_TOKENS = (3, 9, 40, 24)  # of sequences: rows end, others move into their places, and fewer are left
SHAKEN = 8  # trained tensors that move in a trial
SAME_LOGPROBS = 1e-3  # nats: a graph runs the kernels of an eager step


@dataclass(frozen=True)
class Drawn:
    """Tokens and log-probabilities of a trial's sequences. replayed: whether no step was refused by a capture."""

    tokens: list[list[int]]
    logprobs: Tensor
    replayed: bool


def graphs_agree(engine: CachedEngine) -> bool:
    """Return whether steps replayed from graphs draw what eager steps of the same shapes do: in several counts of rows,
    after rows have moved, and after the weights have changed and were copied anew. Warns where not.
    """
    policy = engine.policy
    eager = draw_few(engine, replays=False)
    replayed = draw_few(engine, replays=True)
    with shaken([*policy.parameters["policy"].values()][-SHAKEN:]):
        eager_after = draw_few(engine, replays=False)
        replayed_after = draw_few(engine, replays=True)
    if not (replayed.replayed and replayed_after.replayed):
        return False  # the capture has warned
    for ours, wanted in ((replayed, eager), (replayed_after, eager_after)):
        gap = ours.logprobs - wanted.logprobs if ours.tokens == wanted.tokens else None
        if gap is None or not gap.abs().max() <= SAME_LOGPROBS:
            warnings.warn("sampling without CUDA graphs, which draw other tokens than eager steps", stacklevel=2)
            return False
    return True


def draw_few(engine: CachedEngine, *, replays: bool) -> Drawn:
    """Sample sequences of several lengths, with steps replayed from graphs or run eagerly."""
    vocabulary = embedding_rows(engine.policy.causal)
    sequences = list[DecodedSequence]()
    for i, tokens in enumerate(TRIAL_TOKENS):
        prompt = ordinary_ids(vocabulary, 4 + 3 * i, start=100 * i)
        requests = engine.requests_for(prompt, 2, row=i, seed=0, step=0, limit=tokens)
        sequences += [DecodedSequence(request) for request in requests]
    width = max(sequence.room for sequence in sequences)
    with torch.inference_mode(), engine.scheduler("policy", rows=len(sequences), width=width) as scheduler:
        scheduler.replay_steps(replays)
        scheduler.add(sequences)
        while scheduler.busy:
            scheduler.step()
        replayed = scheduler.replays
    logprobs = torch.tensor([logprob for sequence in sequences for logprob in sequence.logprobs])
    return Drawn([sequence.tokens for sequence in sequences], logprobs, replayed)


@contextmanager
def shaken(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Move some trained tensors, and put them back, bit by bit."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                numbers = torch.arange(parameter.numel(), device=parameter.device)
                parameter.add_(numbers.cos().view_as(parameter), alpha=0.02)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


# ---- choice of an engine ----

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
    ValueError when the engine asked for by name, or each of them, cannot sample from this model correctly.
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
            if decodes_exactly(backbone_of(decoder.model), decoder, longest=tried):
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
    if not all(map(is_plain_lora, policy.adapted_layers(POLICY_ADAPTER))):
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
    layers: list[Any] = [*policy.adapted_layers(POLICY_ADAPTER)]
    adapted = [layer.get_base_layer().weight for layer in layers if own_weights(layer, dtype=dtype)]
    trained = [w for w in policy.causal.parameters() if w.dtype == torch.float32 and dtype != torch.float32]
    copied = adapted if merges or quantized else trained
    needed: int = sum(getattr(w, "quant_state", w).shape.numel() * dtype.itemsize for w in copied)
    if needed <= room:
        return "merged" if merges else "separate_lora"
    if quantized:
        return "quantized"
    return "separate_lora" if merges else None
