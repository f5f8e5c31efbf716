"""Sampling engines: requests in, samples out; and which tokens end a completion.

Each samples through a scheduler: rows of a decoder's cache (scheduler.py), or batches, plain ones (plain.py) or of
requests to a server (server.py).

A token is drawn by inverse CDF (drawing.py). Its uniform comes from (seed, step, prompt, sample, t) by a counter-based
hash, so the same request gives the same completion, to float32 rounding, whichever rows share its batch, from every
engine, after a split for memory and after a restart.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig as ModelGeneration
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig, TaskConfig
from tinyrl.generation.drawing import sample_keys
from tinyrl.generation.play import Play
from tinyrl.generation.request import DecodedSequence, Request, SampledRole
from tinyrl.generation.sample import Sample
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.loading import embedding_rows
from tinyrl.models.policy import Policy
from tinyrl.process.signals import check_stop
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import in_chat

if TYPE_CHECKING:
    from tinyrl.generation.scheduler import Scheduler
    from tinyrl.generation.turns import Episodes

LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have ended: a GPU waits for each look
Result = TypeVar("Result")


class BatchScheduler:
    """Sequences that are sampled in batches: those that wait begin together when all before have ended. It holds no
    row for those that go on. Otherwise as scheduler.Scheduler.
    """

    capacity = width = 1 << 60

    def __init__(self) -> None:
        self.waiting: deque[DecodedSequence] = deque()
        self.rows: list[DecodedSequence] = []  # of the batch under way; some may have ended

    def add(self, sequences: list[DecodedSequence]) -> None:
        self.waiting += sequences

    def drop(self, sequence: DecodedSequence) -> None:
        """Nothing is held for a sequence."""

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    @property
    def stalled(self) -> bool:
        return not self.busy

    def step(self) -> list[DecodedSequence]:
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

    def requests_for(
        self,
        prompt: list[int],
        count: int,
        *,
        row: int,
        seed: int,
        step: int,
        first: int = 0,
        limit: int | None = None,
        greedy: bool = False,
        role: SampledRole = "policy",
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> list[Request]:
        """Ask for `count` samples of a prompt, by the settings of the run. The i-th is drawn by the key (seed, step,
        row, first + i), row being the prompt's row in the data.

        limit: the most new tokens of each (None: generation.max_new_tokens).
        """
        settings = self.settings
        keys = sample_keys(seed, step, prompts=np.full(count, row), samples=np.arange(count) + first)
        return [
            Request(
                prompt=prompt,
                key=key,
                limit=limit or settings.max_new_tokens,
                row=row,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                greedy=greedy,
                stop=settings.stop,
                role=role,
                on_tokens=on_tokens,
            )
            for key in keys
        ]

    def sample(self, requests: list[Request]) -> list[Sample]:
        """Sample what is asked for, in order, from the weights of a role as they are now: that of all the requests.

        Raises torch.OutOfMemoryError when a single row does not fit.
        """

        def attempt(rows: int) -> list[Sample]:
            sequences = [DecodedSequence(request) for request in requests]
            width = max(sequence.room for sequence in sequences)
            with self.scheduler(role_of(requests), rows=rows, width=width) as scheduler:
                scheduler.add(sequences)
                while scheduler.busy:
                    check_stop()
                    scheduler.step()
            return [sequence.sample() for sequence in sequences]

        if not requests:
            return []
        self.start(prompts_of(requests))
        return self.in_fewer_rows(len(requests), attempt)

    def play(self, requests: list[Request], *, episodes: Episodes) -> None:
        """Play `episodes` of several turns, one for each request, which gather what was sampled, and return what is
        prefilled after a turn and how long the next may be (play.py).
        """

        def attempt(rows: int) -> None:
            episodes.restart()
            width = max(len(request.prompt) for request in requests) + episodes.max_episode_tokens
            with self.scheduler(role_of(requests), rows=rows, width=width) as scheduler:
                Play(requests, episodes=episodes, scheduler=scheduler).run(overlaps=self.overlaps)

        if requests:
            self.start(prompts_of(requests))
            self.in_fewer_rows(len(requests), attempt)

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


def role_of(requests: list[Request]) -> SampledRole:
    """Return the role that all requests sample from."""
    role = requests[0].role
    assert all(request.role == role for request in requests)
    return role


def prompts_of(requests: list[Request]) -> list[list[int]]:
    """Return the prompt of each row of the data, in order."""
    return [*{request.row: request.prompt for request in requests}.values()]


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
