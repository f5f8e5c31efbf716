"""Supervised fine-tuning: next-token likelihood on prompt + completion rows, each ending in EOS.

    for each step: a batch of rows; mean negative log-likelihood over its tokens; an optimizer step

Rows hold `prompt` (text or messages) and `completion`; `text` alone is a row without a prompt. sft.loss_on says which
tokens count: the completion's (default) or all. With model.random_init this pre-trains a small model from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.masking import masked_sum
from tinyrl.components import Options, Parts, load_parts
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, few_held_out, fingerprints, hold_out, read_rows
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.micro_batches import RowSizes, Work
from tinyrl.models.vocabulary import check_ids
from tinyrl.runs.signals import watched
from tinyrl.tasks.prompts import render_prompt, token_ids
from tinyrl.text import listed
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

Example = tuple[list[int], list[int]]  # prompt tokens (at least one), tokens the loss counts


@dataclass
class TextParts(Parts):
    """What supervised fine-tuning needs: tokenised rows."""

    train: list[Example]
    held_out: list[Example]
    row_fingerprints: dict[str, str]

    def check(self) -> list[str]:
        """Whether held-out scores can say something."""
        return few_held_out(self.held_out) if self.config.run.eval_prompts else []


def train(session: Session, parts: TextParts) -> None:
    """Run supervised fine-tuning from the session's current step to run.num_steps."""
    size = min(parts.config.sft.batch_size, len(parts.train))  # no row twice in a step
    parts.roles.use_lora_dropout()
    for step in session.steps():
        chosen = [
            parts.train[i]
            for i in batch_indices(parts.config.run.seed, step, num_prompts=size, num_rows=len(parts.train))
        ]
        tokens = sum(len(target) for _, target in chosen)
        session.start_update()

        def loss_of(
            rows: list[int], chosen: list[Example] = chosen, tokens: int = tokens
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss = negative_log_likelihood(parts, [chosen[i] for i in rows]) / tokens
            return loss, {"loss": loss.detach()}

        one_pass = Pass("policy", loss_of, range(size), sizes_of(parts, chosen))
        with session.timed("update"):
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        session.end_step(**{"completion/tokens": float(tokens)})


def negative_log_likelihood(parts: Parts, examples: list[Example]) -> Tensor:
    """Summed over the counted tokens of some rows, in nats."""
    batch = parts.roles.batch([p for p, _ in examples], [t for _, t in examples])
    logprobs, _ = parts.roles.logprobs("policy", batch, temperature=1.0)
    mask = batch.to_rows(torch.ones(len(batch.targets), device=parts.roles.device)).bool()
    return -masked_sum(logprobs, mask)


def sizes_of(parts: Parts, examples: list[Example]) -> RowSizes:
    """What some rows cost a forward pass."""
    return RowSizes.of([p for p, _ in examples], [len(t) for _, t in examples], packed=parts.roles.packs)


def load(config: Config, *, options: Options) -> TextParts:
    """Read the model and tokenise the rows of task.data; a tenth is held out unless task.eval_data says otherwise."""
    parts = load_parts(config, options=options)
    rows, held_out_rows = text_rows(config)
    train, held_out = (
        [example(row, parts) for row in watched(rows)],
        [example(row, parts) for row in watched(held_out_rows)],
    )
    check_ids((prompt + target for prompt, target in train + held_out), parts.tokenizer, parts.roles.causal)
    return TextParts(**vars(parts), train=train, held_out=held_out, row_fingerprints=fingerprints(rows, held_out_rows))


def text_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of task.data and task.eval_data."""
    where = config.task
    if where.data is None:
        raise ValueError(
            f"task.data is missing: `tinyrl train {config.method}` needs rows to learn from "
            "(.jsonl, .json, .csv, .parquet or a hub name)"
        )
    rows = read_rows(where.data, columns=where.columns, revision=where.revision)
    if where.eval_data is not None:
        held_out = read_rows(where.eval_data, columns=where.columns, revision=where.revision)
        return rows[: where.max_samples], held_out[: where.max_samples]
    train_rows, held_out = hold_out(rows, prompt=lambda row: row.get("prompt", row.get("text")), seed=where.split_seed)
    if not train_rows:
        raise ValueError(f"{where.data}: only one prompt, so none can be held out; give task.eval_data too")
    return train_rows[: where.max_samples], held_out[: where.max_samples]


def example(row: Row, parts: Parts) -> Example:
    """Tokens of one row, EOS included. Text without a prompt is predicted from a BOS (or EOS) in front of it."""
    tokenizer, config = parts.tokenizer, parts.config
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    assert isinstance(start, int)
    completion: Any = row.get("completion", row.get("text"))
    if not isinstance(completion, str):
        raise ValueError(
            f"sft needs rows with `text`, or with `prompt` and `completion` as text; this row has {listed(row)}"
        )
    target = [*token_ids(tokenizer, completion), tokenizer.eos_token_id]  # pyright: ignore
    prompt = row.get("prompt")
    if prompt is None:
        return [start], target
    where = config.task
    tokens = render_prompt(
        tokenizer, prompt, chat=where.chat, system_prompt=where.system_prompt, variables=where.chat_template
    ).tokens
    if config.sft.loss_on == "completion":
        return tokens, target
    return [start], (tokens[1:] if tokens[0] == start else tokens) + target  # one BOS, the prompt's own or ours


def evaluate(parts: TextParts) -> Evaluation:
    """Mean negative log-likelihood of the held-out rows, in nats per token, and perplexity."""
    rows = parts.held_out[: parts.config.run.eval_prompts]
    sums: list[Tensor] = []

    def run(micro: list[int]) -> None:
        sums.append(negative_log_likelihood(parts, [rows[i] for i in micro]).cpu())

    with torch.no_grad(), parts.roles.acting("policy"), parts.accelerator.autocast():
        parts.micro_batches.run(Work(sizes_of(parts, rows), run), restart=sums.clear)
    loss = float(sum(sums)) / max(1, sum(len(t) for _, t in rows))
    return Evaluation({"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "num_rows": len(rows)}, [], [])
