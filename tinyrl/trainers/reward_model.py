"""Reward model training: one score for an answer, from pairs (Bradley-Terry) or labels (classification).

InstructGPT (2203.02155) Eq. 1, with the margin of Llama 2 (2307.09288) Eq. 2 where rows ask for one; binary
cross-entropy on labels, so that a score is log-odds (less the centre, once it is saved).

    for each step: a batch of rows; their scores; the loss of the objective; an optimizer step

With LoRA the result is an adapter and a head for the shared base (token in, token out, EOS included); fully
fine-tuned it is a plain sequence-classification model with its own tokenizer, which reads a finished turn of its chat
template. Scores are centred when they are saved: the mean over training rows is subtracted, so PPO starts near zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tinyrl.algorithms.preference import bradley_terry_loss, label_loss
from tinyrl.data.formats import (
    EQUAL,
    Scored,
    described,
    judged,
    leave_out,
    objective_of,
    quoting,
    two_labels,
)
from tinyrl.data.readers import Row
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.statistics import label_metrics, pair_metrics
from tinyrl.models.batches import backbone_of
from tinyrl.models.loading import save_tokenizer
from tinyrl.models.micro_batches import RowSizes
from tinyrl.models.packing import common_length
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.reward_model import SCORE_HEAD, SCORE_OFFSET, classifier_max_tokens
from tinyrl.rewards.model_text import TEXT_FORMAT, TextFormat, reward_tokens
from tinyrl.rollout.components import Parts
from tinyrl.runs.signals import watched
from tinyrl.training.session import Session
from tinyrl.training.trainer import Batch, RowTrainer

CENTERED_ON = 512  # rows to train on that the centre is measured on


@dataclass(frozen=True)
class JudgedTokens:
    """texts: tokens of the chosen and the rejected answer, or of one, each behind its prompt. target: the margin asked
    for, or the label (0 or 1).
    """

    texts: tuple[list[int], ...]
    target: float


Tokenised = tuple[Row, Scored, tuple[list[int], ...]]


class RewardModel(RowTrainer):
    """Reward model training. A row is one or two answers and what is asked of their scores."""

    train_rows: list[JudgedTokens]
    held_out: list[JudgedTokens]

    def read(self, rows: list[Row], held_out: list[Row]) -> tuple[list[JudgedTokens], list[JudgedTokens]]:
        """Raises ValueError for rows that say nothing of their answers, and where they leave nothing to learn."""
        with_adapter = self.roles.peft is not None
        self.room = self.positions if with_adapter else classifier_max_tokens(self.roles.causal.config, self.tokenizer)
        objective = self.objective = objective_of(rows[0])
        self.roles.train_score_head(bias=objective != "pairs")
        self.notes += described(rows, objective)
        splits = [[(row, judged(row, objective)) for row in watched(part)] for part in (rows, held_out)]
        values = [[one.value for _, one in split] for split in splits]
        good = None if objective == "pairs" else self._good_label(*values)
        cut: list[bool] = []  # for each text
        texts = [[(row, one, self._texts(row, one, cut=cut)) for row, one in watched(split)] for split in splits]
        if objective == "pairs":
            texts = [self._distinct(split) for split in texts]
        train, held = (
            [JudgedTokens(tokens, one.value if good is None else float(one.value == good)) for _, one, tokens in split]
            for split in texts
        )
        self.has_prompts = all(row.get("prompt") is not None for row in rows)
        self._prompts = [one.prompt or one.answers for _, one, _ in texts[1]]
        if any(cut):
            self.notes.append(
                f"warning: {sum(cut):,} of {len(cut):,} texts have more than the {self.room:,} tokens that the model "
                "reads; their beginnings are cut off, as they will be in scoring"
            )
        return train, held

    def _good_label(self, values: list[float], held_out: list[float]) -> float:
        """Return the higher of the two labels, and note which that is."""
        low, high = two_labels(values)
        two_labels([*values, *held_out])
        good = f"{values.count(high):,} of {len(values):,} rows"
        self.notes.append(f"labels: {high:g} is the good one ({good}), {low:g} the other")
        return high

    def _distinct(self, split: list[Tokenised]) -> list[Tokenised]:
        """Pairs without those whose sides are equal as tokens, once their beginnings are cut off."""
        same = [f"{EQUAL} once they are cut" if tokens[0] == tokens[1] else None for _, _, tokens in split]
        leave_out([row for row, _, _ in split], same, self.notes)
        return [each for each, reason in zip(split, same, strict=True) if reason is None]

    def _texts(self, row: Row, one: Scored, *, cut: list[bool]) -> tuple[list[int], ...]:
        """Tokens of each answer behind its prompt, by the functions that score completions later; `cut` notes whether
        its beginning is cut off. Raises ValueError, quoting the row, where no policy writes such.
        """
        how = {"text_format": self.text_format, "adapter": self.roles.peft is not None}
        texts = []
        with quoting(row):
            for answer in one.answers:
                text = reward_tokens(self.tokenizer, one.prompt, answer, max_tokens=self.room + 1, **how)
                cut.append(len(text) > self.room)
                if cut[-1]:
                    text = reward_tokens(self.tokenizer, one.prompt, answer, max_tokens=self.room, **how)
                texts.append(text)
        return tuple(texts)

    def batch(self, rows: list[int], session: Session | None = None) -> Batch:
        chosen = [self.train_rows[i] for i in rows]

        def loss_of(micro: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            return score_loss(self, [chosen[i] for i in micro], denominator=len(chosen))

        return Batch(loss_of, sizes_of(self, chosen), {})

    def evaluate(self) -> Evaluation:
        examples = self.held_out[: self.config.run.eval_prompts]
        scores = self.scores(examples, world=self.world)
        targets = torch.tensor([one.target for one in examples], dtype=torch.float64)
        if self.objective == "pairs":
            chosen, rejected = scores
            metrics = pair_metrics(chosen, rejected, targets)
        else:
            metrics = label_metrics(scores[0], targets)
        return Evaluation(metrics, [], [])

    def texts(self, row: JudgedTokens) -> tuple[list[int], ...]:
        return row.texts

    def prompts(self) -> list[Any]:
        return self._prompts

    @property
    def text_format(self) -> TextFormat:
        """How prompts are written; kept with the weights, so that scoring writes them the same way."""
        return TextFormat.of_run(self.config)

    def save_models(self, folder: Path) -> None:
        """LoRA: adapter and centred head. Full: a sequence-classification model whose config holds the centre."""
        center = self.center()
        head = self.roles.score_head
        assert head is not None
        if self.roles.peft is not None:
            super().save_models(folder)
            tensors = {"weight": head.weight.detach().cpu(), "bias": (head.bias - center).detach().cpu()}
            save_file(tensors, folder / SCORE_HEAD, metadata=self.text_format.metadata())
        else:
            config = self.roles.causal.config.__class__.from_dict(self.roles.causal.config.to_dict())
            config.num_labels = 1
            setattr(config, SCORE_OFFSET, float(head.bias.detach() - center))
            setattr(config, TEXT_FORMAT, asdict(self.text_format))
            with torch.device("meta"):  # its weights are those that are trained
                classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            backbone_of(classifier).load_state_dict(backbone_of(self.roles.causal).state_dict(), assign=True)
            classifier.score.weight = head.weight
            classifier.save_pretrained(folder, max_shard_size="10000GB")
            save_tokenizer(self.tokenizer, folder, revision=self.config.model.revision)
        save_file({"bias": head.bias.detach().cpu()}, folder / "score_bias.safetensors")

    def load_models(self, folder: Path) -> None:
        """Restore the uncentred head, which is the one the optimizer trains."""
        head = self.roles.score_head
        assert head is not None
        if self.roles.peft is not None:
            super().load_models(folder)
            weight = load_file(folder / SCORE_HEAD)["weight"]
        else:
            tensors = load_file(folder / "model.safetensors")
            weight = tensors.pop("score.weight")
            prefix = self.roles.causal.base_model_prefix
            backbone_of(self.roles.causal).load_state_dict(
                {k.removeprefix(f"{prefix}."): v for k, v in tensors.items()}
            )
        head.load_state_dict({"weight": weight, **load_file(folder / "score_bias.safetensors")})

    def center(self) -> float:
        """Mean score over some training rows, both sides of pairs: PPO starts with rewards near 0."""
        return float(torch.cat(self.scores(self.train_rows[:CENTERED_ON], world=ALONE)).mean())  # while rank 0 saves

    def scores(self, examples: list[JudgedTokens], *, world: World) -> tuple[Tensor, ...]:
        """Scores (n,) of each side, chosen and rejected or the only one, without gradient."""

        def compute(rows: list[int]) -> tuple[Tensor, ...]:
            return tuple(side.unsqueeze(1) for side in answer_scores(self, [examples[i] for i in rows]))

        sides = self.forward(compute, sizes_of(self, examples), role="policy", among=world)
        return tuple(side.squeeze(1) for side in sides)


def score_loss(
    parts: RewardModel, examples: list[JudgedTokens], *, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the rows' objective on some of a step's `denominator` rows."""
    scores = answer_scores(parts, examples)
    targets = torch.tensor([one.target for one in examples], device=scores[0].device)
    if parts.objective == "pairs":
        chosen, rejected = scores
        return bradley_terry_loss(chosen, rejected, margin=targets, denominator=denominator)
    return label_loss(scores[0], targets, denominator=denominator)


def answer_scores(parts: Parts, examples: list[JudgedTokens]) -> tuple[Tensor, ...]:
    """Scores of the answers, one (n,) for each side; a packed batch reads what two sides begin with once."""
    begins = [begin_of(one) for one in examples]
    answers = [
        text[len(begin) :]
        for side in zip(*(e.texts for e in examples), strict=True)
        for begin, text in zip(begins, side, strict=True)
    ]
    batch = parts.roles.batch(begins * (len(answers) // len(begins)), answers, last_tokens=True)
    return parts.roles.scores(batch).split(len(examples))


def sizes_of(parts: Parts, examples: list[JudgedTokens]) -> RowSizes:
    """What a row costs a forward pass: packed, what its sides begin with once; else each as long as the longest."""
    if not parts.roles.packs:
        return RowSizes.alone([len(e.texts) * max(map(len, e.texts)) for e in examples], packed=False)
    begins = [begin_of(one) for one in watched(examples)]
    rest = [sum(len(text) - len(begin) for text in e.texts) for e, begin in zip(examples, begins, strict=True)]
    return RowSizes.of(begins, rest, packed=True)


def begin_of(example: JudgedTokens) -> list[int]:
    """What its sides begin with; a token at least."""
    return example.texts[0][: max(1, common_length(example.texts))]
