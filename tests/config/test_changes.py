"""Resuming with changed settings: refused with both values, unless it is asked for."""

import re
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.changes import Change, changed_settings
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.runs.resolve import changed_config, config_of
from tinyrl.training.changes import ChangedInput, change_invalidates, check_changes, check_schedule


def test_changed_settings_have_both_values() -> None:
    before = {"optim": {"learning_rate": 0.1, "schedule": "constant"}, "reward": {"model": None, "gone": 1}}
    now = {"optim": {"learning_rate": 0.2, "schedule": "constant", "new": 3}, "reward": {"model": "x"}}
    changes = changed_settings(before, now)
    assert changes == [Change("optim.learning_rate", 0.1, 0.2), Change("reward.model", None, "x")]
    assert [str(change) for change in changes] == [
        "optim.learning_rate: 0.1 then, 0.2 now",
        'reward.model: null then, "x" now',
    ]


JUDGE = {"use": "judge", "weight": 1.0, "criteria": [{"text": "right", "scale": None}]}  # of an earlier version


@pytest.mark.parametrize(
    ("now", "is_changed"),
    [
        ({**JUDGE, "column": None}, False),
        ({**JUDGE, "criteria": [{"text": "right", "scale": None, "name": None}]}, False),
        ({**JUDGE, "column": "rubrics"}, True),
        ({**JUDGE, "weight": 0.0}, True),
        ({**JUDGE, "criteria": [{"text": "wrong", "scale": None}]}, True),
        ({**JUDGE, "criteria": []}, True),
        ({"use": "judge", "criteria": JUDGE["criteria"]}, True),
    ],
)
def test_a_field_of_a_judge_that_another_version_wrote_is_no_change(now: dict[str, object], is_changed: bool) -> None:
    before = {"reward": {"functions": [JUDGE]}}
    assert bool(changed_settings(before, {"reward": {"functions": [now]}})) == is_changed
    assert changed_settings(before, {"reward": {"functions": [now, now]}})


def test_a_mapping_has_other_keys_where_they_are_others() -> None:
    before = {"task": {"columns": {"prompt": "question"}}}
    assert changed_settings(before, {"task": {"columns": {"prompt": "question", "answer": "a"}}})


def test_a_run_with_a_judge_of_an_earlier_version_goes_on() -> None:
    judge = {"use": "judge", "url": "http://127.0.0.1:9", "model": "m", "rubric": "rubric.txt"}
    config = config_of({"method": "grpo", "task": {"name": "sort"}, "reward": {"functions": [judge]}})
    before = config.model_dump(mode="json")
    del before["reward"]["functions"][0]["criteria_column"]
    assert check_changes(before, config, since="step-000010", allowed=False) == []


def test_an_error_names_the_first_three_changes() -> None:
    config = load_config("grpo", None, overrides=[])
    before = config.model_dump(mode="json")
    before["optim"] |= {"learning_rate": 0.5, "max_grad_norm": 0.25, "weight_decay": 0.125, "warmup_steps": 3}
    with pytest.raises(ValueError, match=r"and 1 more\n.*--allow-config-change$"):
        check_changes(before, config, since="step-000010", allowed=False)
    assert len(check_changes(before, config, since="step-000010", allowed=True)) == 4
    for other in ({**before, "method": "ppo"}, {}):
        with pytest.raises(ValueError, match="cannot go on"):
            check_changes(other, config, since="step-000010", allowed=True)


def test_what_a_run_keeps_may_be_another_on_a_resume_and_is_noted() -> None:
    config = load_config("grpo", None, overrides=["run.trackers=[tensorboard]"])
    before = config.model_dump(mode="json")
    before["run"] |= {"save_every": 7, "keep_checkpoints": 9, "trackers": [], "log_completions": True}
    kept = ["run.keep_checkpoints", "run.log_completions", "run.save_every", "run.trackers"]
    assert [change.setting for change in check_changes(before, config, since="step-000010", allowed=False)] == kept
    before["run"]["eval_every"] = 7
    with pytest.raises(ValueError, match=r"run\.eval_every: 7 then, 20 now"):
        check_changes(before, config, since="step-000010", allowed=False)


@pytest.mark.parametrize(
    ("typed", "refused"), [(["optim.betas=[0.9, 0.99]"], True), (["optim.betas=[0.9, 0.999]"], False), ([], False)]
)
def test_a_setting_that_an_earlier_version_did_not_have_is_a_change_from_its_default(
    typed: list[str], refused: bool
) -> None:
    config = load_config("grpo", None, overrides=typed)
    before = config.model_dump(mode="json")
    del before["optim"]["betas"]
    if refused:
        with pytest.raises(ValueError, match=r"optim\.betas: \[0\.9, 0\.999\] then, \[0\.9, 0\.99\] now"):
            check_changes(before, config, since="step-000010", allowed=False)
    assert len(check_changes(before, config, since="step-000010", allowed=True)) == int(refused)


@pytest.mark.parametrize(
    ("change", "invalidates"),
    [
        (Change("optim.learning_rate", 0.1, 0.2), False),
        (Change("run.num_steps", 1, 2), False),
        (Change("run.seed", 1, 2), True),
        (Change("model.path", "a", "b"), True),
        (Change("task.system_prompt", None, "optim."), True),
        (ChangedInput("training rows", "have changed"), True),
    ],
)
def test_what_a_method_keeps_of_its_rows_is_discarded_where_they_may_be_others(
    change: Change | ChangedInput, invalidates: bool
) -> None:
    assert change_invalidates(change) is invalidates


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_an_edited_config_is_refused_and_nothing_of_the_run_changes(model: Path, tmp_path: Path) -> None:
    _, run, _ = running.train(running.config("grpo", model), tmp_path, stop_at=60)
    written = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(written.replace("learning_rate: 0.01", "learning_rate: 0.5"))
    records = run.lengths()
    with pytest.raises(ValueError, match=r"optim.learning_rate: 0\.01 then, 0\.5 now"):
        running.go_on(run)
    assert run.lengths() == records


def test_weights_of_another_shape_are_refused_with_the_setting_that_changed(model: Path, tmp_path: Path) -> None:
    lora = {"enabled": True, "r": 4}
    _, run, _ = running.train(running.config("grpo", model, lora=lora), tmp_path, stop_at=60)
    with pytest.raises(
        ValueError, match=r"\(4, 64\) there, and \(8, 64\) here\nchanged since step-0+\d: lora\.r: 4 then, 8 now"
    ):
        running.go_on(run, config=changed_config(run, ["lora.r=8"]), allow_config_change=True)
    assert run.read_config().lora.r == 4


@pytest.mark.slow
def test_a_finished_run_is_made_longer(model: Path, tmp_path: Path) -> None:
    """As if it had been that long from the beginning: only the number of steps differs."""
    code, whole, _ = running.train(running.config("grpo", model, run={"num_steps": 5}), tmp_path, name="whole")
    assert code == 0
    _, run, _ = running.train(running.config("grpo", model, run={"num_steps": 4}), tmp_path, name="short")
    longer = changed_config(run, ["run.num_steps=5"])
    assert running.go_on(run, config=longer) == 0
    assert run.read_config().run.num_steps == 5
    assert running.lasting(run) == running.lasting(whole)
    ours, theirs = running.weights(run, 5), running.weights(whole, 5)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def scheduled(schedule: str, num_steps: int, *, warmup_steps: int = 0) -> Config:
    optim = {"learning_rate": 5e-4, "schedule": schedule, "warmup_steps": warmup_steps}
    return config_of({"method": "grpo", "optim": optim, "run": {"num_steps": num_steps}})


# Rates of a linear schedule of 5e-4 over 20 steps: the 20th step has 1/20 of it. Over 25 steps the 21st has 5/25. A
# cosine over 20 steps has (1 + cos(0.95 pi)) / 2 of it in the 20th; over 40 the 21st has a half.
JUMPS = [("linear", 20, 25, "2.5e-05", "0.0001"), ("cosine", 20, 40, "3.08e-06", "0.00025")]


@pytest.mark.parametrize(("schedule", "then", "now", "rate_before", "rate_after"), JUMPS)
def test_a_falling_schedule_is_stretched_only_where_it_is_allowed_and_with_both_rates(
    schedule: str, then: int, now: int, rate_before: str, rate_after: str
) -> None:
    before, config = scheduled(schedule, then).written(), scheduled(schedule, now)
    both = rf"step 20 was {rate_before}, that of step 21 is {rate_after}\b"
    with pytest.raises(ValueError, match=both):
        check_schedule(before, config, step=20, allowed=False)
    [note] = check_schedule(before, config, step=20, allowed=True)
    assert re.search(both, note)


def test_a_longer_run_whose_rate_does_not_jump_is_no_stretched_schedule() -> None:
    """A constant rate, the warm-up of a falling one, and its first step."""
    for schedule, warmup_steps, step in (("constant", 0, 20), ("linear", 8, 7), ("cosine", 0, 0)):
        before = scheduled(schedule, 20, warmup_steps=warmup_steps).written()
        config = scheduled(schedule, 400, warmup_steps=warmup_steps)
        assert check_schedule(before, config, step=step, allowed=False) == []


def test_a_run_under_a_stretched_schedule_has_the_rates_of_its_note(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = {"schedule": "linear", "learning_rate": 1e-2}
    _, run, _ = running.train(running.config("grpo", model, optim=optim, run={"num_steps": 2}), tmp_path)
    longer = changed_config(run, ["run.num_steps=3"])
    records = run.lengths()
    with pytest.raises(ValueError, match=r"was 0\.005, that of step 3 is 0\.00333"):
        running.go_on(run, config=longer)
    assert run.lengths() == records
    assert run.read_config().run.num_steps == 2
    capsys.readouterr()
    assert running.go_on(run, config=longer, allow_config_change=True) == 0
    assert "was 0.005, that of step 3 is 0.00333" in capsys.readouterr().err
    rates = [line["optim/learning_rate"] for line in running.metrics(run)[1:]]
    assert rates == pytest.approx([1e-2, 5e-3, 1e-2 / 3])
