"""Signals: they only set a flag; a second Ctrl-C leaves at once; the old handlers come back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinyrl.process.errors import Interrupted
from tinyrl.process.signals import SIGNALS, StopFlag, check_stop, stop_held


@pytest.fixture(autouse=True)
def _not_under_nohup():
    """Tests may themselves run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals):
    before = signal.getsignal(number)
    with StopFlag() as flag:
        flag.check()
        os.kill(os.getpid(), number)
        for _ in range(2):  # it stays set
            with pytest.raises(Interrupted, match=number.name):
                flag.check()
    assert signal.getsignal(number) == before


def test_long_work_looks_at_the_innermost_flag():
    check_stop()  # no flag is in use, as in a notebook or a test
    told: list[str] = []
    with StopFlag() as outer, StopFlag() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.by, inner.by) == (None, "SIGTERM")
        with pytest.raises(Interrupted, match="SIGTERM"):
            check_stop()
        with stop_held(told.append):
            with stop_held():
                check_stop()
            check_stop()  # what has begun is finished
        assert told == ["SIGTERM"]
        with pytest.raises(Interrupted, match="SIGTERM"):
            check_stop()
    check_stop()


def test_a_closed_terminal_does_not_stop_a_run_started_with_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopFlag() as flag:
        os.kill(os.getpid(), signal.SIGHUP)
        flag.check()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("signals", "code", "printed"),
    [
        ("SIGINT SIGINT", 130, ""),
        ("SIGTERM SIGINT", 130, ""),
        ("SIGINT SIGTERM SIGTERM", 0, "going on, stopped by SIGINT\n"),
    ],
)
def test_a_second_ctrl_c_leaves_at_once(signals: str, code: int, printed: str):
    script = "import os, signal\nfrom tinyrl.process.signals import StopFlag\nwith StopFlag() as flag:\n"
    script += "".join(f"    os.kill(os.getpid(), signal.{name})\n" for name in signals.split())
    script += "    print('going on, stopped by', flag.by)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


def test_where_the_process_is_to_stay_a_second_ctrl_c_is_a_keyboard_interrupt():
    with StopFlag(signals=(signal.SIGINT,), leaves=False) as flag:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGINT)
        assert flag.by == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
