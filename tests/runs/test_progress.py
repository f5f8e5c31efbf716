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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_one_line_a_step_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], clock: list[float]):
    shown = Display(num_steps=4)
    shown.start()
    shown.step(0, {"eval/reward_mean": 0.25, "eval/pass@1": 0.125})
    clock[0] += 60
    shown.step(1, {"reward/mean": 0.5, "objective/kl": 0.01234, "tokens_per_second": 1234.5, "unknown": 3})
    clock[0] += 60
    shown.step(2, {"reward/mean": 0.75, "objective/kl": None, "eval/reward_mean": math.nan})
    shown.note("a note")
    shown.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "step 0/4 · held-out 0.25 · pass@1 0.125 · starting",
        "step 1/4 · reward 0.5 · held-out 0.25 · pass@1 0.125 · kl 0.0123 · tokens/s 1,234 · 03:00 left",
        "step 2/4 · reward 0.75 · held-out nan · pass@1 0.125 · kl 0.0123 · tokens/s 1,234 · 02:00 left",
        "a note",
    ]


class Screen(io.StringIO):
    """A terminal that can be closed."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        if self.gone:
            raise BrokenPipeError

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int = 120) -> Screen:
    """Replace standard error by a terminal. (Not a fixture: pytest sets sys.stderr again before a test.)"""
    screen = Screen()
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(("columns", "last"), [(60, "entropy"), (72, "length"), (80, "tokens/s")])
def test_a_line_a_step_stays_above_the_bar_and_fits(columns: int, last: str, monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch, columns=columns)
    shown = Display(num_steps=60)
    shown.start()
    shown.step(0, {"eval/reward_mean": 0.4123, "eval/pass@1": 0.39})
    shown.phase("evaluation")
    numbers = {"policy/entropy": 0.77, "completion/mean_length": 7.8, "tokens_per_second": 15234.0}
    shown.step(1, {"reward/mean": 0.481, "objective/kl": 0.00369, **numbers})
    shown.close()
    lines = ESCAPES.sub("", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= columns
    at = next(number for number, line in enumerate(lines) if line.startswith(" step"))
    header, row = lines[at].split(), lines[at + 1].split()
    assert header[:5] == ["step", "reward", "held-out", "pass@1", "kl"]
    assert header[-1] == last
    numbers = ["1/60", "0.481", "0.412", "0.39", "0.00369", "0.77", "7.8", "15,234"]
    assert row == numbers[: len(row)]
    assert len(row) == len(header)
    assert len(lines[at]) == len(lines[at + 1])
    bar = [line for line in lines if line][-1]
    assert bar.startswith("evaluation ")
    assert " 1/60 " in bar
    assert len(re.findall("[━╸╺]", bar)) > columns - 45  # what the others leave


@pytest.mark.parametrize("kind", ["terminal", "file"])
def test_escapes_in_a_note_do_not_reach_the_terminal(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    screen = open_terminal(monkeypatch) if kind == "terminal" else None
    shown = Display(num_steps=4)
    shown.start()
    shown.note("prompt \x1b]0;owned\x07 \u202egnihtemos\ud800")
    shown.close()
    written = screen.getvalue() if screen else capsys.readouterr().err
    assert "[ESC]]0;owned[U+0007] [U+202E]gnihtemos[U+D800]" in written
    assert not {"\x07", "\u202e", "\ud800"} & set(written)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch)
    shown = Display(num_steps=4)
    shown.start()
    terminal.gone = True
    shown.phase("sampling")
    shown.step(1, {"reward/mean": 0.5})
    shown.note("nobody reads this")
    shown.close()  # nothing raised
    assert "nobody reads this" not in terminal.getvalue()


def test_a_pipe_that_is_closed_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    shown = Display(num_steps=4)
    shown.start()
    shown.note("somebody reads this")
    terminal.gone = True
    shown.step(1, {"reward/mean": 0.5})
    shown.close()
    assert terminal.getvalue() == "somebody reads this\n"


def test_one_header_stands_above_the_lines_and_no_number_twice(monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch)
    shown = Display(num_steps=9)
    shown.start()
    for step in range(4):
        held_out = {"eval/reward_mean": 0.5 * step, "eval/pass@1": 0.5 * step}
        shown.step(step, held_out if step == 0 else {"reward/mean": 0.25, **held_out})
    text = ESCAPES.sub("", terminal.getvalue())
    assert text.count("held-out\n") == 1
    assert "pass@1" not in text
    shown.step(4, {"eval/pass@1": 0.25})
    assert "held-out    pass@1\n" in (text := ESCAPES.sub("", terminal.getvalue()))
    shown.step(5, {"eval/pass@1": 1.5})  # once shown it stays
    shown.close()
    assert ESCAPES.sub("", terminal.getvalue()).count("held-out") == text.count("held-out")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_result_that_nobody_can_read_changes_no_exit_code(kind: str):
    gone, closed = os.pipe()
    os.close(gone)
    code = "from tinyrl.runs.progress import tell\ntell('result')\nprint('more')"
    with open("/dev/full" if kind == "full" else closed, "w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
