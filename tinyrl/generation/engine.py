"""The sampling engine protocol: requests, completions and settings; token lists in, ragged token lists out.

The same request and key give the same completion from every engine and in any batch, to float32 rounding
(token_sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Required, TypedDict, Unpack

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import TaskConfig
from tinyrl.generation.token_sampling import sample_keys
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.roles import Roles
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import in_chat

LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have finished
FinishReason = Literal["eos", "stop", "length", "turns"]  # turns: of an episode that had no more of them
SampledRole = Literal["policy", "reference", "base"]


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


@dataclass(frozen=True)
class Completion:
    """What was sampled: tokens (EOS and stop string included), the log-probability of each under softmax(logits /
    temperature), before any top-k or top-p, and why it ended.

    chosen: which of them the policy chose (None: all); the others were only read, such as a tool's answer, and their
    log-probabilities mean nothing.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    chosen: list[bool] | None = None


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
    """Samples completions. `exact`: in float32 its log-probabilities are those of a training pass, to rounding."""

    name: str
    exact: bool

    @property
    def copy_bytes(self) -> int:
        """Bytes of the private copy of weights that it samples from: adapters are merged there, not in the base."""
        return 0

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once, before the first step, what only `prompts` (tokens) can show; returns lines worth showing.

        Raises ValueError where it would not sample from our models.
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


class HasRowLimit(SamplingEngine, Protocol):
    """An engine that decodes at most `max_rows` sequences at a time (None: all that are asked for), and at the last
    attempt no more than `capacity`, where memory allowed fewer than that.
    """

    max_rows: int | None
    capacity: int | None = None


def max_new_tokens(request: Request, settings: SamplingSettings) -> int:
    return min(settings.max_new_tokens, request.max_new_tokens or settings.max_new_tokens)


def row_keys(requests: list[Request], group: int, *, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys of every sample's random numbers, (R,) with R = requests * group, and the index of its first token."""
    prompts = np.repeat(np.array([r.prompt_row for r in requests]), group)
    samples = np.concatenate([np.arange(group) + r.first_sample for r in requests])
    first = np.repeat(np.array([r.first_token for r in requests]), group)
    return sample_keys(seed, step, prompts=prompts, samples=samples), first


def split(requests: list[Request], group: int, *, max_rows: int) -> Iterator[tuple[list[Request], int]]:
    """Batches of at most `max_rows` rows, in order: (requests, samples of each). A group stays together, and shares
    the prefill of its prompt, unless it is larger than that.
    """
    if group <= max_rows:
        together = max_rows // group
        for start in range(0, len(requests), together):
            yield requests[start : start + together], group
        return
    for request in requests:
        for start in range(0, group, max_rows):
            part = replace(request, first_sample=request.first_sample + start)
            yield [part], min(max_rows, group - start)


def join(parts: list[list[Completion]], group: int) -> list[list[Completion]]:
    flat = [completion for part in parts for completion in part]
    return [flat[i : i + group] for i in range(0, len(flat), group)]


def sample_in_fewer_rows(
    engine: HasRowLimit, wanted: int, attempt: Callable[[int], list[list[Completion]]]
) -> list[list[Completion]]:
    """`attempt(rows)` with as many rows at a time as wanted or allowed; when memory runs out, again with half as many.

    Keyed random numbers give the same samples again, and later calls begin with the lower limit. Raises
    torch.OutOfMemoryError where a single row does not fit.
    """
    while True:
        rows, engine.capacity = min(engine.max_rows or wanted, wanted), None
        try:
            with as_out_of_memory(), torch.inference_mode():
                return attempt(rows)
        except torch.OutOfMemoryError:
            if min(rows, engine.capacity or rows) == 1:
                raise
        engine.release()
        engine.max_rows = max(1, min(rows, engine.capacity or rows) // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def end_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> None:
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


def eos_token_ids(roles: Roles, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a completion: the tokenizer's EOS and the generation config's (chat models list several)."""
    vocabulary = roles.causal.get_input_embeddings().weight.shape[0]  # pyright: ignore
    return {i for i in [tokenizer.eos_token_id, *_listed_eos(roles.causal)] if isinstance(i, int) and i < vocabulary}


def _listed_eos(model: PreTrainedModel) -> list[int]:
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return [i for i in listed if isinstance(i, int)]
