"""Findings of `tinyrl doctor RUN` as warnings of the run itself: once, and not again after a resume."""

from pathlib import Path

import pytest

from tests.running import config, go_on, lasting, train
from tests.tiny_models import TinyModels
from tinyrl.runs.findings import Watch

SECTIONS = {"run": {"num_steps": 40, "eval_every": 0, "save_every": 16}, "optim": {"learning_rate": 1e-6}}


@pytest.mark.slow
def test_a_resumed_run_says_it_no_more_and_watching_changes_nothing(
    tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("grpo", tiny("llama"), **SECTIONS)
    _, whole, looks = train(settings, tmp_path, name="whole")
    code, run, _ = train(settings, tmp_path, name="stopped", stop_at=looks // 2)  # what is left could say it again
    assert code == 75
    assert "warning: truncation: " in capsys.readouterr().err
    assert go_on(run) == 0
    assert "warning: truncation: " not in capsys.readouterr().err
    assert lasting(run) == lasting(whole)
    monkeypatch.setattr(Watch, "look", lambda self, step, line: [])
    _, unwatched, _ = train(settings, tmp_path, name="unwatched")
    assert lasting(unwatched) == lasting(whole)
