"""The configuration: defaults that depend on other fields, presets, types, conflicts."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinyrl.config.method_sections import PRESETS, GrpoConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.recipe import packaged_recipes
from tinyrl.config.schema import Config
from tinyrl.config.settings import allowed, fields_of
from tinyrl.rollout.load import method_of
from tinyrl.training.method import Method


def make(method: str = "grpo", **sections: Any) -> Config:
    return Config.model_validate({"method": method, **sections})


def refused(method: str = "grpo", **sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        make(method, **sections)
    (problem,) = caught.value.errors()
    return problem["msg"]


def test_defaults_and_presets():
    grpo, ppo = make("grpo"), make("ppo")
    assert (grpo.lora.enabled, grpo.lora.r, grpo.lora.alpha, grpo.lora.dropout) == (True, 16, 32.0, 0.0)
    assert (grpo.grpo.num_prompts, grpo.grpo.group_size, grpo.grpo.num_epochs) == (32, 8, 1)
    assert (ppo.ppo.num_prompts, ppo.ppo.num_epochs, ppo.ppo.minibatch_size) == (128, 4, 64)
    assert (grpo.generation.max_new_tokens, grpo.generation.temperature) == (256, 1.0)
    assert (grpo.run.num_steps, grpo.run.eval_every, grpo.run.save_every, grpo.run.keep_checkpoints) == (200, 25, 25, 3)
    assert (grpo.optim.schedule, grpo.optim.weight_decay, grpo.optim.max_grad_norm) == ("constant", 0.0, 1.0)
    assert grpo == make("grpo", grpo={"preset": "dapo"}, lora=None, ppo={"no such": "field"}, sft=3)
    assert ppo == make("ppo", ppo={"preset": "ppo"})


@pytest.mark.parametrize(
    ("method", "lora", "rates"),
    [
        *[(method, True, (5e-5, None)) for method in ("grpo", "sft", "dpo")],
        *[(method, False, (1e-6, None)) for method in ("grpo", "reward", "dpo")],
        ("ppo", True, (5e-5, 1e-4)),
        ("ppo", False, (1e-6, 1e-5)),
    ],
)
def test_learning_rates_depend_on_lora_and_method(method: str, lora: bool, rates: tuple[float, float | None]):
    optim = make(method, lora={"enabled": lora}).optim
    assert (optim.learning_rate, optim.critic_learning_rate) == rates
    assert make(method, lora={"enabled": lora}, optim={"learning_rate": 3e-4}).optim.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("lora", "critic", "kind"),
    [
        (True, {}, "adapter"),
        (False, {}, "separate"),
        (True, {"path": "other"}, "separate"),
        (True, {"kind": "shared"}, "shared"),
        (False, {"kind": "shared-detached"}, "shared-detached"),
    ],
)
def test_the_default_critic(lora: bool, critic: dict[str, Any], kind: str):
    assert make("ppo", lora={"enabled": lora}, critic=critic).critic.kind == kind


def test_the_default_beta_of_a_loss():
    betas = {loss: make("dpo", dpo={"loss": loss}).dpo.beta for loss in ("sigmoid", "ipo", "ipo_sum", "kto", "orpo")}
    assert set(betas.values()) == {0.1}
    assert [make("dpo", dpo={"loss": "simpo", **more}).dpo.beta for more in ({}, {"beta": 2.5})] == [2.0, 2.5]


@pytest.mark.parametrize("name", METHODS)
def test_the_table_of_methods(name: str) -> None:
    method = METHODS[name]
    others = {section for other in METHODS.values() if other is not method for section in other.sections}
    assert {*method.sections} <= {*Config.model_fields}
    assert method.own not in others
    assert method.recipe is None or method.recipe in packaged_recipes()
    config = make(name, grpo={"num_prompts": 4}, ppo={"num_prompts": 64}, sft={}, critic={}, reward={})
    assert {*config.written()} & {*OPTIONAL_SECTIONS} == {*method.sections}
    for what in ("train", "evaluate"):
        assert getattr(method_of(name), what) is not getattr(Method, what)


# ---- presets: every part, as the papers have it ----

PARTS = ("advantage", "advantage_scale", "clip_eps", "clip_eps_high", "aggregation", "kl_coef", "kl_estimator")
PPO_PARTS = ("num_epochs", "minibatch_size", "value_clip_eps", "gae_lambda")


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("dapo", ("group", "std", 0.2, 0.28, "token", 0.0, "k3")),
        ("grpo", ("group", "std", 0.2, 0.2, "sequence", 0.04, "k3")),
        ("dr_grpo", ("group", "none", 0.2, 0.2, "constant", 0.0, "k3")),
        ("gspo", ("group", "std", 3e-4, 4e-4, "sequence", 0.0, "k3")),
        ("gdpo", ("group", "std", 0.2, 0.28, "token", 0.0, "k3")),
        ("cispo", ("group", "std", 0.2, 0.28, "token", 0.0, "k3")),
        ("rloo", ("leave-one-out", "std", 0.2, 0.2, "sequence-sum", 0.05, "k1")),
        ("reinforce++", ("reinforce++", "std", 0.2, 0.2, "token", 0.01, "k1")),
        ("reinforce++-baseline", ("reinforce++-baseline", "std", 0.2, 0.2, "token", 0.01, "k2")),
        ("ppo", (4, 64, 0.2, 0.95)),
        ("a2c", (1, None, None, 1.0)),
    ],
)
def test_a_preset_is_plain_fields(preset: str, parts: tuple[Any, ...]):
    method, names = ("grpo", PARTS) if preset in PRESETS else ("ppo", PPO_PARTS)
    section = getattr(make(method, **{method: {"preset": preset}}), method)
    assert tuple(getattr(section, name) for name in names) == parts


@pytest.mark.parametrize("preset", PRESETS)
def test_each_part_of_a_preset_can_be_overridden_alone(preset: str):
    plain = GrpoConfig.model_validate({"preset": preset}).model_dump()
    others = {"advantage": "leave-one-out", "advantage_scale": "batch", "clip_eps": 0.11, "clip_eps_high": 0.33,
              "aggregation": "constant", "kl_coef": 0.02, "kl_estimator": "k2"}  # fmt: skip
    for name, value in others.items():
        assert GrpoConfig.model_validate({"preset": preset, name: value}).model_dump() == {**plain, name: value}


# ---- types are strict: no value is converted to another type ----


@pytest.mark.parametrize(
    ("section", "field", "values"),
    [
        ("run", "num_steps", (True, 2.0, "3", 0)),
        ("run", "seed", (-1,)),
        ("run", "deterministic", (1,)),
        ("optim", "learning_rate", (True, 0, float("nan"), float("inf"))),
        ("grpo", "group_size", (0,)),
        ("grpo", "clip_eps", (1.0,)),
        ("grpo", "preset", (["dapo"],)),
        ("lora", "dropout", (float("nan"),)),
        ("lora", "target_modules", ([],)),
        ("generation", "stop", ([""], ("a",))),
        ("task", "name", (3,)),
        ("model", "path", ("",)),
    ],
)
def test_wrong_types_and_ranges_are_refused(section: str, field: str, values: tuple[Any, ...]):
    for value in values:
        with pytest.raises(ValidationError) as caught:
            make("grpo", **{section: {field: value}})
        assert {problem["loc"][:2] for problem in caught.value.errors()} == {(section, field)}


def test_no_field_takes_a_number_that_overflows():
    """1e300 is infinite in float32; so is what a learning rate or a weight decay of it makes of the weights."""
    settings, tried = make("grpo"), 0
    for section in fields_of():
        for name, kind in fields_of(section).items():
            if "number" in allowed(kind).replace("whole number", ""):
                tried += 1
                for value in (1e300, -1e300):
                    with pytest.raises(ValidationError):
                        getattr(settings, section).model_validate({name: value})
    assert tried > 20
    with pytest.raises(ValidationError):
        settings.reward.model_validate({"functions": [{"use": "a.py:f", "weight": 1e300}]})


# ---- conflicts ----

FULL = {"lora": {"enabled": False}}
GDPO = {"preset": "gdpo"}
AGENT = {"environment": {"agent": "a.py:f"}}


@pytest.mark.parametrize(
    ("method", "sections", "setting"),
    [
        ("grpo", {"lora": {"dropout": 0.1}}, "lora.dropout=0.1"),
        ("grpo", {**FULL, "model": {"quantization": "4bit"}}, "model.quantization=4bit"),
        ("grpo", {**FULL, "model": {"adapter": "a"}}, "model.adapter=a"),
        ("ppo", {**FULL, "critic": {"kind": "adapter"}}, "critic.kind=adapter"),
        ("grpo", {"task": {"chat_template_kwargs": {"tools": False}}}, "task.chat_template_kwargs"),
        ("grpo", {"environment": {"name": "python", "tools": ["a.py:f"]}}, "environment.tools"),
        ("grpo", {"environment": {"name": "search"}}, "environment.corpus"),
        ("grpo", {"reward": {"overlong_tokens": 257}}, "reward.overlong_tokens=257"),
        ("grpo", {"grpo": {"minibatch_size": 100}}, "does not divide the 256 sequences of a step; 64"),
        ("ppo", {"ppo": {"num_prompts": 32}}, "ppo.minibatch_size=64 does not divide the 32 sequences of a step; 32"),
        ("grpo", {"grpo": {"num_prompts": 999_983, "minibatch_size": 10**14}}, "does not divide"),  # at once
        ("grpo", {"grpo": {"group_size": 1}}, "grpo.group_size=1"),
        ("ppo", {"reference": {"kind": "none"}}, "ppo.kl_coef=0.05"),
        ("grpo", {"grpo": {**GDPO, "advantage": "leave-one-out"}}, "grpo.advantage=leave-one-out"),
        ("grpo", {"grpo": {**GDPO, "kl_coef": 0.1, "kl_estimator": "k1"}}, "grpo.kl_estimator=k1"),
        ("grpo", {"grpo": GDPO, "reward": {"overlong_tokens": 9}}, "reward.overlong_tokens=9"),
        ("grpo", {"grpo": GDPO, "reward": {"truncated": "penalize"}}, "reward.truncated=penalize"),
        ("grpo", {"generation": {"engine": "server"}}, "generation.url"),
        ("grpo", {"generation": {"url": "localhost:8000"}}, "generation.url"),
        ("grpo", {**FULL, "generation": {"engine": "server", "url": "http://a:1"}}, "lora.enabled=true"),
        ("distill", {"teacher": {"path": "self"}}, "teacher.hint"),
        ("distill", {"teacher": {"path": "start", "hint": "x"}, "reference": {"kind": "none"}}, "reference.kind=none"),
        ("distill", {"teacher": {"path": "http://a:1"}, "generation": {"temperature": 0.5}}, "temperature=0.5"),
        ("distill", {"distill": {"on_policy_fraction": 0.5}, "environment": {"name": "python"}}, "environment.name"),
        ("grpo", {**AGENT, "grpo": {"advantage": "reinforce++"}}, "grpo.advantage=group or leave-one-out"),
        ("grpo", {**AGENT, "grpo": {"dynamic_sampling_rounds": 2}}, "grpo.dynamic_sampling_rounds=2"),
        ("grpo", {**AGENT, "grpo": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "grpo.kl_estimator=k3"),
        ("distill", AGENT, "grpo or ppo"),
        ("dpo", {"reference": {"kind": "none"}}, "reference.kind=none"),
        ("dpo", {"dpo": {"loss": "kto", "batch_size": 1}}, "dpo.batch_size=1"),
        ("ppo", {"ppo": {"ptx_coef": 0.5}}, "ppo.ptx_data"),
    ],
)  # fmt: skip
def test_conflicts_are_refused(method: str, sections: dict[str, Any], setting: str):
    assert setting in refused(method, **sections)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("sft", {"lora": {"dropout": 0.1}}),
        ("dpo", {"lora": {"dropout": 0.1}, "dpo": {"label_smoothing": 0.1}}),
        ("dpo", {"reference": {"kind": "none"}, "dpo": {"loss": "simpo", "batch_size": 1}}),
        ("grpo", {"reward": {"overlong_tokens": 256}}),
        ("grpo", {"grpo": {"minibatch_size": 64}}),
        ("ppo", {"ppo": {"num_prompts": 32, "minibatch_size": None}}),
        ("grpo", {"grpo": {"preset": "reinforce++", "group_size": 1}}),
        ("ppo", {"reference": {"kind": "none"}, "ppo": {"kl_coef": 0}}),
        ("ppo", {"critic": {"path": "x", "kind": "shared"}}),  # x may be a run, which runs/resolve.py finds out
        ("ppo", {"ppo": {"ptx_coef": 0.5, "ptx_data": "t.jsonl"}}),
        ("grpo", {"reference": {"kind": "none"}}),
        ("grpo", {"grpo": {"preset": "gdpo", "kl_coef": 0.1}, "reward": {"truncated": "mask"}}),
    ],
)
def test_what_goes_together_is_accepted(method: str, sections: dict[str, Any]):
    assert make(method, **sections).method == method
