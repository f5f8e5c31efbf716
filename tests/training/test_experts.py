"""Runs that train adapters on experts, and what other programs make of these."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests import running
from tests.policies import policy_of
from tests.tiny_models import TinyModels
from tests.training.rows import trained
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import load_start_adapter
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.export import export

IDS = torch.tensor([[5, 9, 11, 7, 3, 8, 2, 30, 31, 32, 33, 34]])


WIDE = [pytest.param(kind, marks=pytest.mark.wide) for kind in ("qwen3.5-moe", "qwen3.5-moe-vl")]


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss", *WIDE])
def base(request: pytest.FixtureRequest, tiny: TinyModels) -> Path:
    return tiny(request.param)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    settings = running.config("grpo", base, lora={"target_parameters": "experts", "r": 4}, run={"num_steps": 2})
    return trained(settings, tmp_path_factory.mktemp("experts"))


def last(run: RunDir) -> Path:
    return run.checkpoints / "step-000002"


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def as_published(folder: Path) -> PreTrainedModel:
    """A model as its config.json names it: with its tower, if it has one."""
    has_tower = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    return (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_pretrained(folder)


def policy_logits(base: Path, run: RunDir) -> Tensor:
    """As the policy computes them while it trains."""
    policy = policy_of(load_start_adapter(load_causal_lm(str(base), dtype=torch.float32), str(last(run))))
    return logits(policy.causal)


@pytest.mark.wide
def test_sampled_log_probabilities_are_those_that_are_trained(run: RunDir) -> None:
    gaps = [line["policy/sampling_gap"] for line in running.metrics(run) if "policy/sampling_gap" in line]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


def test_adapters_on_experts_have_moved(run: RunDir) -> None:
    before, after = running.weights(run, 0), running.weights(run, 2)
    own = [name for name in before if name.startswith("adapter_model.safetensors:") and ".experts." in name]
    moved = [not torch.equal(before[name], after[name]) for name in own if "lora_B" in name]
    assert moved
    assert all(moved)


@pytest.mark.wide
def test_peft_reads_an_exported_adapter_as_the_policy(base: Path, run: RunDir) -> None:
    bundle = export(str(run.path))
    assert any("--merge" in note for note in bundle.notes)  # for programs that read no such adapters
    bare = as_published(base)
    without = logits(bare)
    found = logits(PeftModel.from_pretrained(bare, str(bundle.folder)))
    torch.testing.assert_close(found, policy_logits(base, run), rtol=0, atol=1e-4)
    assert not torch.allclose(found, without, atol=1e-2)


@pytest.mark.wide
def test_transformers_reads_a_merged_export_as_the_policy(base: Path, run: RunDir) -> None:
    bundle = export(str(run.path), merge=True)
    found = logits(as_published(bundle.folder))
    torch.testing.assert_close(found, policy_logits(base, run), rtol=0, atol=1e-4)


@pytest.mark.wide
def test_a_run_begins_from_such_an_adapter(base: Path, run: RunDir, tmp_path: Path) -> None:
    """Its reference is the adapter as it was."""
    settings = running.config("ppo", base, model={"adapter": str(last(run))}, run={"num_steps": 1})
    assert settings.lora.target_parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    again = trained(settings, tmp_path)
    started, first = running.weights(again, 0), running.weights(run, 2)
    kept = [name for name in first if name.startswith("adapter_model.safetensors:")]
    assert all(torch.equal(started[name], first[name]) for name in kept)
    line = next(line for line in running.metrics(again) if "objective/kl" in line)
    assert abs(line["objective/kl"]) < 1e-5
