"""Supervised fine-tuning: next-token likelihood of texts, completions, or the assistant's turns of conversations.

    for each step: a batch of rows; mean negative log-likelihood over the tokens that count; an optimizer step

sft.loss_on says which tokens count: the completion's or the assistant's (default), or all. Of a conversation each turn
of the assistant is learnt behind the messages before it; turns that the template renders as one growing text are read
in one pass, which changes no number. With model.random_init this pre-trains a small model from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyrl.data.formats import is_empty, text_examples
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.batches import Work
from tinyrl.rollout.components import Parts
from tinyrl.trainers.rows import Example, RowTrainer, answer_logprobs, rendered, sizes_of
from tinyrl.training.session import Session
from tinyrl.training.update import LossFn


class Sft(RowTrainer):
    """Supervised fine-tuning. A row has an example for each answer, or for several that are one growing text."""

    def examples(self, row: Row) -> list[Example]:
        return turns_of(row, self, system_prompt=self.config.task.system_prompt)

    def loss(self, examples: list[Example], rows: list[int], session: Session) -> tuple[LossFn, dict[str, float]]:
        tokens = sum(example.num_counted for example in examples)

        def loss_of(micro: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            loss = negative_log_likelihood(self, [examples[i] for i in micro]) / tokens
            return loss, {"loss": loss.detach()}

        return loss_of, {"completion/tokens": float(tokens)}

    def evaluate(self) -> Evaluation:
        """Mean negative log-likelihood of the held-out rows, in nats per token, and perplexity."""
        rows = self.held_out[: self.config.run.eval_prompts]
        examples = [example for row in rows for example in row]
        sums: list[Tensor] = []

        def run(micro: list[int]) -> None:
            sums.append(negative_log_likelihood(self, [examples[i] for i in micro]).cpu())

        sizes = sizes_of(self, examples)
        with torch.no_grad(), self.roles.acting("policy"), self.accelerator.autocast():
            self.micro_batches.run(Work(sizes, run, world=self.world), restart=sums.clear)
        loss = sum(self.world.gather(float(sum(sums)))) / max(1, sum(example.num_counted for example in examples))
        return Evaluation({"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "num_rows": len(rows)}, [], [])


def negative_log_likelihood(parts: Parts, examples: Sequence[Example]) -> Tensor:
    """Summed over the counted tokens of some examples, in nats."""
    return -answer_logprobs(parts, "policy", examples).sum()


def turns_of(row: Row, parts: Parts, *, system_prompt: str | None) -> list[Example]:
    """An example for each answer of a row that is not empty. Under sft.loss_on=all everything counts, and so once: of a
    conversation as far as its last answer. Raises ValueError where a row cannot be read or rendered.
    """
    wanted, tokenizer = text_examples(row), parts.tokenizer
    if parts.config.sft.loss_on == "completion":
        wanted = [w for w in wanted if not is_empty(w.answer)]
        return [rendered(parts, w.prompt, w.answer, tools=w.tools, system_prompt=system_prompt) for w in wanted]
    last = wanted[-1]
    whole = rendered(parts, last.prompt, last.answer, tools=last.tools, system_prompt=system_prompt)
    if last.prompt is None:
        return [whole]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    assert isinstance(start, int)
    (tokens,) = whole.texts
    return [Example([start], (tokens[1:] if tokens[0] == start else tokens,))]  # one BOS, its own or ours
