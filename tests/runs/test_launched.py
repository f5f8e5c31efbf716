"""Processes of a launcher, and which of them prints."""

import pytest

from tinyrl.runs.launched import Launched, RankPrinter, launched, launched_rank

ALL = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_sixth_of_eight_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **{**ALL, "WORLD_SIZE": "1"})
    assert launched() == Launched(0, 1, 0, 1)
    launch(monkeypatch, **ALL)
    assert launched() == Launched(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert launched_rank() == 5


def test_half_of_a_launch_and_sharding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, named in (
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**ALL, "RANK": "five"}, "RANK"),
        ({**ALL, "ACCELERATE_USE_FSDP": "true"}, "FSDP"),
    ):
        launch(monkeypatch, **variables)
        with pytest.raises(ValueError, match=named):
            launched()


def test_one_process_of_a_machine_prints_until_they_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    voice = RankPrinter()
    assert voice.speaks("a")
    launch(monkeypatch, **ALL)
    assert not voice.speaks("a")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert voice.speaks("a")
    voice.connected = lambda sentence: sentence == "b"
    assert [voice.speaks(sentence) for sentence in "ab"] == [False, True]
