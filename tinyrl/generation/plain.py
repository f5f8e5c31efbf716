"""Sampling through the library's modules in plain batches, for models that no decoder with a cache of rows samples from
correctly. Rows whose prompts have the same length begin together, so there is no padding, and the batch ends with its
last row. Nothing of a sequence outlives it: each turn of an episode is prefilled from the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.drawing import advanced, row_params, sample_tokens, uniforms
from tinyrl.generation.engine import BatchScheduler, SamplingEngine
from tinyrl.generation.request import DecodedSequence, SampledRole
from tinyrl.models.device import to_device
from tinyrl.models.logprobs import head_of
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of


def next_states(backbone: nn.Module, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Return the hidden states (R, H) after tokens (R, L) behind those in the cache."""
    return backbone(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]


class PlainEngine(SamplingEngine):
    """Samples in batches of prompts of one length, in the dtype of training passes."""

    name = "plain"

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig) -> None:
        super().__init__(policy, tokenizer, settings)
        self.exact = policy.dtype == torch.float32
        self.look_every = 1

    @contextmanager
    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Iterator[PlainScheduler]:
        with self.policy.acting(role) as model, self.policy.run_device.autocast(keeps_casts=False):
            yield PlainScheduler(self, model, capacity=rows)


class PlainScheduler(BatchScheduler):
    """Batches of at most `capacity` sequences whose prompts have the same length."""

    def __init__(self, engine: PlainEngine, model: PreTrainedModel, *, capacity: int) -> None:
        super().__init__()
        self.engine = engine
        self.capacity = capacity
        self.device = engine.policy.device
        self.backbone = backbone_of(model)
        self.head = head_of(model)

    def step(self) -> list[DecodedSequence]:
        """Decode every row by one token; return the sequences that have ended."""
        if not self.busy:
            return []
        if not self.rows:
            self._begin()
        states = next_states(self.backbone, self.ids, self.cache)
        keys = np.array([s.request.key for s in self.rows], dtype=np.uint64)
        u = uniforms(advanced(keys, np.array([len(s.tokens) for s in self.rows])), num_tokens=1)[:, 0]
        tokens, logprobs = sample_tokens(self.head.logits(states), to_device(u, self.device), self.params)
        self.ids = tokens.unsqueeze(-1)
        going = [not s.over for s in self.rows]
        for sequence, goes, t, p in zip(self.rows, going, tokens.tolist(), logprobs.tolist(), strict=True):
            if goes:
                sequence.append([t], [p], eos=self.engine.eos, tokenizer=self.engine.tokenizer)
        ended = [s for s, goes in zip(self.rows, going, strict=True) if goes and s.over]
        if all(s.over for s in self.rows):
            self.rows = []
        return ended

    def _begin(self) -> None:
        """Begin with the first sequence that waits, and others whose prompts are as long."""
        length = len(self.waiting[0].request.prompt)
        self.rows = [s for s in self.waiting if len(s.request.prompt) == length][: self.capacity]
        begun = {id(s) for s in self.rows}
        self.waiting = deque(s for s in self.waiting if id(s) not in begun)
        self.ids = to_device(torch.tensor([s.request.prompt for s in self.rows]), self.device)
        self.params = row_params([s.request for s in self.rows], self.device)
        self.cache = DynamicCache(config=self.backbone.config)  # pyright: ignore[reportArgumentType]
