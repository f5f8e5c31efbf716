"""The configuration: defaults that depend on other fields, presets, conflicts."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinyrl.config.method_sections import PRESETS, GrpoConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.schema import Config


def make(method: str = "grpo", **sections: Any) -> Config:
    return Config.model_validate({"method": method, **sections})


def refused(method: str = "grpo", **sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        make(method, **sections)
    (problem,) = caught.value.errors()
    return problem["msg"]


def test_starting_numbers_and_presets():
    grpo, ppo = make("grpo"), make("ppo")
    assert (grpo.lora.enabled, grpo.lora.r, grpo.lora.alpha, grpo.lora.dropout) == (True, 16, 32.0, 0.0)
    assert (grpo.grpo.num_prompts, grpo.grpo.group_size, grpo.grpo.num_epochs) == (32, 8, 1)
    assert (ppo.ppo.num_prompts, ppo.ppo.num_epochs, ppo.ppo.minibatch_size) == (128, 4, 64)
    assert (grpo.generation.max_new_tokens, grpo.generation.temperature) == (256, 1.0)
    assert (grpo.run.num_steps, grpo.run.eval_every, grpo.run.save_every, grpo.run.keep_checkpoints) == (200, 25, 25, 3)
    assert (grpo.optim.schedule, grpo.optim.weight_decay, grpo.optim.max_grad_norm) == ("constant", 0.0, 1.0)
    assert grpo == make("grpo", grpo={"preset": "dapo"}, lora=None, ppo={"no such": "field"}, sft=3)
    assert ppo == make("ppo", ppo={"preset": "ppo"})
    given = make("ppo", lora={"enabled": False, "alpha": 8}, optim={"learning_rate": 3e-4})
    assert (given.optim.learning_rate, given.optim.critic_learning_rate, given.lora.alpha) == (3e-4, 1e-5, 8.0)


@pytest.mark.parametrize(
    ("method", "lora", "rates"),
    [
        ("grpo", True, (5e-5, None)),
        ("grpo", False, (1e-6, None)),
        ("ppo", True, (5e-5, 1e-4)),
        ("ppo", False, (1e-6, 1e-5)),
        ("sft", True, (5e-5, None)),
        ("reward", False, (1e-6, None)),
        ("dpo", True, (5e-5, None)),
        ("dpo", False, (1e-6, None)),
    ],
)
def test_learning_rates_depend_on_lora_and_method(method: str, lora: bool, rates: tuple[float, float | None]):
    optim = make(method, lora={"enabled": lora}).optim
    assert (optim.learning_rate, optim.critic_learning_rate) == rates


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
def test_the_critic_that_fits(lora: bool, critic: dict[str, Any], kind: str):
    config = make("ppo", lora={"enabled": lora}, critic=critic)
    assert config.critic.kind == kind


def test_the_beta_that_fits_a_loss():
    betas = {loss: make("dpo", dpo={"loss": loss}).dpo.beta for loss in ("sigmoid", "ipo", "ipo_sum", "kto", "orpo")}
    assert set(betas.values()) == {0.1}
    assert make("dpo", dpo={"loss": "simpo"}).dpo.beta == 2.0
    assert make("dpo", dpo={"loss": "simpo", "beta": 2.5}).dpo.beta == 2.5


# Sections


def test_a_method_has_its_sections_and_no_others():
    for method in METHODS:
        config = make(method, grpo={"num_prompts": 4}, ppo={"num_prompts": 64}, sft={}, critic={}, reward={})
        assert {*config.written()} & {*OPTIONAL_SECTIONS} == {*METHODS[method].sections}
        assert {name for name in OPTIONAL_SECTIONS if config.uses(name)} == {*METHODS[method].sections}


# Presets: every part, as the papers have it.

PARTS = ("advantage", "advantage_scale", "clip_eps", "clip_eps_high", "aggregation", "kl_coef", "kl_estimator")


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
        ("reinforce++", ("discounted-return", "std", 0.2, 0.2, "token", 0.01, "k1")),
        ("reinforce++-baseline", ("baseline-return", "std", 0.2, 0.2, "token", 0.01, "k2")),
    ],
)
def test_a_preset_is_plain_fields(preset: str, parts: tuple[Any, ...]):
    section = make("grpo", grpo={"preset": preset}).grpo
    assert tuple(getattr(section, name) for name in PARTS) == parts


PPO_PARTS = ("num_epochs", "minibatch_size", "value_clip_eps", "gae_lambda")


@pytest.mark.parametrize(("preset", "parts"), [("ppo", (4, 64, 0.2, 0.95)), ("a2c", (1, None, None, 1.0))])
def test_a_preset_of_ppo_is_plain_fields(preset: str, parts: tuple[Any, ...]):
    section = make("ppo", ppo={"preset": preset}).ppo
    assert tuple(getattr(section, name) for name in PPO_PARTS) == parts
    others = {"num_epochs": 3, "minibatch_size": 32, "value_clip_eps": 0.7, "gae_lambda": 0.5}
    for name, value in others.items():
        changed = make("ppo", ppo={"preset": preset, name: value}).ppo
        assert changed.model_dump() == {**section.model_dump(), name: value}


OTHERS: dict[str, Any] = {
    "advantage": "leave-one-out",
    "advantage_scale": "batch",
    "entropy_coef": 0.02,
    "mismatch": "sequence-mask",
    "clip_eps": 0.11,
    "clip_eps_high": 0.33,
    "aggregation": "constant",
    "kl_coef": 0.02,
    "kl_estimator": "k2",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_part_of_a_preset_can_be_overridden_alone(preset: str):
    plain = GrpoConfig.model_validate({"preset": preset}).model_dump()
    for name, value in OTHERS.items():
        assert GrpoConfig.model_validate({"preset": preset, name: value}).model_dump() == {**plain, name: value}


# Types are strict: no value is converted to another type.


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("run", "num_steps", True),
        ("run", "num_steps", 2.0),
        ("run", "num_steps", "3"),
        ("run", "num_steps", 0),
        ("run", "seed", -1),
        ("run", "deterministic", 1),
        ("optim", "learning_rate", True),
        ("optim", "learning_rate", 0),
        ("optim", "learning_rate", float("nan")),
        ("optim", "learning_rate", float("inf")),
        ("grpo", "group_size", 0),
        ("grpo", "clip_eps", 1.0),
        ("grpo", "preset", ["dapo"]),
        ("lora", "dropout", float("nan")),
        ("lora", "target_modules", []),
        ("generation", "stop", [""]),
        ("generation", "stop", ("a",)),
        ("generation", "top_p", 0),
        ("task", "name", 3),
        ("model", "path", ""),
    ],
)
def test_wrong_types_and_ranges_are_refused(section: str, field: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        make("grpo", **{section: {field: value}})
    assert {problem["loc"][:2] for problem in caught.value.errors()} == {(section, field)}


# What cannot go together, and what can.


@pytest.mark.parametrize(
    ("method", "sections", "sentence"),
    [
        ("grpo", {"lora": {"dropout": 0.1}}, "lora.dropout=0.1 makes the ratio"),
        ("grpo", {"lora": {"enabled": False}, "model": {"quantization": "4bit"}}, "model.quantization=4bit needs lora"),
        ("grpo", {"lora": {"enabled": False}, "model": {"adapter": "a"}}, "model.adapter=a needs lora.enabled=true"),
        ("ppo", {"lora": {"enabled": False}, "critic": {"kind": "adapter"}}, "critic.kind=adapter needs lora"),
        ("grpo", {"reward": {"overlong_tokens": 257}}, "reward.overlong_tokens=257 penalises every answer"),
        ("grpo", {"grpo": {"minibatch_size": 100}}, "does not divide the 256 sequences of a step; 64 would"),
        ("ppo", {"ppo": {"num_prompts": 32}}, "ppo.minibatch_size=64 does not divide the 32 sequences of a step; 32"),
        ("grpo", {"grpo": {"group_size": 1}}, "grpo.group_size=1 leaves nothing to compare"),
        ("ppo", {"reference": {"kind": "none"}}, "ppo.kl_coef=0.05 needs a reference"),
        (
            "grpo",
            {"grpo": {"preset": "gdpo", "advantage": "leave-one-out"}},
            "grpo.advantage=leave-one-out is not for grpo.preset=gdpo",
        ),
        (
            "grpo",
            {"grpo": {"preset": "gdpo", "kl_coef": 0.1, "kl_estimator": "k1"}},
            "grpo.kl_estimator=k1 changes the sum of rewards",
        ),
        (
            "grpo",
            {"grpo": {"preset": "gdpo"}, "reward": {"overlong_tokens": 9}},
            "reward.overlong_tokens=9 changes",
        ),
        (
            "grpo",
            {"grpo": {"preset": "gdpo"}, "reward": {"truncated": "penalize"}},
            "reward.truncated=penalize",
        ),
        ("dpo", {"reference": {"kind": "none"}}, "reference.kind=none leaves dpo.loss=sigmoid nothing to measure"),
        ("dpo", {"dpo": {"loss": "kto", "batch_size": 1}}, "dpo.batch_size=1 leaves dpo.loss=kto no answers of other"),
        ("ppo", {"ppo": {"ptx_coef": 0.5}}, "ppo.ptx_coef=0.5 needs ppo.ptx_data: rows of text"),
    ],
)
def test_what_cannot_go_together(method: str, sections: dict[str, Any], sentence: str):
    assert sentence in refused(method, **sections)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("sft", {"lora": {"dropout": 0.1}}),
        ("dpo", {"lora": {"dropout": 0.1}, "dpo": {"label_smoothing": 0.1}}),
        ("dpo", {"reference": {"kind": "none"}, "dpo": {"loss": "simpo", "batch_size": 1}}),
        ("grpo", {"reward": {"overlong_tokens": 256}}),
        ("grpo", {"grpo": {"minibatch_size": 64}}),
        ("ppo", {"ppo": {"num_prompts": 32, "minibatch_size": None}}),
        ("grpo", {"grpo": {"preset": "grpo", "kl_estimator": "k1"}}),
        ("grpo", {"grpo": {"preset": "reinforce++", "group_size": 1}}),
        ("ppo", {"reference": {"kind": "none"}, "ppo": {"kl_coef": 0}}),
        ("ppo", {"critic": {"path": "x"}}),
        ("ppo", {"critic": {"path": "x", "kind": "shared"}}),  # x may be a run, which runs/resolve.py finds out
        ("ppo", {"ppo": {"ptx_coef": 0.5, "ptx_data": "t.jsonl"}}),
        ("grpo", {"reference": {"kind": "none"}}),
        ("grpo", {"grpo": {"kl_coef": 0.1, "kl_estimator": "k1"}}),
        ("grpo", {"grpo": {"preset": "gdpo", "kl_coef": 0.1}, "reward": {"truncated": "mask"}}),
        ("grpo", {"grpo": {"entropy_coef": 2.0}}),
    ],
)
def test_what_can_go_together_is_accepted(method: str, sections: dict[str, Any]):
    assert make(method, **sections).method == method


def test_a_batch_nobody_can_hold_is_answered_at_once():
    sentence = refused("grpo", grpo={"num_prompts": 999_983, "minibatch_size": 10**14})
    assert "does not divide" in sentence
    assert "less than or equal to 1000000" in refused(
        "grpo", grpo={"num_prompts": 10**15 + 37, "minibatch_size": 10**14}
    )
