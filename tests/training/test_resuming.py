"""Resuming under other files, other settings, without checkpoints; state.json; forks. Nothing of a run is lost."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer

from tests import running
from tests.training.rows import chat_model, trained, write_rows
from tests.training.test_resume import assert_same
from tinyrl.config.changes import Change
from tinyrl.config.schema import Config
from tinyrl.generation.engines import DoesNotFit
from tinyrl.models.device import python_rng
from tinyrl.models.kernels import Kernels
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.tokens import DATE
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Options
from tinyrl.rollout.load import _with_date
from tinyrl.rollout.prepared import prepare
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.best import Score
from tinyrl.runs.resolve import changed_config, config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.own import close_workers
from tinyrl.training import changes as changing
from tinyrl.training import inputs as hashing
from tinyrl.training import launch as launching
from tinyrl.training import saver as training_saver
from tinyrl.training.changes import ChangedInput
from tinyrl.training.code_inputs import code_of
from tinyrl.training.launch import fork, started_with
from tinyrl.training.run_state import STATE, CheckpointState, Controllers, InputHashes, RunState
from tinyrl.training.saver import Saver
from tinyrl.training.step import Updater

STEPS = 3
DAY = {DATE: "2026-01-31"}


def reads_files(model: Path, folder: Path) -> Config:
    """A run that reads rows, held-out rows, weights and a reward of its own folder."""
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    for name, words in (("rows", "abcdefgh"), ("eval", "uvwxyz")):
        write_rows(folder / f"{name}.jsonl", ({"prompt": f"say {w}:"} for w in words))
    (folder / "rewards.py").write_text(
        "from helper import scale\n\n\n"
        "def variety(completions, **_):\n    return [scale * len(set(c)) for c in completions]\n"
    )
    (folder / "helper.py").write_text("WORDS = 'abc'\nscale = 1.0 if WORDS else 0.0\n")
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
    assert CheckpointState.read(checkpoints.list_checkpoints(run.checkpoints)[-1]).run.phase == "rollout"
    return run


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(p.relative_to(run.path)): p.read_bytes() for p in run.path.rglob("[!.]*") if p.is_file()}


def test_another_source_is_refused_unless_it_is_allowed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the reward imports, then held-out rows."""
    run = stopped_in_update(reads_files(model, tmp_path), tmp_path)
    for name, change in (("helper.py has changed", "abc"), ("held-out rows have changed", "say z")):
        before = contents(run)
        file = tmp_path / ("helper.py" if change == "abc" else "eval.jsonl")
        file.write_text(file.read_text().replace(change, "say a"))
        with pytest.raises(ValueError, match=rf"(?s)what the run reads has changed since step-000001, .*{name}"):
            running.go_on(run)
        assert contents(run) == before
    assert running.go_on(run, allow_config_change=True) == 0
    assert "changed since step-000001: reward.functions: " in capsys.readouterr().err
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]
    assert run.read_environment()["reward_changed"] == [1]
    assert running.go_on(run) == 0  # what it reads now is what the newest checkpoint was made with


@pytest.mark.parametrize("setting", ["reward.functions", "task.name"])
@pytest.mark.slow
def test_an_edited_module_is_a_change_wherever_it_lies_and_whenever_it_was_imported(
    setting: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a package elsewhere on PYTHONPATH, imported at once or by a call; near it one that nothing has imported, and
    another PYTHONPATH whose module is the same.
    """
    settings = reads_files(model, tmp_path)
    if setting == "task.name":
        settings = settings.with_setting("task.name", f"{tmp_path / 'rewards.py'}:TASK")
        settings = settings.with_setting("reward.functions", [])
    files = {
        "rewards.py": "from pkg.helper import scale\nfrom tinyrl.tasks import Task\n\n\n"
        "def variety(completions, **_):\n    import late\n"
        "    return [scale * late.scale * len(set(c)) for c in completions]\n\n\n"
        "TASK = Task('varied', variety)\n",
        "src/pkg/helper.py": "scale = 1.0\n",
        "src/pkg/near.py": "scale = 1.0\n",
        "src/late.py": "scale = 1.0\n",
        "moved/pkg/helper.py": "scale = 1.0\n",
        "other/pkg/helper.py": "scale = 2.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    run = stopped_in_update(settings, tmp_path)
    for name in ("src/pkg/helper.py", "src/late.py"):
        (tmp_path / name).write_text("scale = 5.0\n")
        with pytest.raises(ValueError, match=rf"{setting}: {tmp_path / name} has changed"):
            running.go_on(run)
        (tmp_path / name).write_text(files[name])
    close_workers()  # as in a process of its own
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'other'}{os.pathsep}{tmp_path / 'src'}")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'src/pkg/helper.py'} has changed"):
        running.go_on(run)
    close_workers()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'moved'}{os.pathsep}{tmp_path / 'src'}")
    (tmp_path / "src/pkg/near.py").write_text("scale = 5.0\n")
    assert running.go_on(run) == 0


def test_a_run_whose_code_was_edited_stops_where_it_would_load_it_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = reads_files(model, tmp_path)
    (tmp_path / "rewards.py").write_text(
        "from pathlib import Path\n"
        "from helper import scale\n"
        "def variety(completions, **_):\n"
        "    if Path(__file__).with_name('fails').exists():\n"
        "        raise RuntimeError('planted')\n"
        "    return [scale * len(set(c)) for c in completions]\n"
    )

    def edit(line: dict[str, Any]) -> None:
        if line["step"] == 1:
            (tmp_path / "helper.py").write_text("scale = 5.0\n")
            (tmp_path / "fails").touch()

    options = Options(device="cpu")
    launch = launching.start(
        prepare(settings),
        options=options,
        output_dir=str(tmp_path),
        name="run",
        overwrite=False,
        command=[],
        on_step=edit,
    )
    assert launch.go(report=running.report) == 75
    run = launch.folder
    assert "helper.py was edited" in capsys.readouterr().err
    assert [line["step"] for line in running.metrics(run)] == [0, 1]
    (tmp_path / "fails").unlink()
    with pytest.raises(ValueError, match=r"helper\.py has changed"):
        running.go_on(run)
    assert running.go_on(run, allow_config_change=True) == 0
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]
    assert run.read_environment()["reward_changed"] == [1]


@pytest.mark.parametrize(
    ("setting", "of_reward"),
    [
        ("reward.functions", True),
        ("environment.name", True),
        ("environment.tools", True),
        ("task.name", True),
        ("environment.agent", False),  # whose text the rewards judge
        ("environment.max_turns", False),
        ("reward.timeout_s", False),
        ("task.max_samples", False),
    ],
)
def test_a_change_of_what_gives_rewards_is_one_of_the_reward(setting: str, of_reward: bool) -> None:
    assert changing.change_is_of_reward(Change(setting=setting, before="a", now="b")) is of_reward


@pytest.mark.parametrize(
    ("setting", "of_reward"), [("environment.name", True), ("environment.tools", True), ("environment.agent", False)]
)
def test_an_edited_file_of_an_environment_is_a_change_of_the_reward(setting: str, of_reward: bool) -> None:
    assert changing.change_is_of_reward(ChangedInput(f"{setting}: rules.py", "has changed")) is of_reward


def append_row(folder: Path) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "say i:"}) + "\n")


def test_a_row_that_max_samples_leaves_out_may_be_appended(model: Path, tmp_path: Path) -> None:
    settings = reads_files(model, tmp_path).with_setting("task.max_samples", 8)
    run = stopped_in_update(settings, tmp_path)
    append_row(tmp_path)
    assert running.go_on(run) == 0
    assert [line["step"] for line in running.metrics(run)] == [0, 1, 2, 3]


def test_a_row_that_is_read_may_not_be_appended(model: Path, tmp_path: Path) -> None:
    run = stopped_in_update(reads_files(model, tmp_path), tmp_path)
    append_row(tmp_path)
    with pytest.raises(ValueError, match="training rows have changed"):
        running.go_on(run)


def test_a_persons_code_is_an_input_of_the_run_whichever_setting_names_it(tmp_path: Path) -> None:
    """The file of each is hashed, and what workers import for it."""
    for name in ("task", "rewards", "world"):
        (tmp_path / f"{name}.py").write_text("TASK = 1\ndef score(): ...\ndef respond(): ...\n")
    config = config_of(
        {
            "method": "grpo",
            "task": {"name": f"{tmp_path}/task.py:TASK"},
            "reward": {"functions": [{"use": f"{tmp_path}/rewards.py:score"}]},
            "environment": {"name": f"{tmp_path}/world.py:respond"},
        }
    )
    settings = {"task.name": "task.py", "reward.functions": "rewards.py", "environment.name": "world.py"}
    assert {one.setting: one.source.file for one in code_of(config)} == {
        setting: tmp_path / file for setting, file in settings.items()
    }
    files = hashing.named_inputs(config).files
    assert settings.items() <= {name.partition(":")[0]: file.name for name, file in files.items()}.items()


def test_files_are_hashed_again_only_when_they_were_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, digest = list[str](), hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, kind: hashed.append(Path(file.name).name) or digest(file, kind)
    )
    settings = reads_files(model, tmp_path)
    first = hashing.read_sources(hashing.named_inputs(settings), rows={}, known={})
    assert {"model.safetensors", "config.json", "tokenizer.json", "rewards.py"} <= set(hashed)
    hashed.clear()
    assert hashing.read_sources(hashing.named_inputs(settings), rows={}, known=first.files) == first
    assert hashed == []
    os.utime(tmp_path / "rewards.py", (1, 1))
    assert (
        changing.changed_sources(
            first, hashing.read_sources(hashing.named_inputs(settings), rows={}, known=first.files)
        )
        == []
    )
    assert hashed == ["rewards.py"]
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    now = hashing.read_sources(hashing.named_inputs(settings), rows={}, known=first.files)
    assert changing.changed_sources(first, now) == [ChangedInput("model.path: model.safetensors", "has changed")]


@pytest.mark.slow
def test_a_file_that_goes_before_it_is_hashed_has_no_hash(model: Path, tmp_path: Path) -> None:
    settings = reads_files(model, tmp_path)
    inputs = hashing.named_inputs(settings)
    (tmp_path / "model" / "tokenizer.json").unlink()
    read = hashing.read_sources(inputs, rows={}, known={})
    assert list(read.unread) == ["model.path: tokenizer.json"]
    assert "model.path: model.safetensors" in read.files


def test_a_run_whose_file_goes_after_loading_is_saved_and_a_resume_asks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = reads_files(model, tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    read_sources = hashing.read_sources

    def gone(*given: Any, **named: Any) -> InputHashes:
        weights.unlink()
        return read_sources(*given, **named)

    monkeypatch.setattr(launching, "read_sources", gone)
    short = settings.run.model_copy(update={"num_steps": 1, "eval_prompts": 0})
    code, run, _ = running.train(settings.model_copy(update={"run": short}), tmp_path)
    assert code == 0
    assert capsys.readouterr().err.count("warning: model.path: model.safetensors") == 1
    monkeypatch.setattr(launching, "read_sources", read_sources)
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors has no hash"):
        running.go_on(run, config=changed_config(run, ["run.num_steps=2"]))


def test_a_run_without_its_checkpoints_is_refused_unless_it_is_at_the_beginning(model: Path, tmp_path: Path) -> None:
    """A record would be lost; a run that was killed before its first checkpoint begins again."""
    run = trained(reads_files(model, tmp_path), tmp_path)
    whole = RunDir(shutil.copytree(run.path, tmp_path / "whole"))
    shutil.rmtree(run.checkpoints)
    before = contents(run)
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        running.go_on(run)
    assert contents(run) == before
    for record in run.path.glob("*.jsonl"):
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if json.loads(line)["step"] == 0))
    assert running.go_on(run) == 0
    assert_same(whole, run, STEPS)


@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
def test_a_run_whose_checkpoints_are_all_damaged_is_refused(steps: int, first: RunDir, tmp_path: Path) -> None:
    """Finished, or not: one byte more in each."""
    run = RunDir(shutil.copytree(first.path, tmp_path / "run"))
    run.write_config(changed_config(run, [f"run.num_steps={steps}"]))
    for checkpoint in checkpoints.list_checkpoints(run.checkpoints):
        with (checkpoint / "adapter_model.safetensors").open("ab") as file:
            file.write(b"\0")
    before = contents(run)
    with pytest.raises(ValueError, match=r"(?s)step-000003: adapter_model.safetensors.*--overwrite"):
        running.go_on(run, allow_config_change=True)
    assert contents(run) == before


@pytest.mark.parametrize("record", ["metrics", "samples"])
def test_a_record_that_is_gone_is_said(
    record: str, first: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(shutil.copytree(first.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step-000003")
    file: Path = getattr(run, record)
    file.unlink()
    lost = CheckpointState.read(run.checkpoints / "step-000002").records[file.name]
    assert running.go_on(run) == 0
    assert f"warning: {file.name}: the file is gone, {lost:,} of" in capsys.readouterr().err
    assert {json.loads(line)["step"] for line in file.read_text().splitlines()} == {3}


def test_a_resume_with_another_sampling_engine_warns(
    first: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an update of a library, where the trial of `auto` ends otherwise."""
    run = RunDir(shutil.copytree(first.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step-000003")
    assert CheckpointState.read(run.checkpoints / "step-000002").engine == "fused"
    refused = Mock(side_effect=DoesNotFit("not built like Llama"))
    monkeypatch.setattr("tinyrl.generation.engines.fused_layout", refused)
    assert running.go_on(run) == 0
    shown = capsys.readouterr().err
    assert any("warning" in line and "fused" in line and "hf" in line for line in shown.splitlines())


def test_a_resume_of_linked_records_is_refused_before_a_weight_is_loaded(
    first: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(shutil.copytree(first.path, tmp_path / "run"))
    run.metrics.rename(tmp_path / "target")
    run.metrics.symlink_to(tmp_path / "target")
    shutil.rmtree(run.checkpoints / "step-000003")  # so that it would go on, and cut its records
    before = (tmp_path / "target").read_bytes()
    monkeypatch.setattr(launching, "load_method", None)
    with pytest.raises(ValueError, match=f"{run.metrics} is a link"):
        running.go_on(run)
    assert (tmp_path / "target").read_bytes() == before


def test_a_resume_of_a_finished_run_deletes_what_a_killed_pruning_left(first: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(first.path, tmp_path / "run"))
    checkpoint = run.checkpoints / "step-000001"
    checkpoint.rename(run.checkpoints / ".deleting-step-000001")
    assert running.go_on(run) == 0
    assert {path.name for path in run.checkpoints.iterdir()} == {"step-000000", "step-000002", "step-000003"}


@pytest.mark.parametrize("record", ["samples", "prompts"])
def test_a_run_without_checkpoints_and_metrics_is_known_by_its_other_records(
    record: str, first: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for name in ("config.yaml", f"{record}.jsonl"):
        shutil.copyfile(first.path / name, run.path / name)
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        running.go_on(run)


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
    assert code == 4
    assert f"tinyrl train --resume {run.path}" in capsys.readouterr().out
    assert running.go_on(run) == 0


def on_full_disk(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, refusals: int, number: int = errno.ENOSPC
) -> tuple[int, list[str]]:
    """(exit code, checkpoints) of a run that saves each step; the disk refuses the last one so many times. The best
    evaluation is that of step 0.
    """
    plain, left = training_saver.save_file, [refusals]

    def write(tensors: dict[str, torch.Tensor], file: Path) -> None:
        if file.parent.name.endswith(f"step-{steps:06d}") and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        plain(tensors, file)

    monkeypatch.setattr(training_saver, "save_file", write)
    run = {"num_steps": steps, "save_every": 1, "keep_checkpoints": 9, "eval_every": 0}
    settings = running.config("grpo", model, run=run, optim={"learning_rate": 1e-9})
    code, made, _ = running.train(settings, folder)
    found = checkpoints.list_checkpoints(made.checkpoints)
    assert [checkpoints.problem_with(checkpoint) for checkpoint in found] == [None] * len(found)
    return code, [checkpoint.name for checkpoint in found]


def test_on_a_full_disk_the_oldest_checkpoint_but_the_best_gives_way(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 0 to 3 are there."""
    code, left = on_full_disk(model, tmp_path, monkeypatch, steps=4, refusals=1)
    assert (code, left) == (0, ["step-000000", "step-000002", "step-000003", "step-000004"])


def test_one_checkpoint_gives_way_and_no_second_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, left = on_full_disk(model, tmp_path, monkeypatch, steps=4, refusals=9)
    assert (code, left) == (4, ["step-000000", "step-000002", "step-000003"])


@pytest.mark.parametrize(("steps", "number"), [(2, errno.ENOSPC), (4, errno.EIO)])
def test_no_checkpoint_gives_way_where_few_are_left_or_the_disk_is_not_full(
    steps: int, number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, left = on_full_disk(model, tmp_path, monkeypatch, steps=steps, refusals=1, number=number)
    assert (code, left) == (4, [f"step-{step:06d}" for step in range(steps)])


@pytest.mark.slow
def test_a_resume_under_new_settings_that_fails_to_load_leaves_the_run_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is loaded, the checkpoint is written anew under them, so that a stop in its first step keeps them."""
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1})
    run = stopped_in_update(settings, tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise Interrupted("SIGTERM")

    changed = changed_config(run, ["grpo.kl_coef=0.1", "grpo.num_epochs=2"])
    for where in ("tinyrl.training.step_start.restore_rng", "tinyrl.training.grpo.Grpo.sample_groups"):
        before = contents(run)
        with monkeypatch.context() as patch:
            patch.setattr(where, fail)
            assert running.go_on(run, config=changed, allow_config_change=True) == 75
        assert (contents(run) == before) == where.endswith("restore_rng")
    assert running.go_on(run) == 0
    assert run.read_config() == changed
    assert ["objective/kl" in line for line in running.metrics(run)] == [False, False, True, True]


def test_nothing_after_the_last_step_changes_the_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(running, "report", fail)
    run = trained(running.config("grpo", model, run={"num_steps": 1}), tmp_path)
    assert (run.checkpoints / "step-000001").is_dir()


def test_a_run_keeps_the_date_of_its_first_day(tmp_path: Path) -> None:
    """Where its template shows today's."""
    dated = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{{ strftime_now('%d %b %Y') }}:"
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path, dated))
    now, before = (running.config("grpo", tmp_path, task={"chat_template_kwargs": given}) for given in ({}, DAY))
    assert _with_date(now, tokenizer).task.chat_template_kwargs == {DATE: date.today().isoformat()}
    assert _with_date(before, tokenizer).task.chat_template_kwargs == DAY


def test_a_resume_uses_the_options_of_the_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_environment({"options": {"device": "cpu", "trust_remote_code": False}})
    assert started_with(run, Options()) == (Options(device="cpu"), [])
    assert started_with(run, Options(device="cuda")) == (Options(device="cuda"), [])
    run.write_environment({"options": {"device": "cuda", "trust_remote_code": True}})
    assert started_with(run, Options(trust_remote_code=True)) == (Options(trust_remote_code=True), [])
    with pytest.raises(ValueError, match="--trust-remote-code"):
        started_with(run, Options())
    run.write_environment({"options": {}})
    assert started_with(run, Options()) == (Options(), [])


@pytest.mark.parametrize("damaged", [None, '{"options": []}', "{}", "[]", "null", "{", "[" * 100_000, b"\xff"])
def test_options_of_the_start_that_cannot_be_read_are_a_warning_with_the_file(damaged: Any, tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    if damaged is not None:
        file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    options, [warning] = started_with(RunDir(tmp_path), Options())
    assert options == Options()
    assert str(file) in warning


def test_a_resume_goes_on_and_says_that_env_json_is_damaged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(running.config("grpo", model, run={"num_steps": 1}), tmp_path)
    for num_steps, damage in ((2, False), (3, True)):
        if damage:
            (run.path / "env.json").write_text("{")
        capsys.readouterr()
        settings = changed_config(run, [f"run.num_steps={num_steps}", "optim.schedule=constant"])
        assert running.go_on(run, config=settings, allow_config_change=True) == 0
        assert ("env.json" in capsys.readouterr().err) == damage


def test_a_fork_is_not_warned_of_its_own_new_folder(
    first: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forked(f"{first.path}@2", output_dir=tmp_path)
    assert "env.json" not in capsys.readouterr().err


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


def test_an_unchanged_fork_is_the_run_again_and_a_changed_one_shares_its_beginning(
    first: RunDir, tmp_path: Path
) -> None:
    before = contents(first)
    again = forked(f"{first.path}@1", output_dir=tmp_path / "same")
    assert contents(first) == before
    assert_same(first, again, STEPS)
    environment = json.loads((again.path / "env.json").read_text())
    assert environment["command"] == "test"
    assert environment["forked_from"] == f"{first.path.resolve()}@1"
    assert environment["reward_changed"] == []
    other = forked(f"{first.path}@2", "optim.learning_rate=0.1", "run.num_steps=4", output_dir=tmp_path)
    there, here = running.lasting(first), running.lasting(other)
    assert [line["step"] for line in here] == [0, 1, 2, 3, 4]
    assert here[:3] == there[:3]
    assert here[3]["optim/learning_rate"] == pytest.approx(0.1)
    assert here[3]["reward/mean"] == there[3]["reward/mean"]  # sampled by the same weights
    assert other.read_config().optim.learning_rate == 0.1


def test_a_fork_with_another_critic_drops_the_moments_of_the_old_one_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"num_steps": 1, "eval_prompts": 0, "save_every": 1}
    small = {"num_prompts": 4, "num_epochs": 1, "minibatch_size": None}
    run = trained(running.config("ppo", model, run=short, ppo=small), tmp_path)
    capsys.readouterr()
    other = forked(f"{run.path}@1", "critic.kind=shared", "run.num_steps=2", output_dir=tmp_path)
    assert [line["step"] for line in running.metrics(other)] == [0, 1, 2]
    assert re.search(r"optimizer state of \d+ parameters .*critic\|.*lora_A", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("at", "override", "problem"),
    [
        ("@7", "run.num_steps=9", "step 7"),
        ("", "optim.learning_rate=1", "run.num_steps"),
        ("@2", "run.num_steps=2", "counts from step 0.*: 3 or more"),
        ("@1", "model.path=gone", "gone"),
        ("@1", "lora.r=3", "lora"),
    ],
)
def test_a_refused_fork_leaves_no_folder(at: str, override: str, problem: str, first: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        forked(f"{first.path}{at}", override, output_dir=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_fork_under_another_preset_has_all_of_it_and_says_what_follows(
    first: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = forked(f"{first.path}@2", "grpo.preset=dr_grpo", output_dir=tmp_path)
    now = new.read_config().grpo
    assert (now.aggregation, now.advantage_scale, now.clip_eps_high) == ("constant", "none", 0.2)
    said = [line for line in capsys.readouterr().err.splitlines() if "grpo.aggregation" in line]
    assert len(said) == 1
    assert "follows from grpo.preset" in said[0]


def test_a_fork_takes_what_was_given_at_its_checkpoint(first: RunDir, tmp_path: Path) -> None:
    """A change that the run accepted later is none of the fork's."""
    old = RunDir(shutil.copytree(first.path, tmp_path / "changed"))
    changed = changed_config(old, ["grpo.clip_eps=0.1", "run.num_steps=4"])
    assert running.go_on(old, config=changed, allow_config_change=True) == 0
    assert old.read_config().given.values["grpo"]["clip_eps"] == 0.1
    earlier = forked(f"{old.path}@1", "grpo.preset=gspo", "run.num_steps=2", output_dir=tmp_path / "earlier")
    later = forked(f"{old.path}@4", "grpo.preset=gspo", "run.num_steps=5", output_dir=tmp_path / "later")
    assert earlier.read_config().grpo.clip_eps == 3e-4
    assert later.read_config().grpo.clip_eps == 0.1


def with_best(first: RunDir, folder: Path, *, step: int) -> RunDir:
    """A copy of the run whose checkpoint of step 2 says that the best evaluation was after `step`."""
    run = RunDir(shutil.copytree(first.path, folder / "of-best"))
    checkpoint = run.checkpoints / "step-000002"
    state = CheckpointState.read(checkpoint)
    state.run.best = Score(step=step, value=1e6)
    state.write(checkpoint)
    checkpoints.seal(checkpoint, 2)
    return run


def test_a_fork_has_the_best_checkpoint_too_and_keeps_it(first: RunDir, tmp_path: Path) -> None:
    old = with_best(first, tmp_path, step=0)
    new = forked(f"{old.path}@2", "run.keep_checkpoints=1", output_dir=tmp_path)
    there = [checkpoints.checkpoint_step(p) for p in checkpoints.list_checkpoints(new.checkpoints)]
    assert there == [0, 2, 3]
    copied = running.weights(new, 0)
    assert copied.keys() == running.weights(old, 0).keys()
    assert all(torch.equal(tensor, running.weights(old, 0)[name]) for name, tensor in copied.items())


@pytest.mark.parametrize("lack", ["gone", "damaged"])
def test_a_fork_forgets_a_best_checkpoint_that_it_cannot_have(lack: str, first: RunDir, tmp_path: Path) -> None:
    """Its own best one is then kept."""
    old = with_best(first, tmp_path, step=0)
    of_best = old.checkpoints / "step-000000"
    if lack == "gone":
        shutil.rmtree(of_best)
    else:
        (of_best / "adapter_model.safetensors").write_bytes(b"")
    new = forked(f"{old.path}@2", output_dir=tmp_path)
    assert [p.name for p in checkpoints.list_checkpoints(new.checkpoints)] == ["step-000002", "step-000003"]
    best = CheckpointState.read(new.checkpoints / "step-000003").run.best
    assert best is not None
    assert (best.step, best.value) == (3, running.metrics(new)[3]["eval/reward_mean"])


def test_a_state_that_was_written_comes_back_and_no_other_text(tmp_path: Path) -> None:
    controllers = Controllers(kl_coef=0.07, failing_batches=1)
    values = {"reward/mean": math.nan, "completion/tokens": 96}
    scaler = torch.amp.GradScaler("cpu").state_dict()
    run = RunState(step=7, values=values, controllers=controllers, best=Score(step=5, value=0.5), loss_scale=scaler)
    own: dict[str, Any] = {"micro_batch_tokens": 768, "python_random": python_rng(), "records": {"metrics.jsonl": 10}}
    state = CheckpointState(run=run, sources=InputHashes(rows={"training": "abc"}), config={"method": "grpo"}, **own)
    (tmp_path / STATE).write_text(json.dumps(state.model_dump()))
    back = CheckpointState.read(tmp_path)
    assert str(back.run.values.pop("reward/mean")) == "nan"
    state.run.values.pop("reward/mean")
    assert back == state
    without = state.model_dump(exclude={"records"})
    negative = state.model_dump() | {"records": {"metrics.jsonl": -1}}
    for text in ("", "[]", "\udcff", json.dumps(without), json.dumps(negative)):
        (tmp_path / STATE).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match="not what this tinyrl writes"):
            CheckpointState.read(tmp_path)


# ---- what was found on a device ----

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("here", "there", "kept", "tokens", "unmeasured"),
    [
        ("H200", "H200", 9_000, 9_000, False),
        ("H200", "T4", 9_000, 4_096, True),
        ("H200", None, 9_000, 4_096, True),
        ("cpu", "H200", 32_768, 1_024, False),
        ("cpu", "cpu", 256, 256, False),
        ("cpu", None, 256, 256, False),
        ("cpu", None, 32_768, 1_024, False),
    ],
)
def test_a_budget_is_kept_on_the_device_that_it_fits(
    here: str, there: str | None, kept: int, tokens: int, monkeypatch: pytest.MonkeyPatch, *, unmeasured: bool
) -> None:
    """A measured one, and one that was halved; an earlier version (None) did not write where."""
    monkeypatch.setattr("tinyrl.training.saver.device_name", lambda device: here)
    budget = MicroBatches(torch.device("cpu" if here == "cpu" else "cuda"))
    own: dict[str, Any] = {"micro_batch_tokens": kept, "micro_batch_device": there, "python_random": [], "records": {}}
    state = CheckpointState(run=RunState(), sources=InputHashes(), config={}, **own)
    run: Any = SimpleNamespace(policy=SimpleNamespace(micro_batches=budget, device=budget.device))
    Saver._restore_budget(run, state)
    assert (budget.tokens, budget.unmeasured) == (tokens, unmeasured)


@pytest.mark.parametrize(
    ("there", "kept", "set_then", "rows"),
    [
        ("H200", 6, None, 6),
        ("T4", 6, None, None),
        (None, 6, None, None),
        ("H200", 6, 12, None),
        ("H200", None, None, None),
    ],
)
def test_a_halved_limit_of_sampled_rows_is_kept_on_its_device(
    there: str | None, kept: int | None, set_then: int | None, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where generation.max_rows is another setting now, that one counts."""
    monkeypatch.setattr("tinyrl.training.saver.device_name", lambda device: "H200")
    own: dict[str, Any] = {"micro_batch_tokens": 1, "micro_batch_device": there, "python_random": [], "records": {}}
    before = {"generation": {"max_rows": set_then}}
    state = CheckpointState(run=RunState(), sources=InputHashes(), config=before, max_rows=kept, **own)
    restored: list[int] = []
    run: Any = SimpleNamespace(
        policy=SimpleNamespace(device=GPU),
        config=SimpleNamespace(generation=SimpleNamespace(max_rows=None)),
        method=SimpleNamespace(restore_max_rows=restored.append),
    )
    Saver._restore_max_rows(run, state)
    assert restored == ([] if rows is None else [rows])


def test_what_was_found_on_a_device_goes_through_a_checkpoint(tmp_path: Path) -> None:
    own: dict[str, Any] = {"micro_batch_tokens": 1, "python_random": [], "records": {}, "config": {}}
    kernels = Kernels(varlen_attention=True)
    found: dict[str, Any] = {"kernels": kernels, "kernels_place": "H200, torch 2.11", "max_rows": 6}
    CheckpointState(run=RunState(), sources=InputHashes(), **own, **found).write(tmp_path)
    kept = CheckpointState.read(tmp_path)
    assert (kept.kernels, kept.kernels_place, kept.max_rows) == (kernels, "H200, torch 2.11", 6)
