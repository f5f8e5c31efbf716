"""Learning from rows, shared by SFT, DPO and reward models: rows as tokens, and the loop over them.

    for each step: a batch of rows; the loss of the method on its examples; an optimizer step

Rows are read by their columns (data/formats.py) and become tokens as the policy meets them later: the prompt as it is
sampled from, and behind it the answer through its end-of-turn token (tasks/answers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any

from tinyrl.config.derive import with_num_steps
from tinyrl.config.method_sections import RowSection
from tinyrl.data.formats import beginning
from tinyrl.data.kinds import EQUAL, leave_out
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, few_held_out, fingerprints
from tinyrl.data.turns import Side
from tinyrl.models.batch import Example
from tinyrl.models.loading import check_ids
from tinyrl.models.policy import Policy
from tinyrl.models.tokens import readable
from tinyrl.process.counting import counted
from tinyrl.rollout.collect import template_warnings
from tinyrl.tasks.answers import NotContinuedError, render_answer, thinking_variables
from tinyrl.tasks.prompts import (
    LongText,
    characters_of,
    check_characters,
    in_chat,
    marker_notes,
    shows_tools,
    unread_key_notes,
)
from tinyrl.tasks.run_rows import RunRows, hidden_tools, keys_of, shared_by_splits
from tinyrl.text import truncate
from tinyrl.training.method import Method, Pass
from tinyrl.training.run import Run

SHOWN = 2000  # characters of each piece of an example in a preview


class RowMethod(Method):
    """A method that learns from rows of task.data. A subclass gives the examples of a row, and the pass over those of a
    step with its loss. kind: that of the rows; train_rows, held_out: the examples of each.
    """

    def __init__(self, policy: Policy, rows: RunRows) -> None:
        super().__init__(policy, policy.config)
        self.kind = rows.kind
        self.notes = [*rows.notes, *rows.kind.described(rows.train)]
        self.tokenizer = policy.tokenizer
        self.row_fingerprints = fingerprints(rows.train, rows.held_out)
        self.switched = Counter[str]()  # rows behind the prompt of another switch of the chat template, by the switch
        self.train_rows = self.tokenised(rows.train)
        self.held_out = self.tokenised(rows.held_out)
        policy.try_images()
        self.notes += self.rendering_notes(rows.train + rows.held_out)
        if self.config.run.eval_prompts:
            system_prompt = self.config.task.system_prompt
            self.notes += few_held_out(keys_of(rows.held_out, self.kind, system_prompt=system_prompt))
            self.notes += shared_by_splits(rows.train, rows.held_out, self.kind, system_prompt=system_prompt)
        texts = (text for row in self.train_rows + self.held_out for one in row for text in one.texts)
        check_ids(texts, self.tokenizer, policy.causal)
        self.config = with_num_steps(self.config, rows=len(self.train_rows), of_step=self.batch_size)

    def rendering_notes(self, rows: list[Row]) -> list[str]:
        """Return notes on what the tokens of rows hold otherwise than one may think, or do not hold."""
        where = self.config.task
        notes = marker_notes(self.tokenizer, rows, chat=where.chat)
        different = {id(row): row for row in rows}  # of few rows, held-out ones are those to train on
        conversations = (messages for row in different.values() for messages in self.kind.conversations(row))
        variables = where.chat_template_kwargs
        notes += unread_key_notes(self.tokenizer, conversations, chat=where.chat, variables=variables)
        if not shows_tools(self.tokenizer, where.chat):
            notes += hidden_tools(rows, self.kind)
        for switch, count in self.switched.items():
            what = f"{count:,} of {len(rows):,} rows are learnt behind the chat template's prompt with {switch}"
            notes.append(f"{what}, since that without it does not go on as their answers do")
        bos = self.tokenizer.bos_token_id
        if isinstance(bos, int) and bos != self.tokenizer.eos_token_id and not in_chat(self.tokenizer, where.chat):
            count = sum(any(learns(one, bos) for one in row) for row in self.train_rows + self.held_out)
            if count:
                what = f"the answers of {count:,} of {len(rows):,} rows hold {self.tokenizer.bos_token}"
                notes.append(f"warning: {what}, the token that begins a text, and it is learnt there")
        return notes

    def examples(self, row: Row, variables: dict[str, Any]) -> list[Example]:
        """Tokenise a row, with variables of the chat template. Raises ValueError where it cannot be rendered."""
        raise NotImplementedError

    def read(self, row: Row) -> list[Example]:
        """Tokenise a row, of which all prompts think or none does: where the chat template's own prompt is not
        continued by an answer with thoughts, or without, its other prompt is taken, and counted in `switched`.
        """
        given = self.config.task.chat_template_kwargs
        try:
            return self.examples(row, given)
        except NotContinuedError:
            for variables in thinking_variables(self.tokenizer, given):
                with suppress(NotContinuedError):
                    found = self.examples(row, variables)
                    (name,) = variables.keys() - given.keys()
                    self.switched[f"{name}={str(variables[name]).lower()}"] += 1
                    return found
            raise

    def make_pass(self, examples: list[Example], rows: list[int], run: Run) -> tuple[Pass, dict[str, float]]:
        """Return the pass over a step's examples, and metrics of them; rows: their places in train_rows."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[int, str]:
        """Return most tokens of an example, and what limits them."""
        positions = self.policy.positions
        most = self.section.max_tokens
        if most is not None and most <= positions:
            return most, f"{self.config.trains.section}.max_tokens={most}"
        return positions, f"the model's context length of {positions}"

    @property
    def section(self) -> RowSection:
        """Return the section of the method."""
        own = self.config.own
        assert isinstance(own, RowSection), self.config.method
        return own

    @property
    def batch_size(self) -> int:
        return min(self.section.batch_size, len(self.train_rows))

    @property
    def rows_of_epoch(self) -> tuple[int, int]:
        return len(self.train_rows), self.batch_size

    def train(self, run: Run) -> None:
        for step in run.steps():
            rows = batch_indices(self.config.run.seed, step, num_prompts=self.batch_size, num_rows=len(self.train_rows))
            examples = [example for row in rows for example in self.train_rows[row]]
            run.fit_to_device(self.trial_passes(examples))
            one_pass, metrics = self.make_pass(examples, rows, run)
            run.start_update()
            with run.timed("update"):
                run.metrics.add(run.updater.step([one_pass], train=["policy"]))
            run.end_step(**metrics)

    def keep_longest(self) -> tuple[int, int]:
        """Keep the longest rows, as many as a step takes, for a trial of the largest step; return their number and the
        tokens of the first.
        """
        longest = sorted(self.train_rows, key=lambda row: -tokens_of(row))
        self.train_rows = longest[: self.batch_size]
        self.forget()
        return len(self.train_rows), tokens_of(self.train_rows[0])

    def check(self) -> list[str]:
        return [*self.notes, *(template_warnings(self.policy) if self.config.trains.policy else [])]

    def tokenised(self, rows: list[Row]) -> list[list[Example]]:
        """Tokenise rows. Those with two equal answers are left out, and examples that are too long under
        task.on_overlong_prompt=drop. Raises ValueError, quoting the row, for others.
        """
        read: list[list[Example]] = []
        long = list[tuple[int, str]]()  # places of long examples, and their lengths in words
        untokenised = 0
        most, limit = self.limit
        for place, row in enumerate(counted(rows, what="rows tokenised", total=len(rows))):
            examples = list[Example]()
            try:
                examples = self.read(row)
            except LongText as error:  # all of the row
                long.append((place, str(error)))
                untokenised += 1
            except ValueError as error:
                raise ValueError(f"{error}\n  in the row {beginning(row)}") from error
            read.append(examples)
            long += [(place, f"{one.length} tokens") for one in examples if one.length > most]
        fitting = [[one for one in row if one.length <= most] for row in read]
        if long:
            place, size = long[0]
            count = sum(map(len, read)) + untokenised
            what = (
                f"{len(long)} of {count} examples have more tokens, prompt and answer, than {limit} "
                f"(the first in row {place + 1}: {size})"
            )
            if self.config.task.on_overlong_prompt == "error" or not any(fitting):
                raise ValueError(f"{what}. Cut them, or leave them out with task.on_overlong_prompt=drop")
            self.notes.append(f"warning: {what}; they are left out")
        equal = [any(one.responses[1:] == one.responses[:1] for one in row) for row in read]
        leave_out(rows, [f"{EQUAL} as tokens" if same else None for same in equal], self.notes)
        return [join_turns(row) for row, same in zip(fitting, equal, strict=True) if row and not same]

    def shown(self, row: list[Example]) -> list[str]:
        """Show the first example of a row as text, piece by piece."""
        texts = ((name, tokens, readable(self.tokenizer, tokens)) for name, tokens in spans(row[0]))
        return [f"{name} ({len(tokens)} tokens): {truncate(text, SHOWN)}" for name, tokens, text in texts]


def tokens_of(row: list[Example]) -> int:
    """Count the tokens of a row's examples."""
    total = 0
    for example in row:
        total += sum(map(len, example.texts))
    return total


def learns(example: Example, token: int) -> bool:
    """Return whether a token is among those of an example that are learnt."""
    if not any(token in answer for answer in example.responses):
        return False
    for answer, mask in zip(example.responses, example.listed(), strict=True):
        if any(found == token and learnt for found, learnt in zip(answer, mask, strict=True)):
            return True
    return False


def rendered(
    policy: Policy,
    prompt: Prompt | None,
    answer: Side,
    *,
    system_prompt: str | None,
    variables: dict[str, Any],
    tools: list[Any] | None = None,
) -> Example:
    """Tokenise an answer behind its prompt. Raises ValueError where the chat template cannot write it, and LongText for
    what is longer than the model's positions, whatever its tokens are.
    """
    characters = characters_of(prompt) + characters_of(answer)
    check_characters(policy.tokenizer, characters, tokens=policy.positions)
    chat = policy.config.task.chat
    how = {"chat": chat, "system_prompt": system_prompt, "variables": variables, "tools": tools}
    tokens, target = render_answer(policy.tokenizer, prompt, answer, images=policy.image_expander, **how)
    return Example(tokens, (target,))


def join_turns(turns: list[Example], *, appended_end: bool = False) -> list[Example]:
    """Join turns: one whose prompt begins with all of the one before goes on behind it, so that a conversation of n
    turns is read once and no number changes. Where a template strips earlier thinking, the turns stay apart.

    appended_end: the template ends no turn (the next role's marker does), so that the EOS at the end of each is not its
    own; a turn that others follow is joined, and learnt, without it.
    """
    out: list[Example] = []
    for turn in turns:
        before = out[-1] if out else None
        if before is None:
            out.append(turn)
            continue
        (target,) = before.responses
        (mask,) = before.listed()
        (answer,) = turn.responses
        read = before.texts[0]
        if appended_end:
            read = read[:-1]
            target = target[:-1]
            mask = mask[:-1]
        if turn.prompt[: len(read)] != read:
            out.append(turn)
            continue
        between = turn.prompt[len(read) :]
        mask = [*mask, *[False] * len(between), *[True] * len(answer)]
        out[-1] = Example(before.prompt, (target + between + answer,), (mask,))
    return out


def spans(example: Example) -> Iterator[tuple[str, list[int]]]:
    """Yield the tokens of an example in order, in pieces that are read, or learnt (of a pair: chosen, rejected)."""
    yield "read", example.prompt
    names = ("learnt",) if len(example.responses) == 1 else ("chosen", "rejected")
    for name, answer, mask in zip(names, example.responses, example.listed(), strict=True):
        for learnt, piece in groupby(zip(mask, answer, strict=True), key=lambda pair: pair[0]):
            yield name if learnt else "read", [token for _, token in piece]
