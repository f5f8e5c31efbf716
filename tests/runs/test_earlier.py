"""Run folders of an earlier version are shown, reported, evaluated, exported and resumed.

Those in earlier/ were written, and stopped after step 2 of 3, by the version before settings began to be removed. No
path in them exists: models are embedded ones, and dpo's rows are found from the folder that the runs are in.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tinyrl.cli.commands import app
from tinyrl.config.methods import METHODS as ALL_METHODS
from tinyrl.config.methods import OPTIONAL_SECTIONS as OPTIONAL
from tinyrl.config.recipe import load_config, load_written_config
from tinyrl.config.removed import REMOVED, Removed
from tinyrl.config.yaml_reader import dump_plain
from tinyrl.runs.checkpoint import problem_with, seal
from tinyrl.runs.records import read_run

WRITTEN = Path(__file__).parent / "earlier"
METHODS = ("grpo", "ppo", "dpo")


@pytest.fixture(autouse=True)
def _earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is a copy of earlier/."""
    shutil.copytree(WRITTEN, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")


def tinyrl(*words: str) -> int | None:
    return app([*words], standalone_mode=False)


def lines(method: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(method, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_it_is_shown(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not tinyrl("show", method, "--json")
    [checkpoint] = json.loads(capsys.readouterr().out)
    assert (checkpoint["step"], checkpoint["problem"]) == (2, None)
    if method != "dpo":  # which samples nothing
        assert not tinyrl("show", method, "--samples")
        assert not tinyrl("show", method, "--prompts")
        assert "training prompts tried" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.wide
def test_it_is_reported(method: str) -> None:
    assert not tinyrl("report", method)
    assert Path(method, "report.html").read_text().count("<svg") > 1
    assert Path(method, "report.png").is_file()
    assert read_run(Path(method)).notes == ()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.wide
def test_it_is_evaluated_to_the_numbers_on_record(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not tinyrl("eval", method, "--num-prompts", "8", "--json", "--device", "cpu")
    found = json.loads(capsys.readouterr().out)
    found |= found.get("held_out", {})
    recorded = lines(method)[2]
    for key in ("reward_mean", "mean_length", "entropy") if method != "dpo" else ("loss", "margin"):
        assert found[key] == pytest.approx(recorded[f"eval/{key}"], rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.wide
def test_it_is_exported(method: str) -> None:
    assert not tinyrl("export", method)
    name = "adapter_model.safetensors"
    exported = Path(method, "export", "adapter", name).read_bytes()
    assert exported == Path(method, "checkpoints", "step-000002", name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.wide
def test_it_is_resumed(method: str) -> None:
    before = Path(method, "metrics.jsonl").read_bytes()
    assert not tinyrl("train", "--resume", method, "--device", "cpu")
    assert Path(method, "metrics.jsonl").read_bytes().startswith(before)
    assert [line["step"] for line in lines(method)] == [0, 1, 2, 3]
    assert lines(method)[3]["optim/grad_norm"] > 0
    assert problem_with(Path(method, "checkpoints", "step-000003")) is None


# ---- removed settings ----


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    """A setting of grpo that an earlier version had, neutral at 0."""
    monkeypatch.setitem(REMOVED, "grpo.of_old", Removed(0, "grpo.clip_eps does it now"))
    return "grpo.of_old"


def give(value: int) -> None:
    """Write grpo.of_old into the settings of the run and of its checkpoint."""
    file, checkpoint = Path("grpo/config.yaml"), Path("grpo/checkpoints/step-000002")
    file.write_text(file.read_text().replace("\ngrpo:\n", f"\ngrpo:\n  of_old: {value}\n"))
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"]["grpo"]["of_old"] = value
    (checkpoint / "state.json").write_text(json.dumps(state))
    seal(checkpoint, 2)


def assert_names(setting: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors or notes name the setting and something else."""
    told = capsys.readouterr().err
    assert setting in told
    assert other in told


ROUTES = {
    "resume": ("train", "--resume", "grpo", "--device", "cpu"),
    "fork": ("train", "--from", "grpo", "--name", "fork", "--device", "cpu"),
    "evaluation": ("eval", "grpo", "--num-prompts", "4", "--device", "cpu"),
    "export": ("export", "grpo"),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.wide
def test_a_removed_setting_is_ignored_at_its_neutral_value(route: str, gone: str) -> None:
    give(0)
    assert not tinyrl(*ROUTES[route])


@pytest.mark.parametrize("route", ROUTES)
def test_a_removed_setting_is_refused_at_another_value(
    route: str, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    give(1)
    assert tinyrl(*ROUTES[route]) == 2
    assert_names(gone, "grpo.clip_eps", capsys)


@pytest.mark.slow  # Fast: test_it_is_resumed, and forks of today's runs in training/test_resuming.py.
def test_a_fork_of_it_is_read_and_forked_again(tmp_path: Path) -> None:
    """It has no record of what was given; what equals its preset follows from the preset."""
    assert not tinyrl(*ROUTES["fork"])
    assert not tinyrl("train", "--resume", "fork")  # which is finished
    assert load_written_config(Path("fork/config.yaml")) == load_written_config(Path("grpo/config.yaml"))
    assert not tinyrl("train", "--from", "fork", "--name", "again", "grpo.preset=gspo", "run.num_steps=4")
    assert load_written_config(Path("again/config.yaml")).grpo.surrogate == "sequence"


@pytest.mark.parametrize("value", [0, 1])
def test_nobody_gives_a_removed_setting(value: int, gone: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, for a new run and for an old one, and in a recipe: even at its neutral value."""
    recipe = Path("recipe.yaml")
    recipe.write_text(f"grpo: {{of_old: {value}}}\n")
    for words in (["grpo", f"{gone}={value}"], ["grpo", str(recipe)], ["--resume", "grpo", f"{gone}={value}"]):
        assert tinyrl("train", *words) == 2
        assert_names(gone, "grpo.clip_eps", capsys)


def test_a_removed_setting_that_is_taken_out_by_hand_is_a_change(gone: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint was written under it."""
    before = Path("grpo/config.yaml").read_text()
    give(1)
    Path("grpo/config.yaml").write_text(before)
    assert tinyrl(*ROUTES["resume"]) == 2
    assert_names(gone, "--allow-config-change", capsys)
    assert not tinyrl(*ROUTES["resume"], "--allow-config-change")
    assert [line["step"] for line in lines("grpo")] == [0, 1, 2, 3]
    assert_names(gone, "step-000002", capsys)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.wide
def test_a_removed_fact_is_ignored_at_every_value(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "grpo.of_old", Removed(0, "it is in env.json", is_fact=True))
    give(1)
    assert not tinyrl(*ROUTES[route])


def test_where_an_earlier_fork_came_from_is_ignored() -> None:
    file = Path("grpo/config.yaml")
    text = file.read_text()
    assert "\n  forked_from: null\n" in text
    before = load_written_config(file)
    file.write_text(text.replace("forked_from: null", "forked_from: runs/first@25"))
    assert load_written_config(file) == before


@pytest.mark.parametrize("setting", [setting for setting, removed in REMOVED.items() if not removed.is_fact])
def test_each_removed_setting_is_read_at_its_neutral_value_and_named_at_another(setting: str) -> None:
    section, _, name = setting.partition(".")
    method = next(name for name, its in ALL_METHODS.items() if section in its.sections or section not in OPTIONAL)
    config = load_config(method, None, overrides=["task.data=rows.jsonl"])
    values, file = config.written(), Path("config.yaml")
    values[section][name] = REMOVED[setting].neutral
    file.write_text(dump_plain(values))
    assert load_written_config(file) == config
    values[section][name] = ["something", "else"]
    file.write_text(dump_plain(values))
    with pytest.raises(ValueError, match=setting):
        load_written_config(file)
