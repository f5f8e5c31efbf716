"""Values at and beyond the boundaries of every setting: each gives a configuration or a short sentence."""

from pathlib import Path
from typing import Any

import pytest

from tinyrl.cli.train import typed_config
from tinyrl.config.method_sections import GrpoConfig, PpoConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.recipe import load_config
from tinyrl.config.settings import SECTIONS, allowed, fields_of
from tinyrl.rollout.preflight import check_named
from tinyrl.runs.resolve import config_of
from tinyrl.tasks import task_of

VALUES = (
    "0", "1", "-1", "1e-300", "1e300", "9" * 30, "9" * 400, ".nan", ".inf", "-.inf", "", "null", "''", "[]", "{}",
    "three", "true", "[1]", "{a: 1}", "[[]]", "x" * 5000, "a\ud83d", '"\\ud83d"', "\0", "../x", "a.py:f", "http://[",
    "[",
)  # fmt: skip
FIELDS_OF_ITEMS = ("use", "weight", "scale", "max_tokens", "max_concurrency", "cache", "max_requests")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n' * 20)
    Path("rubric.txt").write_text("Rate {completion}")


def words(method: str, override: str) -> list[str]:
    has_recipe = METHODS[method].recipe is not None
    return [method, *([] if has_recipe else ["task.data=rows.jsonl"]), override]


def loads_or_is_refused(given: list[str]) -> bool:
    """Load the settings as `tinyrl train` does, before it imports torch; True if they are a configuration."""
    try:
        typed_config(given)
    except ValueError as error:
        assert type(error) is ValueError  # noqa: PT017
        sentence = str(error)
        assert 1 <= len(sentence.splitlines()) <= 6
        assert len(sentence) < 1000
        return False
    return True


@pytest.mark.wide
@pytest.mark.parametrize("method", METHODS)
def test_every_setting_at_its_boundaries(method: str):
    own = METHODS[method].sections
    if method == "grpo":
        sections = [name for name in SECTIONS if name in own or name not in OPTIONAL_SECTIONS]
    else:
        sections = [name for name in own if name not in METHODS["grpo"].sections]
    loaded = 0
    tried = 0
    for section in sections:
        for name in fields_of(section):
            for value in VALUES:
                tried += 1
                loaded += loads_or_is_refused(words(method, f"{section}.{name}={value}"))
    assert 0 < loaded < tried / 2


@pytest.mark.parametrize("name", FIELDS_OF_ITEMS)
def test_every_setting_of_a_reward_at_its_boundaries(name: str):
    judge = {"use": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "rubric.txt"}
    others = ", ".join(f"{key}: '{value}'" for key, value in judge.items() if key != name)
    for value in VALUES:
        loads_or_is_refused(words("grpo", f"reward.functions=[{{{others}, {name}: {value}}}]"))


def test_no_count_is_beyond_what_is_ever_counted():
    """Bytes and seconds are estimated from counts in float64: 10^400 of them are no number there."""
    settings: Any = config_of({"method": "grpo"})
    counts = [(section, name) for section in fields_of() for name, kind in fields_of(section).items()
              if "whole number" in allowed(kind)]  # fmt: skip
    assert len(counts) > 25
    for section, name in counts:
        if (section, name) != ("reward", "model_label"):  # an index, which the model's labels bound
            with pytest.raises(ValueError, match=name):
                getattr(settings, section).model_validate({name: 10**18})


@pytest.mark.parametrize(
    ("section", "name"),
    [(GrpoConfig, "num_epochs"), (PpoConfig, "num_epochs"), (GrpoConfig, "dynamic_sampling_rounds")],
)
def test_a_step_ends(section: Any, name: str):
    assert getattr(section.model_validate({name: 1000}), name) == 1000
    with pytest.raises(ValueError, match=name):
        section.model_validate({name: 1001})


def test_a_minibatch_that_the_command_line_made_wrong_is_placed_there():
    for override in ("grpo.num_prompts=10", "grpo.group_size=5"):  # of a recipe with 32 x 8 and minibatches of 64
        with pytest.raises(ValueError, match=rf"^override '{override}'"):
            load_config("grpo", "starter-grpo", overrides=[override])


@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_rows_that_are_none_are_refused_by_their_setting(name: str):
    config = config_of({"method": "grpo", "task": {"data": "rows.jsonl", name: "rows"}})
    with pytest.raises(ValueError, match=rf"^task\.{name}: "):
        check_named(config, task_of(config))
