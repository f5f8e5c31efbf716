"""The sampling engine with a cache of rows, and the trial of its CUDA graphs at the start of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import Decoder, WeightLayout
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.generation.request import DecodedSequence, SampledRole
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.models.checks import ordinary_ids
from tinyrl.models.device import chunk_tokens, free_bytes
from tinyrl.models.loading import embedding_rows
from tinyrl.models.policy import Policy

CACHE_SHARE = 0.4  # of the free memory that the cache may take
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
            return LibraryDecoder(model, dtype=self.policy.dtype, layout=self.layout, images=self.policy.images)
        assert self.layout is not None
        return Decoder(model, dtype=self.policy.dtype, layout=self.layout)

    @contextmanager
    def synced(self, role: SampledRole) -> Iterator[AnyDecoder]:
        """Yield the decoder of the role's model with its weights as they are now. The copy is freed afterwards, as it
        is quickly made again, unless a scheduler that outlives the call reads it.
        """
        with self.policy.acting(role) as model:
            is_new = id(model) not in self.decoders
            if is_new:
                self.decoders[id(model)] = self._decoder_of(model)
            decoder = self.decoders[id(model)]
            decoder.sync(self.policy.adapter_of(role))
            if is_new:  # it stays as large
                self.copy_bytes = decoder.weight_bytes
            yield decoder
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
