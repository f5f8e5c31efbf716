"""A refusal and the places of its settings: override, line of a recipe, argument, or nowhere."""

import copy
from pathlib import Path

import pytest

import tinyrl
from tinyrl.config.recipe import load_config
from tinyrl.config.refusal import Places, Refusal, Source, refusals_at

LINES = {"grpo": 3, "grpo.group_size": 4, "reward": 6, "reward.functions": 7, "reward.functions[0]": 8}
PLACES = Places(Source("r.yaml", LINES), ("run.seed=1", "grpo={kl_coef: 0}", "run.seed=2"))


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (["run.seed"], "override 'run.seed=2'"),  # the last one
        (["reward.functions", "run.seed"], "override 'run.seed=2'"),  # before any line
        (["grpo.kl_coef"], "override 'grpo={kl_coef: 0}'"),
        (["reward.functions[0].use"], "r.yaml:8"),
        (["reward.timeout_s"], "r.yaml:6"),  # nobody gave it: its section
        (["reward.timeout_s", "reward.functions"], "r.yaml:7"),  # one that somebody gave
        (["lora.r"], "r.yaml"),
        ([], "r.yaml"),
    ],
)
def test_the_place_of_settings(settings: list[str], place: str) -> None:
    assert PLACES.of(settings) == place


def test_a_sentence_begins_with_its_place_and_ends_with_those_of_the_other_settings() -> None:
    refusal = Refusal(("reward.functions", "run.seed", "lora.r"), "no")
    assert PLACES.sentence(refusal) == "override 'run.seed=2': no. Also given: reward.functions (r.yaml:7)"


def test_a_password_in_an_override_is_not_shown() -> None:
    places = Places(overrides=("teacher.path=http://me:pw@127.0.0.1:1",))
    assert "pw" not in places.of(["teacher.path"])


def test_a_default_has_no_place() -> None:
    assert Places().sentence(Refusal(("lora.r",), "no")) == "no"


def test_a_place_is_named_once() -> None:
    with pytest.raises(ValueError, match=r"^r\.yaml:7: no$"), refusals_at(Places()), refusals_at(PLACES):
        raise Refusal(("reward.functions",), "no")


def test_a_refusal_can_be_copied_as_other_exceptions_can() -> None:
    read = copy.copy(Refusal(("lora.r",), "no"))
    assert (read.settings, read.sentence, str(read)) == (("lora.r",), "no", "no")


def test_a_value_of_the_default_recipe_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match="does not divide") as caught:
        load_config("grpo", None, overrides=["grpo.num_prompts=12"])
    sentence = str(caught.value)
    assert sentence.startswith("override 'grpo.num_prompts=12': ")
    assert "grpo.minibatch_size, grpo.group_size (default recipe starter-grpo.yaml:" in sentence


def test_fewer_prompts_than_a_minibatch_of_the_default_recipe_need_no_second_setting() -> None:
    config = load_config("grpo", None, overrides=["grpo.num_prompts=4", "grpo.group_size=4"])
    assert (config.grpo.minibatch_size, config.grpo.update_size) == (64, 16)


def test_a_value_that_looks_like_a_setting_is_not_taken_for_one(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("method: grpo\nlora: {enabled: false}\nmodel: {adapter: run.seed}\n")
    with pytest.raises(ValueError, match=f"^{recipe}:3: model.adapter=run.seed needs"):
        load_config("grpo", str(recipe), overrides=["run.seed=1"])


def test_an_argument_of_python_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^argument rows: "):
        tinyrl.train("grpo", rows="nowhere.jsonl", output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^argument reward: "):
        tinyrl.train("grpo", settings={"task.name": "sort"}, reward="gone.py:f", output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^override 'task\.data=nowhere\.jsonl': "):
        tinyrl.train("grpo", settings={"task.data": "nowhere.jsonl"}, output_dir=tmp_path)
