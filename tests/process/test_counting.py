"""Long work before a run has a display: what it prints."""

import pytest

from tinyrl.process.counting import counted


def test_work_that_takes_long_prints_how_much_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyrl.process.counting.LINE_EVERY_S", -1.0)
    assert [*counted("abc", what="prompts", each=2000, total=5000)] == [*"abc"]
    assert capsys.readouterr().err.splitlines() == [f"prompts: {done} of 5,000" for done in ("0", "2,000", "4,000")]
    monkeypatch.setattr("tinyrl.process.counting.LINE_EVERY_S", 1e9)
    assert [*counted("abc", what="prompts")] == [*"abc"]
    assert capsys.readouterr().err == ""
