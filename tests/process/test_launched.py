"""Processes of a launcher."""

import pytest

from tinyrl.process.launched import Launched, launched

ALL = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **{**ALL, "WORLD_SIZE": "1"})
    assert launched() == Launched(0, 1, 0, 1)
    launch(monkeypatch, **ALL)
    assert launched() == Launched(rank=5, world_size=8, local_rank=1, local_world_size=4)
    for half in ({"WORLD_SIZE": "2"}, {**ALL, "RANK": "five"}):
        launch(monkeypatch, **half)
        with pytest.raises(ValueError, match="RANK"):
            launched()
