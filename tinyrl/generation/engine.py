"""The sampling engine protocol (token lists in, ragged token lists out), and how a token is drawn.

Tokens are drawn by inverse CDF with keyed random numbers. The uniform of token t comes from (seed, step, prompt,
sample, t) by a counter-based hash, so the same request gives the same completion, to float32 rounding, whichever rows
share its batch, from every engine, after a split for memory and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Required, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config import sections
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.roles import Roles
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import in_chat
from tinyrl.text import shortened

LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have finished
FinishReason = Literal["eos", "stop", "length", "turns"]  # turns: of an episode that had no more of them
SampledRole = Literal["policy", "reference", "base"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SampleOptions(TypedDict, total=False):
    """How a call of `sample` draws: (seed, step) key its random numbers. Without the others: sampled, by the policy."""

    seed: Required[int]
    step: Required[int]
    greedy: bool
    role: SampledRole


@dataclass(frozen=True)
class Request:
    """One prompt to continue. Its i-th sample draws by the key (seed, step, prompt_row, first_sample + i), prompt_row
    being the prompt's row in the data.

    first_token: offset of its first new token among those numbers, so that a later turn of a conversation does not
    reuse those of the first. max_new_tokens: its own limit (None: that of SamplingSettings).
    """

    prompt_tokens: list[int]
    prompt_row: int
    first_sample: int = 0
    first_token: int = 0
    max_new_tokens: int | None = None

    def further(self, sample: int, tokens: list[int], most: int) -> Request:
        """Its sample of this number, of which `tokens` are there, continued by at most so many new ones."""
        return Request(
            prompt_tokens=self.prompt_tokens + tokens,
            prompt_row=self.prompt_row,
            first_sample=self.first_sample + sample,
            first_token=self.first_token + len(tokens),
            max_new_tokens=most,
        )


@dataclass(frozen=True)
class Completion:
    """What was sampled: tokens (EOS and stop string included), the log-probability of each under softmax(logits /
    temperature), before any top-k or top-p, and why it ended.

    action_mask: which of them the policy sampled (None: all); the others were only read, such as a tool's answer, and
    their log-probabilities mean nothing.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    action_mask: list[bool] | None = None


@dataclass
class Response:
    """A completion on its way, of several parts: tokens of the policy, and those it only read."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        """logprobs: None where the policy only reads these tokens."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.action_mask += [logprobs is not None] * len(tokens)

    def ended(self, reason: FinishReason) -> Completion:
        return Completion(self.tokens, self.logprobs, reason, self.action_mask)


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn, the same for every request of a run.

    max_new_tokens: may be lowered by a request; max_rows: sequences decoded at a time (None: as memory allows).
    """

    temperature: float
    max_new_tokens: int
    stop: list[str] = field(default_factory=list)
    top_p: float = 1.0
    top_k: int = 0
    max_rows: int | None = None


class SamplingEngine(Protocol):
    """Samples completions. `exact`: in float32 its log-probabilities are those of a training pass, to rounding;
    copy_bytes: size of the private copy of weights that it samples from, if any; the base itself is never merged.
    """

    name: str
    exact: bool
    copy_bytes: int = 0

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once, before the first step, what only `prompts` (tokens) can show; returns lines worth showing.

        Raises ValueError if it would sample from other weights than the run's.
        """
        return []

    def sample(
        self, requests: list[Request], samples_per_request: int, **options: Unpack[SampleOptions]
    ) -> list[list[Completion]]:
        """`samples_per_request` completions for every request, in order, from the role's weights as they are now.

        Raises torch.OutOfMemoryError when a single row does not fit.
        """
        ...

    def release(self) -> bool:
        """Free the memory kept from one call to the next; returns whether there was any."""
        return False

    def close(self) -> None:
        """Take away what it left outside this process."""


class LocalEngine(SamplingEngine, Protocol):
    """An engine that decodes here, at most `max_rows` sequences at a time (None: all that are asked for), and at the
    last attempt no more than `capacity`, where memory allowed fewer than that.
    """

    max_rows: int | None
    capacity: int | None = None

    def in_fewer_rows(self, wanted: int, attempt: Callable[[int], list[list[Completion]]]) -> list[list[Completion]]:
        """`attempt(rows)` with as many rows at a time as wanted or allowed; when memory runs out, again with half.

        Keyed random numbers give the same samples again, and later calls begin with the lower limit. Raises
        torch.OutOfMemoryError where a single row does not fit.
        """
        while True:
            rows, self.capacity = min(self.max_rows or wanted, wanted), None
            try:
                with as_out_of_memory(), torch.inference_mode():
                    return attempt(rows)
            except torch.OutOfMemoryError:
                if min(rows, self.capacity or rows) == 1:
                    raise
            self.release()
            self.max_rows = max(1, min(rows, self.capacity or rows) // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def grouped(completions: list[Completion], group: int) -> list[list[Completion]]:
    return [completions[i : i + group] for i in range(0, len(completions), group)]


def max_new_tokens(request: Request, settings: SamplingSettings) -> int:
    return min(settings.max_new_tokens, request.max_new_tokens or settings.max_new_tokens)


def row_keys(requests: list[Request], group: int, *, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys of every sample's random numbers, (R,) with R = requests * group, and the index of its first token."""
    prompts = np.repeat(np.array([r.prompt_row for r in requests]), group)
    samples = np.concatenate([np.arange(group) + r.first_sample for r in requests])
    first = np.repeat(np.array([r.first_token for r in requests]), group)
    return sample_keys(seed, step, prompts=prompts, samples=samples), first


def end_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: sections.TaskConfig) -> None:
    """Where prompts go through the chat template, have the model's generation configuration list the token that ends
    a turn there: every engine ends completions at it, and so do the programs that read a saved model.
    """
    if not in_chat(tokenizer, task.chat) or not model.can_generate():
        return
    end = answer_end(tokenizer, chat=task.chat, variables=task.chat_template)
    if model.generation_config is None:
        model.generation_config = GenerationConfig()
    if end not in (listed := _listed_eos(model)):
        model.generation_config.eos_token_id = [*listed, end]


# What generation_config.json may set for sampling, each with the value at which it changes nothing.
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "suppress_tokens": None, "begin_suppress_tokens": None, "bad_words_ids": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": None,
}  # fmt: skip


def unused_defaults(model: PreTrainedModel, generation: sections.GenerationConfig) -> str | None:
    """A line that names what the model's generation_config.json sets and sampling here does not use; None: nothing."""
    if model.generation_config is None:
        return None
    given = model.generation_config.to_diff_dict()
    used = {name: getattr(generation, name, neutral) for name, neutral in NEUTRAL.items()}
    unused = {name: given[name] for name, own in used.items() if given.get(name) not in (None, own, NEUTRAL[name])}
    if not unused:
        return None
    listed = ", ".join(f"{name}={value}" for name, value in unused.items())
    return f"generation_config.json sets {shortened(listed)}, which sampling here does not use (section generation)"


def eos_token_ids(roles: Roles, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a completion: the tokenizer's EOS and the generation config's (chat models list several)."""
    vocabulary = roles.causal.get_input_embeddings().weight.shape[0]  # pyright: ignore
    return {i for i in [tokenizer.eos_token_id, *_listed_eos(roles.causal)] if isinstance(i, int) and i < vocabulary}


def _listed_eos(model: PreTrainedModel) -> list[int]:
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return [i for i in listed if isinstance(i, int)]


# ---- drawing tokens ----


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, step: int, *, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """64-bit keys (R,) of R samples from the run's seed, the step, and each row's prompt and sample number."""
    key = np.zeros(len(prompts), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (
            np.uint64(seed),
            np.uint64(step % (1 << 63)),
            prompts.astype(np.uint64),
            samples.astype(np.uint64),
        ):
            key = _mix((key + _GOLDEN) ^ _mix(part * np.ones_like(key) + _GOLDEN))
    return key


def advanced(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Keys (R,) whose uniform t is that of `keys` at tokens[r] + t."""
    with np.errstate(over="ignore"):
        return keys + _GOLDEN * tokens.astype(np.uint64)


def uniforms(keys: np.ndarray, *, num_tokens: int, first: np.ndarray | None = None) -> Tensor:
    """Uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and first[r] + t (None: t)."""
    keys = keys if first is None else advanced(keys, first)
    with np.errstate(over="ignore"):
        words = _mix(keys[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64))
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One index a row by inverse CDF, the smallest j with cumulative weight above u times the row's total, (R,) int64;
    and the totals (R,) float64. weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).

    Sums run in two levels (blocks, then inside one block): a single float32 running sum over 150,000 entries is off
    by several percent of a mean probability.
    """
    rows, vocabulary = weights.shape
    width = block_width(vocabulary)
    blocks = -(-vocabulary // width)
    missing = blocks * width - vocabulary
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights  # a pad of nothing is a copy
    padded = padded.view(rows, blocks, width)
    sums = padded.sum(-1).double()
    ends = sums.cumsum(-1)
    target = (u.to(ends.dtype) * ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks - 1)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, width)).squeeze(1).double().cumsum(-1)
    # Rounding may leave the target just before the block or at its end; clamping keeps the draw inside the block.
    left = (target - (ends - sums).gather(-1, block)).clamp_(min=0.0)
    left = torch.minimum(left, inside[:, -1:] * (1.0 - 1e-12))
    index = block * width + torch.searchsorted(inside, left, right=True)
    return index.squeeze(-1).clamp_(max=vocabulary - 1), ends[:, -1]  # only NaN gets past the end


def block_width(vocabulary: int) -> int:
    """A divisor of the vocabulary near its square root, so that no block is padded; the root where there is none."""
    root = max(1, round(vocabulary**0.5))
    near = (w for d in range(root) for w in (root - d, root + d) if root / 4 <= w <= root * 4 and vocabulary % w == 0)
    return next(near, root)


def sample_tokens(
    logits: Tensor, u: Tensor, *, temperature: float, top_k: int, top_p: float, greedy: bool
) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under softmax(logits / temperature).

    logits (R, V) float32, overwritten; u (R,) uniforms. Returns (R,) int64 and (R,) float32.
    """
    z = logits.div_(temperature) if temperature != 1.0 else logits
    token = z.argmax(-1) if greedy else None
    weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
    if token is not None:
        total = weights.sum(-1, dtype=torch.float64)
    elif top_k or top_p < 1:
        total = weights.sum(-1, dtype=torch.float64)
        token = draw(truncate(weights / total.unsqueeze(-1).float(), top_k=top_k, top_p=top_p), u)[0]
    else:
        token, total = draw(weights, u)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    return token, (chosen / total).log().float()


def truncate(probs: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Zero everything outside the top_k tokens and outside the smallest set of mass top_p; (R, V) -> (R, V)."""
    ordered, order = probs.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    if top_k:
        keep[:, top_k:] = False
    return torch.zeros_like(probs).scatter(-1, order, torch.where(keep, ordered, 0.0))


def stop_said_at(tokens: list[int], stop: list[str], tokenizer: PreTrainedTokenizerBase, *, look_at: int) -> int | None:
    """How many of `tokens` there are when a stop string has just been completed; None where none has. Only ends within
    the last `look_at` tokens are checked.
    """
    # A token is at least one byte; a few more, because decoding that starts inside a character or a word is off.
    window = max(len(s.encode()) for s in stop) + 8
    for end in range(max(1, len(tokens) - look_at + 1), len(tokens) + 1):
        text = tokenizer.decode(tokens[max(0, end - window) : end])
        if any(s in text for s in stop):  # pyright: ignore[reportOperatorIssue]
            return end
    return None
