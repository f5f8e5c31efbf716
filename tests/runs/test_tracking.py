"""Trackers: steps after a resume, failures, and the check before a run starts."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tinyrl.config.schema import Config
from tinyrl.runs.tracking import Trackers, check_trackers, flat


class Tracker:
    """Fails when it is `start`ed or when it `log`s, or never."""

    logged: ClassVar[list[tuple[str, int, dict[str, Any]]]] = []

    def __init__(self, run_name: str, *, fails: str = "") -> None:
        self.fails = fails
        if fails == "start":
            raise OSError("no such server")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((self.fails, step, values))
        if self.fails:
            raise ConnectionError("network down")

    def finish(self) -> None:
        pass


def log(name: str, run: Path) -> None:
    """Log as a run that is killed after step 4, and goes on from the checkpoint of step 2."""
    notes: list[str] = []
    line = {"kind": "eval", "prompt": "2 + 2 =", "completion": "4", "reward": 1.0, "finish_reason": "eos", "sample": 0}
    for first, last in ((0, 4), (3, 5)):
        config = Config.model_validate({"method": "grpo"}).written()
        trackers = Trackers([name], run, config=config, note=notes.append)
        trackers.start(first)
        for step in range(first, last + 1):
            trackers.log_completions([line, line | {"kind": "eval-greedy"}], step)
            trackers.log({"reward/mean": 10.0 + step, "text": "left out", "absent": None}, step)
        trackers.close()
    assert notes == []


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the extra `track`")
def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    PartialState(cpu=True)
    log("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(n, 10.0 + n) for n in range(6)]
    stored = [path.read_text() for path in (tmp_path / "tensorboard").rglob("hparams.yml")]
    assert stored
    assert all("grpo.group_size: 8\n" in text for text in stored)


def test_wandb_goes_on_in_the_same_run_by_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, axes, logged = list[dict[str, Any]](), list[tuple[str, str]](), list[tuple[dict[str, Any], int | None]]()

    class Wandb(Tracker):
        tracker = SimpleNamespace(define_metric=lambda name, step_metric: axes.append((name, step_metric)))

        def __init__(self, run_name: str, **arguments: Any) -> None:
            opened.append({"run_name": run_name, **arguments})

        def log(self, values: dict[str, Any], step: int | None) -> None:
            logged.append((values, step))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Wandb)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda columns, data: data))
    for name in ("WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run-1").mkdir()
    log("wandb", tmp_path / "run-1")
    assert opened[0] == opened[1]
    assert (opened[0]["run_name"], opened[0]["name"], opened[0]["resume"]) == ("tinyrl", "run-1", "allow")
    assert axes == [("*", "step")] * 2
    assert {step for _, step in logged} == {None}
    numbers = [values for values, _ in logged if "reward/mean" in values]
    assert numbers == [{"reward/mean": 10.0 + step, "step": step} for step in (0, 1, 2, 3, 4, 3, 4, 5)]
    tables = [values for values, _ in logged if "completions" in values]
    assert tables[0] == {"completions": [[0, "2 + 2 =", "4", 1.0, "eos"]], "step": 0}


def test_a_failing_tracker_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fails in {"swanlab": "log", "aim": "", "dvclive": "start"}.items():
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, partial(Tracker, fails=fails))
    notes: list[str] = []
    trackers = Trackers(["swanlab", "aim", "dvclive"], tmp_path, config={}, note=notes.append)
    trackers.start(0)
    for step in range(3):
        trackers.log({"loss": 1.0, "text": "left out", "list": [1]}, step)
    trackers.close()
    assert ["dvclive" in note and "no such server" in note for note in notes] == [True, False]
    assert ["swanlab" in note and "network down" in note for note in notes] == [False, True]
    assert [one for one in Tracker.logged if one[0]] == [("log", 0, {"loss": 1.0})]
    assert [one for one in Tracker.logged if not one[0]] == [("", step, {"loss": 1.0}) for step in range(3)]


def test_a_configuration_is_flattened_to_plain_values() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": None, "e": [1, "x"], "f": {}}, "g": True, "h": 0.5, "i": "text"}) == {
        "a.b.c": 1, "a.d": "null", "a.e": '[1, "x"]', "a.f": "{}", "g": True, "h": 0.5, "i": "text",
    }  # fmt: skip
    values = flat(Config.model_validate({"method": "ppo"}).written())
    assert values["ppo.kl_coef"] == 0.05
    assert all(isinstance(value, bool | int | float | str) for value in values.values())


def test_a_tracker_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, found in {"wandb": "pip install wandb", "wandd": "`wandb`"}.items():
        with pytest.raises(ValueError, match=f"run.trackers.*{found}"):
            check_trackers([name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboardX" or None)
    check_trackers(["tensorboard"])
