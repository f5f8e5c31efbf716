"""Sampling from the architectures that people train: what is recorded is what a training pass computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.generation.sampling import CPU, PROMPTS, make_engine, sample, stir
from tests.tiny_models import TinyModels
from tinyrl.generation import engines
from tinyrl.generation.engine import SamplingSettings
from tinyrl.generation.engines import select_engine
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

KINDS = ("gemma4", "qwen3.5")  # windows and states


def choose(made: Any, *, longest: int = 64, **settings: Any) -> tuple[Any, str]:
    sampling = SamplingSettings(**({"temperature": 0.9, "max_new_tokens": 20} | settings))
    return select_engine(made.roles, made.tokenizer, sampling, wanted="auto", dtype=torch.float32, longest=longest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.wide
def test_recorded_log_probabilities_are_those_of_a_training_pass(tiny: TinyModels, kind: str) -> None:
    """Rows of different lengths, some of which end early: cached, dropped and batched, against one row at a time
    through the model's own forward pass, and against the layout that training uses.
    """
    made = make_engine(tiny(kind), lora=True)
    stir(made)
    engine, _ = choose(made)
    engine.eos = set(range(1, 12))
    groups = sample(engine, 4)
    responses = [c.tokens for group in groups for c in group]
    assert len({len(r) for r in responses}) > 2
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    recorded = [torch.tensor(c.logprobs) for group in groups for c in group]
    with torch.no_grad(), made.roles.acting("policy") as model:
        scored, _ = made.roles.logprobs("policy", made.roles.batch(prompts, responses), temperature=0.9)
        for prompt, response, logprobs, row in zip(prompts, responses, recorded, scored, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / 0.9
            own = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(logprobs, own, atol=3e-4, rtol=0)  # gemma4's merged weights: 1.4e-4 from float64
            torch.testing.assert_close(row[: len(response)], own, atol=1e-4, rtol=0)


def test_the_language_model_of_a_vision_folder_is_read(tiny: TinyModels) -> None:
    folder = tiny("qwen3.5-vl")
    model = load_causal_lm(str(folder), dtype=torch.float32)
    saved = load_file(folder / "model.safetensors")
    name = "layers.2.linear_attn.in_proj_qkv.weight"
    (key,) = [key for key in saved if key.endswith(name)]
    assert torch.equal(model.get_parameter(f"model.{name}"), saved[key])


def test_a_trial_that_raises_means_another_engine_and_says_so(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_engine(tiny("gemma3-wide"), lora=True)
    engine, why = choose(made)  # its rotary positions want to know the kind of layer
    assert engine.name == "hf-merged"
    assert why.startswith("its trial with Gemma3ForCausalLM ended in ")
    with pytest.raises(ValueError, match=r"generation\.engine=fused: its trial with Gemma3ForCausalLM ended in"):
        select_engine(made.roles, made.tokenizer, engine.settings, wanted="fused", dtype=torch.float32, longest=64)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(engines, "trial_logprobs", full)
    with pytest.raises(torch.OutOfMemoryError):
        choose(make_engine(tiny("llama")))


def test_an_adapter_that_is_more_than_two_matrices_stays_unmerged(tiny: TinyModels) -> None:
    """Merging W + B A would sample from another model as soon as the rest has moved."""
    made = make_engine(tiny("llama"))
    config = replace(lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear"), use_dora=True)
    made.roles = Roles(wrap_in_lora(made.roles.causal, config), device=CPU, reference=False)
    engine, why = choose(made)
    assert engine.name == "hf"
    assert "more than W + B A" in why
