"""Error sentences for invalid settings: where, what, the value, what is allowed, what was probably meant."""

import re
from typing import Any

import pytest

from tinyrl.config.errors import FAMILIAR, allowed, dotted, fields_of, section_class
from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import Source
from tinyrl.text import did_you_mean


def sentence(values: dict[str, Any], method: str = "grpo") -> str:
    with pytest.raises(ValueError, match=r"^r\.yaml") as caught:
        build_config(Source("r.yaml", {"method": method, **values}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"grpo": {"group_sise": 4}},
            "r.yaml: unknown key `grpo.group_sise`. Did you mean `grpo.group_size`?",
        ),
        ({"rum": {}}, "r.yaml: unknown key `rum`. Did you mean `run`?"),
        ({"num_steps": 3}, "r.yaml: unknown key `num_steps`. Did you mean `run.num_steps`?"),
        ({"grpo": {"num_steps": 3}}, "r.yaml: unknown key `grpo.num_steps`. Did you mean `run.num_steps`?"),
        (
            {"reward": {"functions": [{"use": "a.py:f"}, {"use": "a.py:f", "wait": 2}]}},
            "r.yaml: unknown key `reward.functions[1].wait`. Did you mean `reward.functions[1].weight`?",
        ),
        ({"reference": {"what": 1}}, "r.yaml: unknown key `reference.what`. `reference` has: kind"),
        (
            {"zzz": 1},
            "r.yaml: unknown key `zzz`. Sections: method, model, lora, reference, critic, task, reward, generation, "
            "optim, grpo, ppo, sft, reward_model, run",
        ),
        (
            {"run": {"micro_batch_tokens": "abc"}},
            "r.yaml: `run.micro_batch_tokens` is 'abc'; it must be auto or a whole number of at least 1.",
        ),
        (
            {"run": {"micro_batch_tokens": 0}},
            "r.yaml: `run.micro_batch_tokens` is 0; it must be auto or a whole number of at least 1.",
        ),
        ({"run": {"deterministic": "ja"}}, "r.yaml: `run.deterministic` is 'ja'; it must be true or false."),
        ({"task": {"chat": "maybe"}}, "r.yaml: `task.chat` is 'maybe'; it must be auto, true or false."),
        ({"task": {"name": True}}, "r.yaml: `task.name` is true; it must be text or null. Put it in quotes."),
        (
            {"task": {"columns": {"prompt": 3}}},
            "r.yaml: `task.columns.prompt` is 3; it must be text. Put it in quotes.",
        ),
        (
            {"task": {"columns": "a"}},
            "r.yaml: `task.columns` is 'a'; it must be a mapping of text to text, {new: old}.",
        ),
        ({"model": {"path": ""}}, "r.yaml: `model.path` is ''; it must be text. It is empty."),
        (
            {"lora": {"target_modules": [1]}},
            "r.yaml: `lora.target_modules` is [1]; it must be all-linear or a list of text.",
        ),
        ({"lora": {"dropout": 2}}, "r.yaml: `lora.dropout` is 2; it must be a number of at least 0 and below 1."),
        ({"grpo": {"clip_eps": "x"}}, "r.yaml: `grpo.clip_eps` is 'x'; it must be a number above 0 and below 1."),
        ({"optim": {"learning_rate": -1}}, "r.yaml: `optim.learning_rate` is -1; it must be a number above 0 or null."),
        ({"grpo": 3}, "r.yaml: `grpo` is 3; it must be a section (preset, num_prompts, group_size, num_epochs, ...)."),
        ({"reward": {"functions": "f"}}, "r.yaml: `reward.functions` is 'f'; it must be a list of {use, weight}."),
        ({"reward": {"functions": [{}]}}, "r.yaml: `reward.functions[0].use` is missing; it must be text"),
        (
            {"reward": {"functions": [{"use": "a.py:f", "weight": "abc"}]}},
            "r.yaml: `reward.functions[0].weight` is 'abc'; it must be a number.",
        ),
        (
            {"grpo": {"preset": "dappo"}},
            "r.yaml: `grpo.preset` is 'dappo'; it must be dapo, grpo, dr_grpo, gspo, cispo, rloo, reinforce++ "
            "or reinforce++-baseline. "
            "Did you mean `dapo`?",
        ),
        ({1: 2}, "r.yaml: unknown key `1`. Sections: method, model"),
        ({"grpo": {None: 2}}, "r.yaml: unknown key `grpo.None`. `grpo` has: preset"),
        ({"model": {"path": "x" * 200, "dtype": "y" * 200}}, f"r.yaml: `model.dtype` is '{'y' * 76}...; it must be"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_is_allowed(values: dict[str, Any], expected: str):
    assert sentence(values).startswith(expected)
    assert "\n" not in sentence(values)


def test_one_sentence_a_setting_and_three_at_most():
    values = {"run": {"seed": -1, "num_steps": 0, "threads": "x", "micro_batch_tokens": "abc"}, "lora": {"r": 0}}
    assert sentence(values).splitlines() == [
        "r.yaml: `lora.r` is 0; it must be a whole number of at least 1.",
        "r.yaml: `run.num_steps` is 0; it must be a whole number of at least 1.",
        "r.yaml: `run.seed` is -1; it must be a whole number of at least 0 and below 1000000000000000000.",
        "(and 2 more)",
    ]


def test_a_wrong_preset_is_one_mistake():
    assert "\n" not in sentence({"grpo": {"preset": 3}})


def test_a_conflict_is_placed_at_the_setting_it_names():
    places = {"grpo": "r.yaml:1", "grpo.minibatch_size": "r.yaml:3", "grpo.num_prompts": "r.yaml:2"}
    with pytest.raises(ValueError, match=r"^r\.yaml:3: grpo\.minibatch_size=7 does not divide the 256 sequences"):
        build_config(Source("r.yaml", {"method": "grpo", "grpo": {"minibatch_size": 7}}, places))


# Names from elsewhere


def test_every_familiar_name_is_answered_with_a_setting_there_is():
    for name in FAMILIAR.values():
        section, _, key = name.partition(".")
        assert name == "--output-dir" or key in fields_of(section_class(section)), name


@pytest.mark.parametrize(
    ("values", "method", "expected"),
    [
        ({"grpo": {"beta": 0.1}}, "grpo", "r.yaml: `grpo.beta` is not a setting: `beta` is `grpo.kl_coef` here"),
        ({"ppo": {"beta": 0.1}}, "ppo", "r.yaml: `ppo.beta` is not a setting: `beta` is `ppo.kl_coef` here"),
        ({"lam": 0.9}, "ppo", "r.yaml: `lam` is not a setting: `lam` is `ppo.gae_lambda` here"),
        (
            {"num_generations": 4},
            "grpo",
            "r.yaml: `num_generations` is not a setting: `num_generations` is `grpo.group",
        ),
        ({"seed": 3}, "grpo", "r.yaml: `seed` is not a setting: `seed` is `run.seed` here"),
        ({"optim": {"lr": 3}}, "grpo", "r.yaml: `optim.lr` is not a setting: `lr` is `optim.learning_rate` here"),
        ({"cliprange": 0.1}, "grpo", "r.yaml: `cliprange` is not a setting: `cliprange` is `grpo.clip_eps` here"),
        ({"output_dir": "x"}, "grpo", "r.yaml: `output_dir` is not a setting: `output_dir` is `--output-dir` here"),
    ],
)
def test_familiar_names_are_answered(values: dict[str, Any], method: str, expected: str):
    assert sentence(values, method).startswith(expected)


def test_a_familiar_name_that_is_a_setting_where_it_stands_is_one():
    for values in ({"run": {"seed": 3}}, {"generation": {"temperature": 0.5}}, {"ppo": {"beta": "not looked at"}}):
        assert build_config(Source("r.yaml", {"method": "grpo", **values})).method == "grpo"


# The words themselves


def test_every_setting_can_be_described():
    """A type without words would be a crash in the middle of an error."""
    for section in fields_of(Config):
        for name, kind in {section: fields_of(Config)[section], **fields_of(section_class(section))}.items():
            assert re.fullmatch(r"[\w ,.+(){}:-]+", allowed(kind)), name


def test_dotted_and_near():
    assert dotted(("reward", "functions", 0, "use")) == "reward.functions[0].use"
    assert dotted((1,)) == "[1]"
    assert len(dotted(("x" * 500,))) == 80
    assert did_you_mean("gpro", ["ppo", "grpo"]) == " Did you mean `grpo`?"
    assert did_you_mean("xyz", ["ppo", "grpo"]) == ""
