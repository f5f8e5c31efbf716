"""Names of other libraries: the answer is about settings of the method that is trained."""

import re

import pytest

from tinyrl.config.aliases import ALIASES, TABLE
from tinyrl.config.foreign_options import answer_to_option
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.recipe import METHODS_ELSEWHERE, find_recipe, load_config
from tinyrl.config.settings import SECTIONS, fields_of
from tinyrl.process.errors import UnknownSettings

LACKING = {  # settings of samples, by their names alone
    method: ("num_prompts", "group_size", "minibatch_size", "kl_coef") for method in ("sft", "reward", "dpo")
}


def answer(method: str, *given: str) -> str:
    with pytest.raises(UnknownSettings) as caught:
        load_config(method, None, overrides=["task.name=sort", *given])
    return str(caught.value)


def settings_in(text: str) -> list[str]:
    """Return section.key of each setting that a text names."""
    return [name for name in re.findall(r"\b[a-z_]+\.[a-z_]+", text) if name.partition(".")[0] in SECTIONS]


def assert_settings_of(method: str, text: str) -> None:
    unread = {*OPTIONAL_SECTIONS} - {*METHODS[method].sections}
    for section, key in (name.split(".") for name in settings_in(text)):
        assert section not in unread, text
        assert key in fields_of(section), text
    assert not [name for name in LACKING.get(method, ()) if name in text], text


@pytest.mark.wide
@pytest.mark.parametrize("method", METHODS)
def test_an_answer_names_settings_of_the_method_alone(method: str):
    for alias in sorted(ALIASES):
        name = f"theirs.{alias}" if "." in alias else alias
        values = ("1", "true", "0.5", "sigmoid", "rloo", "-1")
        texts = [answer(method, f"{name}={value}") for value in values]
        texts += [answer_to_option(alias, words, method) for words in (*([value] for value in values), [])]
        itself = rf"(?<![\w.])({re.escape(name)}|{re.escape(alias)})(?!\w)"
        for text in texts:
            assert_settings_of(method, re.sub(itself, "NAME", text))


def test_a_row_of_the_table_is_about_methods_and_names_that_there_are():
    assert len(ALIASES) == sum(len(row.names.split()) for row in TABLE), "a name is in two rows"
    for row in TABLE:
        assert {*row.under} <= {*METHODS}
        assert {*row.reads} <= {*row.names.split()}


@pytest.mark.parametrize(
    ("method", "alias", "setting"),
    [
        ("sft", "train_batch_size", "sft.batch_size"),
        ("reward", "train_batch_size", "reward_model.batch_size"),
        ("dpo", "train_batch_size", "dpo.batch_size"),
        ("dpo", "beta", "dpo.beta"),
        ("ppo", "beta", "ppo.kl_coef"),
        ("dpo", "max_length", "dpo.max_tokens"),
        ("sft", "max_seq_length", "sft.max_tokens"),
        ("reward", "max_len", "reward_model.max_tokens"),
        ("ppo", "num_generations", "ppo.group_size"),
    ],
)
def test_a_name_is_the_setting_of_the_method(method: str, alias: str, setting: str):
    assert answer(method, f"{alias}=16").splitlines()[-1] == f"to copy: {setting}=16"
    assert answer_to_option(alias, ["16"], method).split()[-1] == f"{setting}=16"


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_batch_that_two_libraries_count_otherwise_is_both_and_is_not_copied(method: str):
    for text in (answer(method, "train_batch_size=16"), answer_to_option("train_batch_size", ["16"], method)):
        assert settings_in(text) == [f"{method}.num_prompts", f"{method}.minibatch_size"]
        assert "=16" not in text.removeprefix("override 'train_batch_size=16'")


@pytest.mark.parametrize(("method", "alias"), [("sft", "beta"), ("reward", "init_kl_coef"), ("grpo", "simpo_gamma")])
def test_a_name_of_other_methods_is_answered_with_them(method: str, alias: str):
    others = {"beta": "grpo ppo distill dpo", "init_kl_coef": "grpo ppo", "simpo_gamma": "dpo"}[alias]
    for text in (answer(method, f"{alias}=1"), answer_to_option(alias, ["1"], method)):
        assert re.findall(r"`train (\w+)`", text) == [method, *others.split()]
        assert settings_in(text) == []


@pytest.mark.parametrize(
    ("method", "given", "line"),
    [
        # as it was typed, once; without a coefficient it is OpenRLHF's 0.01, or verl's 0.001
        ("ppo", ["use_kl_loss=true", "kl_estimator=k2"], "ppo.kl_coef=0.01 ppo.kl_estimator=k2"),
        ("ppo", ["kl_loss_type=k2", "use_kl_loss=true"], "ppo.kl_estimator=k2 ppo.kl_coef=0.001"),
        ("ppo", ["use_kl_loss=true"], "ppo.kl_estimator=k3 ppo.kl_coef=0.001"),
        ("sft", ["lora_rank=0", "lora_alpha=16"], "lora.enabled=false"),  # OpenRLHF's full training
        ("sft", ["lora_rank=8", "lora_alpha=16"], "lora.r=8 lora.alpha=16"),
        ("ppo", ["pretrain=x", "reward_pretrain=y"], "model.path=x reward.model=y"),
        ("ppo", ["rollout_batch_size=64", "max_epochs=2"], "ppo.num_prompts=64 ppo.num_epochs=2"),
        ("ppo", ["eps_clip=0.1"], "ppo.clip_eps=0.1"),
        # OpenRLHF's clip is one for both sides, and its KL is in the reward
        ("grpo", ["advantage_estimator=dr_grpo", "eps_clip=0.1"],
         "grpo.advantage_scale=none grpo.kl_coef=0.01 grpo.kl_estimator=k1 grpo.clip_eps=0.1 grpo.clip_eps_high=0.1"),
        ("dpo", ["max_epochs=1", "ipo=true"], "run.epochs=1"),  # per token or summed
    ],
)  # fmt: skip
def test_the_line_to_copy_has_each_setting_once(method: str, given: list[str], line: str):
    assert answer(method, *given).splitlines()[-1] == f"to copy: {line}"


def test_a_method_by_its_name_elsewhere_is_answered_with_what_trains():
    for name, words in METHODS_ELSEWHERE.items():
        with pytest.raises(ValueError, match=rf"tinyrl train {re.escape(words)}`"):
            find_recipe(name)
        method, *overrides = words.split()
        assert load_config(method, None, overrides=[*overrides, "task.data=x"]).method == method
    with pytest.raises(ValueError, match="packaged"):
        find_recipe("rmm")


def test_an_estimator_of_one_method_is_none_of_another():
    assert "to copy: grpo.advantage=leave-one-out" in answer("grpo", "adv_estimator=rloo")
    assert "to copy" not in answer("ppo", "adv_estimator=rloo")


@pytest.mark.parametrize(
    ("name", "method", "written"),
    [
        ("learning_rate", "grpo", "optim.learning_rate=4"),
        ("num_generations", "grpo", "grpo.group_size=4"),
        ("top_p", None, "generation.top_p=4"),  # as of `tinyrl eval`
        ("output_dir", "grpo", "--output-dir 4"),  # an option
        ("warmup_steps", "grpo", "optim.warmup_steps=4"),
    ],
)
def test_an_option_that_is_a_setting_is_written_as_one(name: str, method: str | None, written: str):
    assert answer_to_option(name, ["4"], method).endswith(f" {written}")


@pytest.mark.parametrize("name", ["top_p", "adam_epsilon"])
def test_an_option_that_training_cannot_set_is_answered_with_the_reason(name: str):
    assert answer_to_option(name, ["4"], "grpo").startswith(f"`{name}` is not a setting: ")


def test_an_option_that_nobody_knows_has_no_answer():
    assert answer_to_option("nmae", ["4"], "grpo") == ""


def test_a_share_of_a_run_of_unknown_length_has_no_number_of_steps():
    assert "=" not in answer_to_option("warmup_steps", ["0.1"], "grpo")
