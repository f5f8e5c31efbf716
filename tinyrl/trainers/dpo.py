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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.algorithms.preference import dpo_loss, ipo_loss, kto_loss, mismatched_kl, orpo_loss, simpo_loss
from tinyrl.components import Options, load_parts
from tinyrl.config.method_sections import DpoConfig
from tinyrl.config.schema import Config
from tinyrl.data.described import described
from tinyrl.data.rows import batch_indices, example_rows, few_held_out, fingerprints
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.build import reference_of
from tinyrl.models.micro_batches import StepRows
from tinyrl.models.weight_checks import check_ids
from tinyrl.parts import Parts
from tinyrl.text import number, shortened, visible
from tinyrl.trainers.preference_pairs import (
    Pair,
    lengths_of,
    logprobs_of,
    mismatched,
    most_tokens,
    pair_logprobs,
    sizes_of,
    tokenised,
    usable,
)
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

REFERENCE_LOGPROBS = "reference_logprobs.safetensors"
START_TO = 1e-5  # of the loss before the first step, relative where it is above 1
Split = Literal["training", "held-out"]


@dataclass
class DpoParts(Parts):
    """What preference optimization needs: tokenised pairs, and what the reference has said of them so far.

    State: `reference`, for each split (N, 3): log-probabilities of chosen and rejected, and 1 where they are known.
    """

    train: list[Pair]
    held_out: list[Pair]
    row_fingerprints: dict[str, str]
    notes: list[str]  # what the rows were taken for, and how many were left out
    reference: dict[Split, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.reference = {"training": torch.zeros(len(self.train), 3), "held-out": torch.zeros(len(self.held_out), 3)}

    def check(self) -> list[str]:
        """What the rows are taken for, the loss before the first step, and whether held-out scores can say much."""
        few = few_held_out([pair.prompt for pair in self.held_out]) if self.config.run.eval_prompts else []
        return [*self.notes, *self.template_warnings(), *check_start(self), *few]

    def step_rows(self) -> StepRows:
        """The longest pairs."""
        size = min(self.config.dpo.batch_size, len(self.train))
        pairs = sorted(self.train, key=lambda pair: -pair.longest)[:size]
        return StepRows([[(p.prompt, answer) for answer in p[1:]] for p in pairs], sizes_of(self, pairs), size)

    def preview(self) -> str:
        """A pair as it is read, and what `check` says."""
        shown = [
            f"{name} ({len(tokens)} tokens): {visible(shortened(str(self.tokenizer.decode(tokens)), 400))}"
            for name, tokens in self.train[0]._asdict().items()
        ]
        counts = f"pairs: {len(self.train)} to train on, {len(self.held_out)} held out"
        return "\n".join([*shown, counts, *self.check()])

    def on_training_rows(self) -> DpoParts:
        """The same with the rows that are trained on in place of the held-out ones."""
        return replace(self, held_out=self.train)

    def save_models(self, folder: Path) -> None:
        """With what is known of the reference."""
        super().save_models(folder)
        if self.roles.has_reference:
            save_file({**self.reference}, folder / REFERENCE_LOGPROBS)

    def load_models(self, folder: Path) -> None:
        """Put back what `save_models` wrote."""
        super().load_models(folder)
        if (folder / REFERENCE_LOGPROBS).is_file():  # not where the run began with a loss that needs none
            kept = load_file(folder / REFERENCE_LOGPROBS)
            self.reference = {"training": kept["training"], "held-out": kept["held-out"]}

    def reference_logprobs(self, split: Split, rows: Sequence[int]) -> Tensor | None:
        """(B, 2): the reference's log-probabilities of chosen and rejected; None where the loss needs no reference.

        Rows that come up for the first time are computed, all in one pass, and kept.
        """
        if not self.roles.has_reference:
            return None
        pairs, known = self.train if split == "training" else self.held_out, self.reference[split]
        new = [row for row in dict.fromkeys(rows) if not known[row, 2]]
        if new:
            known[new, :2] = logprobs_of(self, "reference", [pairs[row] for row in new])
            known[new, 2] = 1.0
        return known[list(rows), :2]


def train(session: Session, parts: DpoParts) -> None:
    """Run preference optimization from the session's current step to run.num_steps."""
    config = parts.config.dpo
    size = min(config.batch_size, len(parts.train))  # at most all there are
    parts.roles.use_lora_dropout()
    for step in session.steps():
        # 1. The pairs of this step.
        rows = batch_indices(parts.config.run.seed, step, num_prompts=size, num_rows=len(parts.train))
        pairs = [parts.train[row] for row in rows]

        # 2. What the reference says of them; for KTO, how far the policy is from it elsewhere.
        reference, kl = None, 0.0
        if parts.roles.has_reference:
            with session.timed("reference"):
                reference, kl = parts.reference_logprobs("training", rows), reference_point(parts, pairs)

        # 3. One optimizer step.
        session.start_update()

        def loss_of(
            micro: list[int], pairs: list[Pair] = pairs, reference: Tensor | None = reference, kl: float = kl
        ) -> tuple[Tensor, dict[str, Tensor]]:
            said = None if reference is None else reference[micro]
            return pair_loss(parts, [pairs[i] for i in micro], said, kl=kl, denominator=len(pairs))

        one_pass = Pass("policy", loss_of, range(size), sizes_of(parts, pairs))
        with session.timed("update"):
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        more = {"preference/kl": kl} if config.loss == "kto" else {}
        session.end_step(**{"completion/tokens": float(lengths_of(pairs).sum())}, **more)


def pair_loss(
    parts: DpoParts, pairs: list[Pair], reference: Tensor | None, *, kl: float, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of pairs in one batch, under the acting policy."""
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
    """The loss that `dpo` names. logprobs and reference (None where it needs none), of chosen and rejected, summed over
    their tokens, and how many these are: (B, 2).
    """
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


def reference_point(parts: DpoParts, pairs: list[Pair]) -> float:
    """KTO's z_0: the mean log-ratio, at least 0, of the answers of all pairs of a step behind each other's prompts.

    0 for the other losses.
    """
    others = mismatched(pairs, most=most_tokens(parts)) if parts.config.dpo.loss == "kto" else []
    if not others:
        return 0.0
    return mismatched_kl(logprobs_of(parts, "policy", others), logprobs_of(parts, "reference", others))


def check_start(parts: DpoParts) -> list[str]:
    """The loss before the first step as a line; none where it has no value of its own. Raises ValueError, naming the
    reference, where it is not what it is while policy and reference agree.
    """
    dpo = parts.config.dpo
    if not parts.roles.has_reference:
        return []
    values = {"sigmoid": ("log 2", math.log(2.0)), "kto": ("1/2", 0.5)}
    name, wanted = values.get(dpo.loss, ("1 / (4 beta^2)", 0.25 / dpo.beta / dpo.beta))
    pairs = sorted(parts.train, key=lambda pair: pair.longest)[:4]
    policy, reference = (logprobs_of(parts, role, pairs) for role in ("policy", "reference"))
    kl = mismatched_kl(policy, reference)
    loss = float(preference_loss(dpo, policy, reference, lengths_of(pairs), kl=kl)[0])
    which = f"the reference is {reference_of(parts.roles)}"
    if not abs(loss - wanted) <= START_TO * max(1.0, wanted):
        raise ValueError(
            f"policy and reference differ before the first step: the loss is {loss:.6g}, not {name} = {wanted:.6g}; "
            f"{which}"
        )
    return [f"loss before the first step: {number(loss)}, {name}; {which}"]


def load(config: Config, *, options: Options) -> DpoParts:
    """Read the model and tokenise the pairs of task.data; a tenth is held out unless task.eval_data says otherwise."""
    parts = load_parts(config, options=options)
    rows, held_out_rows = example_rows(config)
    notes = described(rows, "pairs")
    train, held_out = (usable(tokenised(each, parts), parts, notes=notes) for each in (rows, held_out_rows))
    if config.dpo.loss == "kto" and len(train) < 2:
        raise ValueError("dpo.loss=kto estimates a KL from the answers to other prompts, so it needs 2 pairs or more")
    check_ids((p.prompt + answer for p in train + held_out for answer in p[1:]), parts.tokenizer, parts.roles.causal)
    known = fingerprints(rows, held_out_rows)
    return DpoParts(**vars(parts), train=train, held_out=held_out, row_fingerprints=known, notes=notes)


def evaluate(parts: DpoParts) -> Evaluation:
    """Accuracy (a tie counts half), margin and loss on held-out pairs, and the rewards of both sides."""
    pairs = parts.held_out[: parts.config.run.eval_prompts]
    policy, reference = logprobs_of(parts, "policy", pairs), parts.reference_logprobs("held-out", range(len(pairs)))
    kl = reference_point(parts, pairs)
    loss, metrics = preference_loss(parts.config.dpo, policy, reference, lengths_of(pairs), kl=kl)
    named = {name: float(metrics[f"rewards/{name}"]) for name in ("accuracy", "margin")}
    sides = {name: float(metrics[name]) for name in ("rewards/chosen", "rewards/rejected")}
    return Evaluation({**named, "loss": float(loss), **sides, "num_pairs": len(pairs)}, [], [])
