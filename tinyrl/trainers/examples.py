"""Examples of text to learn (sft, PPO-ptx): rows as tokens, and which of these the loss counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tinyrl.data.described import beginning, quoting
from tinyrl.data.readers import Row
from tinyrl.data.shapes import text_examples
from tinyrl.parts import Parts
from tinyrl.runs.signals import watched
from tinyrl.tasks.answers import render_answer
from tinyrl.text import excerpt, visible

SHOWN = 2000  # characters of each piece of an example in a preview


class Example(NamedTuple):
    """Tokens that are read, at least one, and those behind them, of which the loss counts some (None: all)."""

    prompt: list[int]
    target: list[int]
    counts: list[bool] | None = None

    @property
    def length(self) -> int:
        """How many tokens the model reads."""
        return len(self.prompt) + len(self.target)

    @property
    def num_counted(self) -> int:
        """How many tokens the loss counts."""
        return len(self.target) if self.counts is None else sum(self.counts)


def tokenised(rows: list[Row], parts: Parts) -> tuple[list[list[Example]], list[str]]:
    """The examples of each row, and a line about those left out because the model has no positions for them, which
    task.long_prompts=drop asks for. Raises ValueError for rows that cannot be read, and for those otherwise.
    """
    most = parts.positions
    kept: list[list[Example]] = []
    long: list[tuple[int, int]] = []  # row, tokens
    count = 0
    for number, row in enumerate(watched(rows), start=1):
        turns = turns_of(row, parts, system_prompt=parts.config.task.system_prompt)
        count += len(turns)
        long += [(number, turn.length) for turn in turns if turn.length > most]
        fitting = [turn for turn in turns if turn.length <= most]
        kept += [joined(fitting)] if fitting else []
    if not long:
        return kept, []
    number, tokens = long[0]
    first = f"first: row {number} with {tokens}, which begins {beginning(rows[number - 1])}"
    said = f"{len(long)} of {count} examples have more tokens than the model's {most} positions ({first})"
    if parts.config.task.long_prompts == "error" or not kept:
        raise ValueError(f"{said}. Cut them, or leave them out with task.long_prompts=drop.")
    return kept, [f"warning: {said}; they are left out"]


def turns_of(row: Row, parts: Parts, *, system_prompt: str | None) -> list[Example]:
    """An example for each answer of a row. Under sft.loss_on=all everything counts, and so once: of a conversation as
    far as its last answer. Raises ValueError, quoting the row, where it cannot be read or rendered.
    """
    where, tokenizer = parts.config.task, parts.tokenizer
    how = {"chat": where.chat, "system_prompt": system_prompt, "variables": where.chat_template}
    with quoting(row):
        wanted = text_examples(row)
        if parts.config.sft.loss_on == "completion":
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


def shown(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The pieces of an example as a preview shows them."""
    lines = []
    for counts, tokens in spans(example):
        cut = excerpt(str(tokenizer.decode(tokens)), SHOWN)
        text = f"{cut.head} [{cut.omitted:,} characters] {cut.tail}" if cut.omitted else cut.head
        lines.append(f"{'learnt' if counts else 'read'} ({len(tokens)} tokens): {visible(text)}")
    return lines


def tokens_of(row: list[Example]) -> list[int]:
    """Every token of a row's examples."""
    return [token for example in row for token in (*example.prompt, *example.target)]
