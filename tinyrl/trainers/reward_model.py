"""Reward model training: one score for an answer, from pairs (Bradley-Terry), labels (classification) or ratings
(regression).

InstructGPT (2203.02155) Eq. 1, with the margin of Llama 2 (2307.09288) Eq. 2 where rows ask for one; binary
cross-entropy on labels, so that a score is log-odds (less the centre, once it is saved); squared error on ratings, in
deviations from their mean.

    for each step: a batch of rows; their scores; the loss of the objective; an optimizer step

With LoRA the result is an adapter and a head for the shared base (token in, token out, EOS included); fully
fine-tuned it is a plain sequence-classification model with its own tokenizer, which reads a finished turn of its chat
template. Scores are centred when they are saved: the mean over training rows is subtracted, so PPO starts near zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tinyrl.algorithms.preference import bradley_terry_loss
from tinyrl.algorithms.score_losses import label_loss, rating_loss
from tinyrl.components import Options, load_parts
from tinyrl.config.schema import Config
from tinyrl.data.rows import batch_indices
from tinyrl.distributed import ALONE, World
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.reward_models import label_metrics, pair_metrics, rating_metrics
from tinyrl.models.batches import trunk_of
from tinyrl.models.device import to_device
from tinyrl.models.micro_batches import RowSizes, StepRows, Work, own_rows
from tinyrl.models.reward_model import SCORE_HEAD, SCORE_OFFSET
from tinyrl.parts import Parts
from tinyrl.rewards.model_text import TEXT_FORMAT, TextFormat
from tinyrl.runs.signals import watched
from tinyrl.trainers.reward_rows import JudgedRows, JudgedTokens, read_judged_rows
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

CENTERED_ON = 512  # rows to train on that the centre is measured on


@dataclass
class RewardParts(Parts):
    """What a reward model learns from: tokenised rows."""

    rows: JudgedRows

    @property
    def row_fingerprints(self) -> dict[str, str]:
        """Of both splits."""
        return self.rows.fingerprints

    def check(self) -> list[str]:
        """What rows are taken for, and whether held-out scores can say something."""
        return self.rows.notes

    def preview(self) -> str:
        """The same, for `--dry-run`."""
        return "\n".join([*self.rows.notes, super().preview()])

    def step_rows(self) -> StepRows:
        """The longest rows; what the sides of a pair begin with is their prompt."""
        size = min(self.config.reward_model.batch_size, len(self.rows.train))
        longest = sorted(self.rows.train, key=lambda one: -sum(map(len, one.texts)))[:size]
        starts = [max(1, shared_start(one.texts)) for one in longest]
        sequences = [[(t[:n], t[n:]) for t in one.texts] for n, one in zip(starts, longest, strict=True)]
        return StepRows(sequences, sizes_of(self, longest), size)

    def has_prompts(self) -> bool:
        """Whether PPO finds prompts in task.data."""
        return self.rows.prompts

    @property
    def text_format(self) -> TextFormat:
        """How prompts are written; kept with the weights, so that scoring writes them the same way."""
        return TextFormat.of_run(self.config)

    def on_training_rows(self) -> RewardParts:
        """The same with the rows that are trained on in place of the held-out ones."""
        return replace(self, rows=replace(self.rows, held_out=self.rows.train))

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
            config = self.roles.causal.config.__class__.from_dict(
                {**self.roles.causal.config.to_dict(), "num_labels": 1}
            )
            setattr(config, SCORE_OFFSET, float(head.bias.detach() - center))
            setattr(config, TEXT_FORMAT, asdict(self.text_format))
            classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            trunk_of(classifier).load_state_dict(trunk_of(self.roles.causal).state_dict())
            with torch.no_grad():
                classifier.score.weight.copy_(head.weight)
            classifier.save_pretrained(folder, max_shard_size="10000GB")
            self.tokenizer.save_pretrained(folder)
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
            trunk_of(self.roles.causal).load_state_dict({k.removeprefix(f"{prefix}."): v for k, v in tensors.items()})
        head.load_state_dict({"weight": weight, **load_file(folder / "score_bias.safetensors")})

    def center(self) -> float:
        """Mean score over some training rows, both sides of pairs; 0 when reward_model.center is off."""
        if not self.config.reward_model.center:
            return 0.0
        return float(torch.cat(self.scores(self.rows.train[:CENTERED_ON], world=ALONE)).mean())  # while rank 0 saves

    def scores(self, examples: list[JudgedTokens], *, world: World) -> tuple[Tensor, ...]:
        """Scores (n,) of the chosen and of the rejected sides, or of single answers, without gradient; each process of
        `world` computes some of them.
        """
        device = self.roles.device
        out = torch.zeros(len(examples), 2 if self.rows.objective == "pairs" else 1, device=device)

        def run(rows: list[int]) -> None:
            scores = torch.stack(answer_scores(self, [examples[i] for i in rows]), 1).float()
            out[to_device(torch.as_tensor(rows), device)] = scores

        with torch.no_grad(), self.roles.acting("policy"), self.accelerator.autocast():
            sizes = sizes_of(self, examples)
            self.micro_batches.run(Work(sizes, run, own_rows(sizes, None, world)))
        world.sum(out)
        return out.cpu().unbind(1)


def train(session: Session, parts: RewardParts) -> None:
    """Train the reward model from the session's current step to run.num_steps."""
    seed, examples = parts.config.run.seed, parts.rows.train
    size = min(parts.config.reward_model.batch_size, len(examples))  # at most all there are
    parts.roles.use_lora_dropout()
    for step in session.steps():
        chosen = [examples[i] for i in batch_indices(seed, step, num_prompts=size, num_rows=len(examples))]
        session.start_update()

        def loss_of(rows: list[int], chosen: list[JudgedTokens] = chosen) -> tuple[Tensor, dict[str, Tensor]]:
            return score_loss(parts, [chosen[i] for i in rows], denominator=len(chosen))

        one_pass = Pass("policy", loss_of, range(len(chosen)), sizes_of(parts, chosen))
        with session.timed("update"):
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        session.end_step()


def score_loss(
    parts: RewardParts, examples: list[JudgedTokens], *, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the rows' objective on some of a step's `denominator` rows."""
    smoothing, scores = parts.config.reward_model.label_smoothing, answer_scores(parts, examples)
    targets = torch.tensor([one.target for one in examples], device=scores[0].device)
    if parts.rows.objective == "pairs":
        chosen, rejected = scores
        return bradley_terry_loss(chosen, rejected, margin=targets, label_smoothing=smoothing, denominator=denominator)
    if parts.rows.objective == "labels":
        return label_loss(scores[0], targets, label_smoothing=smoothing, denominator=denominator)
    return rating_loss(scores[0], targets, denominator=denominator)


def answer_scores(parts: Parts, examples: list[JudgedTokens]) -> tuple[Tensor, ...]:
    """Scores of the answers, one (n,) for each side. What two sides begin with is the prompt, which a packed batch
    reads once.
    """
    starts = [max(1, shared_start(one.texts)) for one in examples]
    sides = zip(*(one.texts for one in examples), strict=True)
    cut = [(text[:n], text[n:]) for side in sides for n, text in zip(starts, side, strict=True)]
    batch = parts.roles.batch([prompt for prompt, _ in cut], [answer for _, answer in cut], last_tokens=True)
    return parts.roles.scores(batch).split(len(examples))


def shared_start(texts: tuple[list[int], ...]) -> int:
    """How many tokens one or two texts begin with alike: all of a single one."""
    alike = enumerate(zip(*texts, strict=False))
    return next((i for i, tokens in alike if tokens[0] != tokens[-1]), min(map(len, texts)))


def sizes_of(parts: Parts, examples: list[JudgedTokens]) -> RowSizes:
    """What a row costs a forward pass: its sides at the longest one's length, or packed, what they share once."""
    lengths = []
    for one in watched(examples):
        each = [len(text) for text in one.texts]
        shared = (len(each) - 1) * shared_start(one.texts)
        lengths.append(sum(each) - shared if parts.roles.packs else len(each) * max(each))
    return RowSizes.alone(lengths, packed=parts.roles.packs)


def load(config: Config, *, options: Options) -> RewardParts:
    """Read the base, give it a score head, tokenise the rows of task.data."""
    parts = load_parts(config, options=options)
    parts.roles.train_score_head()
    rows = read_judged_rows(config, parts)
    if rows.objective == "pairs":
        parts.roles.fix_score_bias()
    return RewardParts(**vars(parts), rows=rows)


def evaluate(parts: RewardParts) -> Evaluation:
    """How held-out rows are told apart, and how far predictions can be trusted."""
    rows = parts.rows
    examples = rows.held_out[: parts.config.run.eval_prompts]
    scores, targets = (
        parts.scores(examples, world=parts.world),
        torch.tensor([one.target for one in examples], dtype=torch.float64),
    )
    if rows.objective == "pairs":
        chosen, rejected = scores
        metrics = pair_metrics(chosen, rejected, targets)
    elif rows.objective == "labels":
        metrics = label_metrics(scores[0], targets)
    else:
        ratings = rows.mean + rows.deviation * targets
        metrics = rating_metrics(scores[0], ratings, mean=rows.mean, deviation=rows.deviation)
    return Evaluation(metrics, [], [])
