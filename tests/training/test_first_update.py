"""The first update of every run, read from metrics.jsonl; and what each role's training moves."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.models.building import stir
from tests.tiny_models import sharp_model, tiny_model
from tinyrl.rollout.load import load_method
from tinyrl.rollout.sample import fill, padded
from tinyrl.runs.launched import Options
from tinyrl.training.dpo import Dpo
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.ppo import Ppo
from tinyrl.training.step import Pass, Updater, role_optimizers

KINDS = ("llama", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=6)


@pytest.mark.parametrize(("preset", "lora"), [("reinforce++", True), ("grpo", True), ("ppo", False)])
def test_in_bfloat16_the_kl_at_step_1_is_zero(
    preset: str, lora: bool, sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and reference are the same model, so what the sampler rounds otherwise must not be in their KL. The update
    itself measures a KL in the loss (preset grpo), without a pass of its own.
    """
    scored, logprobs = [], OnPolicy.logprobs
    monkeypatch.setattr(OnPolicy, "logprobs", lambda *args, **named: scored.append(args[2]) or logprobs(*args, **named))
    method, sections = ("ppo", {}) if preset == "ppo" else ("grpo", {"grpo": {"preset": preset, "kl_coef": 0.05}})
    settings = running.config(
        method,
        sharp,
        model={"dtype": "bfloat16"},
        lora={"enabled": lora},
        generation={"max_new_tokens": 16},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
        **sections,
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    first = next(line for line in running.metrics(run) if "objective/kl" in line)
    assert abs(first["objective/kl"]) < 1e-3
    if method == "grpo":
        assert first["policy/ratio"] == 1.0
        assert first["policy/sampling_gap"] > 1e-3  # the sampler does round otherwise
        assert scored == (["reference"] if preset == "grpo" else ["reference", "policy"])


@pytest.mark.parametrize(("kind", "method", "lora"), [("llama", "ppo", True), ("gpt2", "grpo", False)])
def test_the_first_update_and_what_it_moves(
    kind: str, method: str, lora: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Ratio 1, clipfrac 0 and KL 0 at the first update; the policy and the critic move; the checkpoint loads back."""
    sections = (
        {"grpo": {"preset": "grpo"}}
        if method == "grpo"
        else {"critic": {"warmup_steps": 0}, "ppo": {"num_epochs": 1, "minibatch_size": 8}}
    )
    settings = running.config(
        method,
        models[kind],
        lora={"enabled": lora},
        optim={"learning_rate": 1e-3},
        run={"num_steps": 2, "save_every": 1},
        **sections,
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    first = running.metrics(run)[1]
    assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert first["policy/clipfrac"] == 0.0
    assert abs(first["objective/kl"]) < 1e-4
    assert first["policy/sampling_gap"] < 1e-5
    assert first["eval/kl" if "eval/kl" in first else "objective/kl"] < 1e-4
    before, after = running.weights(run, 0), running.weights(run, 2)
    moved = {name for name in after if name in before and not torch.equal(before[name], after[name])}
    policy_file = "adapter_model.safetensors:" if lora else "model.safetensors:"
    policy = {n for n in after if n.startswith(policy_file) and "lora_A" not in n}
    assert policy <= moved, f"policy weights that did not move: {sorted(policy - moved)[:5]}"
    if method == "ppo":
        assert any(n.startswith("value_head") for n in moved)
        assert any(n.startswith("critic/") for n in moved)
    assert running.go_on(run) == 0


@pytest.mark.parametrize("kind", ["adapter", "shared"])
def test_warm_up_trains_the_critic_only(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    settings = running.config(
        "ppo",
        models["llama"],
        critic={"kind": kind, "warmup_steps": 2},
        run={"num_steps": 3, "save_every": 1, "keep_checkpoints": 9},
    )
    _, run, _ = running.train(settings, tmp_path)
    start, warm, end = (load_file(run.checkpoints / f"step-{s:06d}" / "adapter_model.safetensors") for s in (0, 2, 3))
    heads = [load_file(run.checkpoints / f"step-{s:06d}" / "value_head.safetensors")["weight"] for s in (0, 1)]
    assert all(torch.equal(start[n], warm[n]) for n in start)
    assert any(not torch.equal(warm[n], end[n]) for n in start)
    assert not heads[0].any()
    assert heads[1].any()


def dpo_passes(trainer: Dpo) -> list[Pass]:
    run: Any = SimpleNamespace(timed=nullcontext)
    return [trainer.batch([*range(8)], run)[0]]


def sampled_passes(trainer: OnPolicy) -> list[Pass]:
    """Of samples with advantages from -1 to 1, one of which is left out."""
    samples = trainer.collector.collect(trainer.collector.train_prompts[:4], group_size=2, step=0)
    fill(samples, "advantage", torch.linspace(-1.0, 1.0, len(samples)))
    sampled = padded(samples, "logprobs")
    fill(samples, "ref", sampled - 0.2)
    samples[3].in_loss = False
    if trainer.teacher is not None:
        trainer.teacher.score(samples)
    if isinstance(trainer, Ppo):
        fill(samples, "old", sampled - 0.1)
        trainer.predict_values(samples)
        fill(samples, "returns", padded(samples, "values") + 0.5)
    trainer.run = SimpleNamespace(update=0)  # pyright: ignore[reportAttributeAccessIssue]
    return trainer.passes(samples, kl_coef=0.1)


SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "dr_grpo": ("grpo", {"grpo": {"preset": "dr_grpo", "num_prompts": 4, "group_size": 2}}),
    "kto": ("dpo", {"dpo": {"loss": "kto"}}),
    "distill": ("distill", {"distill": {"num_prompts": 4}}),
    "shared": ("ppo", {"critic": {"kind": "shared"}}),
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.wide
def test_gradients_and_evaluations_are_those_of_one_micro_batch(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    method, sections = SPLIT[name]
    if method == "dpo":
        sides = [("p" * (i + 1), "yes" * (i % 4 + 1), "no" * (i % 3 + 1)) for i in range(12)]
        lines = (json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) + "\n" for row in sides)
        (tmp_path / "pairs.jsonl").write_text("".join(lines))
        data = str(tmp_path / "pairs.jsonl")
        sections |= {"task": {"name": None, "data": data, "eval_data": data, "max_samples": None}}
        sections |= {"reward": {"functions": []}, "generation": {"max_new_tokens": 256}}
    if method == "distill":
        sections |= {"teacher": {"path": str(models["llama"])}, "model": {"path": str(models["qwen3"])}}
    found = []
    for tokens in (100_000, 64):
        trainer: Any = load_method(
            running.config(method, models["llama"], **sections, run={"micro_batch_tokens": tokens}),
            options=Options(device="cpu"),
        )
        stir(trainer.policy.parameters["policy"])
        optimizers = role_optimizers(trainer.config.optim, trainer.policy.parameters)
        updater = Updater(trainer.policy, optimizers, max_grad_norm=1.0)
        metrics = updater._accumulate((dpo_passes if method == "dpo" else sampled_passes)(trainer))
        parameters = {n: p for role in trainer.policy.parameters.values() for n, p in role.items()}
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        evaluation = {k: v for k, v in trainer.evaluate().metrics.items() if isinstance(v, float)}
        found.append((metrics, gradients, evaluation))
        trainer.close()
    (metrics, gradients, evaluation), (split_metrics, split_gradients, split_evaluation) = found
    assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert split_evaluation == pytest.approx(evaluation, rel=1e-4, abs=1e-6, nan_ok=True)
    assert gradients.keys() == split_gradients.keys()
    assert max(float(gradient.norm()) for gradient in gradients.values()) > 1e-4
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(split_gradients[parameter], gradient, rtol=1e-3, atol=1e-6)


def test_reference_of_a_continued_adapter_is_that_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    """Starting from a trained LoRA the KL is 0 at step 0, and what moved before does not count as KL."""
    _, first, _ = running.train(running.config("grpo", models["llama"], run={"num_steps": 3}), tmp_path, name="first")
    adapter = first.checkpoints / "step-000003"
    assert running.metrics(first)[-1]["eval/kl"] > 1e-3
    settings = running.config("grpo", models["llama"], model={"adapter": str(adapter)}, grpo={"preset": "grpo"})
    code, second, _ = running.train(settings, tmp_path, name="second")
    assert code == 0
    assert abs(running.metrics(second)[0]["eval/kl"]) < 1e-5
    reference = load_file(second.checkpoints / "step-000003" / "reference" / "adapter_model.safetensors")
    trained = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(reference[n], trained[n]) for n in trained)
