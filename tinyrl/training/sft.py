"""Supervised fine-tuning: next-token likelihood of texts, completions, or the assistant's turns of conversations.

    for each step: a batch of rows; mean negative log-likelihood over the tokens that count; an optimizer step

sft.loss_on says which tokens count: the completion's or the assistant's (default), or all. Of a conversation each turn
of the assistant is learnt behind the messages before it; turns that the template renders as one growing text are read
in one pass, which changes no number. With model.random_init this pre-trains a small model from scratch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.data.formats import is_empty, text_examples
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.batch import Batch, Example
from tinyrl.models.policy import Policy
from tinyrl.training.method import Pass
from tinyrl.training.rows import RowMethod, rendered
from tinyrl.training.run import Run


class Sft(RowMethod):
    """Supervised fine-tuning. A row has an example for each answer, or for several that are one growing text."""

    def examples(self, row: Row, variables: dict[str, Any]) -> list[Example]:
        return turns_of(row, self.policy, system_prompt=self.config.task.system_prompt, variables=variables)

    def make_pass(self, examples: list[Example], rows: list[int], run: Run) -> tuple[Pass, dict[str, float]]:
        tokens = sum(sum(one.learnt) for one in examples)
        one_pass = Pass("policy", examples, partial(self.loss, tokens=tokens))
        return one_pass, {"completion/tokens": float(tokens)}

    def loss(self, batch: Batch, *, tokens: int) -> tuple[Tensor, Metrics]:
        """Compute the mean negative log-likelihood; `tokens` are learnt in the whole step."""
        loss = negative_log_likelihood(self.policy, batch) / tokens
        return loss, {"loss": loss.detach()}

    def evaluate(self) -> Evaluation:
        """Compute the mean negative log-likelihood of the held-out rows, in nats per token, and perplexity."""
        rows = self.held_out[: self.config.run.eval_prompts]
        examples = [example for row in rows for example in row]

        def of_each(batch: Batch) -> tuple[Tensor]:
            return (-self.policy.logprobs("policy", batch, temperature=1.0)[0].sum(1, keepdim=True),)

        (each,) = self.policy.map_samples(of_each, examples, role="policy", width=1)
        loss = float(each.double().sum()) / max(1, sum(sum(one.learnt) for one in examples))
        return Evaluation({"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "num_rows": len(rows)})


def negative_log_likelihood(policy: Policy, batch: Batch) -> Tensor:
    """Sum over the learnt tokens of a batch, in nats; the policy must be acting."""
    return -policy.logprobs("policy", batch, temperature=1.0)[0].sum()


def turns_of(row: Row, policy: Policy, *, system_prompt: str | None, variables: dict[str, Any]) -> list[Example]:
    """Make an example for each answer of a row that is not empty; under sft.loss_on=all one of the whole text, of a
    conversation as far as its last answer. Raises ValueError where a row cannot be rendered.
    """
    wanted = text_examples(row)
    tokenizer = policy.tokenizer
    how: Any = {"system_prompt": system_prompt, "variables": variables}
    if policy.config.sft.loss_on == "completion":
        wanted = [w for w in wanted if not is_empty(w.answer)]
        return [rendered(policy, w.prompt, w.answer, tools=w.tools, **how) for w in wanted]
    last = wanted[-1]
    whole = rendered(policy, last.prompt, last.answer, tools=last.tools, **how)
    if last.prompt is None:
        return [whole]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    assert isinstance(start, int)
    (tokens,) = whole.texts
    return [Example([start], (tokens[1:] if tokens[0] == start else tokens,))]  # one BOS, its own or ours
