"""Memory by arithmetic: weights of known models, counts by hand, and beside what a run took."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.recipe import packaged_recipes, read_recipe
from tinyrl.starter import starter_path
from tinyrl.tools.plan import KNOWN_SHAPES, Shapes, plan_run, read_shapes

# Of the model cards and the papers (2412.15115, 2505.09388), in billions.
PUBLISHED = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "1.7B": 1.721, "4B": 4.022, "1B": 1.236}
GB = 10**9


def test_every_model_of_a_recipe_is_known() -> None:
    named = {read_recipe(path).values["model"].get("path", "starter") for path in packaged_recipes().values()}
    on_the_hub = {name for name in named if starter_path(name) is None and "/" in name and not name.startswith("runs/")}
    assert on_the_hub <= {*KNOWN_SHAPES}


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_a_known_model_has_as_many_weights_as_published(name: str) -> None:
    shapes = read_shapes(name)
    size = next(part for part in name.split("-") if part in PUBLISHED)
    assert (shapes.linear + shapes.embeddings) / 1e9 == pytest.approx(PUBLISHED[size], abs=6e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_and_adapters_are_counted_as_the_library_has_them(architecture: str, tiny: TinyModels) -> None:
    config = AutoConfig.from_pretrained(tiny(architecture))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = read_shapes(str(tiny(architecture)))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shapes.linear + shapes.embeddings == matrices
    layers = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert shapes.lora(4, None) == sum(4 * (m.in_features + m.out_features) for m in layers)
    assert shapes.lora(4, ["q_proj"]) < shapes.lora(4, None)


def test_parts_of_a_run_by_hand(tiny: TinyModels) -> None:
    shapes = read_shapes(str(tiny("llama")))
    weights = 4 * (shapes.linear + shapes.embeddings)
    settings = running.config("grpo", tiny("llama"), run={"micro_batch_tokens": 100})
    plan = plan_run(settings, device="cpu", room=8 * GB)
    assert plan.always["base"] == weights
    assert plan.always["Adam"] == 2 * plan.always["adapter"] == 8 * shapes.lora(16, None)
    assert plan.phases["updating"]["gradients"] == plan.always["adapter"]
    assert plan.peak < 0.6 * GB
    assert plan.problem is None
    whole = plan_run(running.config("grpo", tiny("llama"), lora={"enabled": False}), device="cpu", room=8 * GB)
    assert whole.always["Adam"] == 2 * weights
    half = plan_run(running.config("grpo", tiny("llama"), model={"dtype": "bfloat16"}), device="cpu", room=8 * GB)
    assert half.always["base"] == weights / 2


def test_models_beside_the_policy_are_counted(tiny: TinyModels) -> None:
    own, known = read_shapes(str(tiny("llama"))), KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"]
    teacher = {"path": "Qwen/Qwen2.5-0.5B", "quantization": "8bit"}
    settings = running.config("distill", tiny("llama"), reward={"model": str(tiny("llama"))}, teacher=teacher)
    plan = plan_run(settings, device="cpu", room=8 * GB)
    assert plan.always["reward model"] == 4 * (own.linear + own.embeddings)
    assert plan.always["teacher"] == known.linear + 4 * known.embeddings  # of which 8 bits are of linear layers alone


def test_what_does_not_fit_is_a_problem(tiny: TinyModels) -> None:
    problem = plan_run(running.config("grpo", tiny("llama")), device="cpu", room=GB // 10).problem
    assert problem is not None
    assert "run.micro_batch_tokens" in problem


def test_other_names_of_sizes() -> None:
    gpt2 = Shapes.of({"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10})
    assert (gpt2.width, gpt2.inner, gpt2.queries, gpt2.keys) == (8, 32, 8, 8)
    with pytest.raises(KeyError):
        Shapes.of({"d_model": 8})
