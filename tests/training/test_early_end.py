"""run.patience ends a run, and a resume goes on counting; the checkpoint of the best score is kept."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.training.rows import row_config, trained, write_rows
from tests.training.test_resuming import forked
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.best import WITHOUT_GAIN
from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.places import checkpoint_of
from tinyrl.runs.resolve import changed_config, config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.launch import start
from tinyrl.training.run_state import CheckpointState
from tinyrl.workers.loading import use_of


def still(model: Path, **run: Any) -> Config:
    """A run whose policy does not change, so that no evaluation gains on the first."""
    often = {"num_steps": 6, "eval_every": 1, "save_every": 0, **run}
    return running.config("grpo", model, run=often, optim={"learning_rate": 1e-9})


def without_gain(run: RunDir) -> list[int]:
    return [line[WITHOUT_GAIN] for line in running.metrics(run)]


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(still(model, patience=2), tmp_path_factory.mktemp("ended"))


def test_a_run_ends_after_so_many_evaluations_without_a_gain_with_a_checkpoint(ended: RunDir) -> None:
    assert without_gain(ended) == [0, 1, 2]
    assert [folder.name for folder in list_checkpoints(ended.checkpoints)] == ["step-000002"]


def test_it_is_finished_and_goes_on_where_patience_is_longer(ended: RunDir, tmp_path: Path) -> None:
    assert running.go_on(ended) == 0
    assert running.metrics(ended)[-1]["step"] == 2
    other = forked(str(ended.path), output_dir=tmp_path)  # counts anew
    assert without_gain(other)[3:] == [0, 1, 2]
    assert running.go_on(ended, config=changed_config(ended, ["run.patience=3"])) == 0
    assert without_gain(ended) == [0, 1, 2, 3]


def test_a_resume_remembers_the_count(model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"options": Options(device="cpu"), "overwrite": False, "command": ["test"], "until": 1}
    first = start(prepare(still(model, patience=2)), output_dir=str(tmp_path), name="run", **how)
    assert first.go(report=running.report) == 0
    assert without_gain(first.folder) == [0, 1]
    assert running.go_on(first.folder) == 0
    assert without_gain(first.folder) == [0, 1, 2]


def test_the_best_checkpoint_by_loss_is_kept_beside_the_newest(model: Path, tmp_path: Path) -> None:
    """With such a rate, the one before training."""
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"say {i}", "completion": f" {i}"} for i in range(20)))
    few = {"num_steps": 2, "eval_every": 1, "eval_prompts": 8, "save_every": 1, "keep_checkpoints": 1}
    run = trained(row_config("sft", model, rows, run=few, optim={"learning_rate": 0.5}), tmp_path)
    assert [folder.name for folder in list_checkpoints(run.checkpoints)] == ["step-000000", "step-000002"]
    best = CheckpointState.read(run.checkpoints / "step-000002").run.best
    assert best is not None
    assert best.step == 0
    assert checkpoint_of(f"{run.path}@best") == run.checkpoints / "step-000000"


def test_a_best_evaluation_without_a_checkpoint_is_not_the_best_that_is_kept(model: Path, tmp_path: Path) -> None:
    """The state of the run and its records name the same one."""
    run = {"num_steps": 4, "eval_every": 1, "save_every": 2, "keep_checkpoints": 1}
    made = trained(running.config("grpo", model, run=run, optim={"learning_rate": 3e-2}), tmp_path)
    scores = {line["step"]: line["eval/reward_mean"] for line in running.metrics(made)}
    saved = {step: scores[step] for step in (0, 2, 4)}
    best = CheckpointState.read(made.checkpoints / "step-000004").run.best
    assert best is not None
    assert best.step == max(saved, key=lambda step: saved[step])
    assert checkpoint_of(f"{made.path}@best").name == f"step-{best.step:06d}"


def alternate(completions: list[str], **_: Any) -> list[float]:
    """Reward every second completion of a batch."""
    return [float(place % 2) for place in range(len(completions))]


# Fast: tests/evaluation/test_statistics.py has how many prompts can show a gain.
@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "is_warned"), [(4, True), (6, False)])
def test_a_start_warns_where_so_few_prompts_show_no_gain(
    prompts: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_warned: bool
) -> None:
    run = {"num_steps": 1, "eval_prompts": prompts, "patience": 2}
    reward = {"functions": [{"use": use_of(partial(alternate))}]}
    trained(running.config("grpo", model, run=run, reward=reward), tmp_path)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "run.patience=2" in line]
    assert bool(warnings) is is_warned
    assert all("At least 5 are needed" in line for line in warnings)


@pytest.mark.parametrize("section", [{"eval_prompts": 0}, {"eval_every": 0}])
def test_patience_without_evaluations_is_refused(section: dict[str, int]) -> None:
    settings = [f"run.{name}={value}" for name, value in section.items()]
    with pytest.raises(ValueError, match=r"run\.patience.*evaluation"):
        config_of({"method": "grpo"}, ["run.patience=2", *settings])


def test_patience_without_a_reward_is_refused(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"say {i}"} for i in range(20)))
    values = {"method": "distill", "model": {"path": str(model)}, "teacher": {"path": str(model)}}
    values["task"] = {"name": "rows", "data": str(rows)}
    prepare(config_of(values))
    with pytest.raises(ValueError, match=r"run\.patience=2 needs a held-out reward"):
        prepare(config_of(values, ["run.patience=2"]))
