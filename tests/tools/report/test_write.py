"""write_report: both files, whole, the same bytes every time, for any run."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import write_run
from tinyrl.tools.report import write_report


def test_the_same_run_gives_the_same_bytes(grpo: tuple[Path, str]) -> None:
    import matplotlib

    run, html = grpo
    picture = (run / "report.png").read_bytes()
    with matplotlib.rc_context():
        matplotlib.rcParams["xtick.labelsize"] = (
            30  # a person's own style neither shows in the report nor is changed by it
        )
        write_report(run)
        assert matplotlib.rcParams["xtick.labelsize"] == 30
    assert (run / "report.html").read_text("utf-8") == html
    assert (run / "report.png").read_bytes() == picture
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_a_failed_write_leaves_the_old_report(grpo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, html = grpo

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert (run / "report.html").read_text("utf-8") == html
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_a_run_of_many_steps_makes_a_small_page(tmp_path: Path) -> None:
    """Held-out points are left out evenly, in charts and table; the first and the last stay, with their values."""
    metrics = [{"step": step, "eval/reward_mean": step / 3000, "eval/reward_ci": [0, 1]} for step in range(3000)]
    html, picture = write_report(write_run(tmp_path / "run", metrics))
    text = html.read_text("utf-8")
    assert html.stat().st_size < 300_000
    assert picture.stat().st_size < 300_000
    assert "Held-out measurements in numbers: 100 of 3000, the others are in metrics.jsonl" in text
    assert text.count('<tr><td class="n">') == 100
    assert '<td class="n">2999</td>' in text


def test_report_never_imports_torch_and_imports_fast(grpo: tuple[Path, str]) -> None:
    code = (
        "import sys; from pathlib import Path; import tinyrl.tools.report\n"
        "slow = {'torch', 'transformers', 'matplotlib', 'numpy', 'yaml'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        f"tinyrl.tools.report.write_report(Path({str(grpo[0])!r}))\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    assert (grpo[0] / "report.html").read_text("utf-8") == grpo[1]  # another process, another hash seed


@pytest.mark.parametrize(
    "metrics",
    [
        [{"step": 1, "reward/mean": 0.5}],
        [{"step": 0, "eval/reward_mean": 0.5}],
        [{"step": 1}],
        [{"step": 1, "reward/mean": None, "loss": float("inf")}],
        [{"step": 1, "reward/mean": 1e308}, {"step": 2, "reward/mean": 10**400}, {"step": 3, "reward/mean": 2}],
        [{"step": 2**52, "reward/mean": 1, "reward/$a^{$": 2, "reward/\u202e": 3, "time/$x_$": 1, "time/total": -3}],
        [{"step": 1, "optim/grad_norm": 1e-300}, {"step": 2, "optim/grad_norm": 1e90}],
    ],
    ids=["one step", "step 0", "nothing", "not finite", "enormous", "names", "range"],
)
def test_any_run_can_be_reported(tmp_path: Path, metrics: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a name in a script that the font lacks is no reason for one
        paths = write_report(write_run(tmp_path / "试验", metrics))
    assert [path.name for path in paths] == ["report.html", "report.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_backend_that_is_not_here_does_not_matter(tmp_path: Path) -> None:
    """MPLBACKEND of a notebook's kernel, and a matplotlibrc that names another one: a process of its own imports it."""
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    (tmp_path / "matplotlibrc").write_text("backend: nowhere\n")
    code = f"from pathlib import Path; from tinyrl.tools.report import write_report; write_report(Path({str(run)!r}))"
    theirs = {"MPLBACKEND": "not_installed", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **theirs}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "report.png").is_file()
