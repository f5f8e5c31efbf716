"""Resuming under other files, other settings, without checkpoints; state.json; forks. Nothing of a run is lost."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

from tests import running
from tests.training.rows import chat_model, trained, write_rows
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted
from tinyrl.models.device import python_rng
from tinyrl.rollout import load
from tinyrl.rollout.load import load_collector
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.export import export
from tinyrl.training import run as training_run
from tinyrl.training import state as sources
from tinyrl.training.launch import fork, started_with
from tinyrl.training.state import STATE, Best, CheckpointState, Controllers, InputHashes, RunState, read_state
from tinyrl.training.step import Updater

STEPS = 3


def reads_files(model: Path, folder: Path) -> Config:
    """A run that reads rows, held-out rows, weights and a reward of its own folder."""
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    for name, words in (("rows", "abcdefgh"), ("eval", "uvwxyz")):
        write_rows(folder / f"{name}.jsonl", ({"prompt": f"say {w}:"} for w in words))
    (folder / "rewards.py").write_text(
        "from helper import scale\n\n\n"
        "def variety(completions, **_):\n    return [scale * len(set(c)) for c in completions]\n"
    )
    (folder / "words").mkdir()
    (folder / "helper.py").write_text("import words.known\n\nscale = 1.0 if words.known.WORDS else 0.0\n")
    (folder / "words" / "known.py").write_text("WORDS = 'abc'\n")
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    rewards = {"functions": [{"use": f"{folder / 'rewards.py'}:variety"}]}
    run = {"num_steps": STEPS, "save_every": 1, "eval_prompts": 4}
    return running.config("grpo", folder / "model", task=task, reward=rewards, run=run)


def stopped_in_update(settings: Config, folder: Path) -> RunDir:
    """A run that was stopped inside the update of its second step."""
    plain, calls = Updater.step, []

    def stop(updater: Updater, passes: Any, *, train: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) > 1:
            raise Interrupted("SIGTERM")
        return plain(updater, passes, train=train)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "step", stop)
        code, run, _ = running.train(settings, folder)
    assert code == 75
    assert read_state(checkpoints.list_checkpoints(run.checkpoints)[-1]).run.phase == "rollout"
    return run


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(p.relative_to(run.path)): p.read_bytes() for p in run.path.rglob("[!.]*") if p.is_file()}


def test_another_source_is_refused_unless_it_is_allowed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the reward's helper imports, then held-out rows."""
    run = stopped_in_update(reads_files(model, tmp_path), tmp_path)
    for name, change in (("words/known.py has changed", "abc"), ("held-out rows: the data has changed", "say z")):
        before = contents(run)
        file = tmp_path / ("words/known.py" if change == "abc" else "eval.jsonl")
        file.write_text(file.read_text().replace(change, "say a"))
        with pytest.raises(ValueError, match=rf"(?s)what the run reads has changed since step-000001, .*{name}"):
            running.go_on(run)
        assert contents(run) == before
    assert running.go_on(run, allow_config_change=True) == 0
    assert "changed since step-000001: reward.functions: " in capsys.readouterr().err
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]
    assert running.go_on(run) == 0  # what it reads now is what the newest checkpoint was made with


def test_files_are_hashed_again_only_when_they_were_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(sources, "_known_digest", lambda path, size: hashed.append(path.name))
    settings = reads_files(model, tmp_path)
    first = sources.read_sources(settings, rows={}, known={})
    assert {"model.safetensors", "config.json", "tokenizer.json", "rewards.py"} <= set(hashed)
    hashed.clear()
    assert sources.read_sources(settings, rows={}, known=first.files) == first
    assert hashed == []
    os.utime(tmp_path / "rewards.py", (1, 1))
    assert sources.changed_sources(first, sources.read_sources(settings, rows={}, known=first.files)) == []
    assert hashed == ["rewards.py"]
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    now = sources.read_sources(settings, rows={}, known=first.files)
    assert sources.changed_sources(first, now) == ["model.path: model.safetensors has changed"]


@pytest.mark.slow
def test_a_run_without_its_checkpoints_is_refused_unless_it_is_at_the_beginning(model: Path, tmp_path: Path) -> None:
    """A record would be lost; a run that was killed before its first checkpoint begins again."""
    run = trained(reads_files(model, tmp_path), tmp_path)
    whole = RunDir(shutil.copytree(run.path, tmp_path / "whole"))
    shutil.rmtree(run.checkpoints)
    before = contents(run)
    for what in ("does not exist", "is empty"):
        with pytest.raises(ValueError, match=rf"step 3 and has no checkpoint to go on from: .*checkpoints {what}"):
            running.go_on(run)
        run.checkpoints.mkdir(exist_ok=True)
    assert contents(run) == before
    run.metrics.write_text(run.metrics.read_text().splitlines()[0] + "\n")
    assert running.go_on(run) == 0
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
    whole = trained(settings, tmp_path, name="whole")
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


def test_settings_of_other_kinds_in_a_checkpoint_are_a_change(model: Path, tmp_path: Path) -> None:
    run = stopped_in_update(running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1}), tmp_path)
    newest = checkpoints.list_checkpoints(run.checkpoints)[-1]
    state = json.loads((newest / STATE).read_text())
    state["config"]["reward"] = {"functions": [1, {"use": 2}]}
    (newest / STATE).write_text(json.dumps(state))
    (newest / checkpoints.MANIFEST).unlink()
    checkpoints.seal(newest, 1)
    with pytest.raises(ValueError, match="settings have changed"):
        running.go_on(run)


def test_nothing_after_the_last_step_changes_the_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(running, "report", fail)
    monkeypatch.setattr(training_run, "summary", fail)
    run = trained(running.config("grpo", model, run={"num_steps": 1}), tmp_path)
    assert (run.checkpoints / "step-000001").is_dir()


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that shows today's date shows the first day's when a run is resumed, evaluated and exported."""
    dated = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{{ strftime_now('%d %b %Y') }}:"
    model = chat_model(tmp_path / "model", dated)

    def on(day: date) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(day.year, day.month, day.day, 12, tzinfo=tz)

            @classmethod
            def today(cls) -> Any:
                return day

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        monkeypatch.setattr(load, "date", Clock)

    def last_words(config: Config) -> set[str]:
        return {prompt.text[-12:] for prompt in load_collector(config, options=Options(device="cpu")).eval_prompts}

    on(date(2026, 1, 31))
    settings = running.config("grpo", model, run={"num_steps": 2, "save_every": 1, "eval_prompts": 2})
    run = stopped_in_update(settings, tmp_path)
    on(date(2026, 2, 1))
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


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    often = {"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9, "eval_every": 2}
    run = trained(running.config("grpo", model, run=often), tmp_path_factory.mktemp("first"))
    return run


def forked(origin: str, *overrides: str, output_dir: Path) -> RunDir:
    how: dict[str, Any] = {"options": Options(device="cpu"), "name": "second", "command": ["test"]}
    run = fork(origin, [*overrides], output_dir=str(output_dir), **how)
    assert run.go(report=running.report) == 0
    return run.folder


def test_an_unchanged_fork_is_the_run_again(first: RunDir, tmp_path: Path) -> None:
    run, before = first, contents(first)
    again = forked(f"{run.path}@1", output_dir=tmp_path)
    assert contents(run) == before
    assert running.lasting(again) == running.lasting(run)
    assert again.samples.read_bytes() == run.samples.read_bytes()
    now, then = running.weights(again, STEPS), running.weights(run, STEPS)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert again.read_config().run.forked_from == f"{run.path.resolve()}@1"
    assert json.loads((again.path / "env.json").read_text())["command"] == "test"


def test_a_changed_fork_shares_the_beginning_only(first: RunDir, tmp_path: Path) -> None:
    again = forked(f"{first.path}@2", "optim.learning_rate=0.1", "run.num_steps=4", output_dir=tmp_path)
    there, here = running.lasting(first), running.lasting(again)
    assert [line["step"] for line in here] == [0, 1, 2, 3, 4]
    assert here[:3] == there[:3]
    assert here[3]["optim/learning_rate"] == pytest.approx(0.1)
    assert here[3]["reward/mean"] == there[3]["reward/mean"]  # sampled by the same weights
    assert again.read_config().optim.learning_rate == 0.1


@pytest.mark.parametrize(
    ("at", "override", "problem"),
    [
        ("@7", "run.num_steps=9", "step 7"),
        ("", "optim.learning_rate=1", "run.num_steps"),
        ("@1", "model.path=gone", "gone"),
        ("@1", "lora.r=3", "lora"),
    ],
)
def test_a_refused_fork_leaves_no_folder(at: str, override: str, problem: str, first: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        forked(f"{first.path}{at}", override, output_dir=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, CheckpointState]:
    scaler = torch.amp.GradScaler("cpu").state_dict()
    controllers = Controllers(kl_coef=0.07, exact_sampling=True, failing_batches=1)
    values = {"reward/mean": math.nan, "completion/tokens": 96}
    run = RunState(step=7, values=values, controllers=controllers, best=Best(step=5, value=0.5), loss_scale=scaler)
    own: dict[str, Any] = {"micro_batch_tokens": 768, "threads": 1, "python_random": python_rng()}
    sources = InputHashes(rows={"training": "abc"})
    state = CheckpointState(run=run, sources=sources, config={"method": "grpo"}, records={"metrics.jsonl": 10}, **own)
    folder = tmp_path / "step-000007"
    folder.mkdir()
    state.write(folder)
    return folder, state


def test_a_state_that_was_written_comes_back_and_no_other_text(written: tuple[Path, CheckpointState]) -> None:
    folder, state = written
    back = read_state(folder)
    assert str(back.run.values.pop("reward/mean")) == "nan"
    state.run.values.pop("reward/mean")
    assert back == state
    for text in ("", "[]", "\udcff"):
        (folder / STATE).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match="not what this tinyrl writes"):
            read_state(folder)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative step": (lambda s: s["run"].update(step=-1), "run.step: Input should be greater than or equal to 0"),
    "a missing field": (lambda s: s.pop("records"), "records: Field required"),
    "another step than the folder's": (lambda s: s["run"].update(step=8), "run.step: 8, in step-000007"),
    "a scale without its growth": (lambda s: s["run"]["loss_scale"].pop("_growth_tracker"), "run.loss_scale: "),
    "a generator of text": (lambda s: s["python_random"][1].__setitem__(0, "a"), "python_random.1"),
    "a field of another version": (lambda s: s.update(new=1), "new: Extra inputs are not permitted"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_is_refused(name: str, written: tuple[Path, CheckpointState]) -> None:
    folder, _ = written
    edit, problem = EDITS[name]
    values = json.loads((folder / STATE).read_text())
    edit(values)
    (folder / STATE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="not what this tinyrl writes") as caught:
        read_state(folder)
    assert problem in str(caught.value)
