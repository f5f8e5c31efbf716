"""Trackers that fail: each is named once and switched off, and the run goes on."""

from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tinyrl.runs.tracking import Trackers, check_trackers


class Good:
    requires_logging_directory = False
    logged: list = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name

    def store_init_configuration(self, values: dict) -> None:
        pass

    def log(self, values: dict, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        pass


class Failing(Good):
    calls = 0

    def log(self, values: dict, step: int) -> None:
        type(self).calls += 1
        raise ConnectionError("network down")


def test_a_failing_tracker_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Failing)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Good)
    notes: list[str] = []
    trackers = Trackers(["wandb", "mlflow"], tmp_path, config={}, note=notes.append)
    for step in range(3):
        trackers.log({"loss": 1.0, "text": "left out", "list": [1]}, step)
    trackers.close()
    assert Failing.calls == 1
    assert notes == ["warning: tracker wandb failed and is switched off: ConnectionError: network down"]
    assert Good.logged == [(step, {"loss": 1.0}) for step in range(3)]


def test_unknown_tracker() -> None:
    with pytest.raises(ValueError, match=r"no tracker 'wandbb'.*Did you mean `wandb`"):
        check_trackers(["wandbb"])
