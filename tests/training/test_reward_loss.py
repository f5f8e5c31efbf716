"""The loss and gradient of a reward model beside TRL's, and under any layout and split of the batch."""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.models.packing import common_length
from tinyrl.rollout.load import load_method
from tinyrl.runs.launched import Options
from tinyrl.training.reward import RewardModel
from tinyrl.training.rows import Example
from tinyrl.training.run import Run

CHOSEN = [[10, 11, 12, 13, 14], [20, 21, 22], [10, 11, 40, 41, 42, 43, 44], [30, 31, 50, 51]]
REJECTED = [[10, 11, 60, 61], [20, 70, 71, 72, 73, 74], [10, 11, 40, 45], [30, 31, 50, 52]]
MARGINS = [0.0, 0.5, 1.5, 0.25]


def parts_of(folder: Path, *, lora: bool = False) -> RewardModel:
    """A reward model on the tiny llama of seed 0, its head's weights 32 numbers from -1 to 1."""
    rows = folder / "rows.jsonl"
    line = '{"prompt": "p%d", "chosen": "a", "rejected": "b"}\n'
    rows.write_text("".join(line % i for i in range(4)))
    config = Config.model_validate(
        {
            "method": "reward",
            "model": {"path": str(tiny_model(folder / "model", "llama"))},
            "lora": {"enabled": lora},
            "task": {"data": str(rows)},
        }
    )
    parts = load_method(config, options=Options(device="cpu"))
    assert parts.policy.score_head is not None
    with torch.no_grad():
        parts.policy.score_head.weight.copy_(torch.linspace(-1, 1, 32).unsqueeze(0))
    return parts


def example(*texts: list[int], value: float) -> Example:
    at = max(1, common_length(texts))
    return Example(texts[0][:at], tuple(text[at:] for text in texts), value=value)


def gradients(parts: RewardModel, examples: list[Example], splits: list[slice]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient by name, summed over some rows at a time."""
    total, run = 0.0, cast(Run, None)
    loss_of, _ = parts.loss(examples, [], run)
    for rows in splits:
        with parts.policy.acting("policy"):
            loss, _ = loss_of(parts.policy.batch_of(examples[rows], last_tokens=True))
            loss.backward()
        total += loss.item()
    found = {n: p.grad for n, p in parts.policy.parameters["policy"].items() if p.grad is not None}
    for parameter in parts.policy.parameters["policy"].values():
        parameter.grad = None
    return total, found


# What RewardTrainer.compute_loss of TRL 1.16 gave for LlamaForSequenceClassification with the weights of `parts_of` on
# these tokens (through its collator, padded with 0): the loss, the first four entries of the gradient of `score`, and
# the norm of the gradient of the weights in NORMS_OF.
TRL: dict[str, tuple[float, list[float], list[float]]] = {
    "no margin": (
        2.388162851333618,
        [-0.4723338484764099, -0.14151078462600708, 0.4610222280025482, -0.6770097017288208],
        [17.14557647705078, 9.614706993103027, 4.111164569854736, 1.6339962482452393],
    ),
    "margin": (
        2.830225944519043,
        [-0.4720838665962219, -0.2503355145454407, 0.48979994654655457, -0.7163258194923401],
        [19.205154418945312, 10.355107307434082, 4.701805591583252, 1.754459023475647],
    ),
}
NORMS_OF = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "norm")


@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_are_those_of_trl(name: str, tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    margins = MARGINS if name == "margin" else [0.0] * 4
    examples = [example(a, b, value=m) for a, b, m in zip(CHOSEN, REJECTED, margins, strict=True)]
    loss, found = gradients(parts, examples, [slice(4)])
    wanted, head, norms = TRL[name]
    assert loss == pytest.approx(wanted, abs=1e-4)
    assert found["score_head.weight"][0, :4].tolist() == pytest.approx(head, abs=1e-4)
    ours = [float(found[f"model.{name}.weight"].norm()) for name in NORMS_OF]
    assert ours == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(("objective", "lora"), [("pairs", True), ("labels", False)])
def test_layout_and_split_change_no_gradient(objective: str, lora: bool, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, lora=lora)
    targets = {"pairs": MARGINS, "labels": [0.0, 1.0, 1.0, 0.0]}[objective]
    sides = zip(CHOSEN, REJECTED, strict=True) if objective == "pairs" else ((text,) for text in CHOSEN)
    examples = [example(*texts, value=target) for texts, target in zip(sides, targets, strict=True)]
    assert parts.policy.packs
    loss, whole = gradients(parts, examples, [slice(4)])
    for packs, splits in ((True, [slice(0, 1), slice(1, 4)]), (False, [slice(4)]), (False, [slice(0, 3), slice(3, 4)])):
        parts.policy.packs = packs
        other, found = gradients(parts, examples, splits)
        assert other == pytest.approx(loss, rel=1e-5)
        assert found.keys() == whole.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-3, atol=1e-5, msg=name)
