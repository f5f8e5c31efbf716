"""Non-finite numbers, made by real forward and backward passes.

No weight changes, the batch is kept and counted, and a run that can do nothing else stops.
A batch without spread changes nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.models.loading import load_tokenizer
from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.run_dir import RunDir

WORDS = [f"w{i}" for i in range(20_000)]  # so many that a completion does not hold the bad one by chance
BAD_WORD = "w12345"
PROMPTS = 8  # a step
ONE_UPDATE_A_STEP: dict[str, Any] = {
    "grpo": {"num_prompts": PROMPTS, "group_size": 2},
    "ppo": {"num_prompts": PROMPTS, "num_epochs": 1, "minibatch_size": None, "target_kl": 6.0},
}


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the embedding of the bad word, and no other, is infinite."""
    folder = tiny_model(tmp_path_factory.mktemp("model"), "llama", vocabulary=WORDS)
    tokens = load_tokenizer(str(folder)).encode(BAD_WORD, add_special_tokens=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens] = math.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings_for(method: str, model: Path, folder: Path, *, steps_an_epoch: int) -> Config:
    """A run over as many rows as fill this many steps, the last row bad; none is held out for evaluation."""
    good = WORDS[: PROMPTS * steps_an_epoch - 1]
    for name, words in (("rows", [*good, BAD_WORD]), ("eval", good)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"w0 {word}"}) + "\n" for word in words))
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    often = {"num_steps": 4, "save_every": 1, "eval_prompts": 4, "keep_checkpoints": 10}
    given = {"task": task, "run": often, method: ONE_UPDATE_A_STEP[method]}
    return running.config(method, model, reward=running.IN_A_WORKER, **given)


def changed(run: RunDir, step: int) -> list[str]:
    """The tensors (weights and Adam's state) that a step changed."""
    before, after = running.weights(run, step - 1), running.weights(run, step)
    return [name for name in after if name not in before or not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_a_batch_without_finite_numbers_changes_nothing_and_the_run_goes_on(
    method: str, broken_model: Path, tmp_path: Path
) -> None:
    """One row gives infinities; one of every two steps has it. An adaptive KL coefficient survives, too."""
    settings = settings_for(method, broken_model, tmp_path, steps_an_epoch=2)
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    skipped = [line.get("optim/skipped_steps", 0) for line in running.metrics(run)]
    bad = [step for step in range(1, 5) if skipped[step] > skipped[step - 1]]
    assert len(bad) == skipped[-1] == 2
    assert {step: bool(changed(run, step)) for step in range(1, 5)} == {step: step not in bad for step in range(1, 5)}
    for number, step in enumerate(bad, 1):
        kept = json.loads((run.path / "nonfinite" / f"step-{step - 1:06d}-{number}.json").read_text())
        assert PROMPTS * 2 - 1 in [sample["row"] for sample in kept["samples"]]
        assert all(len(sample["advantage"]) == len(sample["response"]) for sample in kept["samples"])


def test_weights_that_a_step_makes_infinite_are_never_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decay of 1e300 makes them so from finite gradients, in the first step that there is."""
    settings = settings_for("ppo", model, tmp_path, steps_an_epoch=2)
    monkeypatch.setattr("tinyrl.training.run.role_optimizers", running.optimizers_with(weight_decay=1e300))
    code, run, _ = running.train(settings, tmp_path)
    assert code == 3
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-000000"]
    assert all(tensor.isfinite().all() for tensor in running.weights(run, 0).values())
