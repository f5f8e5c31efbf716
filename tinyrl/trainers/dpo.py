"""Direct preference optimization: a policy learns from pairs of answers, without a reward model, without sampling.

DPO (2305.18290) Eq. 7. IPO, KTO, ORPO and SimPO are other losses of the same log-probabilities, one word away
(algorithms/preference.py).

    for each step: a batch of pairs; log-probabilities of both answers under the reference, at a pair's first use,
    and under the policy; the loss; an optimizer step

Both answers stand behind one prompt, which is read once. The reference is what training starts from: the base with
adapters off, a frozen copy of the start adapter, or of the model. Its log-probabilities of a row are kept in the
checkpoint, so nothing waits for them before the first step, no epoch computes them again, and a resume is exact. KTO is
learnt from pairs here, each a desirable and an undesirable example; rows with a single labelled answer are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.algorithms.preference import dpo_loss, ipo_loss, kto_loss, mismatched_kl, orpo_loss, simpo_loss
from tinyrl.config.method_sections import DpoConfig
from tinyrl.config.schema import Config
from tinyrl.data.formats import Side, preference
from tinyrl.data.messages import Prompt, as_messages
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.checks import check_reference, reference_of
from tinyrl.models.packing import common_length
from tinyrl.rollout.components import Options, Parts
from tinyrl.trainers.rows import Example, RowTrainer, answer_logprobs, joined, rendered
from tinyrl.training.session import Session
from tinyrl.training.update import LossFn

REFERENCE_LOGPROBS = "reference_logprobs.safetensors"
Split = Literal["training", "held-out"]


class Dpo(RowTrainer):
    """Preference optimization. A row has one example, a pair.

    State: `reference`, for each split (N, 3): the reference's log-probabilities of chosen and rejected, and 1 where
    they are known.
    """

    def __init__(self, config: Config, *, options: Options) -> None:
        super().__init__(config, options=options)
        if config.dpo.loss == "kto" and len(self.train_rows) < 2:
            raise ValueError(
                "dpo.loss=kto estimates a KL from the answers to other prompts, so it needs 2 pairs or more"
            )
        self.forget()

    def forget(self) -> None:
        self.reference: dict[Split, Tensor] = {
            "training": torch.zeros(len(self.train_rows), 3),
            "held-out": torch.zeros(len(self.held_out), 3),
        }

    @property
    def limit(self) -> tuple[int, str]:
        most = self.config.dpo.max_tokens
        return (most, f"dpo.max_tokens={most}") if most and most <= self.positions else super().limit

    def examples(self, row: Row) -> list[Example]:
        """Both sides behind what their prompts have in common: all, unless a side begins with other messages."""
        pair = preference(row)
        sides = [answered(self, pair.prompt, answer) for answer in pair.answers]
        at = common_length([side.prompt for side in sides])
        answers = tuple(side.texts[0][at:] for side in sides)
        masks = None
        if any(side.masks or len(side.prompt) > at for side in sides):
            learnt = [side.masks[0] if side.masks else [True] * len(side.answers[0]) for side in sides]
            masks = tuple([False] * (len(s.prompt) - at) + mask for s, mask in zip(sides, learnt, strict=True))
        return [Example(sides[0].prompt[:at], answers, masks)]

    def loss(self, examples: list[Example], rows: list[int], session: Session) -> tuple[LossFn, dict[str, float]]:
        # 1. Log-probabilities under the reference; for KTO, how far the policy is from it elsewhere.
        reference, kl = None, 0.0
        if self.roles.has_reference:
            with session.timed("reference"):
                reference, kl = self.reference_logprobs("training", rows), reference_point(self, examples)

        # 2. The loss that the optimizer step descends.
        def loss_of(micro: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            pairs, theirs = [examples[i] for i in micro], None if reference is None else reference[micro]
            logprobs, count = pair_logprobs(self, "policy", pairs), len(examples)
            loss, metrics = preference_loss(self.config.dpo, logprobs, theirs, pairs, kl=kl, denominator=count)
            chosen, rejected = (logprobs.detach().sum(0) / count).unbind()
            return loss, {**metrics, "policy/chosen_logprobs": chosen, "policy/rejected_logprobs": rejected}

        more = {"preference/kl": kl} if self.config.dpo.loss == "kto" else {}
        return loss_of, {"completion/tokens": float(sum(pair.num_counted for pair in examples)), **more}

    def evaluate(self) -> Evaluation:
        """Accuracy (a tie counts half), margin and loss on held-out pairs, and the rewards of both sides."""
        pairs = [pair for row in self.held_out[: self.config.run.eval_prompts] for pair in row]
        policy, reference = logprobs_of(self, "policy", pairs), self.reference_logprobs("held-out", range(len(pairs)))
        kl = reference_point(self, pairs)
        loss, metrics = preference_loss(self.config.dpo, policy, reference, pairs, kl=kl)
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
            known[new, :2] = logprobs_of(self, "reference", [pairs[row][0] for row in new])
            known[new, 2] = 1.0
        return known[list(rows), :2]

    def check(self) -> list[str]:
        """Check that policy and reference agree before the first step."""
        texts = [pair.texts[0] for row in self.train_rows[:4] for pair in row]
        check_reference(self.roles, texts, temperature=1.0, autocast=self.accelerator.autocast)
        more = [f"the reference is {reference_of(self.roles)}"] if self.roles.has_reference else []
        return [*super().check(), *more]

    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        if self.roles.has_reference:
            save_file({**self.reference}, folder / REFERENCE_LOGPROBS)

    def load_models(self, folder: Path) -> None:
        super().load_models(folder)
        if (folder / REFERENCE_LOGPROBS).is_file():  # not where the run began with a loss that needs none
            kept = load_file(folder / REFERENCE_LOGPROBS)
            self.reference = {"training": kept["training"], "held-out": kept["held-out"]}


def answered(parts: Dpo, prompt: Prompt | None, answer: Side) -> Example:
    """A side of a pair behind its prompt. Of several messages each turn of the assistant is learnt. Raises ValueError
    where it cannot be rendered.
    """
    system_prompt = parts.config.task.system_prompt
    if isinstance(answer, str) or len(answer) == 1:
        return rendered(parts, prompt, answer, system_prompt=system_prompt)
    messages = [*as_messages(prompt), *answer]
    first = len(messages) - len(answer)
    turns = [at for at, message in enumerate(messages) if at >= first and message["role"] == "assistant"]
    one, *more = joined([rendered(parts, messages[:at], [messages[at]], system_prompt=system_prompt) for at in turns])
    if more:
        raise ValueError(
            "the chat template writes a turn of the answer differently once other messages follow it, so the answer "
            "is no single text; give its last turn alone, behind the messages before it"
        )
    return one


# ---- the loss ----


def preference_loss(
    dpo: DpoConfig,
    logprobs: Tensor,
    reference: Tensor | None,
    pairs: list[Example],
    *,
    kl: float,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `pairs` that `dpo` names. logprobs, reference: (B, 2), summed over tokens, of chosen and rejected."""
    lengths = torch.tensor([pair.learnt for pair in pairs]).to(logprobs)
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


def reference_point(parts: Dpo, pairs: list[Example]) -> float:
    """KTO's z_0: the mean log-ratio, at least 0, of each answer behind the next pair's prompt, where that is another
    prompt and both are short enough; 0 for other losses.
    """
    if parts.config.dpo.loss != "kto":
        return 0.0
    nexts = zip(pairs, pairs[1:] + pairs[:1], strict=True)
    shifted = (b._replace(prompt=a.prompt) for a, b in nexts if a.prompt != b.prompt)
    others = [pair for pair in shifted if pair.length <= parts.limit[0]]
    if not others:
        return 0.0
    return mismatched_kl(logprobs_of(parts, "policy", others), logprobs_of(parts, "reference", others))


def pair_logprobs(parts: Parts, role: Literal["policy", "reference"], pairs: list[Example]) -> Tensor:
    """(B, 2): log-probabilities of chosen and rejected, summed over their tokens; the role must be acting."""
    return answer_logprobs(parts, role, pairs).sum(1).view(2, len(pairs)).T


def logprobs_of(parts: RowTrainer, role: Literal["policy", "reference"], pairs: list[Example]) -> Tensor:
    """`pair_logprobs` of any number of pairs, without gradient, on the CPU."""
    return parts.over(partial(pair_logprobs, parts, role), pairs, role=role)
