"""The hf sampling engine: a left-padded batch through the library's own modules and cache.

It is simple, so the other engines are tested against it. Prompts are prefilled once per group, rows are dropped as
they finish, and log-probabilities are recorded while decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack, get_args

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from tinyrl.generation.engine import (
    LOOK_EVERY,
    Completion,
    FinishReason,
    LocalEngine,
    Request,
    SampleOptions,
    SamplingSettings,
    draw,
    eos_token_ids,
    grouped,
    max_new_tokens,
    row_keys,
    stop_said_at,
    truncate,
    uniforms,
)
from tinyrl.models.batches import backbone_of
from tinyrl.models.device import to_device
from tinyrl.models.logprobs import head_of
from tinyrl.models.lora import POLICY_ADAPTER, adapted_parameter
from tinyrl.models.memory import weight_bytes
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop

# Rows are dropped when fewer than this share of the batch is still going: copying the cache costs about one token.
COMPACT_BELOW = 0.8
REASONS = get_args(FinishReason)


class HfEngine(LocalEngine):
    """merged: with the role's adapter merged into private copies of the weights while it samples, for models that the
    fused engine does not support.
    """

    def __init__(
        self, roles: Roles, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, *, merged: bool = False
    ) -> None:
        self.roles, self.tokenizer, self.settings, self.merged = roles, tokenizer, settings, merged
        self.name, self.max_rows = "hf-merged" if merged else "hf", settings.max_rows
        self.exact = roles.causal.dtype == torch.float32
        self.look_every = LOOK_EVERY[roles.device.type]  # a number read from a GPU is waited for
        self.eos = torch.tensor(sorted(eos_token_ids(roles, tokenizer)), dtype=torch.long, device=roles.device)
        layers = roles.adapted_layers(POLICY_ADAPTER) if merged else []
        self.copy_bytes = weight_bytes(getattr(*adapted_parameter(layer)) for layer in layers)

    def sample(
        self, requests: list[Request], samples_per_request: int, **options: Unpack[SampleOptions]
    ) -> list[list[Completion]]:
        def attempt(rows: int) -> list[list[Completion]]:
            acting = self.roles.acting_merged if self.merged else self.roles.acting
            with acting(options.get("role", "policy")) as model:
                flat = [
                    completion
                    for batch, group in split(requests, samples_per_request, max_rows=rows)
                    for completion in Decoding(self, model, batch, group, options).run()
                ]
            return grouped(flat, samples_per_request)

        return self.in_fewer_rows(max(1, len(requests) * samples_per_request), attempt)

    def on_token(self, rows: Tensor, alive: Tensor, tokens: Tensor) -> None:
        """Told of the tokens of a step as they are drawn, of which rows they are, and which of these still go on. An
        engine that is listened to overrides it.
        """


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


class Decoding:
    def __init__(
        self, engine: HfEngine, model: torch.nn.Module, requests: list[Request], group: int, options: SampleOptions
    ) -> None:
        self.engine, self.settings, self.requests, self.group = engine, engine.settings, requests, group
        self.greedy = options.get("greedy", False)
        self.backbone, self.head = backbone_of(model), head_of(model)
        self.device = engine.roles.device
        self.num_rows = len(requests) * group
        keys, first = row_keys(requests, group, seed=options["seed"], step=options["step"])
        limits = torch.tensor([max_new_tokens(r, self.settings) for r in requests]).repeat_interleave(group)
        self.width = int(limits.max())
        self.limits = to_device(limits, self.device)
        self.uniforms = to_device(uniforms(keys, num_tokens=self.width, first=first), self.device)
        self.tokens = torch.zeros(self.num_rows, self.width, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(self.num_rows, self.width, device=self.device)
        self.lengths = self.limits.clone()
        self.reasons = torch.full((self.num_rows,), REASONS.index("length"), device=self.device)

    def run(self) -> list[Completion]:
        logits, cache, mask = self._prefill()
        rows = torch.arange(self.num_rows, device=self.device)  # which rows are still in the batch
        alive = torch.ones_like(rows, dtype=torch.bool)  # and which of those are still going
        for t in range(self.width):
            check_stop()
            token, logprob = self._draw(logits, self.uniforms[rows, t])
            self.tokens[rows, t] = torch.where(alive, token, 0)
            self.logprobs[rows, t] = torch.where(alive, logprob, 0.0)
            self.engine.on_token(rows, alive, token)
            alive = self._still_going(t, rows, alive, token)
            if t + 1 == self.width:
                break
            if (t + 1) % self.engine.look_every == 0:
                going = int(alive.sum())
                if going == 0:
                    break
                if going < COMPACT_BELOW * len(rows):
                    keep = alive.nonzero().squeeze(-1)
                    _take_rows(cache, keep)
                    rows, mask, token, alive = rows[keep], mask[keep], token[keep], alive[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(token.unsqueeze(-1), mask, cache)
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        ends = zip(self.lengths.tolist(), self.reasons.tolist(), strict=True)
        return [Completion(tokens[r][:n], logprobs[r][:n], REASONS[why]) for r, (n, why) in enumerate(ends)]

    def _prefill(self) -> tuple[Tensor, DynamicCache, Tensor]:
        width = max(len(r.prompt_tokens) for r in self.requests)
        ids = torch.zeros(len(self.requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(self.requests):
            ids[i, width - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask[i, width - len(request.prompt_tokens) :] = 1
        ids, mask = to_device(ids, self.device), to_device(mask, self.device)
        cache = DynamicCache(config=self.backbone.config)  # pyright: ignore
        logits = self._forward(ids, mask, cache)
        source = torch.arange(self.num_rows, device=self.device) // self.group
        _take_rows(cache, source)
        return logits[source], cache, mask[source]

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits (rows, V) after the last position of `ids`, over the temperature."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.backbone(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return self.head.logits(output.last_hidden_state[:, -1]) / self.settings.temperature

    def _draw(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """One token a row, and its log-probability under the distribution that training scores."""
        log_p = logits.log_softmax(-1)
        if self.greedy:
            token = log_p.argmax(-1)
        else:
            probs = log_p.exp()
            if self.settings.top_k or self.settings.top_p < 1:
                probs = truncate(probs, top_k=self.settings.top_k, top_p=self.settings.top_p)
            token = draw(probs, u)[0]
        return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)

    def _still_going(self, t: int, rows: Tensor, alive: Tensor, token: Tensor) -> Tensor:
        alive = self._finish(t, rows, alive, torch.isin(token, self.engine.eos), "eos")
        if stop := self.settings.stop:
            texts = zip(self.tokens[rows, : t + 1].tolist(), alive.tolist(), strict=True)
            tokenizer = self.engine.tokenizer
            said = [going and stop_said_at(tokens, stop, tokenizer, look_at=1) is not None for tokens, going in texts]
            alive = self._finish(t, rows, alive, to_device(torch.tensor(said), self.device), "stop")
        return alive & (self.limits[rows] > t + 1)

    def _finish(self, t: int, rows: Tensor, alive: Tensor, ended: Tensor, reason: FinishReason) -> Tensor:
        ended = alive & ended
        self.lengths[rows] = torch.where(ended, t + 1, self.lengths[rows])
        self.reasons[rows] = torch.where(ended, REASONS.index(reason), self.reasons[rows])
        return alive & ~ended


def _take_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep these rows of the cache, in this order and as often as named. Of all that a cache offers for it, this alone
    exists for every kind of layer (not only attention: Qwen3.5's have recurrent states).
    """
    cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
