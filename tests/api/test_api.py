"""tinyrl in a script or a notebook: the command's run bit for bit, interrupts that save, one run at a time."""

import datetime
import decimal
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyrl
from tests import running
from tests.tiny_models import TinyModels
from tests.varied_reward import variety
from tinyrl.api import OpenedRun, OpenedSeeds, alone, overrides_from, whole_numbers
from tinyrl.config.given import apply_overrides
from tinyrl.data.sources import placed_rows
from tinyrl.process.errors import CodeChanged
from tinyrl.process.signals import check_stop
from tinyrl.runs.folders import FolderLock
from tinyrl.runs.run_dir import open_run

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"letters: {a} {b} sorted:"} for a in "abcdefgh" for b in "ijkl"]
FEW: dict[str, Any] = {
    "grpo.num_prompts": 4,
    "grpo.group_size": 4,
    "generation": {"max_new_tokens": 6},
    "run": {"num_steps": 2, "eval_every": 1, "eval_prompts": 4, "save_every": 1, "threads": 1},
}


@pytest.fixture(autouse=True)
def _without_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no report, which takes longer than they do, but where a test is marked `whole`."""
    if request.node.get_closest_marker("whole") is None:
        monkeypatch.setattr("tinyrl.api.write_report", lambda folder: ())


def run_of(tiny: TinyModels, folder: Path, **more: Any) -> Any:
    settings = {**FEW, "model.path": str(tiny("llama")), "optim.learning_rate": 1e-2}
    return tinyrl.train("grpo", None, settings, reward=variety, rows=ROWS, output_dir=str(folder), **more)


@pytest.mark.slow
def test_it_is_the_commands_run_bit_for_bit(tiny: TinyModels, tmp_path: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    mine = run_of(tiny, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    [rows] = (tmp_path / "a" / "inputs").glob("rows-*.jsonl")
    words = [f"model.path={tiny('llama')}", "optim.learning_rate=0.01", f"task.data={rows}", *overrides_from(FEW)]
    words += [f"reward.functions=[{{use: '{ROOT / 'tests' / 'varied_reward.py'}:variety'}}]"]
    command = [sys.executable, "-m", "tinyrl", "train", "grpo", *words, "--output-dir", str(tmp_path / "b")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=tmp_path)
    theirs = open_run(tmp_path / "b" / "grpo-rows-1")
    assert running.lasting(open_run(mine.path)) == running.lasting(theirs)
    assert (mine.path / "samples.jsonl").read_bytes() == theirs.samples.read_bytes()
    a, b = running.weights(open_run(mine.path), 2), running.weights(theirs, 2)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.whole
def test_a_run_has_its_metrics_samples_report_and_policy(tiny: TinyModels, tmp_path: Path):
    run = run_of(tiny, tmp_path, name="mine")
    assert (run.exit_code, run.finished, run.name) == (0, True, "mine")
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert {row["kind"] for row in run.samples(step=2)} >= {"eval", "eval-greedy"}
    assert {row["kind"] for row in run.samples(kind="train")} == {"train"}
    assert "step 2 of 2" in repr(run)
    page = run.report()._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert 'sandbox=""' in page
    assert "<script" not in page
    with run.policy(device="cpu") as policy:
        assert isinstance(policy("letters: b a sorted:", greedy=True), str)
    assert tinyrl.open_run(run.path).metrics == run.metrics
    result = tinyrl.evaluate(run, vs="base", num_prompts=3, device="cpu")
    assert result["num_prompts"] == 3
    json.dumps(result, allow_nan=False)
    assert run.resume().exit_code == 0


def test_an_interrupt_saves_returns_the_run_and_it_goes_on_bit_for_bit(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = run_of(tiny, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 8:
            signal.raise_signal(signal.SIGINT)
        check_stop()

    with monkeypatch.context() as patched:
        patched.setattr("tinyrl.generation.engine.check_stop", look)
        run = run_of(tiny, tmp_path / "cut")
    assert run.exit_code == 75
    assert not run.finished
    assert "interrupted" in repr(run)
    assert signal.getsignal(signal.SIGINT) is handler
    run.resume()
    assert (run.exit_code, run.finished) == (0, True)
    assert running.lasting(open_run(run.path)) == running.lasting(open_run(whole.path))


# ---- several seeds ----


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of several seeds name their file and are not drawn."""
    monkeypatch.setattr("tinyrl.tools.report._write", lambda folder, *_, **__: [folder / "report.html"])


# Fast: tests/cli/test_seeds.py has which seeds are trained, left and resumed.
@pytest.mark.slow
@pytest.mark.usefixtures("_undrawn")
def test_seeds_are_the_runs_one_by_one_and_the_same_call_goes_on(
    tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tinyrl.train(
        "grpo",
        None,
        {**FEW, "model.path": str(tiny("llama")), "optim.learning_rate": 1e-2, "run.seed": 1},
        reward=variety,
        rows=ROWS,
        output_dir=tmp_path / "one",
    )
    stopped = run_of(tiny, tmp_path, seeds=2, name="x", on_step=lambda line: "stop" if line["step"] == 1 else None)
    assert (stopped.exit_code, [len(run.metrics) for run in stopped]) == (0, [2, 2])
    capsys.readouterr()
    seeds = run_of(tiny, tmp_path, seeds=2, name="x")
    assert "95 % t interval" in capsys.readouterr().out
    assert [run.path for run in seeds] == [tmp_path / "x" / "seed-0", tmp_path / "x" / "seed-1"]
    assert seeds.report().path == tmp_path / "x" / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == {"one", "x", "inputs"}
    assert running.lasting(open_run(seeds[1].path)) == running.lasting(open_run(one.path))
    first, second = (running.weights(open_run(path), 2) for path in (seeds[1].path, one.path))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    before = (seeds[1].path / "metrics.jsonl").stat().st_mtime_ns
    run_of(tiny, tmp_path, seeds=2, name="x")
    assert (seeds[1].path / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(("given", "seeds"), [(3, 3), ([3, 7], [3, 7]), (range(2), [0, 1]), (np.array([4, 2]), [4, 2])])
def test_seeds_are_how_many_or_which(given: Any, seeds: int | list[int]) -> None:
    assert whole_numbers(given) == seeds


@pytest.mark.parametrize("given", ["37", 2.0, [0.5, 2], ["3", "7"], None])
def test_seeds_that_are_no_whole_numbers_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="seeds="):
        whole_numbers(given)


def test_a_report_of_seeds_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no seed has a finished step"):
        OpenedSeeds(tmp_path, [], exit_code=4).report()


@pytest.mark.parametrize(
    ("seeds", "more"), [(1, {}), ([3], {}), ([3, 3], {}), ([3, 4], {"run.seed": 3}), (2, {"model.path": "./none"})]
)
def test_seeds_that_cannot_be_trained_leave_no_folder(seeds: Any, more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seed|\./none"):
        tinyrl.train("grpo", None, {"task.name": "sort", **more}, seeds=seeds, output_dir=tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_second_interrupt_is_a_keyboard_interrupt_and_not_the_end_of_the_process():
    threads = torch.get_num_threads()
    with alone():
        torch.set_num_threads(threads + 1)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert torch.get_num_threads() == threads


def test_code_that_was_edited_is_a_value_error_outside_of_a_run():
    with pytest.raises(ValueError, match="an edit"), alone():
        raise CodeChanged("an edit")


def test_a_second_run_at_the_same_time_is_refused_and_another_thread_may_run(tiny: TinyModels, tmp_path: Path):
    with alone(), pytest.raises(ValueError, match="a run is going on in this process already"):
        run_of(tiny, tmp_path)
    assert not (tmp_path / "inputs").exists()
    found: list[OpenedRun] = []
    thread = threading.Thread(target=lambda: found.append(run_of(tiny, tmp_path, name="held")))
    thread.start()
    thread.join()
    with FolderLock(found[0].path), pytest.raises(ValueError, match="is in use"):
        found[0].resume({"run.num_steps": 3}, allow_config_change=True)


def test_own_rows_are_of_the_task_rows_whatever_recipe_lends_the_settings():
    assert overrides_from({}, None, "a.jsonl") == ["task.name=rows", "task.eval_data=null", "task.data=a.jsonl"]
    mine = overrides_from({"task": {"name": "gsm8k", "eval_data": "b.jsonl"}}, None, "a.jsonl")
    assert mine == ["task.name=gsm8k", "task.eval_data=b.jsonl", "task.data=a.jsonl"]


class Frame:
    """Rows as pandas has them: the names of columns, when they are gone through."""

    def __iter__(self) -> Iterator[str]:
        return iter(["prompt"])

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        return [{"prompt": orient}]


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"settings": {"run.num_steps": object()}}, "run.num_steps"),
        ({"settings": {"num_steps": 20}}, "`run.num_steps`"),
        ({"settings": ["run.num_steps=20"]}, "section.key"),
        ({"rows": [{"prompt": "a"}, {"prompt": "b", "odd": float("inf")}]}, "row 2.*Infinity"),
        ({"rows": ["a"]}, "row 1.*'a'"),
        ({"rows": {"prompt": ["a"]}}, "row 1.*'prompt'"),
        ({"rows": Frame()}, r"to_dict\('records'\)"),
        ({"rows": 3}, "not 3"),
        ({"reward": {"r.py:f": "much"}}, r"reward.functions\[0\].weight"),
        ({"reward": [None]}, r"reward.functions\[0\].use"),
    ],
)
def test_what_a_user_can_fix_is_a_value_error(given: dict[str, Any], place: str, tmp_path: Path):
    sound = {"method": "grpo", "output_dir": tmp_path, "rows": ROWS, "reward": variety}
    with pytest.raises(ValueError, match=place):
        tinyrl.train(**{**sound, **given})
    with pytest.raises(ValueError, match="num_prompts=0"):
        tinyrl.evaluate(tmp_path, num_prompts=0)


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}/none is not a run"):
        tinyrl.open_run("~/none")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "mine" / "other").mkdir(parents=True)  # which no run replaces
    with pytest.raises(ValueError, match="--name mine"):
        tinyrl.train("grpo", rows="~/rows.jsonl", output_dir="~", name="mine", reward=variety)
    assert placed_rows("~/rows.jsonl")[0][1] == {"prompt": "a"}


def test_settings_rewards_and_rows_become_what_the_command_line_takes(tmp_path: Path):
    """Paths and numbers of numpy and torch, too; a missing cell is null."""
    numbers = {"run.num_steps": np.int64(3), "optim.learning_rate": torch.tensor(0.5)}
    given = {**numbers, "run": {"save_every": 2}, "model": {"path": tmp_path}}
    words = ["run.num_steps=3", "optim.learning_rate=0.5", "run.save_every=2", f'model.path="{tmp_path}"']
    assert apply_overrides({}, overrides_from(given)) == apply_overrides({}, words)
    rewards, rows = {"r.py:f": np.float32(0.5), "r.py:g": 2}, [{"prompt": "a", "n": np.int64(2), "x": {"y": math.nan}}]
    words = overrides_from({}, rewards, tmp_path / "a.jsonl", rows, inputs=tmp_path)
    assert words[0] == 'reward.functions=[{"use": "r.py:f", "weight": 0.5}, {"use": "r.py:g", "weight": 2}]'
    assert words[1:3] == ["task.name=rows", f"task.data={tmp_path / 'a.jsonl'}"]
    key, _, file = words[3].partition("=")
    assert (key, Path(file).read_text()) == ("task.eval_data", '{"prompt": "a", "n": 2, "x": {"y": null}}\n')
    dated = [{"prompt": "a", "on": datetime.date(2026, 11, 28), "price": decimal.Decimal("1.5")}]
    [_, _, word] = overrides_from({}, None, dated, inputs=tmp_path)
    written = Path(word.partition("=")[2]).read_text()
    assert written == '{"prompt": "a", "on": "2026-11-28", "price": 1.5}\n'
    with pytest.raises(ValueError, match="row 1: column 'file' holds bytes"):
        overrides_from({}, None, [{"prompt": "a", "file": b"x"}], inputs=tmp_path)
    [word] = overrides_from({}, [functools.partial(variety, scale=2), "r.py:f"])
    assert "__main__:variety" in word
    assert "r.py:f" in word


def scored_by(level: float) -> Callable[..., list[float]]:
    def score(completions: list[str], **_: Any) -> list[float]:
        return [level + len(set(text)) % 2 for text in completions]

    return score


def test_two_functions_of_one_name_are_refused() -> None:
    one = scored_by(0.0)
    for other in (scored_by(100.0), functools.partial(one)):
        with pytest.raises(ValueError, match=r"'score'.*__name__"):
            overrides_from({}, [one, other])
    other = scored_by(100.0)
    other.__name__ = "higher"
    [word] = overrides_from({}, [one, other])
    assert [each["use"] for each in json.loads(word.partition("=")[2])] == ["__main__:score", "__main__:higher"]


@pytest.mark.parametrize("rewards", [[one := scored_by(0.0), one], ["r.py:score", "r.py:score"], [variety, variety]])
def test_a_function_that_is_given_twice_is_refused(rewards: list[Any]) -> None:
    """Its scores would count twice, under two names."""
    with pytest.raises(ValueError, match="twice"):
        overrides_from({}, rewards)


def test_a_new_run_calls_the_newest_function_of_a_name_and_a_resume_refuses_another_one(
    tiny: TinyModels, tmp_path: Path
):
    def trained(level: float, name: str) -> OpenedRun:
        settings = {**FEW, "model.path": str(tiny("llama"))}
        given = {"rows": ROWS, "output_dir": str(tmp_path), "device": "cpu", "on_step": stops}
        return tinyrl.train("grpo", None, settings, reward=scored_by(level), name=name, **given)

    def stops(line: dict[str, Any]) -> str:
        return "stop" if line["step"] == 1 else ""

    first = trained(0.0, "first")
    second = trained(100.0, "second")
    assert first.metrics[-1]["reward/mean"] < 2.0
    assert second.metrics[-1]["reward/mean"] >= 100.0
    with pytest.raises(ValueError, match="__main__:score is another function"):
        first.resume(device="cpu")
    assert second.resume(device="cpu").exit_code == 0
    assert first.resume(device="cpu", allow_config_change=True).metrics[-1]["reward/mean"] >= 100.0
    assert json.loads((first.path / "env.json").read_text())["reward_changed"] == [1]


def test_on_step_gets_each_line_and_stops_the_run(tiny: TinyModels, tmp_path: Path):
    seen: list[dict[str, Any]] = []

    def stop_after_one(line: dict[str, Any]) -> str | None:
        seen.append(line)
        return "stop" if line["step"] == 1 else "go on"

    run = run_of(tiny, tmp_path, on_step=stop_after_one)
    assert run.exit_code == 0
    assert json.loads(json.dumps(seen)) == run.metrics
    assert [line["step"] for line in run.metrics] == [0, 1]
    assert not run.finished
    assert (run.path / "checkpoints" / "step-000001").is_dir()
    assert run.resume().finished
