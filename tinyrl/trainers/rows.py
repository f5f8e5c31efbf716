"""Learning from rows, shared by SFT, DPO and reward models: rows as tokens, and the loop over them.

    for each step: a batch of rows; the loss of the method on its examples; an optimizer step

Rows are read by their columns (data/formats.py) and become tokens as the policy meets them later: the prompt as it is
sampled from, and behind it the answer through its end-of-turn token (tasks/answers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from torch import Tensor

from tinyrl.config.schema import Config
from tinyrl.data.formats import (
    EQUAL,
    Objective,
    Side,
    beginning,
    described,
    leave_out,
    objective_of,
    quoting,
    shared_prompt,
)
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, example_rows, few_held_out, fingerprints, prompt_key
from tinyrl.models.batches import RowSizes
from tinyrl.models.loading import check_ids
from tinyrl.models.tokens import readable
from tinyrl.rollout.components import Options, Parts
from tinyrl.runs.signals import watched
from tinyrl.tasks.answers import render_answer
from tinyrl.tasks.prompts import marker_notes
from tinyrl.text import shortened
from tinyrl.training.session import Session, Trainer
from tinyrl.training.update import LossFn, Pass

SHOWN = 2000  # characters of each piece of an example in a preview


class Example(NamedTuple):
    """Tokens that are read, at least one, and an answer behind them, or two: chosen and rejected.

    masks: which tokens of each answer are learnt (None: all); value: the margin of a pair, or the label of an answer.
    """

    prompt: list[int]
    answers: tuple[list[int], ...]
    masks: tuple[list[bool], ...] | None = None
    value: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt with its longest answer."""
        return len(self.prompt) + max(map(len, self.answers))

    @property
    def learnt(self) -> list[int]:
        """Number of learnt tokens of each answer."""
        return [sum(mask) for mask in self.masks] if self.masks else [len(answer) for answer in self.answers]

    @property
    def num_counted(self) -> int:
        return sum(self.learnt)

    @property
    def texts(self) -> list[list[int]]:
        """Each answer behind its prompt."""
        return [self.prompt + answer for answer in self.answers]


class RowTrainer(Trainer):
    """A method that learns from rows of task.data. A subclass gives the examples of a row and the loss of a batch.

    train_rows, held_out: the examples of each row; notes: what the rows were taken for, and which are left out.
    """

    def __init__(self, config: Config, *, options: Options) -> None:
        self.notes: list[str] = []
        rows, held_out = example_rows(config, self.notes)  # a bad row is reported before a weight is loaded
        super().__init__(config, options=options)
        self.objective: Objective = objective_of(rows[0]) if config.trains.rows == "judged" else "pairs"
        self.notes += described(rows, "text" if config.trains.rows == "text" else self.objective)
        self.row_fingerprints = fingerprints(rows, held_out)
        self.has_prompts = all(row.get("prompt") is not None for row in rows)
        self.train_rows, self.held_out = self.tokenised(rows), self.tokenised(held_out)
        self.notes += marker_notes(self.tokenizer, rows + held_out, chat=self.config.task.chat)
        if config.run.eval_prompts:
            trained_on = {*map(id, held_out)} <= {*map(id, rows)}
            different = {prompt_key(shared_prompt(row)) for row in held_out}
            self.notes += few_held_out(len(different), trained_on=trained_on)
        texts = (text for row in self.train_rows + self.held_out for text in self.texts(row))
        check_ids(texts, self.tokenizer, self.roles.causal)

    def examples(self, row: Row) -> list[Example]:
        """Tokenise a row. Raises ValueError where it cannot be rendered."""
        raise NotImplementedError

    def loss(self, examples: list[Example], rows: list[int], session: Session) -> tuple[LossFn, dict[str, float]]:
        """Return the loss of some of a step's examples, by their place, and metrics. `rows` are the training rows."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[int, str]:
        """Most tokens of an example, and what limits them."""
        return self.positions, f"the model's {self.positions} positions"

    @property
    def batch_size(self) -> int:
        """Rows of a step: at most all there are."""
        size: int = self.config.own.batch_size
        return min(size, len(self.train_rows))

    def train(self, session: Session) -> None:
        self.roles.lora_dropout = True
        for step in session.steps():
            rows = batch_indices(self.config.run.seed, step, num_prompts=self.batch_size, num_rows=len(self.train_rows))
            one_pass, metrics = self.batch(rows, session)
            session.start_update()
            with session.timed("update"):
                session.metrics.add(session.updater.step([one_pass], train=["policy"]))
            session.end_step(**metrics)

    def batch(self, rows: list[int], session: Session) -> tuple[Pass, dict[str, float]]:
        examples = [example for row in rows for example in self.train_rows[row]]
        loss, metrics = self.loss(examples, rows, session)
        return Pass("policy", loss, range(len(examples)), sizes_of(self, examples)), metrics

    def check(self) -> list[str]:
        return [*self.notes, *(self.template_warnings() if self.config.trains.policy else [])]

    def tokenised(self, rows: list[Row]) -> list[list[Example]]:
        """Tokenise rows. Those with two equal answers are left out, and examples that are too long under
        task.long_prompts=drop. Raises ValueError, quoting the row, for others that are too long or cannot be rendered.
        """
        read: list[list[Example]] = []
        for row in watched(rows):
            with quoting(row):
                read.append(self.examples(row))
        most, limit = self.limit
        long = [(place, one.length) for place, row in enumerate(read) for one in row if one.length > most]
        fitting = [[one for one in row if one.length <= most] for row in read]
        if long:
            place, tokens = long[0]
            what = (
                f"{len(long)} of {sum(map(len, read))} examples have more tokens, prompt and answer, than {limit} (the "
                f"longest {max(count for _, count in long)}; the first {tokens}, in row {place + 1}, which begins "
                f"{beginning(rows[place])})"
            )
            if self.config.task.long_prompts == "error" or not any(fitting):
                raise ValueError(f"{what}. Cut them, or leave them out with task.long_prompts=drop")
            self.notes.append(f"warning: {what}; they are left out")
        equal = [any(one.answers[1:] == one.answers[:1] for one in row) for row in read]
        leave_out(rows, [f"{EQUAL} as tokens" if same else None for same in equal], self.notes)
        return [joined(row) for row, same in zip(fitting, equal, strict=True) if row and not same]

    def over(self, compute: Callable[[list[Example]], Tensor], all_of: list[Example], **how: Any) -> Tensor:
        """Run `compute` (n examples -> (n, answers)) on any number, without gradient (Parts.forward); on the CPU."""
        width = len(all_of[0].answers)
        return self.forward(
            lambda rows: (compute([all_of[i] for i in rows]),), sizes_of(self, all_of), width=width, **how
        )[0]

    def texts(self, row: list[Example]) -> list[list[int]]:
        return [text for example in row for text in example.texts]

    def shown(self, row: list[Example]) -> list[str]:
        """The first example of a row as text, piece by piece."""
        return [
            f"{name} ({len(tokens)} tokens): {shortened(readable(self.tokenizer, tokens), SHOWN)}"
            for name, tokens in spans(row[0])
        ]


def rendered(
    parts: Parts, prompt: Prompt | None, answer: Side, *, system_prompt: str | None, tools: list[Any] | None = None
) -> Example:
    """Tokenise an answer behind its prompt. Raises ValueError where the chat template cannot write it."""
    where = parts.config.task
    how = {"chat": where.chat, "system_prompt": system_prompt, "variables": where.chat_template, "tools": tools}
    tokens, target = render_answer(parts.tokenizer, prompt, answer, **how)
    return Example(tokens, (target,))


def joined(turns: list[Example]) -> list[Example]:
    """The same examples in fewer passes: one whose prompt begins with all of the one before goes on behind it.

    What a token is predicted from stays the same, so no number changes; a conversation of n turns is read once instead
    of n times. Where a template strips the thinking of earlier turns, the prompt differs and the turns stay apart.
    """
    out: list[Example] = []
    for turn in turns:
        before = out[-1] if out else None
        read = before.texts[0] if before else []
        if before is None or turn.prompt[: len(read)] != read:
            out.append(turn)
            continue
        (target,), (answer,), between = before.answers, turn.answers, turn.prompt[len(read) :]
        mask = before.masks[0] if before.masks else [True] * len(target)
        mask = mask + [False] * len(between) + [True] * len(answer)
        out[-1] = Example(before.prompt, (target + between + answer,), (mask,))
    return out


def spans(example: Example) -> Iterator[tuple[str, list[int]]]:
    """The tokens of an example in order, in pieces by what becomes of them: read, or learnt (of a pair: chosen,
    rejected).
    """
    yield "read", example.prompt
    names = ("learnt",) if len(example.answers) == 1 else ("chosen", "rejected")
    masks = example.masks or [[True] * len(answer) for answer in example.answers]
    for name, answer, mask in zip(names, example.answers, masks, strict=True):
        for learnt, piece in groupby(zip(mask, answer, strict=True), key=lambda pair: pair[0]):
            yield name if learnt else "read", [token for _, token in piece]


def by_side(examples: Sequence[Example]) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    """Prompts, answers and masks of n examples as rows of a batch: their n first answers, then their n second ones."""
    rows = [(one, side) for side in range(len(examples[0].answers)) for one in examples]
    masks = [one.masks[side] if one.masks else [True] * len(one.answers[side]) for one, side in rows]
    return [one.prompt for one, _ in rows], [one.answers[side] for one, side in rows], masks


def answer_logprobs(parts: Parts, role: Literal["policy", "reference"], examples: Sequence[Example]) -> Tensor:
    """Log-probabilities of the learnt tokens of `by_side`, (answers, T), 0 elsewhere; the role must be acting."""
    return parts.roles.logprobs(role, parts.roles.batch(*by_side(examples)), temperature=1.0)[0]


def sizes_of(parts: Parts, examples: Sequence[Example]) -> RowSizes:
    """Cost of examples in a forward pass: packed, prompts once; else each answer as long as the longest."""
    if not parts.roles.packs:
        return RowSizes.alone([len(e.answers) * e.length for e in examples], packed=False)
    return RowSizes.of([e.prompt for e in examples], [sum(map(len, e.answers)) for e in examples], packed=True)
