"""Resuming under other files, other settings, without checkpoints: refused or said, and nothing of the run is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tests import running
from tests.tiny_models import tiny_model
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted
from tinyrl.rollout import load
from tinyrl.rollout.load import load_collector
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.launched import Options
from tinyrl.runs.records import read_run
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.export import export
from tinyrl.training import run as training_run
from tinyrl.training import state as sources
from tinyrl.training.launch import started_with
from tinyrl.training.state import STATE, read_state
from tinyrl.training.step import Updater

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def reads_files(model: Path, folder: Path) -> Config:
    """A run that reads rows, held-out rows, weights and a reward of its own folder."""
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    for name, words in (("rows", "abcdefgh"), ("eval", "uvwxyz")):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}:"}) + "\n" for w in words))
    (folder / "rewards.py").write_text(
        "from helper import scale\n\n\n"
        "def variety(completions, **_):\n    return [scale * len(set(c)) for c in completions]\n"
    )
    (folder / "helper.py").write_text("import words.known\n\nscale = 1.0 if words.known.WORDS else 0.0\n")
    (folder / "words").mkdir(exist_ok=True)
    (folder / "words" / "known.py").write_text("WORDS = 'abc'\n")
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    rewards = {"functions": [{"use": f"{folder / 'rewards.py'}:variety"}]}
    run = {"num_steps": STEPS, "save_every": 1, "eval_prompts": 4}
    return running.config("grpo", folder / "model", task=task, reward=rewards, run=run)


def stopped_in_update(settings: Config, folder: Path, *, after: int = 1, name: str = "run") -> RunDir:
    """A run that was stopped inside the update after the first `after` optimizer steps."""
    plain, calls = Updater.step, []

    def stop(updater: Updater, passes: Any, *, train: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) > after:
            raise Interrupted("SIGTERM")
        return plain(updater, passes, train=train)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "step", stop)
        code, run, _ = running.train(settings, folder, name=name)
    assert code == 75
    assert read_state(checkpoints.list_checkpoints(run.checkpoints)[-1]).run.phase == "rollout"
    return run


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(p.relative_to(run.path)): p.read_bytes() for p in run.path.rglob("[!.]*") if p.is_file()}


def other_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})


def edited(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "held-out rows": (lambda f: edited(f / "eval.jsonl", "say z", "say a"), "held-out rows: the data has changed"),
    "base weights": (other_weights, "model.path: model.safetensors has changed"),
    "what that imports": (lambda f: edited(f / "words" / "known.py", "abc", "xyz"), "/words/known.py has changed"),
}


@pytest.mark.parametrize("what", SOURCES)
def test_another_source_is_refused_unless_it_is_allowed(
    what: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, line = SOURCES[what]
    run = stopped_in_update(reads_files(model, tmp_path), tmp_path)
    before = contents(run)
    change(tmp_path)
    with pytest.raises(ValueError, match=r"what the run reads has changed since step-000001, .*\n  ") as caught:
        running.go_on(run)
    assert line in str(caught.value)
    assert contents(run) == before
    assert running.go_on(run, allow_config_change=True) == 0
    said = capsys.readouterr().err
    assert f"changed since step-000001: {str(caught.value).splitlines()[1].strip()}" in said
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]
    assert running.go_on(run) == 0  # what it reads now is what the newest checkpoint was made with


def random_bytes(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(file.stat().st_size))


LOSSES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no metrics": ("metrics.jsonl", Path.unlink),
    "samples of random bytes": ("samples.jsonl", random_bytes),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_record_that_was_lost_is_said_and_the_run_goes_on(
    what: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped_in_update(reads_files(model, tmp_path), tmp_path)
    name, lose = LOSSES[what]
    other = {"metrics.jsonl": "samples.jsonl", "samples.jsonl": "metrics.jsonl"}[name]
    kept = (run.path / other).read_bytes()
    lose(run.path / name)
    capsys.readouterr()
    assert running.go_on(run) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if ".jsonl: " in line]
    assert warnings
    assert all(line.startswith(f"warning: {name}: ") for line in warnings)
    assert (run.path / other).read_bytes().startswith(kept)
    assert {2, 3} <= read_run(run.path).steps.keys()


def test_weights_are_hashed_again_only_when_their_file_was_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def digest(path: Path, size: int) -> None:
        hashed.append(path.name)

    monkeypatch.setattr(sources, "_known_digest", digest)
    settings = reads_files(model, tmp_path)
    first = sources.read_sources(settings, rows={}, known={})
    assert {"model.safetensors", "config.json", "tokenizer.json", "rewards.py"} <= set(hashed)
    hashed.clear()
    assert sources.read_sources(settings, rows={}, known=first.files) == first
    assert hashed == []
    os.utime(tmp_path / "rewards.py", (1, 1))
    assert sources.changed_sources(first, sources.read_sources(settings, rows={}, known=first.files)) == []
    assert hashed == ["rewards.py"]


# Without checkpoints


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_is_refused_and_its_record_stays(model: Path, tmp_path: Path) -> None:
    settings = reads_files(model, tmp_path)
    code, whole, _ = running.train(settings, tmp_path, name="whole")
    assert code == 0
    run = stopped_in_update(settings, tmp_path)
    run.checkpoints.rename(tmp_path / "elsewhere")
    before = contents(run)
    for what in ("does not exist", "is empty"):
        with pytest.raises(ValueError, match=rf"step 1 and has no checkpoint to go on from: .*checkpoints {what}"):
            running.go_on(run)
        run.checkpoints.mkdir(exist_ok=True)
    assert contents(run) == before
    run.checkpoints.rmdir()
    (tmp_path / "elsewhere").rename(run.checkpoints)
    assert running.go_on(run) == 0
    assert_same(whole, run, STEPS)


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(model: Path, tmp_path: Path) -> None:
    settings = reads_files(model, tmp_path)
    code, run, _ = running.train(settings, tmp_path)
    whole = RunDir(shutil.copytree(run.path, tmp_path / "whole"))
    shutil.rmtree(run.checkpoints)
    run.metrics.write_text(run.metrics.read_text().splitlines()[0] + "\n")
    assert (code, running.go_on(run)) == (0, 0)
    assert_same(whole, run, STEPS)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_whose_last_save_failed_says_how_to_get_the_last_step(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoints.write_checkpoint

    def full_at_the_end(root: Path, step: int, **named: Any) -> Path:
        return plain(root, step, **named) if step < STEPS else full()  # pyright: ignore[reportReturnType]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_checkpoint", full_at_the_end)
        code, run, _ = running.train(reads_files(model, tmp_path), tmp_path)
    said = capsys.readouterr()
    assert code == 4
    assert "Older checkpoints are intact" in said.err
    assert f"go on from the checkpoint before:\n  tinyrl train --resume {run.path}" in said.out
    assert running.go_on(run) == 0


# Under other settings


def test_settings_changed_inside_an_update(model: Path, tmp_path: Path) -> None:
    """The step that was stopped is begun again under the new settings, and counted once."""
    overrides = ["grpo.kl_coef=0.1", "grpo.num_epochs=2"]
    settings = running.config("grpo", model, run={"save_every": 1, "num_steps": STEPS})
    run = stopped_in_update(settings, tmp_path)
    assert running.go_on(run, config=run.read_config(overrides), allow_config_change=True) == 0
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]
    assert run.read_config() == run.read_config(overrides)
    assert ["objective/kl" in line for line in running.metrics(run)] == [False, False, True, True]


@pytest.mark.slow
def test_a_resume_under_new_settings_that_fails_leaves_the_run_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in its first step, or killed there: config.yaml changes with the first checkpoint."""
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1})
    code, whole, _ = running.train(settings, tmp_path, name="whole")
    assert code == 0
    run = stopped_in_update(settings, tmp_path)
    written = (run.path / "config.yaml").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("anything")

    for where, owner in (("restore_rng", "tinyrl.training.run"), ("sample_groups", "tinyrl.training.grpo.Grpo")):
        before = contents(run)
        with monkeypatch.context() as patch:
            patch.setattr(f"{owner}.{where}", fail)
            with pytest.raises(RuntimeError):
                running.go_on(run, config=run.read_config(["grpo.kl_coef=0.1"]), allow_config_change=True)
        assert contents(run) == before
    assert (run.path / "config.yaml").read_bytes() == written
    assert running.go_on(run) == 0
    assert_same(whole, run, STEPS)


def test_fewer_steps_need_leave(model: Path, tmp_path: Path) -> None:
    _, run, _ = running.train(running.config("grpo", model, run={"num_steps": 2}), tmp_path)
    with pytest.raises(ValueError, match=r"run\.num_steps: 2 then, 1 now"):
        running.go_on(run, config=run.read_config(["run.num_steps=1"]))


# An edited checkpoint


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a step that is not the folder's": lambda s: s["run"].update(step=2),
    "functions of other kinds": lambda s: s["config"].update(reward={"functions": [1, {"use": 2}]}),
    "records of half a line": lambda s: s["records"].update({"metrics.jsonl": s["records"]["metrics.jsonl"] - 3}),
}


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1})
    return stopped_in_update(settings, tmp_path_factory.mktemp("stopped"))


@pytest.mark.parametrize("name", EDITS)
def test_a_state_that_was_edited_and_sealed_again_is_a_sentence(name: str, stopped: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(stopped.path, tmp_path / "run"))
    newest = checkpoints.list_checkpoints(run.checkpoints)[-1]
    state = json.loads((newest / STATE).read_text())
    EDITS[name](state)
    (newest / STATE).write_text(json.dumps(state))
    (newest / checkpoints.MANIFEST).unlink()
    checkpoints.seal(newest, 1)
    assert checkpoints.problem_with(newest) is None
    if name == "records of half a line":
        assert running.go_on(run) == 0
        assert all(line["step"] >= 0 for line in running.metrics(run))
    else:
        problem = "settings have changed" if name == "functions of other kinds" else "not what this tinyrl writes"
        with pytest.raises(ValueError, match=problem):
            running.go_on(run)


@pytest.mark.parametrize("where", ["report", "summary"])
def test_nothing_after_the_last_step_changes_the_exit_code(
    where: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(running if where == "report" else training_run, where, fail)
    code, run, _ = running.train(running.config("grpo", model, run={"num_steps": 1}), tmp_path)
    assert code == 0
    assert (run.checkpoints / "step-000001").is_dir()


DATED = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{{ strftime_now('%d %b %Y') }}:"


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that shows today's date shows the first day's when a run is resumed, evaluated and talked to."""
    model = tiny_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(model)

    def on(year: int, month: int, day: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(year, month, day, 12, tzinfo=tz)

            @classmethod
            def today(cls) -> Any:
                return date(year, month, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        monkeypatch.setattr(load, "date", Clock, raising=False)

    def last_words(config: Config) -> set[str]:
        return {prompt.text[-12:] for prompt in load_collector(config, options=Options(device="cpu")).eval_prompts}

    on(2026, 1, 31)
    settings = running.config("grpo", model, run={"num_steps": 2, "save_every": 1, "eval_prompts": 2})
    run = stopped_in_update(settings, tmp_path)
    on(2026, 2, 1)
    assert last_words(settings) == {"01 Feb 2026:"}
    assert running.go_on(run) == 0
    assert {json.loads(line)["prompt"][-12:] for line in run.samples.read_text().splitlines()} == {"31 Jan 2026:"}
    assert last_words(run.read_config()) == {"31 Jan 2026:"}
    assert any("2026-01-31" in note for note in export(str(run.path)).notes)


def test_a_resume_uses_the_options_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert started_with(run, Options()) == (Options(), [])  # nothing is known
    run.write_environment({"options": {"device": "cpu", "trust_remote_code": False}})
    assert started_with(run, Options()) == (Options(device="cpu"), [])
    for given in (Options(device="cuda"), Options(trust_remote_code=True)):  # others are used, and said
        used, [_] = started_with(run, given)
        assert used == Options(given.device.replace("auto", "cpu"), given.trust_remote_code)
    run.write_environment({"options": {"device": "cuda", "trust_remote_code": True}})
    assert started_with(run, Options(trust_remote_code=True)) == (Options("cuda", trust_remote_code=True), [])
    with pytest.raises(ValueError, match="--trust-remote-code"):
        started_with(run, Options())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    used, [_] = started_with(run, Options(trust_remote_code=True))
    assert used.device == "cpu"
