"""Supervised fine-tuning: next-token likelihood of texts, completions, or the assistant's turns of conversations.

    for each step: a batch of rows; mean negative log-likelihood over the tokens that count; an optimizer step

Rows are read by their columns (data/shapes.py) and become tokens as the policy meets them later: the prompt as it is
sampled from, and behind it the answer through its end-of-turn token (tasks/answers.py). sft.loss_on says
which tokens count: the completion's or the assistant's (default), or all. Of a conversation each turn of the assistant
is learnt behind the messages before it; turns that the template renders as one growing text are read in one pass, which
changes no number. With model.random_init this pre-trains a small model from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyrl.algorithms.masking import masked_sum
from tinyrl.components import Options, load_parts
from tinyrl.config.schema import Config
from tinyrl.data.described import described
from tinyrl.data.rows import batch_indices, example_rows, few_held_out, fingerprints
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.micro_batches import RowSizes, StepRows, Work, own_rows
from tinyrl.models.weight_checks import check_ids
from tinyrl.parts import Parts
from tinyrl.trainers.examples import Example, shown, tokenised, tokens_of
from tinyrl.training.session import Session
from tinyrl.training.update import Pass


@dataclass
class TextParts(Parts):
    """What supervised fine-tuning needs: the examples of each row. `notes`: what the rows were taken for."""

    train: list[list[Example]]
    held_out: list[list[Example]]
    row_fingerprints: dict[str, str]
    notes: list[str]

    def check(self) -> list[str]:
        """What the rows were taken for, and whether the chat template and held-out scores can say something."""
        few = few_held_out(self.held_out) if self.config.run.eval_prompts else []
        return [*self.notes, *self.template_warnings(), *few]

    def step_rows(self) -> StepRows:
        """The longest examples."""
        size = min(self.config.sft.batch_size, len(self.train))
        longest = sorted(self.train, key=lambda row: -sum(one.length for one in row))[:size]
        examples = [example for row in longest for example in row]
        return StepRows([[(e.prompt, e.target)] for e in examples], sizes_of(self, examples), len(examples))

    def preview(self) -> str:
        """What the rows were taken for, and one as the model reads it."""
        count = f"rows: {len(self.train)} to train on, {len(self.held_out)} held out"
        return "\n".join([super().preview(), *self.check(), *shown(self.train[0][0], self.tokenizer), count])

    def on_training_rows(self) -> TextParts:
        """The same with the rows that are trained on in place of the held-out ones."""
        return replace(self, held_out=self.train)


def train(session: Session, parts: TextParts) -> None:
    """Run supervised fine-tuning from the session's current step to run.num_steps."""
    size = min(parts.config.sft.batch_size, len(parts.train))  # at most all there are
    parts.roles.use_lora_dropout()
    for step in session.steps():
        rows = batch_indices(parts.config.run.seed, step, num_prompts=size, num_rows=len(parts.train))
        chosen = [example for row in rows for example in parts.train[row]]
        tokens = sum(example.num_counted for example in chosen)
        session.start_update()

        def loss_of(
            rows: list[int], chosen: list[Example] = chosen, tokens: int = tokens
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss = negative_log_likelihood(parts, [chosen[i] for i in rows]) / tokens
            return loss, {"loss": loss.detach()}

        one_pass = Pass("policy", loss_of, range(len(chosen)), sizes_of(parts, chosen))
        with session.timed("update"):
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        session.end_step(**{"completion/tokens": float(tokens)})


def negative_log_likelihood(parts: Parts, examples: list[Example]) -> Tensor:
    """Summed over the counted tokens of some examples, in nats."""
    masks = [e.counts or [True] * len(e.target) for e in examples]
    batch = parts.roles.batch([e.prompt for e in examples], [e.target for e in examples], masks)
    logprobs, _ = parts.roles.logprobs("policy", batch, temperature=1.0)
    mask = batch.to_rows(torch.ones(len(batch.targets), device=parts.roles.device)).bool()
    return -masked_sum(logprobs, mask)


def sizes_of(parts: Parts, examples: list[Example]) -> RowSizes:
    """What some examples cost a forward pass."""
    return RowSizes.of([e.prompt for e in examples], [len(e.target) for e in examples], packed=parts.roles.packs)


def load(config: Config, *, options: Options) -> TextParts:
    """Read the model and tokenise the rows of task.data; a tenth is held out unless task.eval_data says otherwise."""
    parts = load_parts(config, options=options)
    rows, held_out_rows = example_rows(config)
    train, left_out = tokenised(rows, parts)
    held_out, left_out_there = tokenised(held_out_rows, parts)
    check_ids((tokens_of(row) for row in train + held_out), parts.tokenizer, parts.roles.causal)
    notes = [*described(rows, "text"), *left_out, *left_out_there]
    return TextParts(
        **vars(parts), train=train, held_out=held_out, row_fingerprints=fingerprints(rows, held_out_rows), notes=notes
    )


def evaluate(parts: TextParts) -> Evaluation:
    """Mean negative log-likelihood of the held-out rows, in nats per token, and perplexity."""
    rows = parts.held_out[: parts.config.run.eval_prompts]
    examples = [example for row in rows for example in row]
    sums: list[Tensor] = []

    def run(micro: list[int]) -> None:
        sums.append(negative_log_likelihood(parts, [examples[i] for i in micro]).cpu())

    sizes = sizes_of(parts, examples)
    with torch.no_grad(), parts.roles.acting("policy"), parts.accelerator.autocast():
        parts.micro_batches.run(Work(sizes, run, own_rows(sizes, None, parts.world)), restart=sums.clear)
    loss = sum(parts.world.gather(float(sum(sums)))) / max(1, sum(example.num_counted for example in examples))
    return Evaluation({"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "num_rows": len(rows)}, [], [])
