"""Reward model training on pairs of a chosen and a rejected completion, by the Bradley-Terry loss.

InstructGPT (2203.02155), Eq. 1.

    for each step: a batch of pairs; -log sigmoid(score(chosen) - score(rejected)); an optimizer step

With LoRA the result is an adapter and a head for the shared base (token in, token out, EOS included); fully
fine-tuned it is a plain sequence-classification model with its own tokenizer, which reads a finished turn of its chat
template. Pairs are tokenised by the functions that score completions later (rewards/model_text.py). Scores are
centred: the mean over training pairs is subtracted, so PPO starts near zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tinyrl.algorithms.preference import bradley_terry_loss
from tinyrl.components import Options, Parts, load_parts
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, few_held_out, fingerprints
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.batches import trunk_of
from tinyrl.models.micro_batches import RowSizes, Work
from tinyrl.models.reward_model import SCORE_HEAD, SCORE_OFFSET, classifier_room, positions_of
from tinyrl.rewards.model_text import TEXT_FORMAT, TextFormat, adapter_tokens, classifier_tokens
from tinyrl.runs.signals import watched
from tinyrl.text import listed
from tinyrl.trainers.sft import text_rows
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

Pair = tuple[list[int], list[int]]  # tokens of prompt + chosen, prompt + rejected
CENTERED_ON = 512  # training pairs the centre is measured on


@dataclass
class PairParts(Parts):
    """What a reward model learns from: tokenised pairs. `center` is the mean score that is subtracted."""

    train: list[Pair]
    held_out: list[Pair]
    row_fingerprints: dict[str, str]

    def check(self) -> list[str]:
        """Whether held-out scores can say something."""
        return few_held_out(self.held_out) if self.config.run.eval_prompts else []

    @property
    def text_format(self) -> TextFormat:
        """How prompts are written; kept with the weights, so that scoring writes them the same way."""
        return text_format_of(self.config)

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
        """Mean score over some training pairs, both sides; 0 when reward_model.center is off."""
        if not self.config.reward_model.center:
            return 0.0
        return float(torch.cat(self.scores(self.train[:CENTERED_ON])).mean())

    def scores(self, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected sides, without gradient."""
        out = torch.zeros(len(pairs), 2)

        def run(rows: list[int]) -> None:
            out[rows] = torch.stack(pair_scores(self, [pairs[i] for i in rows]), 1).float().cpu()

        with torch.no_grad(), self.roles.acting("policy"), self.accelerator.autocast():
            self.micro_batches.run(Work(sizes_of(self, pairs), run))
        return out[:, 0], out[:, 1]


def train(session: Session, parts: PairParts) -> None:
    """Train the reward model from the session's current step to run.num_steps."""
    config = parts.config.reward_model
    size = min(config.batch_size, len(parts.train))  # no pair twice in a step
    parts.roles.use_lora_dropout()
    for step in session.steps():
        chosen = [
            parts.train[i]
            for i in batch_indices(parts.config.run.seed, step, num_prompts=size, num_rows=len(parts.train))
        ]
        session.start_update()

        def loss_of(rows: list[int], chosen: list[Pair] = chosen) -> tuple[Tensor, dict[str, Tensor]]:
            return pair_loss(
                parts, [chosen[i] for i in rows], smoothing=config.label_smoothing, denominator=len(chosen)
            )

        one_pass = Pass("policy", loss_of, range(len(chosen)), sizes_of(parts, chosen))
        with session.timed("update"):
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        session.end_step()


def pair_loss(
    parts: PairParts, pairs: list[Pair], *, smoothing: float, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry loss of pairs in one batch; with smoothing s a label is right with probability 1 - s."""
    chosen, rejected = pair_scores(parts, pairs)
    return bradley_terry_loss(chosen, rejected, label_smoothing=smoothing, denominator=denominator)


def pair_scores(parts: Parts, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and rejected sides. Their common start is the prompt, which a packed batch reads once."""
    starts = [max(1, shared_start(a, b)) for a, b in pairs]
    sides = [*zip(starts, (a for a, _ in pairs), strict=True), *zip(starts, (b for _, b in pairs), strict=True)]
    batch = parts.roles.batch([side[:n] for n, side in sides], [side[n:] for n, side in sides], last_tokens=True)
    scores = parts.roles.scores(batch)
    return scores[: len(pairs)], scores[len(pairs) :]


def shared_start(chosen: list[int], rejected: list[int]) -> int:
    """How many tokens both sides of a pair begin with."""
    both = zip(chosen, rejected, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))


def sizes_of(parts: Parts, pairs: list[Pair]) -> RowSizes:
    """What a pair costs a forward pass: both sides at the longer one's length, or packed, what they share once."""
    if parts.roles.packs:
        lengths = [len(a) + len(b) - shared_start(a, b) for a, b in watched(pairs)]
    else:
        lengths = [2 * max(len(a), len(b)) for a, b in pairs]
    return RowSizes.alone(lengths, packed=parts.roles.packs)


def load(config: Config, *, options: Options) -> PairParts:
    """Read the base, give it a score head, tokenise the pairs of task.data."""
    parts = load_parts(config, options=options)
    parts.roles.train_score_head()
    rows, held_out = text_rows(config)
    return PairParts(
        **vars(parts),
        train=[pair(r, parts) for r in watched(rows)],
        held_out=[pair(r, parts) for r in watched(held_out)],
        row_fingerprints=fingerprints(rows, held_out),
    )


def pair(row: Row, parts: Parts) -> Pair:
    """Tokens of prompt + chosen and prompt + rejected, as the finished reward model will read them."""
    missing = [name for name in ("prompt", "chosen", "rejected") if name not in row]
    if missing:
        raise ValueError(
            "a reward model needs rows with `prompt`, `chosen` and `rejected`; this row has no "
            f"{missing[0]} (it has {listed(row)})"
        )
    tokenizer, text_format, config = parts.tokenizer, text_format_of(parts.config), parts.roles.causal.config

    def tokens(completion: str) -> list[int]:
        if parts.roles.peft is not None:
            tokens_of, room = adapter_tokens, positions_of(config)
        else:
            tokens_of, room = classifier_tokens, classifier_room(config, tokenizer)
        return tokens_of(tokenizer, row["prompt"], completion, text_format=text_format, max_tokens=room)

    return tokens(row["chosen"]), tokens(row["rejected"])


def text_format_of(config: Config) -> TextFormat:
    """How a run's configuration writes prompts."""
    return TextFormat(config.task.chat, config.task.system_prompt, config.task.chat_template)


def evaluate(parts: PairParts) -> Evaluation:
    """Accuracy (a tie counts half) and loss on held-out pairs."""
    pairs = parts.held_out[: parts.config.run.eval_prompts]
    chosen, rejected = parts.scores(pairs)
    loss, metrics = bradley_terry_loss(chosen, rejected)
    return Evaluation(
        {
            "accuracy": float(metrics["rewards/accuracy"]),
            "margin": float(metrics["rewards/margin"]),
            "loss": float(loss),
            "num_pairs": len(pairs),
        },
        [],
        [],
    )
