"""The hf sampling engine: a left-padded batch through the library's own modules and cache, for any architecture.

It is simple, so the other engines are tested against it. A prompt is prefilled once for its group, rows are dropped as
they finish, and log-probabilities are recorded while decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.generation.engine import (
    LocalEngine,
    RowParams,
    SampledRole,
    SamplingSettings,
    Sequence,
    draw,
    truncate,
    uniforms,
)
from tinyrl.models.batches import backbone_of
from tinyrl.models.device import to_device
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora import POLICY_ADAPTER, adapted_parameter
from tinyrl.models.roles import Roles, weight_bytes

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
