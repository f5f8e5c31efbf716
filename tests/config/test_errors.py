"""Error sentences for invalid settings: where, what, the value, what is allowed, what was probably meant."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tinyrl.config.aliases import ALIASES, ALIASES_OF_DPO
from tinyrl.config.recipe import build_config, load_config
from tinyrl.config.schema import Config
from tinyrl.config.settings import allowed, dotted, fields_of
from tinyrl.config.yaml_reader import Source
from tinyrl.text import did_you_mean

SETTINGS = Config(method="grpo")


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
            "r.yaml: unknown key `zzz`. Sections: method, model, lora, reference, critic, teacher, task, reward, "
            "environment, generation, optim, grpo, ppo, distill, sft, reward_model, dpo, run",
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
        (
            {"optim": {"learning_rate": -1}},
            "r.yaml: `optim.learning_rate` is -1; it must be a number above 0 and",
        ),
        (
            {"grpo": 3},
            "r.yaml: `grpo` is 3; it must be a section (preset, num_prompts, num_epochs, minibatch_size, ...).",
        ),
        ({"reward": {"functions": "f"}}, "r.yaml: `reward.functions` is 'f'; it must be a list of {use, weight, ...}."),
        ({"reward": {"functions": [{}]}}, "r.yaml: `reward.functions[0].use` is missing; it must be text"),
        (
            {"reward": {"functions": [{"use": "a.py:f", "weight": "abc"}]}},
            "r.yaml: `reward.functions[0].weight` is 'abc'; it must be a number of at least -1000000 and",
        ),
        (
            {"grpo": {"preset": "dappo"}},
            "r.yaml: `grpo.preset` is 'dappo'; it must be dapo, grpo, dr_grpo, gspo, gdpo, cispo, rloo, reinforce++ "
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
        "r.yaml: `lora.r` is 0; it must be a whole number of at least 1 and of at most 16384.",
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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"chat_template": {"a": [1]}},
            "r.yaml: `task.chat_template.a` is [1]; it must be true, false, a whole number, a number, text or null.",
        ),
        (
            {"chat_template": "qwen"},
            "r.yaml: `task.chat_template` is 'qwen'; it must be a mapping of names to plain values.",
        ),
        ({"chat_template": {"tokenize": False}}, "r.yaml: task.chat_template: 'tokenize' is tinyrl's to set; give"),
        ({"chat_template": {"a b": 1}}, "r.yaml: task.chat_template: 'a b' is no name of a variable; give"),
        (
            {"chat_template": {"a": 1}, "chat": False},
            "r.yaml: task.chat_template={'a': 1} goes to the chat template, which task.chat=false does without",
        ),
    ],
)
def test_variables_of_a_chat_template_are_plain_and_not_ours(values: dict[str, Any], expected: str):
    assert sentence({"task": values}).startswith(expected)


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


def test_a_rank_that_no_model_has_is_refused():
    assert "`lora.r` is 1000000000; it must be" in sentence({"lora": {"r": 10**9}})


# Names from elsewhere


def test_every_familiar_name_is_answered_with_a_setting_there_is():
    for answer in {*ALIASES.values(), *ALIASES_OF_DPO.values()}:
        if not answer.startswith(("!", "--")):
            section, key = re.findall(r"^([a-z_]+)\.([a-z_]+)", answer)[0]
            assert key in fields_of(section), answer


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


@pytest.mark.parametrize(
    ("override", "method", "expected"),
    [
        ("actor_rollout_ref.rollout.n=8", "grpo", "`rollout.n` is `grpo.group_size` here"),
        ("+actor_rollout_ref.rollout.n=8", "grpo", "`rollout.n` is `grpo.group_size` here"),
        ("actor_rollout_ref.model.path=x", "ppo", "`actor_rollout_ref.model.path` is `model.path` here"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "grpo", "`lr` is `optim.learning_rate` here"),
        ("critic.optim.lr=1e-5", "ppo", "`critic.optim.lr` is `optim.critic_learning_rate` here"),
        ("algorithm.adv_estimator=gae", "ppo", "it is the method (`tinyrl train ppo` for gae"),
        ("algorithm.gamma=1.0", "ppo", "`algorithm.gamma` is `ppo.gamma` here"),
        ("algorithm.lam=0.9", "ppo", "`lam` is `ppo.gae_lambda` here"),
        ("critic.cliprange_value=0.5", "ppo", "`cliprange_value` is `ppo.value_clip_eps` here"),
        ("pretrain_data=x", "ppo", "`pretrain_data` is `ppo.ptx_data` here"),
        ("critic_pretrain=x", "ppo", "`critic_pretrain` is `critic.path` here"),
        ("data.train_batch_size=8", "ppo", "`train_batch_size` is `ppo.num_prompts` here, as verl's; OpenRLHF's"),
        ("data.train_batch_size=8", "dpo", "`train_batch_size` is `dpo.batch_size` here"),
        ("use_vllm=true", "grpo", "no serving engine is started"),
        ("bf16=true", "grpo", "`bf16` is `model.dtype` here: bfloat16, float16, float32 or auto"),
        ("enable_thinking=false", "grpo", "`enable_thinking` is `task.chat_template` here: {enable_thinking"),
        ("run.logging_steps=1", "grpo", "every step is logged"),
        ("log_completions=true", "grpo", "completions are always logged, in samples.jsonl"),
        ("max_seq_length=99", "sft", "prompts and completions have limits of their own"),
        ("beta=0.1", "dpo", "`beta` is `dpo.beta` here"),
        ("beta=0.1", "grpo", "`beta` is `grpo.kl_coef` here"),
        ("loss_type=ipo", "dpo", "`loss_type` is `dpo.loss` here"),
        ("label_smoothing=0.1", "dpo", "`label_smoothing` is `dpo.label_smoothing` here"),
        ("max_length=99", "dpo", "`max_length` is `dpo.max_tokens` here"),
        ("simpo_gamma=0.5", "dpo", "`simpo_gamma` is `dpo.target_margin` here"),
        ("ref_model=x", "dpo", "`ref_model` is `model.adapter` here: the reference is what training starts from"),
        ("precompute_ref_log_probs=true", "dpo", "reference log-probabilities are computed where a row is first used"),
        ("packing=true", "sft", "sequences are always packed"),
        ("generation.stop_sequences=[x]", "grpo", "`stop_sequences` is `generation.stop` here"),
        ("scale_rewards=batch", "grpo", "`scale_rewards` is `grpo.advantage_scale` here: std (its `group`), batch or"),
        ("importance_sampling_level=sequence", "grpo", "`importance_sampling_level` is `grpo.preset` here: gspo"),
        (
            "vllm_importance_sampling_mode=sequence_mask",
            "grpo",
            "`vllm_importance_sampling_mode` is `grpo.mismatch` here: token, sequence, token-mask, sequence-mask or",
        ),
        (
            "multi_objective_aggregation=normalize_then_sum",
            "grpo",
            "`multi_objective_aggregation` is `grpo.preset` here: gdpo",
        ),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "grpo", "`entropy_coeff` is `grpo.entropy_coef` here"),
        ("num_train_epochs=3", "grpo", "`num_train_epochs` is `run.num_steps` here, in steps: one step takes num_pro"),
    ],
)
def test_names_of_trl_and_verl_are_answered_also_with_dots(override: str, method: str, expected: str):
    name = override.partition("=")[0]
    with pytest.raises(ValueError, match="is not a setting") as caught:
        load_config(method, None, overrides=["task.data=rows.jsonl", override])
    assert str(caught.value).startswith(f"override '{override}': `{name}` is not a setting: {expected}")


def test_a_familiar_name_that_is_a_setting_where_it_stands_is_one():
    for values in ({"run": {"seed": 3}}, {"generation": {"temperature": 0.5}}, {"ppo": {"beta": "not looked at"}}):
        assert build_config(Source("r.yaml", {"method": "grpo", **values})).method == "grpo"


# The words themselves


def test_every_setting_can_be_described():
    """A type without words would be a crash in the middle of an error."""
    for section in fields_of():
        for name, kind in {section: fields_of()[section], **fields_of(section)}.items():
            assert re.fullmatch(r"[\w ,.+(){}:-]+", allowed(kind)), name


def test_dotted_and_near():
    assert dotted(("reward", "functions", 0, "use")) == "reward.functions[0].use"
    assert dotted((1,)) == "[1]"
    assert len(dotted(("x" * 500,))) == 80
    assert did_you_mean("gpro", ["ppo", "grpo"]) == " Did you mean `grpo`?"
    assert did_you_mean("xyz", ["ppo", "grpo"]) == ""
