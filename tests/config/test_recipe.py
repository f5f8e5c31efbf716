"""Recipes and overrides: broken files, overrides laid over them, and config.yaml read back."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tinyrl.config.aliases import ALIASES
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import (
    MAX_RECIPE_BYTES,
    apply_overrides,
    build_config,
    dump_config,
    find_recipe,
    load_config,
    load_written_config,
    method_of,
    packaged_recipes,
    split_settings,
)
from tinyrl.config.schema import Config
from tinyrl.config.settings import fields_of
from tinyrl.config.yaml_reader import Source

SORT = "method: grpo\ntask: {name: sort}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], str]:
    """Writes r.yaml into the current folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> str:
        Path("r.yaml").write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return "r.yaml"

    return write


def refused(method: str, name: str | None, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_config(method, name, overrides=list(overrides))
    assert type(caught.value) is ValueError
    sentence = str(caught.value)
    assert len(sentence.splitlines()) <= 6
    return sentence


# Files


@pytest.mark.parametrize(
    ("content", "place", "parts"),
    [
        ("# only a comment\n", "recipe r.yaml", "empty"),
        (b"\xef\xbb\xbf", "recipe r.yaml", "empty"),
        ("- a\n", "r.yaml:1: ", "a mapping of sections"),
        (b"method: grpo\nmodel: {path: caf\xe9}\n", "r.yaml:2: ", "UTF-8"),
        ("method: grpo".encode("utf-16"), "r.yaml:1: ", "UTF-8"),
        ("method: grpo\ngrpo: {group_size: [4\n", "r.yaml:3: ", "broken YAML"),
        (SORT + "grpo:\n  kl_coef: 0\n  kl_coef: 1\n", "r.yaml:5: ", "`grpo.kl_coef`.*r.yaml:4"),
        (SORT + "grpo:\n  group_sise: 4\n", "r.yaml:4: ", "`grpo.group_size`"),
        (SORT + "reward:\n  functions:\n    - use: a.py:f\n      wait: 1\n", "r.yaml:6: ", "`reward.functions"),
        (SORT + "run: {num_steps: many}\n", "r.yaml:3: ", "`run.num_steps` is 'many'"),
        (SORT + "grpo: {minibatch_size: 7}\n", "r.yaml:3: ", "grpo.minibatch_size=7"),
        ("method: gpro\n", "r.yaml:1: ", "`grpo`"),
        ("method: [grpo]\n", "r.yaml:1: ", "`method` is"),
        ("method: ppo\n", "r.yaml:1: ", "train ppo`, not grpo"),
        ("method: reward\nreward: {timeout_s: 3.0}\n", "r.yaml:1: ", "train reward`, not grpo"),
        (b"a" * (MAX_RECIPE_BYTES + 1), "recipe r.yaml", "100,000 bytes"),
    ],
)
def test_a_bad_recipe_is_answered_with_its_line(
    recipe: Callable[..., str], content: str | bytes, place: str, parts: str
):
    found = refused("grpo", recipe(content))
    assert found.startswith(place)
    assert re.search(parts, found)


def test_a_recipe_as_other_editors_write_it(recipe: Callable[..., str]):
    for content in (b"\xef\xbb\xbf" + SORT.encode(), SORT.replace("\n", "\r\n"), "task: {name: sort}\n"):
        assert load_config("grpo", recipe(content), overrides=[]).task.name == "sort"


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert "`starter-grpo`" in refused("grpo", "starter-gpro")
    for name in ("./nothing.yaml", "folder", "x" * 5000, "a\0b"):
        assert refused("grpo", name).startswith("recipe '")


def test_a_recipe_for_two_methods(recipe: Callable[..., str]):
    name = recipe(SORT + "grpo: {num_prompts: 4}\nppo: {num_prompts: 64}\n")
    grpo, ppo = (load_config(method, name, overrides=[]) for method in ("grpo", "ppo"))
    assert "ppo" not in grpo.written()
    assert "grpo" not in ppo.written()
    assert (grpo.grpo.num_prompts, ppo.ppo.num_prompts) == (4, 64)
    assert "ppo" not in dump_config(grpo)


def test_packaged_recipes_are_found_by_name_and_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    packaged = packaged_recipes()["starter-grpo"]
    for name in ("starter-grpo", "starter-grpo.yaml", "recipes/starter-grpo.yaml"):
        assert find_recipe(name) == packaged
    Path("starter-grpo").write_text(SORT)
    assert find_recipe("starter-grpo") == Path("starter-grpo")
    with pytest.raises(ValueError, match="neither a file"):
        find_recipe("other/starter-grpo.yaml")


# Overrides


def overridden(values: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return apply_overrides(Source("r.yaml", values), list(overrides)).values


def test_overrides_are_laid_over_and_read_as_yaml():
    before = {"grpo": {"kl_coef": 0.1, "group_size": 4}, "run": None}
    after = overridden(
        before, "grpo.kl_coef=1", "grpo.kl_coef=5e-5", "run.seed=3", "model.adapter=", "lora={r: 4}", "a.b=x=y"
    )
    assert after == {
        "grpo": {"kl_coef": 5e-5, "group_size": 4},
        "run": {"seed": 3},
        "model": {"adapter": None},
        "lora": {"r": 4},
        "a": {"b": "x=y"},
    }
    assert before == {"grpo": {"kl_coef": 0.1, "group_size": 4}, "run": None}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("grpo.kl_coef", "section.key=value"),
        ("=3", "section.key=value"),
        ("grpo..x=3", "section.key=value"),
        ("grpo.x=[1", "broken YAML"),
        ("grpo.x=&a [*a]", "no aliases"),
        ("list.0.x=1", "(r.yaml), so give all of it: list="),
        ("text.x=1", "(r.yaml), so give all of it: text="),
    ],
)
def test_broken_overrides(override: str, part: str):
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        overridden({"list": [1], "text": "abc"}, override)
    assert str(caught.value).startswith(f"override '{override}'")


def test_a_mistake_in_an_override_is_placed_there(recipe: Callable[..., str]):
    name = recipe(SORT + "grpo:\n  clip_eps: 0.2\n  kl_coef: 0\n")
    for override, part in {
        "grpo.clip_eps=2": "`grpo.clip_eps` is 2",
        "grpo={clip_eps: 2}": "`grpo.clip_eps` is 2",
        "grpo.clip_eps.x=2": "`grpo.clip_eps` is 0.2 (r.yaml:4)",
        "ppo.kl_coef=1": "`ppo` is for ppo, not for grpo",
        "reward_model.batch_size=3": "`reward_model` is for reward, not for grpo",
        "method=ppo": "tinyrl train grpo",
    }.items():
        found = refused("grpo", name, override)
        assert found.startswith(f"override '{override}'")
        assert part in found
    assert refused("grpo", name, "grpo.minibatch_size=7").startswith("grpo.minibatch_size=7 does not divide")
    assert refused("ppo", name, "ppo.num_epochs=1").startswith("r.yaml:1: ")


def test_without_a_recipe_the_embedded_default_runs_unless_a_model_or_data_is_named():
    embedded = load_config("grpo", None, overrides=[])
    assert embedded == load_config("grpo", "starter-grpo", overrides=[])
    plain = Config.model_validate({"method": "grpo", "task": {"name": "gsm8k"}})
    for overrides in (["task.name=gsm8k"], ["task={name: gsm8k}"]):
        assert load_config("grpo", None, overrides=overrides) == plain
    assert load_config("grpo", None, overrides=["run.num_steps=7"]).run.num_steps == 7
    assert embedded != plain


# What follows the method on the command line


def test_recipe_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1.yaml").write_text(SORT)
    assert split_settings([]) == (None, [])
    assert split_settings(["a.b=c"]) == (None, ["a.b=c"])
    assert split_settings(["r.yaml", "a.b=c", "d=e"]) == ("r.yaml", ["a.b=c", "d=e"])
    assert split_settings(["lr=1.yaml", "a.b=c"]) == ("lr=1.yaml", ["a.b=c"])
    assert split_settings(["r.yaml", "typo"]) == ("r.yaml", ["typo"])  # said when it is read as an override
    with pytest.raises(ValueError, match=r"'r\.yaml': the recipe comes before overrides: tinyrl train METHOD r\.yaml"):
        split_settings(["a.b=c", "r.yaml"])
    with pytest.raises(ValueError, match="'starter-ppo': one recipe is enough, and 'starter-grpo' is one"):
        split_settings(["starter-grpo", "a.b=c", "starter-ppo"])


# config.yaml gives the same object


def round_trip(config: Config, folder: Path) -> Config:
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return load_written_config(folder / "config.yaml")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lora", [True, False])
def test_config_yaml_is_the_same_object(method: str, lora: bool, tmp_path: Path):
    asked = {"ppo": {"minibatch_size": None}}  # defaults to 64: a null that was left out would come back as 64
    config = Config.model_validate({"method": method, "lora": {"enabled": lora}, "task": {"data": "x.jsonl"}, **asked})
    assert round_trip(config, tmp_path) == config


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)


@given(
    prompt=TEXT,
    stop=st.lists(TEXT, max_size=3),
    columns=st.dictionaries(TEXT, TEXT, max_size=3),
    label=st.none() | TEXT | st.integers(-(10**17), 10**17),
    rate=st.floats(min_value=0, max_value=1, exclude_min=True),
    seed=st.integers(0, 10**18 - 1),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_config_yaml_holds_any_text_and_number(tmp_path: Path, prompt, stop, columns, label, rate, seed):
    config = Config.model_validate(
        {
            "method": "ppo",
            "task": {"system_prompt": prompt, "columns": columns},
            "generation": {"stop": stop},
            "reward": {"model_label": label},
            "optim": {"learning_rate": rate},
            "run": {"seed": seed},
        }
    )
    assert round_trip(config, tmp_path) == config


# Nothing but a Config or a ValueError

SECTION_KEYS = [(name, key) for name in fields_of() for key in fields_of(name)]
KEYS = st.sampled_from([*fields_of(), *(key for _, key in SECTION_KEYS), *ALIASES]) | st.text(max_size=6)
ODD_KEYS = KEYS | st.none() | st.integers() | st.booleans() | st.tuples(st.integers())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 2, float("nan"), float("inf"), b"\xff", "auto", "all-linear", "dapo", "grpo"])
    | st.floats()
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_KEYS, inner, max_size=3),
    max_leaves=10,
)


@st.composite
def nested(draw: st.DrawFn) -> dict[Any, Any]:
    """Mostly real sections with real keys, so that errors lie deep."""
    values: dict[Any, Any] = draw(st.dictionaries(ODD_KEYS, VALUES, max_size=2))
    for section, key in draw(st.lists(st.sampled_from(SECTION_KEYS), max_size=4)):
        inside = values.setdefault(section, {})
        if isinstance(inside, dict):
            inside[key] = draw(VALUES)
    values["method"] = draw(st.sampled_from([*METHODS]) | SCALARS)
    return values


def check_answer(load: Callable[[], Config], method: Any) -> None:
    """The result is a Config, or a plain ValueError of at most six lines, and nothing else."""
    problem, config = None, None
    try:
        config = load()
    except ValueError as error:
        problem = error
    if config is not None:
        assert config.method == method
    else:
        assert type(problem) is ValueError
        assert 1 <= len(str(problem).splitlines()) <= 6


@given(nested())
@settings(max_examples=200, deadline=None)
@example({1: 2})
@example({"method": "grpo", "grpo": {None: 1}, "task": {"columns": {1: [2]}}})
def test_any_values_give_a_config_or_a_sentence(values: dict[Any, Any]):
    check_answer(lambda: build_config(Source("fuzz", values)), values.get("method"))


LINES = ["method: grpo", "task: {name: sort}", "grpo:", "  kl_coef: 0.1", "  kl_coef: 2024-01-01", "run: &a {seed: 1}"]
LINES += ["lora: *a", "1: 2", "null:", "? [a]", "- x", "\tb: 1", "model: !!python/name:os.system", "a: &b [*b]", "'"]
LINES += ["seed: 1e999", f"x: {'9' * 4400}", "<<: {a: 1}", "run: {seed: 0x_}", '"\\ud800": 1', "\u2028: \x85", "---"]
DOCUMENTS = st.lists(st.sampled_from(LINES) | st.text(max_size=30), max_size=6).map("\n".join)


@given(DOCUMENTS | st.text(max_size=60), st.sampled_from([*METHODS]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_a_config_or_a_sentence(tmp_path: Path, text: str, method: str):
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check_answer(lambda: load_config(method, str(path), overrides=[]), method)


def test_a_recipe_says_its_method_where_none_is_said(recipe: Callable[[str | bytes], str]):
    name = recipe(SORT)
    assert method_of([name, "run.seed=7"]) == ("grpo", [name, "run.seed=7"])
    assert method_of(["ppo", name, "run.seed=7"]) == ("ppo", [name, "run.seed=7"])
    assert method_of(["starter-ppo"]) == ("ppo", ["starter-ppo"])
    assert method_of(["run.seed=7"]) == (None, ["run.seed=7"])
    with pytest.raises(ValueError, match=r"r\.yaml says no method; say it first, as in `tinyrl check grpo r.yaml`"):
        method_of([recipe("task: {name: sort}\n")])
