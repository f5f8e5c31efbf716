"""The held-out score of a run: gains beyond the interval, an early end, the best checkpoint and its place RUN@best."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import write_run
from tinyrl.config.recipe import load_config
from tinyrl.runs.best import LOSS, WITHOUT_GAIN, Gains, Score, best_checkpoint, early_end, score_of
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.places import checkpoint_of, named_run, run_of
from tinyrl.runs.records import read_run
from tinyrl.runs.resolve import config_of, resolve
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import summary
from tinyrl.tools.report.panels import subtitle

# ---- gains ----


def counts(scores: list[Score | None]) -> list[int]:
    """The evaluations without a gain after each of the scores."""
    gains = Gains()
    found = list[int]()
    for score in scores:
        gains = gains.after(score)
        found.append(gains.without_gain)
    return found


def rewards(*values: float, half_width: float | None) -> list[Score | None]:
    bounds = [None if half_width is None else value + half_width for value in values]
    return [
        Score(step=i, value=value, bound=bound) for i, (value, bound) in enumerate(zip(values, bounds, strict=True))
    ]


def test_an_evaluation_gains_beyond_the_interval_of_the_one_that_gained_last() -> None:
    """Small gains add up: the third is beyond the first's interval, though not beyond the second's."""
    assert counts(rewards(0.2, 0.25, 0.31, 0.31, 0.2, half_width=0.1)) == [0, 1, 0, 1, 2]


def test_a_score_at_the_end_of_the_interval_is_no_gain() -> None:
    assert counts(rewards(0.25, 0.5, 0.5625, half_width=0.25)) == [0, 1, 0]


def test_where_there_is_no_interval_any_better_score_gains() -> None:
    assert counts(rewards(0.2, 0.21, 0.21, half_width=None)) == [0, 0, 1]


def test_of_a_loss_a_lower_one_gains() -> None:
    losses = [Score(step=i, value=value, metric=LOSS) for i, value in enumerate((2.0, 1.9, 1.95, 1.8))]
    assert counts([*losses]) == [0, 0, 1, 0]


def test_an_evaluation_without_a_score_is_not_counted() -> None:
    scores = rewards(0.2, 0.2, half_width=None)
    assert counts([scores[0], None, scores[1]]) == [0, 0, 1]


@pytest.mark.parametrize(
    ("line", "score"),
    [
        (
            {"eval/reward_mean": 0.5, "eval/reward_ci": [0.4, 0.6], "eval/loss": 9.0},
            Score(step=3, value=0.5, bound=0.6),
        ),
        ({"eval/reward_mean": 1.0, "eval/reward_ci": [math.nan, math.nan]}, Score(step=3, value=1.0)),
        ({"eval/reward_mean": 1.0, "eval/reward_ci": [None, None]}, Score(step=3, value=1.0)),
        ({"eval/reward_mean": None}, None),
        ({"eval/loss": 2.5}, Score(step=3, value=2.5, metric=LOSS)),
        ({"reward/mean": 0.5}, None),
    ],
)
def test_the_score_is_the_mean_reward_with_its_interval_or_else_the_loss(line: dict[str, Any], score: Score | None):
    assert score_of(line, step=3) == score


# ---- an early end ----

RISEN = {
    0: {"eval/reward_mean": 0.1},
    10: {"eval/reward_mean": 0.4, "eval/reward_ci": [0.3, 0.5], WITHOUT_GAIN: 0},
    20: {"eval/reward_mean": 0.45, WITHOUT_GAIN: 1},
    30: {"eval/reward_mean": 0.42, WITHOUT_GAIN: 2},
}


def test_an_early_end_names_the_evaluation_that_gained_last() -> None:
    text = early_end(RISEN, patience=2)
    assert "of step 10" in text
    assert "0.500" in text
    assert early_end(RISEN, patience=3) == early_end(RISEN, patience=None) == early_end({}, patience=1) == ""


def test_the_summary_and_the_report_say_that_a_run_ended_early(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [{"step": step, **line} for step, line in RISEN.items()])
    config = load_config("grpo", None, overrides=["run.patience=2"])
    RunDir(path).write_config(config)
    assert "ended early at step 30" in summary(RunDir(path))
    assert "run.patience=2" in subtitle(read_run(path))


# ---- the best checkpoint ----


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Steps 0, 10, 20 and 30 are evaluated, 0, 20 and 30 saved, 25 saved only; the best is that of step 10."""

    def write(folder: Path) -> None:
        (folder / "x").write_text("x")

    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    made.write_config(load_config("grpo", None, overrides=[]))
    for step, value in ((0, 0.1), (10, 0.9), (20, 0.7), (25, None), (30, 0.7)):
        made.append_metrics(step, {} if value is None else {"eval/reward_mean": value})
        if step != 10:
            write_checkpoint(made.checkpoints, step, write=write)
    return made


def test_the_best_is_the_best_of_those_evaluated_and_saved_and_it_says_which_was_better(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint_of(f"{run.path}@best") == run.checkpoints / "step-000020"
    assert "step 10" in capsys.readouterr().err


def test_a_setting_that_takes_a_model_takes_the_best_checkpoint_of_a_run(run: RunDir) -> None:
    config = resolve(config_of({"method": "grpo", "model": {"path": "starter", "adapter": f"{run.path}@best"}}))
    assert config.model.adapter == str(run.checkpoints / "step-000020")


def test_a_best_checkpoint_that_does_not_verify_gives_way_to_the_next_and_a_warning(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "step-000020/x").write_text("y")
    assert checkpoint_of(f"{run.path}@best") == run.checkpoints / "step-000030"
    assert "step-000020" in capsys.readouterr().err


def test_scores_of_another_reward_do_not_count(run: RunDir) -> None:
    run.write_environment({"reward_changed": [20]})
    best = best_checkpoint(run)
    assert best is not None
    assert best.folder.name == "step-000030"


def test_a_run_without_an_evaluated_checkpoint_has_no_best_one(run: RunDir) -> None:
    run.metrics.write_text(json.dumps({"step": 25, "loss": 1.0}) + "\n")
    with pytest.raises(ValueError, match="no checkpoint of an evaluated step"):
        checkpoint_of(f"{run.path}@best")


def test_a_step_and_a_wrong_word_after_the_at_sign(run: RunDir) -> None:
    assert checkpoint_of(f"{run.path}@25") == run.checkpoints / "step-000025"
    assert checkpoint_of(run.path) == run.checkpoints / "step-000030"
    for which, problem in (("10", "step 10"), ("bset", "best")):
        with pytest.raises(ValueError, match=problem):
            checkpoint_of(f"{run.path}@{which}")


def test_a_folder_whose_name_has_an_at_sign_is_that_folder(run: RunDir) -> None:
    other = run.path.rename(run.path.with_name("run@best"))
    assert run_of(other) == other
    assert named_run(f"{other}@best") == other
    assert named_run("owner/name@best") is None
