"""Sampling engines: requests of token lists in, ragged token lists out; and which tokens end a completion.

Each samples through a scheduler: rows of a decoder's cache (scheduler.py), or batches, plain ones (plain.py) or of
requests to a server (server.py).

A token is drawn by inverse CDF. Its uniform comes from (seed, step, prompt, sample, t) by a counter-based hash, so the
same request gives the same completion, to float32 rounding, whichever rows share its batch, from every engine, after a
split for memory and after a restart.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Required, Self, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig as ModelGeneration
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig, TaskConfig
from tinyrl.generation.sample import FinishReason, Sample
from tinyrl.models.device import as_out_of_memory, to_device
from tinyrl.models.loading import embedding_rows
from tinyrl.models.policy import Policy
from tinyrl.process.signals import check_stop
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import in_chat

if TYPE_CHECKING:
    from tinyrl.generation.scheduler import CachedRow, Scheduler
    from tinyrl.generation.turns import Episodes

LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have ended: a GPU waits for each look
SampledRole = Literal["policy", "reference", "base"]
Result = TypeVar("Result")


class SampleOptions(TypedDict, total=False):
    """Options of `sample`: (seed, step) key its random numbers; by default the policy samples, not greedily. on_tokens,
    on_reply: called with the tokens of every row as they come, and with those of a reply.
    """

    seed: Required[int]
    step: Required[int]
    greedy: bool
    role: SampledRole
    on_tokens: Callable[[list[int]], None] | None
    on_reply: Callable[[list[int]], None] | None


@dataclass(frozen=True)
class Request:
    """A prompt to continue. Its i-th sample draws by the key (seed, step, prompt_row, first_sample + i), prompt_row
    being the prompt's row in the data.

    max_new_tokens: its own limit (None: generation.max_new_tokens).
    """

    prompt_tokens: list[int]
    prompt_row: int
    first_sample: int = 0
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a sequence are drawn. greedy: the likeliest, scored at this temperature all the same."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


@dataclass(eq=False)
class Sequence:
    """A sequence that a scheduler decodes: its prompt, how its tokens are drawn, and the tokens so far (EOS and stop
    string included) with the log-probability of each under softmax(logits / temperature) before any top-k or top-p.

    key: its t-th new token is drawn by the key's uniform t. after: what becomes of its row in the cache when it has
    ended: free; cached, until another sequence needs the room; or held, until it is continued or dropped. row: the row
    in the cache that it continues. on_tokens: called with new tokens as they come; on_end: called by the thread of
    LiveScheduler, with the error that ended it, if any. cancelled: nobody waits for it any more. finish_reason: None
    until it has ended. sent: tokens that on_tokens had before it began again.
    """

    prompt: list[int]
    params: SamplingParams
    key: np.uint64
    limit: int
    stop: list[str] = field(default_factory=list)
    after: Literal["free", "cached", "held"] = "free"
    role: SampledRole = "policy"
    on_tokens: Callable[[list[int]], None] | None = None
    on_end: Callable[[Exception | None], None] = lambda error: None
    row: CachedRow | None = None
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    sent: list[int] = field(default_factory=list)

    def restart(self) -> None:
        """Begin again, after an error; its key gives the same tokens, which on_tokens gets once."""
        self.sent = max(self.sent, self.tokens, key=len)
        self.tokens = []
        self.logprobs = []
        self.finish_reason = None
        self.row = None

    def append(
        self, tokens: list[int], logprobs: list[float], *, eos: set[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Append new tokens up to the one that ends the sequence: EOS, the last of a stop string, or the last within
        the limit. Later ones, decoded between two looks, are dropped.
        """
        # A token is at least one byte; a few more, because decoding that starts inside a character or a word is off.
        window = max((len(s.encode()) for s in self.stop), default=0) + 8
        before = len(self.tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            self.logprobs.append(logprob)
            text = str(tokenizer.decode(self.tokens[-window:])) if self.stop else ""
            if token in eos:
                self.finish_reason = "eos"
            elif any(s in text for s in self.stop):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
        if self.sent[: len(self.tokens)] != self.tokens[: len(self.sent)]:
            raise RuntimeError("other tokens were sampled after an error")
        new = self.tokens[max(before, len(self.sent)) :]
        if new and self.on_tokens is not None and not self.cancelled:
            self.on_tokens(new)

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.cancelled

    def sample(self, row: int) -> Sample:
        """Return what was sampled, once it has ended; row: of its prompt in the data."""
        assert self.finish_reason is not None
        chosen = [True] * len(self.tokens)
        return Sample(self.prompt, self.tokens, chosen, self.logprobs, row=row, finish=self.finish_reason)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def room(self) -> int:
        """Return the most tokens that it may have."""
        return len(self.prompt) + self.limit


class BatchScheduler:
    """Sequences that are sampled in batches: those that wait begin together when all before have ended. It holds no
    row for those that go on. Otherwise as scheduler.Scheduler.
    """

    capacity = width = 1 << 60

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.rows: list[Sequence] = []  # of the batch under way; some may have ended

    def add(self, sequences: list[Sequence]) -> None:
        self.waiting += sequences

    def drop(self, sequence: Sequence) -> None:
        """Nothing is held for a sequence."""

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    @property
    def stalled(self) -> bool:
        return not self.busy

    def step(self) -> list[Sequence]:
        """Sample on; return the sequences that have ended."""
        raise NotImplementedError


class SamplingEngine:
    """Samples completions through a scheduler of at most `max_rows` rows (None: all that are asked for).

    exact: in float32 its log-probabilities are those of a training pass, to rounding; copy_bytes: size of its private
    copy of weights, if any; overlaps: rows go on while others wait for their environment. The base itself is never
    merged.
    """

    name: str
    exact: bool
    copy_bytes = 0
    overlaps = False
    capacity: int | None = None  # rows that memory allowed at the last attempt

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.settings = settings
        self.eos = eos_token_ids(policy, tokenizer)
        self.max_rows = settings.max_rows
        self.look_every = LOOK_EVERY[policy.device.type]

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check before the first step, by some prompts (tokens), that it samples from the run's weights; return notes.
        Raises ValueError if not.
        """
        return []

    def scheduler(
        self, role: SampledRole, *, rows: int, width: int, serving: bool = False
    ) -> AbstractContextManager[Scheduler | BatchScheduler]:
        """Return a scheduler over the role's weights as they are now, of at most `rows` rows of `width` tokens.

        serving: weights and cached rows of the last call are used again, until `forget`; requests enter at once.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Discard the weights and cached rows of serving calls: the model has changed."""

    def release(self) -> bool:
        """Free the memory kept from one call to the next; return whether there was any."""
        return False

    def with_settings(self, settings: GenerationConfig, *, look_every: int | None = None) -> Self:
        """Return an engine on the same model with other settings; look_every: tokens between two looks at which rows
        have ended. This one's cached rows are freed.
        """
        self.release()
        other = copy.copy(self)
        other.settings = settings
        other.look_every = look_every or self.look_every
        return other

    def without_ends(self, max_new_tokens: int) -> SamplingEngine:
        """Return an engine on the same model whose completions end at `max_new_tokens` alone: no token and no string
        ends one. This one's cached rows are freed.
        """
        endless = self.with_settings(
            self.settings.model_copy(update={"max_new_tokens": max_new_tokens, "stop": []}),
        )
        endless.eos = set()
        return endless

    def close(self) -> None:
        """Remove what it left outside this process."""

    def sample(
        self, requests: list[Request], samples_per_request: int, **options: Unpack[SampleOptions]
    ) -> list[list[Sample]]:
        """Sample that many completions for every request, in order, from the role's weights as they are now.

        Raises torch.OutOfMemoryError when a single row does not fit.
        """

        def attempt(rows: int) -> list[list[Sample]]:
            sequences = self.sequences(requests, samples_per_request, options)
            width = max(sequence.room for sequence in sequences)
            with self.scheduler(options.get("role", "policy"), rows=rows, width=width) as scheduler:
                scheduler.add(sequences)
                while scheduler.busy:
                    check_stop()
                    scheduler.step()
            groups = list[list[Sample]]()
            for number, request in enumerate(requests):
                first = number * samples_per_request
                group = sequences[first : first + samples_per_request]
                groups.append([sequence.sample(request.prompt_row) for sequence in group])
            return groups

        self.start([request.prompt_tokens for request in requests])
        return self.in_fewer_rows(len(requests) * samples_per_request, attempt) if requests else []

    def play(
        self, requests: list[Request], samples_per_request: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """Play `episodes` of several turns, which gather what was sampled, and return what is prefilled after a turn
        and how long the next may be (max_new_tokens of a request does not count). Sample i of request r is episode
        r * samples_per_request + i, and its token t is drawn by the sample's random number t.

        A turn is a sequence of its own, so that nothing of the text before it can end it; a scheduler with a cache of
        rows holds its row meanwhile, and prefills the reply only.
        """

        on_reply = options.get("on_reply")

        def attempt(rows: int) -> None:
            episodes.restart()
            turns = self.sequences(requests, samples_per_request, options)
            firsts = [*turns]
            numbers = {turn: sample for sample, turn in enumerate(turns)}
            width = max(len(first.prompt) for first in firsts) + episodes.max_episode_tokens
            with self.scheduler(options.get("role", "policy"), rows=rows, width=width) as scheduler:
                for sample, turn in enumerate(turns):
                    turn.after = "held"
                    turn.limit = episodes.limit(sample)
                scheduler.add(turns)
                waiting = 0  # episodes, for their answers
                while scheduler.busy or waiting:
                    check_stop()
                    stalled = scheduler.stalled
                    going = list[Sequence]()
                    for sample, answer in episodes.answers(wait=stalled) if stalled or self.overlaps else []:
                        waiting -= 1
                        first = firsts[sample]
                        before = turns[sample]
                        said = episodes.samples[sample].response
                        if answer is None:
                            scheduler.drop(before)
                            continue
                        if on_reply is not None:
                            on_reply(answer)
                        [key] = advanced(np.array([first.key]), np.array([len(said)]))
                        turn = Sequence(
                            prompt=[*first.prompt, *said],
                            params=first.params,
                            key=key,
                            limit=episodes.limit(sample),
                            stop=first.stop,
                            after="held",
                            on_tokens=first.on_tokens,
                            row=before.row,
                        )
                        turns[sample] = turn
                        numbers[turn] = sample
                        going.append(turn)
                    scheduler.add(going)
                    for turn in scheduler.step():
                        waiting += 1
                        episodes.ended(numbers.pop(turn), turn)

        self.start([request.prompt_tokens for request in requests])
        if requests:
            self.in_fewer_rows(len(requests) * samples_per_request, attempt)

    def sequences(self, requests: list[Request], group: int, options: SampleOptions) -> list[Sequence]:
        """Make `group` sequences for every request, in order, drawn by the settings of the run."""
        s = self.settings
        on_tokens = options.get("on_tokens")
        params = SamplingParams(s.temperature, s.top_p, s.top_k, options.get("greedy", False))
        keys = row_keys(requests, group, seed=options["seed"], step=options["step"])
        rows = [request for request in requests for _ in range(group)]
        return [
            Sequence(r.prompt_tokens, params, key, r.max_new_tokens or s.max_new_tokens, s.stop, on_tokens=on_tokens)
            for r, key in zip(rows, keys, strict=True)
        ]

    def in_fewer_rows(self, wanted: int, attempt: Callable[[int], Result]) -> Result:
        """Call `attempt(rows)` with as many rows at a time as wanted or allowed; when memory runs out, with half.

        Keyed random numbers give the same samples again, and later calls begin with the lower limit. Raises
        torch.OutOfMemoryError where a single row does not fit.
        """
        while True:
            rows = min(self.max_rows or wanted, wanted)
            self.capacity = None
            try:
                with as_out_of_memory(), torch.inference_mode():
                    return attempt(rows)
            except torch.OutOfMemoryError:
                if min(rows, self.capacity or rows) == 1:
                    raise
            self.release()
            self.max_rows = max(1, min(rows, self.capacity or rows) // 2)
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()


# ---- which tokens end a completion ----


def eos_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end a completion: the tokenizer's EOS and the model's (chat models list several)."""
    listed = [tokenizer.eos_token_id, *_listed_eos(policy.causal)]
    vocabulary = embedding_rows(policy.causal)
    return {i for i in listed if isinstance(i, int) and i < vocabulary}


def _listed_eos(model: PreTrainedModel) -> list[int]:
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [i for i in (listed if isinstance(listed, list) else [listed]) if isinstance(i, int)]


def end_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> None:
    """Add the token that ends a turn in the chat template, where prompts go through it, to the model's generation
    configuration: every engine ends completions at it, and so do programs that load a saved model.
    """
    if not in_chat(tokenizer, task.chat) or not model.can_generate():
        return
    end = answer_end(tokenizer, chat=task.chat, variables=task.chat_template_kwargs)
    if model.generation_config is None:
        model.generation_config = ModelGeneration()
    if end not in (listed := _listed_eos(model)):
        model.generation_config.eos_token_id = [*listed, end]


# ---- drawing a token ----

ALL = 2.0  # as a top-p: rounding of cumulative probabilities drops no token


def row_params(rows: list[SamplingParams], device: torch.device) -> dict[str, Tensor]:
    """Return the parameters of R rows, (R,) each, without those that none of them needs."""
    greedy = [p.greedy for p in rows]
    truncated = any(p.top_k or p.top_p < 1 for p in rows if not p.greedy)
    columns: dict[str, tuple[bool, list[Any], torch.dtype]] = {
        "temperature": (any(p.temperature != 1 for p in rows), [p.temperature for p in rows], torch.float32),
        "top_p": (truncated, [p.top_p if p.top_p < 1 else ALL for p in rows], torch.float32),
        "top_k": (truncated, [p.top_k or 1 << 40 for p in rows], torch.int64),
        "greedy": (any(greedy) and not all(greedy), greedy, torch.bool),
        "all greedy": (all(greedy), greedy, torch.bool),
    }
    needed = {name: (values, dtype) for name, (needed, values, dtype) in columns.items() if needed}
    return {name: to_device(torch.tensor(values, dtype=dtype), device) for name, (values, dtype) in needed.items()}


def sample_tokens(logits: Tensor, u: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Draw one token a row; return it and its log-probability under softmax(logits / temperature), before truncation.

    logits (R, V) float32, overwritten; u (R,) uniforms. Returns (R,) int64 and (R,) float32.
    """
    z = logits.div_(params["temperature"].unsqueeze(-1)) if "temperature" in params else logits
    likeliest = z.argmax(-1) if "all greedy" in params or "greedy" in params else None
    weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
    if "all greedy" in params and likeliest is not None:
        token = likeliest
        total = weights.sum(-1, dtype=torch.float64)
    elif "top_p" in params:
        total = weights.sum(-1, dtype=torch.float64)
        probs = weights / total.unsqueeze(-1).float()
        token = draw(truncate_probs(probs, top_k=params["top_k"], top_p=params["top_p"]), u)[0]
    else:
        token, total = draw(weights, u)
    if "greedy" in params and likeliest is not None:
        token = torch.where(params["greedy"], likeliest, token)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    return token, (chosen / total).log().float()


def truncate_probs(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero everything outside the top_k (R,) tokens and the smallest set of mass top_p (R,); (R, V) -> (R, V)."""
    ordered, order = probs.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p.unsqueeze(-1)
    keep &= torch.arange(probs.shape[-1], device=probs.device) < top_k.unsqueeze(-1)
    return torch.zeros_like(probs).scatter(-1, order, torch.where(keep, ordered, 0.0))


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one index a row by inverse CDF, the smallest j with cumulative weight above u times the row's total, (R,)
    int64; return it and the totals (R,) float64. weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).

    Sums run in two levels (blocks, then inside one block): a single float32 running sum over 150,000 entries is off
    by several percent of a mean probability.
    """
    rows, vocabulary = weights.shape
    width = block_width(vocabulary)
    missing = -vocabulary % width
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    padded = padded.view(rows, -1, width)
    sums = padded.sum(-1).double()
    ends = sums.cumsum(-1)
    target = (u.to(ends.dtype) * ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, width)).squeeze(1).double().cumsum(-1)
    # Rounding may leave the target just before the block or at its end; clamping keeps the draw inside the block.
    left = (target - (ends - sums).gather(-1, block)).clamp_(min=0.0)
    left = torch.minimum(left, inside[:, -1:] * (1.0 - 1e-12))
    index = block * width + torch.searchsorted(inside, left, right=True)
    return index.squeeze(-1).clamp_(max=vocabulary - 1), ends[:, -1]  # only NaN gets past the end


def block_width(vocabulary: int) -> int:
    """Return the width of a block: the divisor of the vocabulary that is nearest to its square root, since padding is a
    copy; the root itself where none is from a quarter to four times of it.
    """
    root = max(1, round(vocabulary**0.5))
    for distance in range(root):
        for width in (root - distance, root + distance):
            if root / 4 <= width <= root * 4 and vocabulary % width == 0:
                return width
    return root


# ---- keyed uniforms ----

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014), a bijection of 64-bit words that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, step: int, *, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Derive 64-bit keys (R,) of R samples from the run's seed, the step, and each row's prompt and sample number."""
    key = np.zeros(len(prompts), dtype=np.uint64)
    parts = np.uint64(seed), np.uint64(step % (1 << 63)), prompts.astype(np.uint64), samples.astype(np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = _mix((key + _GOLDEN) ^ _mix(part * np.ones_like(key) + _GOLDEN))
    return key


def row_keys(requests: list[Request], group: int, *, seed: int, step: int) -> np.ndarray:
    """Derive the keys of every sample's random numbers, (R,) with R = requests * group."""
    prompts = np.repeat(np.array([r.prompt_row for r in requests]), group)
    samples = np.concatenate([np.arange(group) + r.first_sample for r in requests])
    return sample_keys(seed, step, prompts=prompts, samples=samples)


def advanced(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return keys (R,) whose uniform t is that of `keys` at tokens[r] + t."""
    with np.errstate(over="ignore"):
        return keys + _GOLDEN * tokens.astype(np.uint64)


def uniforms(keys: np.ndarray, *, num_tokens: int) -> Tensor:
    """Draw uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and t."""
    with np.errstate(over="ignore"):
        words = _mix(keys[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64))
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
