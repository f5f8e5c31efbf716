"""A hub that cannot be reached."""

import os

import pytest

from tinyrl.cli.preflight import ask_hub_once
from tinyrl.config.schema import Config


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that nothing is asked from then on is said."""
    asked: list[str] = []

    def refuse(request: object, *, timeout: float) -> None:
        asked.append(getattr(request, "full_url", ""))
        raise OSError("no network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is taken away again
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    ask_hub_once(Config.model_validate({"method": "grpo", "task": {"name": "sort"}}))
    assert asked == []
    for _ in range(2):
        ask_hub_once(Config.model_validate({"method": "grpo", "model": {"path": "own/tiny"}}))
    assert len(asked) == 1
    assert capsys.readouterr().err.count("HF_HUB_OFFLINE") == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"
