"""Sampling engines of this process, and the choice of one by the model's shape and a trial of its numbers.

A server (server.py) where one is named. Else `fused`, a scheduler over our own decoder for models built like Llama,
where its numbers agree with the model's own forward pass. Else the library's modules with merged weights, or with LoRA
branches (a quantised or bfloat16 base, or no room for the copy); simple, so the others are tested against them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.decoder import Decoder, Held, can_share
from tinyrl.generation.engine import (
    LocalEngine,
    Request,
    RowParams,
    SampledRole,
    SampleOptions,
    SamplingEngine,
    SamplingSettings,
    Sequence,
    advanced,
    draw,
    truncate,
    uniforms,
)
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.generation.server import ServerClient, ServerEngine
from tinyrl.generation.turns import Episodes
from tinyrl.models.batches import backbone_of
from tinyrl.models.checks import as_exact, in_float32, ordinary_ids
from tinyrl.models.device import HALVES, free_bytes, to_device
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora import POLICY_ADAPTER, adapted_parameter, is_plain_lora
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Roles, weight_bytes
from tinyrl.runs.signals import check_stop
from tinyrl.text import first_line, masked

CACHE_SHARE = 0.4  # of the memory that is free when sampling starts
WIDTH_BUCKET = 256  # graphs outlive a call whose longest row is a little longer


class FusedEngine(LocalEngine):
    """Samples through a `Decoder`, whose weights are copied from the acting role at every call.

    by_graphs: whether steps are replayed from graphs, as on CUDA; deterministic algorithms may copy from the host,
    which no graph can.
    overlaps: whether rows go on while others wait for their environment. Which rows are decoded together then depends
    on the clock, and with it the rounding, so not where the same run is to give the same bits.
    """

    name = "fused"

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        dtype: torch.dtype,
        held: Held,
    ) -> None:
        super().__init__(roles, tokenizer, settings)
        self.dtype = dtype
        self.held: Held = held
        self.exact = dtype == torch.float32 and roles.causal.dtype == torch.float32
        self.by_graphs = roles.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.overlaps = self.by_graphs
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Scheduler | None = None  # outlives a call
        self._kept_for: tuple[int, SampledRole | None] = (0, None)  # rows wanted of it; a serving call's weights in it

    @contextmanager
    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Iterator[Scheduler]:
        kept, width = self._kept, width + self.look_every - 1
        fits = kept is not None and self._kept_for[0] >= rows and kept.width >= width
        if kept is not None and fits and serving and self._kept_for[1] == role:
            yield kept
            return
        with self.roles.acting(role) as model:
            decoder = self.decoders.get(id(model)) or self.decoder(model)
            self.decoders[id(model)] = decoder
            decoder.sync(self.roles.adapter_of(role))
            if kept is None or not fits or kept.decoder is not decoder:
                kept = self._kept = None  # its memory serves the next
                width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if self.by_graphs else width
                self.capacity = min(rows, rows_that_fit(decoder, width, free=free_bytes(self.roles.device)))
                shape = {"capacity": self.capacity, "width": width, "look_every": self.look_every}
                kept = Scheduler(decoder, self.tokenizer, self.eos, **shape, by_graphs=self.by_graphs)
                self._kept_for = (rows, None)
            kept.clear()
            kept.admit_below = 1.0 if serving else ADMIT_BELOW
            self.capacity, self._kept_for = kept.capacity, (self._kept_for[0], role if serving else None)
            self._kept = kept if serving or self.by_graphs else None
            yield kept
        self.keep(decoder)

    def decoder(self, model: PreTrainedModel) -> Decoder:
        return Decoder(model, dtype=self.dtype, held=self.held)

    def keep(self, decoder: Decoder) -> None:
        """Sample from its model through this decoder from now on. Its copy of the weights is freed for the update, as
        it is quickly made again, unless a scheduler that outlives the call reads it.
        """
        self.decoders[id(decoder.model)] = decoder
        self.copy_bytes = decoder.weight_bytes
        if self._kept is None:
            decoder.release()

    def forget(self) -> None:
        self._kept_for = (self._kept_for[0], None)
        if not self.by_graphs:
            self.release()

    def release(self) -> bool:
        """Free the cache, the graphs and the copies of the weights; the next call makes them again."""
        kept, self._kept = self._kept is not None, None
        for decoder in self.decoders.values():
            decoder.release()
        return kept

    def play(
        self, requests: list[Request], samples_per_request: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """Play `episodes` of several turns, which gather what was said, and say what is prefilled after a turn and how
        long the next may be (max_new_tokens of a request does not count). Sample i of request r is episode
        r * samples_per_request + i. Token t of it is drawn by the request's random number first_token + t.

        A turn is a sequence of its own, so that nothing of the text before it can end it; its row is held meanwhile.
        """

        def attempt(rows: int) -> None:
            episodes.restart()
            turns = self.sequences(requests, samples_per_request, options)
            firsts, numbers = [*turns], {turn: sample for sample, turn in enumerate(turns)}
            width = max(len(first.prompt) for first in firsts) + episodes.max_episode_tokens
            with self.scheduler(options.get("role", "policy"), rows=rows, width=width) as scheduler:
                for sample, turn in enumerate(turns):
                    turn.after, turn.limit = "held", episodes.limit(sample)
                scheduler.add(turns)
                waiting = set[int]()  # for their answers
                while scheduler.busy or waiting:
                    check_stop()
                    stalled, going = scheduler.stalled, list[Sequence]()
                    for sample, answer in episodes.answers(wait=stalled) if stalled or self.overlaps else []:
                        waiting.discard(sample)
                        first, before, said = firsts[sample], turns[sample], episodes.responses[sample].tokens
                        if answer is None:
                            scheduler.drop(before)
                            continue
                        [key] = advanced(np.array([first.key]), np.array([len(said)]))
                        prompt, most = [*first.prompt, *said], episodes.limit(sample)
                        turn = Sequence(prompt, first.params, key, most, first.stop, "held", row=before.row)
                        turns[sample], numbers[turn] = turn, sample
                        going.append(turn)
                    scheduler.add(going)
                    for turn in scheduler.step():
                        sample = numbers.pop(turn)
                        episodes.ended(sample, turn.completion)
                        waiting.add(sample)

        if requests:
            self.in_fewer_rows(len(requests) * samples_per_request, attempt)


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))


# ---- the library's modules ----

# Rows are dropped when fewer than this share of the batch is still going: copying the cache costs about one token.
COMPACT_BELOW = 0.8


class HfEngine(LocalEngine):
    """merged: with the role's adapter merged into private copies of the weights while it samples, for models that the
    fused engine does not support.
    """

    def __init__(
        self, roles: Roles, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, *, merged: bool = False
    ) -> None:
        super().__init__(roles, tokenizer, settings)
        self.merged, self.name = merged, "hf-merged" if merged else "hf"
        self.exact = roles.causal.dtype == torch.float32
        layers = roles.adapted_layers(POLICY_ADAPTER) if merged else []
        self.copy_bytes = weight_bytes(getattr(*adapted_parameter(layer)) for layer in layers)

    @contextmanager
    def scheduler(
        self, role: SampledRole, *, rows: int, width: int, serving: bool = False
    ) -> Iterator[LibraryScheduler]:
        acting = self.roles.acting_merged if self.merged else self.roles.acting
        with acting(role) as model:
            yield LibraryScheduler(self, model, capacity=rows)


class LibraryScheduler:
    """Sequences in batches: `capacity` of those that wait begin together when all of the batch before have ended.
    Otherwise as scheduler.Scheduler.
    """

    width = 1 << 60  # its cache grows

    def __init__(self, engine: HfEngine, model: PreTrainedModel, *, capacity: int) -> None:
        self.engine, self.capacity, self.device = engine, capacity, engine.roles.device
        self.backbone, self.head = backbone_of(model), head_of(model)
        self.waiting: deque[Sequence] = deque()
        self.rows: list[Sequence] = []  # of the batch; some may have ended

    def add(self, sequences: list[Sequence]) -> None:
        self.waiting += sequences

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def step(self) -> list[Sequence]:
        """Decode every row by one token, or on a GPU by a few; returns the sequences that have ended."""
        if not self.rows:
            self.rows = [self.waiting.popleft() for _ in range(min(self.capacity, len(self.waiting)))]
            self.params = RowParams.of([s.params for s in self.rows], self.device)
            logits = self._prefill()
        else:
            logits = self._forward_tokens()
        look, going = self.engine.look_every, [s.finish_reason is None and not s.cancelled for s in self.rows]
        keys, counts = np.array([s.key for s in self.rows], dtype=np.uint64), [len(s.tokens) for s in self.rows]
        u = to_device(uniforms(keys, num_tokens=look, first=np.array(counts)), self.device)
        drawn = [self._draw(logits, u[:, 0])]
        for t in range(1, look):
            drawn.append(self._draw(self._forward_tokens(), u[:, t]))
        tokens, logprobs = (torch.stack(columns, 1).tolist() for columns in zip(*drawn, strict=True))
        for sequence, t, p in zip(self.rows, tokens, logprobs, strict=True):
            sequence.append(t, p, eos=self.engine.eos, tokenizer=self.engine.tokenizer)
        stay = [i for i, s in enumerate(self.rows) if s.finish_reason is None and not s.cancelled]
        gone = {*range(len(self.rows))} - {*stay}
        ended = [s for i, s in enumerate(self.rows) if going[i] and i in gone]
        if not stay:
            self.rows = []
        elif len(stay) < COMPACT_BELOW * len(self.rows):
            keep = to_device(torch.tensor(stay), self.device)
            _take_rows(self.cache, keep)
            self.rows, self.mask, self.token = [self.rows[i] for i in stay], self.mask[keep], self.token[keep]
            self.params = RowParams.of([s.params for s in self.rows], self.device)
        return ended

    def _prefill(self) -> Tensor:
        """Logits (R, V) after the prompts; one that several rows have in common is prefilled once."""
        prompts, source = list[list[int]](), list[int]()
        for row in self.rows:
            if not prompts or row.prompt != prompts[-1]:
                prompts.append(row.prompt)
            source.append(len(prompts) - 1)
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = torch.tensor(prompt), 1
        self.cache, self.mask = DynamicCache(config=self.backbone.config), to_device(mask, self.device)  # pyright: ignore
        logits, rows = self._forward(to_device(ids, self.device)), to_device(torch.tensor(source), self.device)
        _take_rows(self.cache, rows)
        self.mask = self.mask[rows]
        return logits[rows]

    def _forward_tokens(self) -> Tensor:
        """Logits (R, V) after the last token of each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)
        return self._forward(self.token.unsqueeze(-1))

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.backbone(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return self.head.logits(output.last_hidden_state[:, -1])

    def _draw(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """One token a row, and its log-probability under the distribution that training scores."""
        params = self.params
        z = logits if params.temperature is None else logits / params.temperature.unsqueeze(-1)
        log_p = z.log_softmax(-1)
        probs, likeliest = log_p.exp(), log_p.argmax(-1)
        if params.top_k is not None and params.top_p is not None:
            probs = truncate(probs, top_k=params.top_k, top_p=params.top_p)
        self.token = likeliest if params.all_greedy else draw(probs, u)[0]
        if params.greedy is not None:
            self.token = torch.where(params.greedy, likeliest, self.token)
        return self.token, log_p.gather(-1, self.token.unsqueeze(-1)).squeeze(-1)


def _take_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep these rows of the cache, in this order and as often as named. Of all that a cache offers for it, this alone
    exists for every kind of layer (not only attention: Qwen3.5's have recurrent states).
    """
    cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]


# ---- choice of an engine ----

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
