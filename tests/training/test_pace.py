"""A machine that gets busy: slow steps are found, threads are calibrated again, and do not spin at barriers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.training.pace import Pace


def test_a_step_three_times_slower_than_the_median_is_slow() -> None:
    pace = Pace()
    assert [pace.slowed(s) for s in (1.0, 9.0, 1.0, 1.0, 1.0)] == [None] * 5  # too few to know
    assert pace.slowed(3.0) is None
    assert pace.slowed(4.0) == 4.0
    assert [pace.slowed(s) for s in (4.0, 4.0, 4.0, 4.0, 4.0)] == [None] * 5  # that is usual now
    assert pace.slowed(14.0) == 3.5


@pytest.mark.parametrize(("threads", "deterministic", "times"), [("auto", False, 2), (1, False, 1), ("auto", True, 1)])
def test_threads_are_calibrated_again_where_they_were_chosen_here(
    threads: str | int,
    deterministic: bool,
    times: int,
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the start, and after the second step, which this test makes slow; not where a run must repeat itself."""
    calls: list[str] = []
    for module in ("launch", "session"):
        monkeypatch.setattr(f"tinyrl.training.{module}.settle_threads", lambda parts: calls.append("") or "calibrated")
    answers = iter([None, None, 8.0, None])
    monkeypatch.setattr(Pace, "slowed", lambda self, seconds: next(answers))
    run = {"threads": threads, "deterministic": deterministic}
    assert running.train(running.config("grpo", tiny("llama"), run=run), tmp_path)[0] == 0
    assert len(calls) == times


WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":
            print("at torch:", os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit
sys.meta_path.insert(0, Watch())
from tinyrl.cli.commands import main
sys.argv = ["tinyrl", "train", "grpo", "--dry-run"]
main()
"""


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, "30000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE")],
)
def test_threads_stop_spinning_before_torch_is_imported(given: dict[str, str], seen: str) -> None:
    """libgomp reads its environment when it is loaded; what a person has set stays."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WATCH], env={**clean, **given}, capture_output=True, text=True, check=False
    )
    assert f"at torch: {seen}\n" in done.stdout
