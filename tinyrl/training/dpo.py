"""Direct preference optimization: a policy learns from pairs of answers, without a reward model, without sampling.

DPO (2305.18290) Eq. 7. IPO, KTO, ORPO and SimPO are other losses of the same log-probabilities, one word away
(algorithms/preference.py).

    for each step: a batch of pairs; log-probabilities of both answers under the reference, at a pair's first use,
    and under the policy; the loss; an optimizer step

Both answers share one prompt, which is read once. Of conversations every turn of the assistant behind their common
beginning is learnt, and what is between the turns is read. The reference is the start of training: the base with
adapters off, a frozen copy of the start adapter, or of the model. Its log-probabilities of a row are computed at first
use and saved in the checkpoint. KTO is learnt from pairs here, each a desirable and an undesirable example; rows with a
single labelled answer are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.preference import dpo_loss, ipo_loss, kto_loss, mismatched_kl, orpo_loss, simpo_loss
from tinyrl.config.method_sections import DpoConfig
from tinyrl.data.formats import preference
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.data.turns import Side, learnt_turns
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.batch import Batch, Example
from tinyrl.models.packing import common_length
from tinyrl.models.policy import Policy
from tinyrl.tasks.answers import turn_closing
from tinyrl.tasks.run_rows import RunRows
from tinyrl.training.method import Pass
from tinyrl.training.rows import RowMethod, join_turns, rendered
from tinyrl.training.run import Run

REFERENCE_LOGPROBS = "reference_logprobs.safetensors"
REWRITTEN = (
    "warning: the chat template writes an earlier turn of the assistant otherwise than it is sampled; of conversations "
    "with such turns only those through the first one are learnt"
)
Split = Literal["training", "held-out"]


class Dpo(RowMethod):
    """Preference optimization. A row has one example, a pair. State: `reference`, for each split (N, 3) the
    log-probabilities of chosen and rejected, and 1 where they are known.
    """

    def __init__(self, policy: Policy, rows: RunRows) -> None:
        super().__init__(policy, rows)
        if self.config.dpo.loss == "kto" and len(self.train_rows) < 2:
            raise ValueError("dpo.loss=kto estimates a KL from the answers to other prompts: it needs 2 pairs or more")
        self.forget()

    def forget(self) -> None:
        train = torch.zeros(len(self.train_rows), 3)
        held_out = torch.zeros(len(self.held_out), 3)
        self.reference: dict[Split, Tensor] = {"training": train, "held-out": held_out}

    def examples(self, row: Row, variables: dict[str, Any]) -> list[Example]:
        """Put both sides behind the tokens that their prompts have in common. Every turn of the assistant is learnt."""
        pair = preference(row)
        how: Any = {"continues": pair.continues, "variables": variables}
        sides = [self.side(pair.prompt, answer, **how) for answer in pair.answers]
        at = common_length([side.prompt for side in sides])
        answers = tuple(side.texts[0][at:] for side in sides)
        masks = tuple([False] * (len(side.prompt) - at) + side.listed()[0] for side in sides)
        return [Example(sides[0].prompt[:at], answers, None if all(map(all, masks)) else masks)]

    def side(self, prompt: Prompt | None, answer: Side, *, continues: bool, variables: dict[str, Any]) -> Example:
        """Tokenise an answer, or the turns of the assistant in a conversation, each behind all before it. Where the
        template writes a turn otherwise once others follow (it strips its thinking), only the turns through the first
        such one are learnt, which is noted: both sides of a pair begin behind their common prompt.
        """
        how: Any = {"system_prompt": self.config.task.system_prompt, "variables": variables}
        if isinstance(answer, str):
            return rendered(self.policy, prompt, answer, **how)
        turns = [
            rendered(self.policy, turn.prompt, turn.answer, **how)
            for turn in learnt_turns(prompt, answer, continues=continues)
        ]
        closing = turn_closing(self.tokenizer, variables)
        parts = join_turns(turns, appended_end=not closing)
        if len(parts) > 1 and REWRITTEN not in self.notes:
            self.notes.append(REWRITTEN)
        return parts[0]

    def make_pass(self, examples: list[Example], rows: list[int], run: Run) -> tuple[Pass, dict[str, float]]:
        """Look up or compute what the reference says of the pairs, then make the pass over them."""
        reference = None
        kl = 0.0
        if self.policy.has_reference:
            with run.timed("reference"):
                reference = self.reference_logprobs("training", rows)
                kl = reference_point(self, examples)
        loss = partial(self.loss, reference=reference, kl=kl, count=len(examples))
        metrics = {"completion/tokens": float(sum(sum(pair.learnt) for pair in examples))}
        if self.config.dpo.loss == "kto":
            metrics["preference/kl"] = kl
        return Pass("policy", examples, loss), metrics

    def loss(self, batch: Batch, *, reference: Tensor | None, kl: float, count: int) -> tuple[Tensor, Metrics]:
        """Compute the preference loss of a micro-batch of the step's `count` pairs; the policy must be acting.

        reference (count, 2): log-probabilities of chosen and rejected of the step's pairs under the reference; kl:
        KTO's z_0.
        """
        logprobs = pair_logprobs(self.policy, "policy", batch)
        theirs = None if reference is None else reference[[*batch.rows]]
        loss, metrics = preference_loss(self.config.dpo, logprobs, theirs, batch.items, kl=kl, denominator=count)
        chosen, rejected = (logprobs.detach().sum(0) / count).unbind()
        return loss, {**metrics, "policy/chosen_logprobs": chosen, "policy/rejected_logprobs": rejected}

    def evaluate(self) -> Evaluation:
        """Return accuracy (a tie counts half), margin and loss on held-out pairs, and the rewards of both sides."""
        pairs = [pair for row in self.held_out[: self.config.run.eval_prompts] for pair in row]
        policy = logprobs_of(self.policy, "policy", pairs)
        reference = self.reference_logprobs("held-out", range(len(pairs)))
        kl = reference_point(self, pairs)
        loss, metrics = preference_loss(self.config.dpo, policy, reference, pairs, kl=kl)
        named = {name: float(metrics[f"rewards/{name}"]) for name in ("accuracy", "margin")}
        sides = {name: float(metrics[name]) for name in ("rewards/chosen", "rewards/rejected")}
        return Evaluation({**named, "loss": float(loss), **sides, "num_pairs": len(pairs)})

    def reference_logprobs(self, split: Split, rows: Sequence[int]) -> Tensor | None:
        """Return (B, 2) of chosen and rejected, computed at first use; None where the loss needs no reference."""
        if not self.policy.has_reference:
            return None
        pairs = self.train_rows if split == "training" else self.held_out
        known = self.reference[split]
        new = [row for row in dict.fromkeys(rows) if not known[row, 2]]
        if new:
            known[new, :2] = logprobs_of(self.policy, "reference", [pairs[row][0] for row in new])
            known[new, 2] = 1.0
        return known[list(rows), :2]

    def check(self) -> list[str]:
        """Check that policy and reference agree before the first step."""
        texts = [pair.texts[0] for row in self.train_rows[:4] for pair in row]
        self.policy.check_reference(texts, temperature=1.0)
        return super().check()

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.policy.has_reference:
            save_file({**self.reference}, folder / REFERENCE_LOGPROBS)

    def load(self, folder: Path) -> None:
        super().load(folder)
        if (folder / REFERENCE_LOGPROBS).is_file():  # not where the run began with a loss that needs none
            kept = load_file(folder / REFERENCE_LOGPROBS)
            self.reference = {"training": kept["training"], "held-out": kept["held-out"]}


# ---- the loss ----


def preference_loss(
    dpo: DpoConfig,
    logprobs: Tensor,
    reference: Tensor | None,
    pairs: Sequence[Example],
    *,
    kl: float,
    denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the loss of pairs. logprobs, reference: (B, 2), summed over tokens, of chosen and rejected."""
    lengths = torch.tensor([pair.learnt for pair in pairs]).to(logprobs)
    if reference is None:
        chosen, rejected = (logprobs / lengths).unbind(1)
        if dpo.loss == "orpo":
            return orpo_loss(chosen, rejected, beta=dpo.beta, denominator=denominator)
        assert dpo.loss == "simpo", dpo.loss
        gamma = dpo.target_margin
        return simpo_loss(chosen, rejected, beta=dpo.beta, target_margin=gamma, denominator=denominator)
    policy = logprobs
    reference = reference.to(logprobs)
    if dpo.loss == "ipo":
        policy = policy / lengths
        reference = reference / lengths
    four = (*policy.unbind(1), *reference.unbind(1))
    if dpo.loss in ("ipo", "ipo_sum"):
        return ipo_loss(*four, beta=dpo.beta, denominator=denominator)
    if dpo.loss == "kto":
        return kto_loss(*four, beta=dpo.beta, kl=kl, denominator=denominator)
    assert dpo.loss == "sigmoid", dpo.loss
    return dpo_loss(*four, beta=dpo.beta, label_smoothing=dpo.label_smoothing, denominator=denominator)


def reference_point(dpo: Dpo, pairs: list[Example]) -> float:
    """Estimate KTO's z_0: the mean log-ratio, at least 0, of each answer behind the next pair's prompt, where that is
    another prompt and both are short enough; 0 for other losses.
    """
    if dpo.config.dpo.loss != "kto":
        return 0.0
    nexts = zip(pairs, pairs[1:] + pairs[:1], strict=True)
    shifted = (b._replace(prompt=a.prompt) for a, b in nexts if a.prompt != b.prompt)
    others = [pair for pair in shifted if pair.length <= dpo.limit[0]]
    if not others:
        return 0.0
    return mismatched_kl(logprobs_of(dpo.policy, "policy", others), logprobs_of(dpo.policy, "reference", others))


def pair_logprobs(policy: Policy, role: Literal["policy", "reference"], batch: Batch) -> Tensor:
    """Sum the log-probabilities (B, 2) of chosen and rejected over their tokens; the role must be acting."""
    return policy.logprobs(role, batch, temperature=1.0)[0].sum(1).view(2, -1).T


def logprobs_of(policy: Policy, role: Literal["policy", "reference"], pairs: list[Example]) -> Tensor:
    """Compute `pair_logprobs` of any number of pairs, without gradient, on the CPU."""
    return policy.map_samples(lambda batch: (pair_logprobs(policy, role, batch),), pairs, role=role, width=2)[0]
