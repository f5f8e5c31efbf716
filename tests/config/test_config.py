"""The configuration: defaults that depend on other fields, presets, types, conflicts."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tinyrl.config.conflicts import training_conflicts
from tinyrl.config.derive import derive
from tinyrl.config.given import Given
from tinyrl.config.method_sections import PRESETS
from tinyrl.config.schema import Config
from tinyrl.config.settings import allowed, fields_of


def make(method: str = "grpo", **sections: Any) -> Config:
    return derive(Given({"method": method, **sections}))


def test_defaults_and_presets():
    grpo, ppo = make("grpo"), make("ppo")
    assert (grpo.lora.enabled, grpo.lora.r, grpo.lora.alpha, grpo.lora.dropout) == (True, 16, 32.0, 0.0)
    assert (grpo.grpo.num_prompts, grpo.grpo.group_size, grpo.grpo.num_epochs) == (32, 8, 1)
    assert (grpo.generation.max_new_tokens, grpo.generation.temperature) == (256, 1.0)
    assert (grpo.run.num_steps, grpo.run.eval_every, grpo.run.save_every, grpo.run.keep_checkpoints) == (200, 25, 25, 3)
    assert grpo == make("grpo", grpo={"preset": "dapo"}, lora=None, ppo={"no such": "field"}, sft=None)
    assert ppo == make("ppo", ppo={"preset": "ppo"})


def test_defaults_that_depend_on_other_fields():
    for method, lora, rates in (
        ("grpo", True, (5e-5, None)),
        ("dpo", False, (1e-6, None)),
        ("ppo", True, (5e-5, 1e-4)),
        ("ppo", False, (1e-6, 1e-5)),
    ):
        optim = make(method, lora={"enabled": lora}).optim
        assert (optim.learning_rate, optim.critic_learning_rate) == rates
        assert make(method, lora={"enabled": lora}, optim={"learning_rate": 3e-4}).optim.learning_rate == 3e-4
    for lora, kind, resolved in ((True, None, "adapter"), (False, None, "separate"), (True, "shared", "shared")):
        assert make("ppo", lora={"enabled": lora}, critic={"kind": kind}).critic.kind == resolved
    for loss, beta in (("sigmoid", 0.1), ("ipo", 0.1), ("kto", 0.1), ("simpo", 2.0)):
        assert make("dpo", dpo={"loss": loss}).dpo.beta == beta
    assert make("dpo", dpo={"loss": "simpo", "beta": 2.5}).dpo.beta == 2.5


# ---- presets: every part, as the papers have it ----

PARTS = (
    "surrogate", "advantage", "advantage_scale", "clip_eps", "clip_eps_high", "aggregation", "kl_coef", "kl_estimator",
    "reward_aggregation",
)  # fmt: skip
PPO_PARTS = ("num_prompts", "num_epochs", "minibatch_size", "value_clip_eps", "gae_lambda", "whiten_advantages")


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("dapo", ("clip", "group", "std", 0.2, 0.28, "token", 0.0, "k3", "sum")),
        ("grpo", ("clip", "group", "std", 0.2, 0.2, "sequence", 0.04, "k3", "sum")),
        ("dr_grpo", ("clip", "group", "none", 0.2, 0.2, "constant", 0.0, "k3", "sum")),
        ("gspo", ("sequence", "group", "std", 3e-4, 4e-4, "sequence", 0.0, "k3", "sum")),
        ("gdpo", ("clip", "group", "std", 0.2, 0.28, "token", 0.0, "k3", "normalize-then-sum")),
        ("cispo", ("cispo", "group", "std", 0.2, 0.28, "token", 0.0, "k3", "sum")),
        ("rloo", ("clip", "leave-one-out", "std", 0.2, 0.2, "sequence-sum", 0.05, "k1", "sum")),
        ("reinforce++", ("clip", "reinforce++", "std", 0.2, 0.2, "token", 0.01, "k1", "sum")),
        ("reinforce++-baseline", ("clip", "reinforce++-baseline", "std", 0.2, 0.2, "token", 0.01, "k2", "sum")),
        ("ppo", (128, 4, 64, 0.2, 0.95, True)),
        ("a2c", (128, 1, None, None, 1.0, False)),
    ],
)
def test_a_preset_is_plain_fields(preset: str, parts: tuple[Any, ...]):
    method, names = ("grpo", PARTS) if preset in PRESETS else ("ppo", PPO_PARTS)
    section = getattr(make(method, **{method: {"preset": preset}}), method)
    assert tuple(getattr(section, name) for name in names) == parts


def test_gtpo_is_dapo_with_credit_by_turn():
    game = {"environment": {"name": "game.py:respond"}}
    dapo = make("grpo", **game).grpo.model_dump()
    gtpo = make("grpo", **game, grpo={"preset": "gtpo"}).grpo.model_dump()
    assert (dapo["credit"], dapo["turn_gamma"]) == ("episode", 1.0)
    assert gtpo == {**dapo, "preset": "gtpo", "credit": "turn", "turn_gamma": 0.9}


def test_each_part_of_a_preset_can_be_overridden_alone():
    plain = make("grpo", grpo={"preset": "grpo"}).grpo.model_dump()
    others = {"surrogate": "sequence", "reward_aggregation": "normalize-then-sum", "advantage": "leave-one-out",
              "advantage_scale": "batch", "clip_eps": 0.11, "clip_eps_high": 0.33,
              "aggregation": "constant", "kl_coef": 0.02, "kl_estimator": "k2"}  # fmt: skip
    for name, value in others.items():
        assert make("grpo", grpo={"preset": "grpo", name: value}).grpo.model_dump() == {**plain, name: value}


# ---- types are strict: no value is converted to another type ----


@pytest.mark.parametrize(
    ("section", "field", "values"),
    [
        ("run", "num_steps", (True, 2.0, "3", 0)),
        ("run", "seed", (-1,)),
        ("run", "deterministic", (1,)),
        ("optim", "learning_rate", (True, 0, float("nan"), float("inf"))),
        ("optim", "betas", (0.9, [0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9], None)),
        ("grpo", "clip_eps", (1.0,)),
        ("grpo", "preset", (["dapo"],)),
        ("lora", "target_modules", ([],)),
        ("generation", "stop", ([""], ("a",))),
        ("task", "name", (3,)),
        ("model", "path", ("",)),
    ],
)
def test_wrong_types_and_ranges_are_refused(section: str, field: str, values: tuple[Any, ...]):
    for value in values:
        with pytest.raises(ValidationError) as caught:
            Config.model_validate({"method": "grpo", section: {field: value}})
        assert {problem["loc"][:2] for problem in caught.value.errors()} == {(section, field)}


def test_no_field_takes_a_number_that_overflows():
    """1e300 is infinite in float32; so is what a learning rate or a weight decay of it makes of the weights."""
    settings = make("grpo")
    numbers = [(section, name) for section in fields_of() for name, kind in fields_of(section).items()
               if "number" in allowed(kind).replace("whole number", "")]  # fmt: skip
    assert len(numbers) > 20
    for section, name in numbers:
        with pytest.raises(ValidationError):
            getattr(settings, section).model_validate({name: 1e300})


@pytest.mark.parametrize(
    ("turns", "own", "total", "expected"), [(4, None, 256, 64), (3, None, 256, 85), (4, 200, 256, 200), (4, None, 3, 1)]
)
def test_a_call_of_an_agent_has_an_equal_share_of_its_episode(turns: int, own: int | None, total: int, expected: int):
    environment = make("grpo", environment={"agent": "a.py:f", "max_turns": turns, "max_call_tokens": own}).environment
    assert environment.call_tokens(total) == expected


# ---- conflicts ----

FULL = {"lora": {"enabled": False}}
GDPO = {"preset": "gdpo"}
EACH = "grpo.reward_aggregation=normalize-then-sum"
GTPO = {"preset": "gtpo"}
GAME = {"environment": {"name": "game.py:respond"}}
BY_TURN = "grpo.credit=turn"
AGENT = {"environment": {"agent": "a.py:f"}}
SERVER = {"engine": "server", "url": "http://a:1"}


@pytest.mark.parametrize(
    ("method", "sections", "setting"),
    [
        ("grpo", {"lora": {"dropout": 0.1}}, "lora.dropout=0.1"),
        ("sft", {"lora": {"dropout": 0.1, "target_parameters": "experts"}}, "lora.target_parameters"),
        (
            "grpo",
            {
                "lora": {"target_parameters": ["mlp.experts.down_proj"]},
                "generation": {"engine": "server", "url": "http://127.0.0.1:1"},
            },
            "mlp.experts.down_proj",
        ),
        ("grpo", {**FULL, "model": {"quantization": "4bit"}}, "model.quantization=4bit"),
        ("grpo", {**FULL, "model": {"adapter": "a"}}, "model.adapter=a"),
        ("ppo", {**FULL, "critic": {"kind": "adapter"}}, "critic.kind=adapter"),
        ("grpo", {**FULL, "generation": SERVER}, "generation.engine=server needs lora.enabled=true"),
        ("grpo", {"environment": {"name": "python", "tools": ["a.py:f"]}}, "environment.tools"),
        ("grpo", {"grpo": {"minibatch_size": 100}}, "grpo.minibatch_size=100"),
        ("grpo", {"grpo": {"group_size": 1}}, "grpo.group_size=1"),
        ("ppo", {"reference": {"kind": "none"}}, "ppo.kl_coef=0.05"),
        ("grpo", {"grpo": {**GDPO, "advantage": "leave-one-out"}}, EACH),
        ("grpo", {"grpo": {**GDPO, "kl_coef": 0.1, "kl_estimator": "k1"}}, EACH),
        ("grpo", {"grpo": GDPO, "reward": {"truncated": "penalize"}}, EACH),
        ("grpo", {"grpo": {"kl_unbiased": True, "kl_coef": 0.1, "kl_estimator": "k2"}}, "grpo.kl_unbiased=true"),
        ("grpo", {"grpo": {"kl_unbiased": True, "kl_coef": 0.1, "kl_estimator": "k1"}}, "grpo.kl_unbiased=true"),
        ("grpo", {"grpo": GTPO}, BY_TURN),
        ("grpo", {"grpo": GTPO, "task": {"name": "lookup"}}, BY_TURN),
        ("grpo", {"grpo": GTPO, "environment": {"tools": ["a.py:f"]}}, BY_TURN),
        ("grpo", {"grpo": GTPO, "environment": {"name": "search"}}, "environment.name=search"),
        ("grpo", {"grpo": GTPO, **AGENT}, "calls of an agent"),
        ("grpo", {"grpo": {**GTPO, "advantage": "leave-one-out"}, **GAME}, "not leave-one-out"),
        ("grpo", {"grpo": {**GTPO, "advantage": "reinforce++"}, **GAME}, "not reinforce++"),
        ("grpo", {"grpo": {**GTPO, "surrogate": "sequence"}, **GAME}, "grpo.surrogate=sequence"),
        ("grpo", {"grpo": {**GDPO, "credit": "turn"}, **GAME}, "grpo.reward_aggregation=sum"),
        ("grpo", {"grpo": {**GTPO, "kl_coef": 0.1, "kl_estimator": "k1"}, **GAME}, "grpo.kl_estimator=k1"),
        ("ppo", {"ppo": {"num_prompts": 8, "group_size": 3, "minibatch_size": 16}}, "ppo.minibatch_size=16"),
        ("grpo", {"grpo": {"num_prompts": 3, "group_size": 3, "minibatch_size": 4}}, "grpo.minibatch_size=4"),
        ("grpo", {"generation": {"engine": "server"}}, "generation.url"),
        ("grpo", {"generation": {"engine": "server", "url": "localhost:8000"}}, "generation.url"),
        ("distill", {"teacher": {"path": "self"}}, "teacher.hint"),
        ("distill", {"teacher": {"path": "start", "hint": "x"}, "reference": {"kind": "none"}}, "reference.kind=none"),
        ("distill", {"teacher": {"path": "http://a:1"}, "generation": {"temperature": 0.5}}, "temperature=0.5"),
        ("grpo", {**AGENT, "grpo": {"advantage": "reinforce++"}}, "grpo.advantage=reinforce++"),
        ("grpo", {**AGENT, "grpo": {"dynamic_sampling_rounds": 2}}, "grpo.dynamic_sampling_rounds=2"),
        ("grpo", {**AGENT, "grpo": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "grpo.kl_estimator=k1"),
        ("grpo", {**AGENT, "generation": SERVER}, "generation.engine=server"),
        ("distill", {**AGENT, "teacher": {"path": "a"}}, "method=distill"),
        ("dpo", {"reference": {"kind": "none"}}, "reference.kind=none"),
        ("dpo", {"dpo": {"loss": "kto", "batch_size": 1}}, "dpo.batch_size=1"),
        ("ppo", {"ppo": {"ptx_coef": 0.5}}, "ppo.ptx_data"),
    ],
)  # fmt: skip
def test_conflicts_are_refused(method: str, sections: dict[str, Any], setting: str):
    with pytest.raises(ValueError, match=re.escape(setting)):
        make(method, **sections)


def test_what_goes_together_is_accepted():
    make("sft", lora={"dropout": 0.1})
    make("dpo", reference={"kind": "none"}, dpo={"loss": "simpo", "batch_size": 1})
    make("grpo", reward={"overlong_tokens": 256}, grpo={"minibatch_size": 64})
    make("grpo", grpo={"preset": "reinforce++", "group_size": 1})
    make("grpo", grpo={"kl_unbiased": True, "kl_coef": 0.1})
    make("ppo", ppo={"num_prompts": 8, "group_size": 4, "minibatch_size": 16})
    make("ppo", ppo={"num_prompts": 4})  # fewer than its minibatches of 64
    make("ppo", reference={"kind": "none"}, ppo={"kl_coef": 0, "ptx_coef": 0.5, "ptx_data": "t.jsonl"})
    make("ppo", critic={"path": "x", "kind": "shared"})  # x may be a run, which runs/resolve.py finds out
    make("grpo", grpo={"preset": "gdpo", "kl_coef": 0.1}, reward={"truncated": "mask"})
    make("ppo", **AGENT, **FULL, generation={"url": "localhost"})
    make("grpo", **GAME, grpo={**GTPO, "kl_coef": 0.1, "surrogate": "cispo", "advantage_scale": "batch"})


@pytest.mark.parametrize(("minibatch", "size"), [(8, 8), (16, 16), (17, 16), (64, 16), (None, 16)])
def test_a_minibatch_is_at_most_the_rollout(minibatch: int | None, size: int):
    assert make("grpo", grpo={"num_prompts": 4, "group_size": 4, "minibatch_size": minibatch}).grpo.update_size == size


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.9)])
def test_training_takes_no_cut_distribution_and_evaluation_does(name: str, value: float):
    for method in ("grpo", "distill"):
        config = make(method, generation={name: value}, teacher={"path": "x"})  # as `tinyrl eval` reads it
        [refusal] = training_conflicts(config)
        assert refusal.settings == (f"generation.{name}",)
    assert [*training_conflicts(make("grpo", generation={"top_k": 0, "top_p": 1.0}))] == []
