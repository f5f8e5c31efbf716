"""Tokenised preference pairs and their log-probabilities, both answers behind one prompt."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tinyrl.data.described import quoting
from tinyrl.data.readers import Row
from tinyrl.data.shapes import preference
from tinyrl.models.device import to_device
from tinyrl.models.micro_batches import RowSizes, Work, own_rows
from tinyrl.parts import Parts
from tinyrl.runs.signals import watched
from tinyrl.tasks.answers import render_answer
from tinyrl.text import visible


class Pair(NamedTuple):
    """Tokens of a prompt and of two answers to it, each through the end of its turn."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


# ---- log-probabilities ----


def pair_logprobs(parts: Parts, role: Literal["policy", "reference"], pairs: list[Pair]) -> Tensor:
    """(B, 2): log-probabilities of chosen and rejected, summed over their tokens; the role must be acting."""
    answers = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    batch = parts.roles.batch([pair.prompt for pair in pairs] * 2, answers)
    logprobs, _ = parts.roles.logprobs(role, batch, temperature=1.0)  # 0 behind the end of an answer
    return logprobs.sum(1).view(2, len(pairs)).T


def logprobs_of(parts: Parts, role: Literal["policy", "reference"], pairs: list[Pair]) -> Tensor:
    """`pair_logprobs` of any number of pairs, without gradient, on the CPU."""
    device = parts.roles.device
    out = torch.zeros(len(pairs), 2, device=device)

    def run(rows: list[int]) -> None:
        said = pair_logprobs(parts, role, [pairs[i] for i in rows]).float()
        out[to_device(torch.as_tensor(rows), device)] = said

    with torch.no_grad(), parts.roles.acting(role), parts.accelerator.autocast():
        sizes = sizes_of(parts, pairs)
        parts.micro_batches.run(Work(sizes, run, own_rows(sizes, None, parts.world)))
    parts.world.sum(out)
    return out.cpu()


def sizes_of(parts: Parts, pairs: list[Pair]) -> RowSizes:
    """What a pair costs a forward pass: packed, the prompt (once for all pairs that share it) and both answers; else
    twice the prompt with the longer answer.
    """
    if not parts.roles.packs:
        return RowSizes.alone([2 * pair.longest for pair in pairs], packed=False)
    prompts, answers = [p.prompt for p in pairs], [len(p.chosen) + len(p.rejected) for p in pairs]
    return RowSizes.of(prompts, answers, packed=True)


def lengths_of(pairs: list[Pair]) -> Tensor:
    """(B, 2): tokens of chosen and rejected."""
    return torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs])


def mismatched(pairs: list[Pair], *, most: int) -> list[Pair]:
    """Each prompt with both answers of the next pair, where that is of another prompt; at most `most` tokens."""
    nexts = zip(pairs, pairs[1:] + pairs[:1], strict=True)
    others = (Pair(a.prompt, b.chosen, b.rejected) for a, b in nexts if a.prompt != b.prompt)
    return [pair for pair in others if pair.longest <= most]


# ---- from rows ----


def tokenised(rows: list[Row], parts: Parts) -> list[Pair]:
    """The tokens of every row. Raises ValueError, quoting the row, where one is no pair or cannot be rendered."""
    where = parts.config.task
    how = {"chat": where.chat, "system_prompt": where.system_prompt, "variables": where.chat_template}
    pairs = []
    for row in watched(rows):
        with quoting(row):
            pair = preference(row)
            answers = (pair.chosen, pair.rejected)
            sides = [render_answer(parts.tokenizer, pair.prompt, answer, **how) for answer in answers]
        (prompt, chosen), (_, rejected) = sides
        pairs.append(Pair(prompt, chosen, rejected))
    return pairs


def most_tokens(parts: Parts) -> int:
    """How many tokens a prompt with an answer may have."""
    return min(parts.config.dpo.max_tokens or parts.positions, parts.positions)


def usable(pairs: list[Pair], parts: Parts, *, notes: list[str]) -> list[Pair]:
    """Without pairs whose answers are the same, which say nothing, and, under task.long_prompts=drop, those that are
    too long; `notes` gets a line that says how many. Raises ValueError for long ones otherwise, and where none is left.
    """
    most = most_tokens(parts)
    long = [pair for pair in pairs if pair.longest > most]
    if long and parts.config.task.long_prompts == "error":
        limit = f"dpo.max_tokens={most}" if most == parts.config.dpo.max_tokens else f"the model's {most} positions"
        start = visible(str(parts.tokenizer.decode(long[0].prompt))[:60])
        raise ValueError(
            f"{len(long)} of {len(pairs)} pairs have more tokens, prompt and answer, than {limit} (the longest "
            f"{max(pair.longest for pair in long)}; the first begins {start!r}). Leave them out with "
            "task.long_prompts=drop"
        )
    same = sum(pair.chosen == pair.rejected for pair in pairs)
    kept = [pair for pair in pairs if pair.chosen != pair.rejected and pair.longest <= most]
    why = {"with the same answer twice": same, "that are too long": len(long)}
    reasons = ", ".join(f"{count} {reason}" for reason, count in why.items() if count)
    if not kept:
        raise ValueError(f"of {len(pairs)} pairs none can be learnt from: {reasons}")
    if len(kept) < len(pairs):
        notes.append(f"warning: {len(pairs) - len(kept)} of {len(pairs)} pairs are left out: {reasons}")
    return kept
