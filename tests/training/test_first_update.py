"""The first update of every run, read from metrics.jsonl; and what each role's training moves."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import running
from tests.models.building import stir
from tests.tiny_models import TinyModels, sharp_model
from tests.training.experiences import experience_of
from tests.training.rows import loaded, trained, write_rows
from tinyrl.generation.sample import Logprobs, Sample, sampled_logprobs
from tinyrl.models.micro_batches import SequenceLengths
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.grpo import loss_options
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts, Experience
from tinyrl.training.ppo import Ppo
from tinyrl.training.run_state import RunState
from tinyrl.training.step import Pass, Updater, role_optimizers


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=6)


@pytest.mark.parametrize(("preset", "lora"), [("grpo", True), ("reinforce++", True), ("ppo", False)])
@pytest.mark.wide
def test_in_bfloat16_the_kl_at_step_1_is_zero(
    preset: str, lora: bool, sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and reference are the same model, so what the sampler rounds otherwise must not be in their KL. The update
    itself measures a KL in the loss (preset grpo), without a pass of its own.
    """
    scored, logprobs = [], OnPolicy.logprobs
    monkeypatch.setattr(OnPolicy, "logprobs", lambda *args, **named: scored.append(args[3]) or logprobs(*args, **named))
    method, sections = ("ppo", {}) if preset == "ppo" else ("grpo", {"grpo": {"preset": preset, "kl_coef": 0.05}})
    once: dict[str, Any] = {"run": {"num_steps": 1, "eval_every": 0, "eval_prompts": 0}, "lora": {"enabled": lora}}
    half = {"model": {"dtype": "bfloat16"}, "generation": {"max_new_tokens": 16}}
    run = trained(running.config(method, sharp, **once, **half, **sections), tmp_path)
    first = next(line for line in running.metrics(run) if "objective/kl" in line)
    assert abs(first["objective/kl"]) < 1e-3
    if method == "grpo":
        assert first["policy/ratio"] == 1.0
        assert first["policy/sampling_gap"] > 1e-3  # the sampler does round otherwise
        assert scored == (["reference"] if preset == "grpo" else ["reference", "policy"])


def test_experts_learn_in_bfloat16(tiny: TinyModels, tmp_path: Path) -> None:
    """Beside the layers of all-linear; and the start is the base."""
    settings = running.config(
        "grpo",
        tiny("qwen3-moe"),
        model={"dtype": "bfloat16"},
        grpo={"preset": "grpo"},
        lora={"target_parameters": "experts"},
        run={"num_steps": 2},
    )
    run = trained(settings, tmp_path)
    assert abs(running.metrics(run)[1]["objective/kl"]) < 1e-3
    before, after = running.weights(run, 0), running.weights(run, 2)
    names = [name for name in after if name.startswith("adapter_model.safetensors:") and "lora_B" in name]
    for part in (".q_proj.", ".experts."):
        moved = [not torch.equal(before[name], after[name]) for name in names if part in name]
        assert moved, part
        assert all(moved), part


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_in_bfloat16_a_policy_that_does_not_move_has_ratio_1_in_every_epoch(
    method: str, sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities before the update come from the update's own micro-batches."""
    monkeypatch.setattr("tinyrl.training.run.role_optimizers", running.optimizers_with(learning_rate=0.0))
    sections: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "generation": {"max_new_tokens": 16},
        "run": {"num_steps": 1, "eval_prompts": 0, "eval_every": 0, "micro_batch_tokens": 128},
        "critic": {"warmup_steps": 0},
        "grpo": {"preset": "gspo", "num_prompts": 4, "group_size": 4, "num_epochs": 2, "minibatch_size": 8},
        "ppo": {"num_prompts": 16, "num_epochs": 2, "minibatch_size": 8},
    }
    run = trained(running.config(method, sharp, **sections), tmp_path)
    first = next(line for line in running.metrics(run) if "policy/ratio" in line)
    assert first["policy/ratio"] == 1.0
    assert first["policy/clipfrac"] == 0.0
    assert first["policy/approx_kl"] == 0.0
    assert first["policy/sampling_gap"] > 1e-3  # the sampler rounds otherwise


STILL: dict[str, tuple[str, dict[str, Any]]] = {
    "reinforce++": ("grpo", {"preset": "reinforce++"}),
    "ppo": ("ppo", {"num_epochs": 2}),
    "grpo": ("grpo", {"preset": "grpo"}),
    "rloo": ("grpo", {"preset": "rloo"}),
    "rloo in one minibatch": ("grpo", {"preset": "rloo", "minibatch_size": None}),
    "dapo": ("grpo", {"kl_coef": 0.05, "kl_estimator": "k1"}),
    "ppo in the loss": ("ppo", {"kl_estimator": "k3"}),
}


def still(name: str, dtype: str, base: Path, folder: Path) -> tuple[RunDir, Experience]:
    """A step whose rewards are all 0, and its samples; the first critic knows nothing and says 0."""
    (folder / "wrong.py").write_text("def score(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    method, of_preset = STILL[name]
    settings = running.config(
        method,
        base,
        model={"dtype": dtype},
        reward={"functions": [{"use": f"{folder / 'wrong.py'}:score"}]},
        generation={"max_new_tokens": 16},
        critic={"warmup_steps": 0},
        run={"num_steps": 1, "save_every": 1, "eval_prompts": 0, "eval_every": 0, "micro_batch_tokens": 128},
        **{method: {"num_prompts": 8, "group_size": 4, "minibatch_size": 8, **of_preset}},
    )
    seen: list[Experience] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicy, "record", lambda self, run, step, experience, *args, **named: seen.append(experience))
        run = trained(settings, folder)
    return run, seen[0]


def assert_nothing_moved(run: RunDir, experience: Experience) -> None:
    line = running.metrics(run)[-1]
    inputs = experience.inputs
    kl = Logprobs(inputs.sampled, reference=inputs.reference, old=inputs.old).kl(inputs.mask)
    assert not kl.any() or line["objective/kl"] == 0.0 or line["policy/kl_loss"] == 0.0
    assert line["optim/flat_steps"] == 1
    assert line["optim/grad_norm"] == line.get("value/grad_norm", 0.0) == 0.0
    start, end = (running.weights(run, step) for step in (0, 1))
    assert all(torch.equal(start[name], end[name]) for name in start)


@pytest.mark.parametrize("name", STILL)
@pytest.mark.wide
def test_in_bfloat16_no_rounding_of_a_kl_of_0_is_learnt(name: str, sharp: Path, tmp_path: Path) -> None:
    """Policy and reference are the same, in several minibatches; passes of other micro-batches differ by some 1e-2."""
    assert_nothing_moved(*still(name, "bfloat16", sharp, tmp_path))


@pytest.mark.parametrize("name", STILL)
@pytest.mark.wide
def test_in_float32_no_rounding_of_a_kl_of_0_is_learnt(name: str, sharp: Path, tmp_path: Path) -> None:
    """The sampler's numbers, which are the old ones, differ from those of a pass by some 1e-6."""
    assert_nothing_moved(*still(name, "float32", sharp, tmp_path))


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "method", "lora"), [("llama", "ppo", True), ("gpt2", "grpo", False)])
def test_the_first_update_and_what_it_moves(
    kind: str, method: str, lora: bool, tiny: TinyModels, tmp_path: Path
) -> None:
    """Ratio 1, clipfrac 0 and KL 0 at the first update; the policy and the critic move; the checkpoint loads back."""
    sections: dict[str, Any] = {"lora": {"enabled": lora}, "optim": {"learning_rate": 1e-3}, "grpo": {"preset": "grpo"}}
    if method == "ppo":
        sections |= {"critic": {"warmup_steps": 0}, "ppo": {"num_epochs": 1, "minibatch_size": 8}}
    settings = running.config(method, tiny(kind), run={"num_steps": 2, "save_every": 1}, **sections)
    run = trained(settings, tmp_path)
    first = running.metrics(run)[1]
    assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert first["policy/clipfrac"] == 0.0
    assert abs(first["objective/kl"]) < 1e-4
    assert first["policy/sampling_gap"] < 1e-5
    before, after = running.weights(run, 0), running.weights(run, 2)
    moved = {name for name in after if name in before and not torch.equal(before[name], after[name])}
    policy_file = "adapter_model.safetensors:" if lora else "model.safetensors:"
    policy = {n for n in after if n.startswith(policy_file) and "lora_A" not in n}
    assert policy <= moved, f"policy weights that did not move: {sorted(policy - moved)[:5]}"
    if method == "ppo":
        assert any(n.startswith("value_head") for n in moved)
        assert any(n.startswith("critic/") for n in moved)
    assert running.go_on(run) == 0


def test_warm_up_trains_the_critic_only(tiny: TinyModels, tmp_path: Path) -> None:
    often = {"num_steps": 3, "save_every": 1, "keep_checkpoints": 9}
    run = trained(running.config("ppo", tiny("llama"), critic={"warmup_steps": 2}, run=often), tmp_path)
    start, warm, end = (load_file(run.checkpoints / f"step-{s:06d}" / "adapter_model.safetensors") for s in (0, 2, 3))
    heads = [load_file(run.checkpoints / f"step-{s:06d}" / "value_head.safetensors")["weight"] for s in (0, 1)]
    assert all(torch.equal(start[n], warm[n]) for n in start)
    assert any(not torch.equal(warm[n], end[n]) for n in start)
    assert (bool(heads[0].any()), bool(heads[1].any())) == (False, True)


def passes_of(trainer: Any) -> list[Pass]:
    """Of rows; or of samples with advantages from -1 to 1, one of which is left out."""
    if not isinstance(trainer, OnPolicy):
        run: Any = SimpleNamespace(timed=nullcontext)
        rows = [*range(8)]
        return [trainer.make_pass([example for row in rows for example in trainer.train_rows[row]], rows, run)[0]]
    samples = trainer.collector.collect(trainer.collector.train_prompts[:4], group_size=2, step=0)
    samples[3] = replace(samples[3], in_loss=False)
    return passes_over(trainer, samples, torch.linspace(-1.0, 1.0, len(samples)))


def passes_over(trainer: Any, samples: list[Sample], advantage: Tensor) -> list[Pass]:
    sampled = sampled_logprobs(samples)
    columns: dict[str, Any] = {"advantage": advantage, "reference": sampled - 0.2}
    if trainer.teacher is not None:
        columns["teacher"] = trainer.teacher.score(samples, trainer.teacher.prompts(samples))
    if isinstance(trainer, Ppo):
        values = trainer.predict_values(samples)
        columns |= {"old": sampled - 0.1, "values": values, "returns": values + 0.5}
        state: Any = SimpleNamespace(state=RunState(), update=0)
        return trainer.passes(state, experience_of(samples, **columns), kl_coef=0.1, warming_up=False)
    minibatch = experience_of(samples, **columns)
    of_minibatch: dict[str, Any] = {"minibatch": minibatch, "counts": Counts.of(minibatch)}
    if trainer.config.method == "distill":
        return [Pass("policy", samples, partial(trainer.loss, **of_minibatch))]
    options = loss_options(trainer.config.grpo, max_new_tokens=6, inexact=False)
    loss = partial(trainer.policy_terms, **of_minibatch, options=options, measure_gap=True)
    return [Pass("policy", samples, loss)]


@pytest.mark.parametrize(("kind", "reaches"), [("shared", True), ("shared-detached", False)])
def test_the_values_gradient_reaches_the_backbone_that_it_shares(tiny: TinyModels, *, kind: str, reaches: bool) -> None:
    """Advantages are 0, so that no other gradient is there; the head's own is, of both."""
    trainer: Any = loaded(running.config("ppo", tiny("llama"), critic={"kind": kind}))
    policy = trainer.policy
    with torch.no_grad():
        policy.value_head.weight.fill_(0.1)
    samples = trainer.collector.collect(trainer.collector.train_prompts[:4], group_size=2, step=0)
    [joint] = passes_over(trainer, samples, torch.zeros(len(samples)))
    with policy.acting("policy"):
        loss, _ = joint.loss(policy.batch_of(samples))
        loss.backward()
    moved = [p.grad is not None and bool(p.grad.any()) for p in policy.parameters["policy"].values()]
    assert any(moved) is reaches
    assert policy.value_head.weight.grad.any()
    trainer.close()


SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "dr_grpo": ("grpo", {"grpo": {"preset": "dr_grpo", "num_prompts": 4, "group_size": 2}}),
    "kto": ("dpo", {"dpo": {"loss": "kto"}}),
    "reward": ("reward", {}),
    "distill": ("distill", {"distill": {"num_prompts": 4}}),
    "shared": ("ppo", {"critic": {"kind": "shared"}}),
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.wide
def test_gradients_and_evaluations_are_those_of_one_micro_batch(
    name: str, tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a small budget, which every pass through a model keeps to, that of a reward model too."""
    budgets, plan = set[int](), SequenceLengths.plan

    def noted(self: SequenceLengths, rows: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        budgets.add(max_tokens)
        return plan(self, rows, max_tokens=max_tokens)

    monkeypatch.setattr(SequenceLengths, "plan", noted)
    method, sections = SPLIT[name]
    if method in ("dpo", "reward"):
        sides = (
            {"prompt": "p" * i, "chosen": "yes" * (i % 4 + 1), "rejected": "n" * (i % 3 + 1)} for i in range(1, 13)
        )
        data = str(write_rows(tmp_path / "pairs.jsonl", sides))
        sections |= {"task": {"name": "rows", "data": data, "eval_data": data, "max_samples": None}}
    if method == "distill":
        sections |= {"teacher": {"path": str(tiny("llama"))}, "model": {"path": str(tiny("qwen3"))}}
    if method == "ppo":
        sections |= {"reward": {"functions": [], "model": str(tiny.reward("llama"))}}
    found = []
    for tokens in (100_000, 64):
        budgets.clear()
        trainer: Any = loaded(running.config(method, tiny("llama"), **sections, run={"micro_batch_tokens": tokens}))
        stir(trainer.policy.parameters["policy"])
        optimizers = role_optimizers(trainer.config.optim, trainer.policy.parameters)
        updater = Updater(trainer.policy, optimizers, max_grad_norm=1.0)
        metrics = updater._accumulate(passes_of(trainer))
        parameters = {n: p for role in trainer.policy.parameters.values() for n, p in role.items()}
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        evaluation = {k: v for k, v in trainer.evaluate().metrics.items() if isinstance(v, float)}
        found.append((metrics, gradients, evaluation))
        trainer.close()
        assert budgets == {tokens}
    (metrics, gradients, evaluation), (split_metrics, split_gradients, split_evaluation) = found
    assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert split_evaluation == pytest.approx(evaluation, rel=1e-4, abs=1e-6, nan_ok=True)
    assert gradients.keys() == split_gradients.keys()
    assert max(float(gradient.norm()) for gradient in gradients.values()) > 1e-4
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(split_gradients[parameter], gradient, rtol=1e-3, atol=1e-6)
