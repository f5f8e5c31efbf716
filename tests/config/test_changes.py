"""Resuming with changed settings: refused with both values, unless it is asked for."""

from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.changes import Change, changed_settings
from tinyrl.config.recipe import load_config
from tinyrl.training.launch import ChangedInput, change_invalidates, check_changes


def test_changed_settings_have_both_values() -> None:
    before = {"optim": {"learning_rate": 0.1, "schedule": "constant"}, "reward": {"model": None, "gone": 1}}
    now = {"optim": {"learning_rate": 0.2, "schedule": "constant", "new": 3}, "reward": {"model": "x"}}
    changes = changed_settings(before, now)
    assert changes == [Change("optim.learning_rate", 0.1, 0.2), Change("reward.model", None, "x")]
    assert [str(change) for change in changes] == [
        "optim.learning_rate: 0.1 then, 0.2 now",
        'reward.model: null then, "x" now',
    ]


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


@pytest.mark.slow
def test_a_finished_run_is_made_longer(model: Path, tmp_path: Path) -> None:
    """As if it had been that long from the beginning: only the number of steps differs."""
    code, whole, _ = running.train(running.config("grpo", model, run={"num_steps": 5}), tmp_path, name="whole")
    assert code == 0
    _, run, _ = running.train(running.config("grpo", model, run={"num_steps": 4}), tmp_path, name="short")
    longer = run.read_config(["run.num_steps=5"])
    assert running.go_on(run, config=longer) == 0
    assert run.read_config().run.num_steps == 5
    assert running.lasting(run) == running.lasting(whole)
    ours, theirs = running.weights(run, 5), running.weights(whole, 5)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
