"""Reward model training: one score for an answer, from pairs (Bradley-Terry) or labels (classification).

InstructGPT (2203.02155) Eq. 1, with the margin of Llama 2 (2307.09288) Eq. 2 where rows ask for one; binary
cross-entropy on labels, so that a score is log-odds (less the centre, once it is saved).

    for each step: a batch of rows; their scores; the loss of the objective; an optimizer step

With LoRA the result is an adapter and a head for the shared base (token in, token out, EOS included); fully
fine-tuned it is a plain sequence-classification model with its own tokenizer, which reads a finished turn of its chat
template. Scores are centred when they are saved: the mean over training rows is subtracted, so PPO starts near zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.preference import bradley_terry_loss, label_loss
from tinyrl.data.formats import labelled, preference, two_labels
from tinyrl.data.readers import Row
from tinyrl.data.turns import behind_beginning
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.reward_model import label_metrics, pair_metrics
from tinyrl.models.batch import Batch, Example, Item
from tinyrl.models.loading import save_tokenizer
from tinyrl.models.packing import common_length
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.policy import Policy
from tinyrl.models.reward_model import SCORE_HEAD, SCORE_OFFSET, classifier_max_tokens, load_classifier
from tinyrl.models.states import backbone_of
from tinyrl.rewards.model_text import TEXT_FORMAT, TextFormat, reward_tokens
from tinyrl.tasks.run_rows import RunRows
from tinyrl.training.method import Pass
from tinyrl.training.rows import RowMethod
from tinyrl.training.run import Run

SCORE_BIAS = "score_bias.safetensors"  # the bias that is trained: not centred
CENTERED_ON = 512  # rows to train on that the centre is measured on


class RewardModel(RowMethod):
    """Reward model training. A row has one example: a pair and its margin, or an answer and its label, 0 or 1."""

    def __init__(self, policy: Policy, rows: RunRows) -> None:
        super().__init__(policy, rows)
        policy.train_score_head(bias=self.kind.has_labels)
        if self.kind.has_labels:
            self._take_labels()
        full = 0  # texts of as many tokens as the model reads
        for row in self.train_rows + self.held_out:
            for example in row:
                full += sum(len(text) >= self.room for text in example.texts)
        if full:
            what = f"warning: {full:,} texts fill the {self.room:,} tokens that the model reads"
            self.notes.append(f"{what}; the beginnings of longer ones are cut off, as they will be in scoring")

    def _take_labels(self) -> None:
        """Set the higher of the two labels to 1 and the other to 0, and note which that is."""
        splits = self.train_rows, self.held_out
        values, held_out = ([row[0].value for row in split] for split in splits)
        low, high = two_labels(values)
        two_labels([*values, *held_out])  # raises for a third label among the held-out rows
        self.train_rows, self.held_out = (
            [[one._replace(value=float(one.value == high)) for one in row] for row in split] for split in splits
        )
        good = f"{values.count(high):,} of {len(values):,} rows"
        self.notes.append(f"labels: {high:g} is the good one ({good}), {low:g} the other")

    @property
    def room(self) -> int:
        """Return most tokens that the model reads."""
        if self.policy.adapters.peft is not None:
            return self.policy.positions
        return classifier_max_tokens(self.policy.causal.config, self.tokenizer)

    @property
    def text_format(self) -> TextFormat:
        """Return how prompts are written; saved with the weights, so that scoring writes them the same way."""
        return TextFormat.of_run(self.config)

    def examples(self, row: Row, variables: dict[str, Any]) -> list[Example]:
        """Tokenise each answer behind its prompt, by the functions that score completions later."""
        one = labelled(row) if self.kind.has_labels else preference(row)
        how: Any = {"text_format": self.text_format, "max_tokens": self.room, "images": self.policy.image_expander}
        adapter = self.policy.adapters.peft is not None
        texts = list[list[int]]()
        for side in one.answers:
            prompt, answer = behind_beginning(one.prompt, side, continues=one.continues)
            texts.append(reward_tokens(self.tokenizer, prompt, answer, adapter=adapter, **how))
        at = max(1, common_length(texts))
        return [Example(texts[0][:at], tuple(text[at:] for text in texts), value=one.value)]

    def make_pass(self, examples: list[Example], rows: list[int], run: Run) -> tuple[Pass, dict[str, float]]:
        loss = partial(self.loss, count=len(examples))
        return Pass("policy", examples, loss, last_tokens=True), {}

    def loss(self, batch: Batch, *, count: int) -> tuple[Tensor, Metrics]:
        """Compute Bradley-Terry's loss of pairs, or cross-entropy of labels; the step has `count` examples."""
        chosen, *other = self.score_batch(batch).unbind(1)
        targets = torch.tensor([one.value for one in batch.items], device=chosen.device)
        if other:
            return bradley_terry_loss(chosen, other[0], margin=targets, denominator=count)
        return label_loss(chosen, targets, denominator=count)

    def trial_passes(self, items: Sequence[Item]) -> list[Pass]:
        """Return a pass that scores the items."""
        return [Pass("policy", items, lambda batch: (self.score_batch(batch).sum(), {}), last_tokens=True)]

    def evaluate(self) -> Evaluation:
        examples = [one for row in self.held_out[: self.config.run.eval_prompts] for one in row]
        chosen, *other = self.score_examples(examples).unbind(1)
        targets = torch.tensor([one.value for one in examples], dtype=torch.float64)
        metrics = pair_metrics(chosen, other[0], targets) if other else label_metrics(chosen, targets)
        return Evaluation(metrics)

    def score_batch(self, batch: Batch) -> Tensor:
        """Score a batch: (n, 2) of chosen and rejected, or (n, 1)."""
        return self.policy.reward_scores(batch).view(-1, len(batch.items)).T

    def score_examples(self, examples: list[Example], *, among: World | None = None) -> Tensor:
        """Score any number of examples, without gradient, on the CPU."""
        how: Any = {"role": "policy", "width": len(examples[0].responses), "last_tokens": True, "among": among}
        return self.policy.map_samples(lambda batch: (self.score_batch(batch),), examples, **how)[0]

    def save(self, folder: Path) -> None:
        """Save adapter and centred head, or a sequence-classification model whose config holds the centre."""
        head = self.policy.score_head
        assert head is not None
        first = [one for row in self.train_rows[:CENTERED_ON] for one in row]
        # The mean over both sides of pairs: PPO starts with rewards near 0. Rank 0 saves alone.
        center = float(torch.cat(self.score_examples(first, among=ALONE).unbind(1)).mean())
        if self.policy.adapters.peft is not None:
            super().save(folder)
            tensors = {"weight": head.weight.detach().cpu(), "bias": (head.bias - center).detach().cpu()}
            save_file(tensors, folder / SCORE_HEAD, metadata=self.text_format.metadata())
        else:
            classifier = self._classifier(offset=float(head.bias.detach() - center))
            backbone_of(classifier).load_state_dict(backbone_of(self.policy.causal).state_dict(), assign=True)
            classifier.score.weight = head.weight
            classifier.save_pretrained(folder, max_shard_size="10000GB")
            save_tokenizer(self.tokenizer, folder, revision=self.config.model.revision)
        save_file({"bias": head.bias.detach().cpu()}, folder / SCORE_BIAS)

    def save_without_weights(self, folder: Path) -> None:
        if self.policy.adapters.peft is None:
            self._classifier(offset=0.0).save_pretrained(folder, state_dict={})
            save_tokenizer(self.tokenizer, folder, revision=self.config.model.revision)
        else:
            super().save_without_weights(folder)

    def _classifier(self, *, offset: float) -> Any:
        """Make the classification model that is saved, without memory for its weights, which are those trained."""
        config = self.policy.causal.config.__class__.from_dict(self.policy.causal.config.to_dict())
        config.num_labels = 1
        setattr(config, SCORE_OFFSET, offset)
        setattr(config, TEXT_FORMAT, asdict(self.text_format))
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)

    def load(self, folder: Path) -> None:
        """Restore the uncentred head, which is the one the optimizer trains."""
        head = self.policy.score_head
        assert head is not None
        if self.policy.adapters.peft is not None:
            super().load(folder)
            weight = load_file(folder / SCORE_HEAD)["weight"]
        else:
            classifier: Any = load_classifier(str(folder), dtype=torch.float32)
            weight = classifier.score.weight.detach()
            backbone_of(self.policy.causal).load_state_dict(backbone_of(classifier).state_dict())
        head.load_state_dict({"weight": weight, **load_file(folder / SCORE_BIAS)})
