"""Direct preference optimization: a policy learns from pairs of answers, without a reward model, without sampling.

DPO (2305.18290) Eq. 7. IPO, KTO, ORPO and SimPO are other losses of the same log-probabilities, one word away
(algorithms/preference.py).

    for each step: a batch of pairs; log-probabilities of both answers under the reference, at a pair's first use,
    and under the policy; the loss; an optimizer step

Both answers stand behind one prompt, which is read once. The reference is what training starts from: the base with
adapters off, a frozen copy of the start adapter, or of the model. What it says of a row is kept in the checkpoint, so
nothing waits for it before the first step, no epoch computes it again, and a resume is exact. KTO is learnt from pairs
here, each a desirable and an undesirable example; rows with a single labelled answer are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.algorithms.preference import dpo_loss, ipo_loss, kto_loss, mismatched_kl, orpo_loss, simpo_loss
from tinyrl.config.method_sections import DpoConfig
from tinyrl.data.formats import EQUAL, Side, described, leave_out, preference, quoting
from tinyrl.data.messages import Prompt, as_messages
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.checks import check_reference, reference_of
from tinyrl.models.micro_batches import RowSizes
from tinyrl.models.packing import common_length
from tinyrl.models.tokens import readable
from tinyrl.rollout.components import Parts
from tinyrl.runs.signals import watched
from tinyrl.tasks.answers import render_answer
from tinyrl.text import number, shortened, visible
from tinyrl.trainers.sft import Example, joined
from tinyrl.training.session import Session
from tinyrl.training.trainer import Batch, RowTrainer

REFERENCE_LOGPROBS = "reference_logprobs.safetensors"
Split = Literal["training", "held-out"]


class Pair(NamedTuple):
    """Tokens of a prompt and of two answers to it, each through the end of its turn. masks: of answers of several
    messages, which tokens of chosen and of rejected are the assistant's (None: all).
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    masks: tuple[list[bool] | None, list[bool] | None] = (None, None)

    @property
    def counted(self) -> list[int]:
        """Learnt tokens of chosen and rejected."""
        sides = zip((self.chosen, self.rejected), self.masks, strict=True)
        return [len(tokens) if mask is None else sum(mask) for tokens, mask in sides]

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


class Dpo(RowTrainer):
    """Preference optimization. A row is a pair.

    State: `reference`, for each split (N, 3): the reference's log-probabilities of chosen and rejected, and 1 where
    they are known.
    """

    train_rows: list[Pair]
    held_out: list[Pair]

    def read(self, rows: list[Row], held_out: list[Row]) -> tuple[list[Pair], list[Pair]]:
        self.notes += described(rows, "pairs")
        self.train_rows, self.held_out = self.tokenised(rows), self.tokenised(held_out)
        if self.config.dpo.loss == "kto" and len(self.train_rows) < 2:
            raise ValueError(
                "dpo.loss=kto estimates a KL from the answers to other prompts, so it needs 2 pairs or more"
            )
        self.forget()
        return self.train_rows, self.held_out

    def batch(self, rows: list[int], session: Session | None = None) -> Batch:
        # 1. The pairs of this step.
        pairs = [self.train_rows[row] for row in rows]

        # 2. What the reference says of them; for KTO, how far the policy is from it elsewhere.
        reference, kl = torch.zeros(len(pairs), 2) if self.roles.has_reference else None, 0.0
        if self.roles.has_reference and session is not None:
            with session.timed("reference"):
                reference, kl = self.reference_logprobs("training", rows), reference_point(self, pairs)

        # 3. The loss that the optimizer step descends.
        def loss_of(micro: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            said = None if reference is None else reference[micro]
            return pair_loss(self, [pairs[i] for i in micro], said, kl=kl, denominator=len(pairs))

        more = {"preference/kl": kl} if self.config.dpo.loss == "kto" else {}
        tokens = float(lengths_of(pairs).sum())
        return Batch(loss_of, sizes_of(self, pairs), {"completion/tokens": tokens, **more})

    def evaluate(self) -> Evaluation:
        """Accuracy (a tie counts half), margin and loss on held-out pairs, and the rewards of both sides."""
        pairs = self.held_out[: self.config.run.eval_prompts]
        policy, reference = logprobs_of(self, "policy", pairs), self.reference_logprobs("held-out", range(len(pairs)))
        kl = reference_point(self, pairs)
        loss, metrics = preference_loss(self.config.dpo, policy, reference, lengths_of(pairs), kl=kl)
        named = {name: float(metrics[f"rewards/{name}"]) for name in ("accuracy", "margin")}
        sides = {name: float(metrics[name]) for name in ("rewards/chosen", "rewards/rejected")}
        return Evaluation({**named, "loss": float(loss), **sides, "num_pairs": len(pairs)}, [], [])

    def reference_logprobs(self, split: Split, rows: Sequence[int]) -> Tensor | None:
        """(B, 2) of chosen and rejected, computed at first use and kept; None where the loss needs no reference."""
        if not self.roles.has_reference:
            return None
        pairs, known = self.train_rows if split == "training" else self.held_out, self.reference[split]
        new = [row for row in dict.fromkeys(rows) if not known[row, 2]]
        if new:
            known[new, :2] = logprobs_of(self, "reference", [pairs[row] for row in new])
            known[new, 2] = 1.0
        return known[list(rows), :2]

    def forget(self) -> None:
        self.reference: dict[Split, Tensor] = {
            "training": torch.zeros(len(self.train_rows), 3),
            "held-out": torch.zeros(len(self.held_out), 3),
        }

    def tokenised(self, rows: list[Row]) -> list[Pair]:
        """Every row as tokens, but those whose sides are the same tokens and, under long_prompts=drop, those that are
        too long. Raises ValueError, quoting the row, where one cannot be rendered.
        """
        pairs = []
        for row in watched(rows):
            with quoting(row):
                pair = preference(row)
                pairs.append(pair_of(*(answered(self, pair.prompt, answer) for answer in pair.answers)))
        most, limit = token_limit(pairs, self)
        reasons = [EQUAL if pair.chosen == pair.rejected else limit if pair.longest > most else None for pair in pairs]
        leave_out(rows, reasons, self.notes)
        return [pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None]

    def texts(self, row: Pair) -> list[list[int]]:
        return [row.prompt + row.chosen, row.prompt + row.rejected]

    def prompts(self) -> list[list[int]]:
        return [pair.prompt for pair in self.held_out]

    def check(self) -> list[str]:
        """Check that policy and reference agree, which gives the loss before the first step."""
        if not self.roles.has_reference:
            return super().check()
        texts = [pair.prompt + pair.chosen for pair in self.train_rows[:4]]
        check_reference(self.roles, texts, temperature=1.0, autocast=self.accelerator.autocast)
        known = {"sigmoid": ("log 2", math.log(2.0)), "kto": ("1/2", 0.5)}
        dpo = self.config.dpo
        name, loss = known.get(dpo.loss, ("1 / (4 beta^2)", 0.25 / dpo.beta / dpo.beta))
        which = reference_of(self.roles)
        return [*super().check(), f"loss before the first step: {number(loss)}, {name}; the reference is {which}"]

    def shown(self, row: Pair) -> list[str]:
        return [
            f"{name} ({len(tokens)} tokens): {visible(shortened(readable(self.tokenizer, tokens), 400))}"
            for name, tokens in zip(("prompt", "chosen", "rejected"), row[:3], strict=True)
        ]

    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        if self.roles.has_reference:
            save_file({**self.reference}, folder / REFERENCE_LOGPROBS)

    def load_models(self, folder: Path) -> None:
        super().load_models(folder)
        if (folder / REFERENCE_LOGPROBS).is_file():  # not where the run began with a loss that needs none
            kept = load_file(folder / REFERENCE_LOGPROBS)
            self.reference = {"training": kept["training"], "held-out": kept["held-out"]}


def pair_loss(
    parts: Dpo, pairs: list[Pair], reference: Tensor | None, *, kl: float, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = pair_logprobs(parts, "policy", pairs)
    lengths = lengths_of(pairs)
    loss, metrics = preference_loss(parts.config.dpo, logprobs, reference, lengths, kl=kl, denominator=denominator)
    chosen, rejected = (logprobs.detach().sum(0) / denominator).unbind()
    return loss, {**metrics, "policy/chosen_logprobs": chosen, "policy/rejected_logprobs": rejected}


def preference_loss(
    dpo: DpoConfig,
    logprobs: Tensor,
    reference: Tensor | None,
    lengths: Tensor,
    *,
    kl: float,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that `dpo` names. logprobs, reference (sums over tokens) and lengths: (B, 2), chosen and rejected."""
    lengths = lengths.to(logprobs)
    if reference is None:
        chosen, rejected = (logprobs / lengths).unbind(1)
        if dpo.loss == "orpo":
            return orpo_loss(chosen, rejected, beta=dpo.beta, denominator=denominator)
        assert dpo.loss == "simpo", dpo.loss
        gamma = dpo.target_margin
        return simpo_loss(chosen, rejected, beta=dpo.beta, target_margin=gamma, denominator=denominator)
    policy, reference = logprobs, reference.to(logprobs)
    if dpo.loss == "ipo":
        policy, reference = policy / lengths, reference / lengths
    four = (*policy.unbind(1), *reference.unbind(1))
    if dpo.loss in ("ipo", "ipo_sum"):
        return ipo_loss(*four, beta=dpo.beta, denominator=denominator)
    if dpo.loss == "kto":
        return kto_loss(*four, beta=dpo.beta, kl=kl, denominator=denominator)
    assert dpo.loss == "sigmoid", dpo.loss
    return dpo_loss(*four, beta=dpo.beta, label_smoothing=dpo.label_smoothing, denominator=denominator)


def reference_point(parts: Dpo, pairs: list[Pair]) -> float:
    """KTO's z_0: the mean log-ratio, at least 0, of each answer behind the next pair's prompt; 0 for other losses."""
    others = mismatched(pairs, most=most_tokens(parts)) if parts.config.dpo.loss == "kto" else []
    if not others:
        return 0.0
    return mismatched_kl(logprobs_of(parts, "policy", others), logprobs_of(parts, "reference", others))


# ---- log-probabilities ----


def pair_logprobs(parts: Parts, role: Literal["policy", "reference"], pairs: list[Pair]) -> Tensor:
    """(B, 2): log-probabilities of chosen and rejected, summed over their tokens; the role must be acting."""
    answers = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    masks = [*(pair.masks[0] for pair in pairs), *(pair.masks[1] for pair in pairs)]
    listed = [mask or [True] * len(answer) for mask, answer in zip(masks, answers, strict=True)] if any(masks) else None
    batch = parts.roles.batch([pair.prompt for pair in pairs] * 2, answers, listed)
    logprobs, _ = parts.roles.logprobs(role, batch, temperature=1.0)  # 0 behind the end of an answer
    return logprobs.sum(1).view(2, len(pairs)).T


def logprobs_of(parts: Parts, role: Literal["policy", "reference"], pairs: list[Pair]) -> Tensor:
    """`pair_logprobs` of any number of pairs, without gradient, on the CPU."""

    def compute(rows: list[int]) -> tuple[Tensor, ...]:
        return (pair_logprobs(parts, role, [pairs[i] for i in rows]),)

    return parts.forward(compute, sizes_of(parts, pairs), role=role, width=2)[0]


def sizes_of(parts: Parts, pairs: list[Pair]) -> RowSizes:
    """Cost of a pair in a forward pass: packed, prompts once and both answers; else twice the longer side."""
    if not parts.roles.packs:
        return RowSizes.alone([2 * pair.longest for pair in pairs], packed=False)
    prompts, answers = [p.prompt for p in pairs], [len(p.chosen) + len(p.rejected) for p in pairs]
    return RowSizes.of(prompts, answers, packed=True)


def lengths_of(pairs: list[Pair]) -> Tensor:
    """(B, 2): learnt tokens of chosen and rejected."""
    return torch.tensor([pair.counted for pair in pairs])


def mismatched(pairs: list[Pair], *, most: int) -> list[Pair]:
    """Each prompt with both answers of the next pair, where that is of another prompt; at most `most` tokens."""
    nexts = zip(pairs, pairs[1:] + pairs[:1], strict=True)
    others = (b._replace(prompt=a.prompt) for a, b in nexts if a.prompt != b.prompt)
    return [pair for pair in others if pair.longest <= most]


# ---- from rows ----


def most_tokens(parts: Parts) -> int:
    return min(parts.config.dpo.max_tokens or parts.positions, parts.positions)


def answered(parts: Dpo, prompt: Prompt | None, answer: Side) -> Example:
    """A side of a pair behind its prompt. Of several messages each turn of the assistant is learnt. Raises ValueError
    where it cannot be rendered.
    """
    where = parts.config.task
    how = {"chat": where.chat, "system_prompt": where.system_prompt, "variables": where.chat_template}
    if isinstance(answer, str) or len(answer) == 1:
        return Example(*render_answer(parts.tokenizer, prompt, answer, **how))
    before = as_messages(prompt)
    turns = [at for at, message in enumerate(answer) if message["role"] == "assistant"]
    rendered = [render_answer(parts.tokenizer, [*before, *answer[:at]], [answer[at]], **how) for at in turns]
    first, *more = joined([Example(*turn) for turn in rendered])
    if more:
        raise ValueError(
            "the chat template writes a turn of the answer differently once other messages follow it, so the answer "
            "is no single text; give its last turn alone, behind the messages before it"
        )
    return first


def pair_of(chosen: Example, rejected: Example) -> Pair:
    """Both sides behind what their prompts have in common: all, unless a side begins with other messages."""
    at = common_length([chosen.prompt, rejected.prompt])
    ours, theirs = ((one.prompt + one.target)[at:] for one in (chosen, rejected))
    masks = [[False] * (len(one.prompt) - at) + (one.counts or [True] * len(one.target)) for one in (chosen, rejected)]
    first, second = (None if all(mask) else mask for mask in masks)
    return Pair(chosen.prompt[:at], ours, theirs, (first, second))


def token_limit(pairs: list[Pair], parts: Dpo) -> tuple[int, str]:
    """How many tokens a pair may have, and why it is left out with more. Raises ValueError for such pairs unless
    long_prompts=drop.
    """
    most = most_tokens(parts)
    limit = f"dpo.max_tokens={most}" if most == parts.config.dpo.max_tokens else f"the model's {most} positions"
    long = [pair for pair in pairs if pair.longest > most]
    if long and parts.config.task.long_prompts == "error":
        start = visible(str(parts.tokenizer.decode(long[0].prompt))[:60])
        raise ValueError(
            f"{len(long)} of {len(pairs)} pairs have more tokens, prompt and answer, than {limit} (the longest "
            f"{max(pair.longest for pair in long)}; the first begins {start!r}). Leave them out with "
            "task.long_prompts=drop"
        )
    return most, f"more tokens than {limit}"
