"""Error sentences for invalid settings: where, what, the value, what is allowed, what was probably meant."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tinyrl.config.aliases import ALIASES, ALIASES_OF_DPO
from tinyrl.config.recipe import build_config, load_config
from tinyrl.config.schema import Config
from tinyrl.config.settings import allowed, fields_of
from tinyrl.config.yaml_reader import Source

SETTINGS = Config(method="grpo")


def sentence(values: dict[str, Any], method: str = "grpo") -> str:
    with pytest.raises(ValueError, match=r"^r\.yaml") as caught:
        build_config(Source("r.yaml", {"method": method, **values}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"grpo": {"group_sise": 4}}, ("unknown key `grpo.group_sise`", "`grpo.group_size`")),
        ({"rum": {}}, ("unknown key `rum`", "`run`")),
        ({"num_steps": 3}, ("unknown key `num_steps`", "`run.num_steps`")),
        ({"reward": {"functions": [{"use": "a.py:f", "wait": 2}]}}, ("`reward.functions[0].wait`", "[0].weight`")),
        ({"reference": {"what": 1}}, ("unknown key `reference.what`", "has: kind")),
        ({1: 2}, ("unknown key `1`", "Sections: method, model")),
        ({"grpo": {None: 2}}, ("unknown key `grpo.None`",)),
        ({"run": {"micro_batch_tokens": 0}}, ("`run.micro_batch_tokens` is 0", "auto or a whole number")),
        ({"run": {"deterministic": "ja"}}, ("`run.deterministic` is 'ja'", "true or false")),
        ({"task": {"name": True}}, ("`task.name` is true", "text or null")),
        ({"task": {"columns": {"prompt": 3}}}, ("`task.columns.prompt` is 3", "text")),
        ({"lora": {"target_modules": [1]}}, ("`lora.target_modules` is [1]", "all-linear or a list of text")),
        ({"lora": {"dropout": 2}}, ("`lora.dropout` is 2", "at least 0 and below 1")),
        ({"lora": {"r": 10**9}}, ("`lora.r` is 1000000000",)),
        ({"grpo": 3}, ("`grpo` is 3", "section")),
        ({"reward": {"functions": [{}]}}, ("`reward.functions[0].use` is missing",)),
        ({"grpo": {"preset": "dappo"}}, ("`grpo.preset` is 'dappo'", "cispo", "Did you mean `dapo`?")),
        ({"model": {"path": "x" * 200, "dtype": "y" * 200}}, (f"`model.dtype` is '{'y' * 76}...",)),
        ({"task": {"chat_template": {"a": [1]}}}, ("`task.chat_template.a` is [1]",)),
        ({"task": {"chat_template": {"tokenize": False}}}, ("task.chat_template", "tokenize")),
        ({"grpo": {"beta": 0.1}}, ("`grpo.beta`", "`grpo.kl_coef`")),
        ({"output_dir": "x"}, ("`output_dir`", "`--output-dir`")),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_is_allowed(values: dict[str, Any], parts: tuple[str, ...]):
    found = sentence(values)
    assert "\n" not in found
    for part in parts:
        assert part in found


def test_one_sentence_a_setting_and_three_at_most():
    values = {"run": {"seed": -1, "num_steps": 0, "threads": "x", "micro_batch_tokens": "abc"}, "lora": {"r": 0}}
    *lines, more = sentence(values).splitlines()
    assert [line.split("`")[1] for line in lines] == ["lora.r", "run.num_steps", "run.seed"]
    assert "2 more" in more


def test_a_conflict_is_placed_at_the_setting_it_names():
    places = {"grpo": "r.yaml:1", "grpo.minibatch_size": "r.yaml:3", "grpo.num_prompts": "r.yaml:2"}
    with pytest.raises(ValueError, match=r"^r\.yaml:3: grpo\.minibatch_size=7 does not divide the 256 sequences"):
        build_config(Source("r.yaml", {"method": "grpo", "grpo": {"minibatch_size": 7}}, places))


def test_variables_of_a_chat_template_keep_their_types():
    values = {"enable_thinking": False, "effort": "low", "budget": 3, "share": 0.5, "none": None}
    config = build_config(Source("r.yaml", {"method": "grpo", "task": {"chat_template": values}}))
    kept = config.written()["task"]["chat_template"]
    assert [(name, type(value), value) for name, value in kept.items()] == [
        (name, type(value), value) for name, value in values.items()
    ]


def test_no_field_takes_a_number_that_overflows():
    """1e300 is infinite in float32; so is what a learning rate or a weight decay of it makes of the weights."""
    taken, tried = [], 0
    for section in fields_of():
        for name, kind in fields_of(section).items():
            if "number" not in allowed(kind).replace("whole number", ""):
                continue
            tried += 1
            for value in (1e300, -1e300):
                try:
                    getattr(SETTINGS, section).model_validate({name: value})
                except ValidationError:
                    continue
                taken.append(f"{section}.{name}={value}")
    assert tried > 20
    assert not taken
    with pytest.raises(ValidationError):
        SETTINGS.reward.model_validate({"functions": [{"use": "a.py:f", "weight": 1e300}]})


# Names from elsewhere


def test_every_familiar_name_is_answered_with_a_setting_there_is():
    for answer in {*ALIASES.values(), *ALIASES_OF_DPO.values()}:
        if not answer.startswith(("!", "--")):
            section, key = re.findall(r"^([a-z_]+)\.([a-z_]+)", answer)[0]
            assert key in fields_of(section), answer


@pytest.mark.parametrize(
    ("override", "method", "setting"),
    [
        ("+actor_rollout_ref.rollout.n=8", "grpo", "`grpo.group_size`"),
        ("critic.optim.lr=1e-5", "ppo", "`optim.critic_learning_rate`"),
        ("algorithm.adv_estimator=gae", "ppo", "tinyrl train ppo"),
        ("data.train_batch_size=8", "ppo", "`ppo.num_prompts`"),
        ("data.train_batch_size=8", "dpo", "`dpo.batch_size`"),
        ("beta=0.1", "dpo", "`dpo.beta`"),
        ("beta=0.1", "grpo", "`grpo.kl_coef`"),
        ("scale_rewards=batch", "grpo", "`grpo.advantage_scale`"),
    ],
)
def test_names_of_trl_and_verl_are_answered_also_with_dots(override: str, method: str, setting: str):
    with pytest.raises(ValueError, match="is not a setting") as caught:
        load_config(method, None, overrides=["task.data=rows.jsonl", override])
    assert str(caught.value).startswith(f"override '{override}'")
    assert setting in str(caught.value)
