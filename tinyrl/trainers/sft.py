"""Supervised fine-tuning: next-token likelihood of texts, completions, or the assistant's turns of conversations.

    for each step: a batch of rows; mean negative log-likelihood over the tokens that count; an optimizer step

Rows are read by their columns (data/formats.py) and become tokens as the policy meets them later: the prompt as it is
sampled from, and behind it the answer through its end-of-turn token (tasks/answers.py). sft.loss_on says
which tokens count: the completion's or the assistant's (default), or all. Of a conversation each turn of the assistant
is learnt behind the messages before it; turns that the template renders as one growing text are read in one pass, which
changes no number. With model.random_init this pre-trains a small model from scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tinyrl.algorithms.masking import masked_sum
from tinyrl.data.formats import beginning, described, is_empty, quoting, text_examples
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.micro_batches import RowSizes, Work, own_rows
from tinyrl.models.tokens import readable
from tinyrl.rollout.components import Parts
from tinyrl.runs.signals import watched
from tinyrl.tasks.answers import render_answer
from tinyrl.text import excerpt, visible
from tinyrl.training.session import Session
from tinyrl.training.trainer import Batch, RowTrainer

SHOWN = 2000  # characters of each piece of an example in a preview


class Example(NamedTuple):
    """Tokens that are read, at least one, and those behind them, of which the loss counts some (None: all)."""

    prompt: list[int]
    target: list[int]
    counts: list[bool] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.target)

    @property
    def num_counted(self) -> int:
        return len(self.target) if self.counts is None else sum(self.counts)


class Sft(RowTrainer):
    """Supervised fine-tuning. A row is the examples it holds."""

    train_rows: list[list[Example]]
    held_out: list[list[Example]]

    def batch(self, rows: list[int], session: Session | None = None) -> Batch:
        examples = [example for row in rows for example in self.train_rows[row]]
        tokens = sum(example.num_counted for example in examples)

        def loss_of(micro: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            loss = negative_log_likelihood(self, [examples[i] for i in micro]) / tokens
            return loss, {"loss": loss.detach()}

        return Batch(loss_of, sizes_of(self, examples), {"completion/tokens": float(tokens)})

    def evaluate(self) -> Evaluation:
        """Mean negative log-likelihood of the held-out rows, in nats per token, and perplexity."""
        rows = self.held_out[: self.config.run.eval_prompts]
        examples = [example for row in rows for example in row]
        sums: list[Tensor] = []

        def run(micro: list[int]) -> None:
            sums.append(negative_log_likelihood(self, [examples[i] for i in micro]).cpu())

        sizes = sizes_of(self, examples)
        with torch.no_grad(), self.roles.acting("policy"), self.accelerator.autocast():
            self.micro_batches.run(Work(sizes, run, own_rows(sizes, None, self.world)), restart=sums.clear)
        loss = sum(self.world.gather(float(sum(sums)))) / max(1, sum(example.num_counted for example in examples))
        return Evaluation({"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "num_rows": len(rows)}, [], [])

    def read(self, rows: list[Row], held_out: list[Row]) -> tuple[list[list[Example]], list[list[Example]]]:
        both = self.tokenised(rows), self.tokenised(held_out)
        self.notes[:0] = described(rows, "text")
        return both

    def tokenised(self, rows: list[Row]) -> list[list[Example]]:
        """The examples of each row, without those that the model has no positions for under task.long_prompts=drop.
        Raises ValueError for rows that cannot be read, and for those otherwise.
        """
        most = self.positions
        kept: list[list[Example]] = []
        long: list[tuple[int, int]] = []  # row, tokens
        count = 0
        for number, row in enumerate(watched(rows), start=1):
            turns = turns_of(row, self, system_prompt=self.config.task.system_prompt)
            count += len(turns)
            long += [(number, turn.length) for turn in turns if turn.length > most]
            fitting = [turn for turn in turns if turn.length <= most]
            kept += [joined(fitting)] if fitting else []
        if long:
            number, tokens = long[0]
            first = f"first: row {number} with {tokens}, which begins {beginning(rows[number - 1])}"
            said = f"{len(long)} of {count} examples have more tokens than the model's {most} positions ({first})"
            if self.config.task.long_prompts == "error" or not kept:
                raise ValueError(f"{said}. Cut them, or leave them out with task.long_prompts=drop.")
            self.notes.append(f"warning: {said}; they are left out")
        return kept

    def texts(self, row: list[Example]) -> list[list[int]]:
        return [tokens_of(row)]

    def shown(self, row: list[Example]) -> list[str]:
        lines = []
        for counts, tokens in spans(row[0]):
            cut = excerpt(readable(self.tokenizer, tokens), SHOWN)
            text = f"{cut.head} [{cut.omitted:,} characters] {cut.tail}" if cut.omitted else cut.head
            lines.append(f"{'learnt' if counts else 'read'} ({len(tokens)} tokens): {visible(text)}")
        return lines


def negative_log_likelihood(parts: Parts, examples: list[Example]) -> Tensor:
    """Summed over the counted tokens of some examples, in nats."""
    masks = [e.counts or [True] * len(e.target) for e in examples]
    batch = parts.roles.batch([e.prompt for e in examples], [e.target for e in examples], masks)
    logprobs, _ = parts.roles.logprobs("policy", batch, temperature=1.0)
    mask = batch.to_rows(torch.ones(len(batch.targets), device=parts.roles.device)).bool()
    return -masked_sum(logprobs, mask)


def sizes_of(parts: Parts, examples: list[Example]) -> RowSizes:
    return RowSizes.of([e.prompt for e in examples], [len(e.target) for e in examples], packed=parts.roles.packs)


# ---- rows as tokens ----


def turns_of(row: Row, parts: Parts, *, system_prompt: str | None) -> list[Example]:
    """An example for each answer of a row that is not empty. Under sft.loss_on=all everything counts, and so once: of a
    conversation as far as its last answer. Raises ValueError, quoting the row, where it cannot be read or rendered.
    """
    where, tokenizer = parts.config.task, parts.tokenizer
    how = {"chat": where.chat, "system_prompt": system_prompt, "variables": where.chat_template}
    with quoting(row):
        wanted = text_examples(row)
        if parts.config.sft.loss_on == "completion":
            wanted = [w for w in wanted if not is_empty(w.answer)]
            return [Example(*render_answer(tokenizer, w.prompt, w.answer, tools=w.tools, **how)) for w in wanted]
        tokens, target = render_answer(tokenizer, wanted[-1].prompt, wanted[-1].answer, tools=wanted[-1].tools, **how)
    if wanted[-1].prompt is None:
        return [Example(tokens, target)]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    assert isinstance(start, int)
    return [Example([start], (tokens[1:] if tokens[0] == start else tokens) + target)]  # one BOS, its own or ours


def joined(turns: list[Example]) -> list[Example]:
    """The same examples in fewer passes: one whose prompt begins with all of the one before goes on behind it.

    What a token is predicted from stays the same, so no number changes; a conversation of n turns is read once instead
    of n times. Where a template strips the thinking of earlier turns, the prompt differs and the turns stay apart.
    """
    out: list[Example] = []
    for turn in turns:
        before = out[-1] if out else None
        read = [] if before is None else before.prompt + before.target
        if before is None or turn.prompt[: len(read)] != read:
            out.append(turn)
            continue
        between = turn.prompt[len(read) :]
        counts = before.counts or [True] * len(before.target)
        counts = counts + [False] * len(between) + [True] * len(turn.target)
        out[-1] = Example(before.prompt, before.target + between + turn.target, counts)
    return out


def spans(example: Example) -> Iterator[tuple[bool, list[int]]]:
    """The tokens of an example in order, in pieces that are learnt (True) or only read."""
    yield False, example.prompt
    counts = example.counts or [True] * len(example.target)
    start = 0
    for at in range(1, len(counts) + 1):
        if at == len(counts) or counts[at] != counts[start]:
            yield counts[start], example.target[start:at]
            start = at


def tokens_of(row: list[Example]) -> list[int]:
    return [token for example in row for token in (*example.prompt, *example.target)]
