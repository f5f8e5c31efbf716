"""The progress display: a line a step, a bar below them in a terminal, and nothing that could stop a run."""

import io
import math
import os
import re
import subprocess
import sys

import pytest

from tinyrl.runs import progress as module
from tinyrl.runs.progress import Display


def test_a_line_a_step_estimates_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = Display(num_steps=3)
    shown.start()
    shown.step(0, {"eval/reward_mean": 0.25, "eval/pass@1": 0.125})
    now[0] += 60
    shown.step(1, {"reward/mean": 0.5, "objective/kl": 0.01234, "tokens_per_second": 1234.5, "unknown": 3})
    shown.step(2, {"objective/kl": None, "eval/reward_mean": 0.5, "eval/pass@1": 0.5})  # the same, printed once
    shown.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "step 0/3 · held-out 0.25 · pass@1 0.125",
        "step 1/3 · reward 0.5 · kl 0.0123 · tokens/s 1,234 · 02:00 left",
        "step 2/3 · held-out 0.5 · 00:30 left",
    ]


def test_a_metric_that_is_unknown_is_left_out(capsys: pytest.CaptureFixture[str]):
    shown = Display(num_steps=3)
    shown.step(0, {"eval/reward_mean": math.nan, "eval/kl": 0.0, "policy/entropy": 1.5, "objective/kl": None})
    assert capsys.readouterr().err.splitlines() == ["step 0/3 · entropy 1.5"]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ("57", "step 1/3 · reward 0.5 · kl 0.0123 · length 9 · 00:20 left"),  # 57 characters
        ("56", "step 1/3 · reward 0.5 · kl 0.0123 · 00:20 left"),
        ("10", "step 1/3 · 00:20 left"),
    ],
)
def test_in_a_terminal_a_step_is_one_line(columns: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stderr", screen)
    shown = Display(num_steps=3)
    shown.start()
    now[0] += 10
    shown.step(
        1, {"reward/mean": 0.5, "objective/kl": 0.01234, "completion/mean_length": 9.0, "tokens_per_second": 99.0}
    )
    shown.close()
    assert screen.getvalue().replace("\r\x1b[K", "").splitlines() == [line]


def test_in_a_terminal_the_status_is_not_that_of_a_step_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    shown = Display(num_steps=3)
    shown.start()
    shown.phase("update")
    shown.note("a note")
    assert screen.getvalue().endswith("a note\nstep 1/3: update")
    shown.step(1, {"reward/mean": 0.5})
    assert screen.getvalue().endswith(" left\n")


class Screen(io.StringIO):
    """Standard error that can be closed; a terminal or a pipe."""

    gone, terminal = False, True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        if self.gone:
            raise BrokenPipeError

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_screen_gets_no_escapes_and_one_that_is_gone_stops_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    screen = Screen()
    screen.terminal = terminal
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", screen)  # not by a fixture: pytest sets it again before a test
    shown = Display(num_steps=60)
    shown.start()
    shown.step(1, {"reward/mean": 0.481})
    shown.sample([{"kind": "eval-greedy", "prompt": "a?", "completion": "b", "reward": 1.0}])
    shown.phase("sampling")
    shown.note("prompt \x1b]0;owned\x07 \u202egnihtemos\ud800 " + "x" * 100)
    assert "[ESC]]0;owned[U+0007] [U+202E]gnihtemos[U+D800] " + "x" * 100 in screen.getvalue()
    assert not {"\x07", "\u202e", "\ud800"} & set(screen.getvalue())
    screen.gone = True
    shown.phase("evaluation")
    shown.step(2, {"reward/mean": 0.5})
    screen.gone = False
    shown.phase("update")
    shown.close()
    assert "step 2/60 ·" not in screen.getvalue()
    lines = re.sub(r"\x1b\[K", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert any(line.startswith("step 1/60 · reward 0.481") for line in lines)
    assert ("  policy (reward 1): b" in lines) == ("step 3/60: update" in lines) == terminal


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_result_that_nobody_can_read_changes_no_exit_code(kind: str):
    gone, closed = os.pipe()
    os.close(gone)
    code = "from tinyrl.runs.progress import tell\ntell('result')\nprint('more')"
    with open("/dev/full" if kind == "full" else closed, "w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
