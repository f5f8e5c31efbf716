"""`tinyrl train ... --seeds`: which seeds, which are finished or begun, what ends them all, and what comes out."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.cli import seeds
from tinyrl.cli.commands import app
from tinyrl.cli.seeds import SeedCommands, SeedRuns, _run_process, chosen_seeds, prepare_seeds, train_seeds, typed_seeds
from tinyrl.cli.train import typed_config
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.run_dir import RunDir, create_run
from tinyrl.training.launch import start

WORDS = ["grpo", "run.num_steps=4"]


def prepared(folder: Path, *more: str, words: list[str] = WORDS, **options: Any) -> SeedRuns:
    given: dict[str, Any] = {"seeds": 3, "name": "x", "overwrite": False, **options}
    return prepare_seeds(typed_config([*words, *more]), output_dir=str(folder), **given)


def command(runs: SeedRuns, seed: int, *, words: list[str] = WORDS) -> list[str]:
    return SeedCommands(runs, words, given="3", options=Options(device="cpu")).of(seed)


def made(folder: Path, seed: int, *, steps: int) -> RunDir:
    """A run of a seed, of so many of its 4 steps."""
    config = typed_config([*WORDS, f"run.seed={seed}"])
    run = create_run(str(folder / "x"), name=f"seed-{seed}", config=config, overwrite=False)
    for step in range(steps + 1):
        run.append_metrics(step, {"reward/mean": 0.5})
    write_checkpoint(run.checkpoints, steps, write=lambda folder: None)
    run.lock.release()
    return run


# ---- which ----


@pytest.mark.parametrize(
    ("text", "settings", "seeds"),
    [("3", [], [0, 1, 2]), ("2", ["run.seed=5"], [5, 6]), ("3,7, 11", [], [3, 7, 11])],
)
def test_a_number_counts_from_the_seed_of_the_run_and_a_list_names_seeds(
    text: str, settings: list[str], seeds: list[int]
) -> None:
    assert chosen_seeds(typed_seeds(text), typed_config(["grpo", *settings])) == seeds


@pytest.mark.parametrize("text", ["1", "0", "3,x", "-2", "3,3", "101", "9" * 17, ""])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds"):
        chosen_seeds(typed_seeds(text), typed_config(["grpo"]))


def test_a_list_beside_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.seed=2"):
        chosen_seeds([3, 4], typed_config(["grpo", "run.seed=2"]))


def test_a_finished_seed_is_left_one_that_has_begun_is_resumed_and_another_is_started(tmp_path: Path) -> None:
    made(tmp_path, 0, steps=4)
    made(tmp_path, 1, steps=2)
    runs = prepared(tmp_path)
    assert (runs.finished, runs.begun) == ([0], [1])
    assert command(runs, 1)[:3] == ["train", "--resume", str(tmp_path / "x/seed-1")]
    assert command(runs, 2)[:4] == ["train", *WORDS, "run.seed=2"]


def test_a_run_of_other_settings_is_refused_unless_it_is_overwritten(tmp_path: Path) -> None:
    made(tmp_path, 0, steps=4)
    with pytest.raises(ValueError, match=r"optim\.learning_rate"):
        prepared(tmp_path, "optim.learning_rate=1e-3")
    runs = prepared(tmp_path, "optim.learning_rate=1e-3", overwrite=True)
    assert "--overwrite" in command(runs, 0)


def test_a_seed_of_the_settings_gives_way_to_that_of_the_run(tmp_path: Path) -> None:
    runs = prepared(tmp_path, "run.seed=5")
    assert runs.seeds == [5, 6, 7]
    assert command(runs, 6, words=[*WORDS, "run.seed=5"])[:4] == ["train", *WORDS, "run.seed=6"]


def test_a_fork_of_a_seed_may_be_beside_the_seeds(tmp_path: Path) -> None:
    made(tmp_path, 0, steps=4)
    (tmp_path / "x/seed-0").rename(tmp_path / "x/half-rate")
    assert prepared(tmp_path).begun == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        prepared(tmp_path)


def test_without_a_name_the_next_free_one_is_taken(tmp_path: Path) -> None:
    assert [prepared(tmp_path, name=None).folder.name for _ in range(2)] == ["grpo-sort-1", "grpo-sort-2"]


# ---- one after another ----


STOPS_ITS_PARENT = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGTERM)"
)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import time; time.sleep(60)", 75),  # ended by the signal that is passed on
        (f"{STOPS_ITS_PARENT}; os._exit(130)", 130),
        (f"{STOPS_ITS_PARENT}; os._exit(0)", 75),  # at its own end
    ],
)
def test_a_stop_is_passed_on_to_the_seed_that_runs_and_is_the_end_of_all(script: str, code: int) -> None:
    with StopFlag():
        if STOPS_ITS_PARENT not in script:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert _run_process([sys.executable, "-S", "-c", script]) == code


def test_a_seed_that_is_killed_by_another_is_no_stop() -> None:
    with StopFlag():
        killed = [sys.executable, "-S", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]
        assert _run_process(killed) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "code", "reported"),
    [
        ([0, 0, 0], 0, [0, 1, 2]),
        ([0, 3, 2], 3, [0]),  # the first that failed
        ([-9, 3, 0], 137, [2]),  # SIGKILL, as shells have it
        ([2], 2, []),  # what is refused at the first would be at all
        ([3, 2, 0], 3, [2]),
        ([0, 75], 75, []),  # a stop
    ],
)
def test_a_seed_that_fails_gives_the_exit_code_and_the_others_are_reported(
    codes: list[int], code: int, reported: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [*codes]
    found = list[Path]()
    monkeypatch.setattr(seeds, "_report", lambda folders, parent: found.extend(folders))
    runs = SeedRuns([0, 1, 2], tmp_path / "x")
    assert train_seeds(runs, lambda seed: left.pop(0), again="the same") == code
    assert left == []
    assert found == [runs.run(seed) for seed in reported]


@pytest.fixture
def half(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], RunDir]:
    """The words of a command whose seed 0 has run to its end, and the run of seed 1, which has begun."""
    monkeypatch.chdir(tmp_path)
    words = ["grpo", f"model.path={tiny('llama')}", "task.name=sort", "task.max_samples=32", "run.num_steps=2"]
    words += ["run.eval_prompts=4", "grpo.num_prompts=2", "grpo.group_size=2", "generation.max_new_tokens=4"]
    words += ["run.threads=1"]
    for seed in (0, 1):
        config = typed_config([*words, f"run.seed={seed}"])
        where: dict[str, Any] = {"output_dir": str(tmp_path / "runs/x"), "name": f"seed-{seed}", "overwrite": False}
        until = None if seed == 0 else 1
        run = start(prepare(config), options=Options(device="cpu"), command=["test"], until=until, **where)
        assert run.go(report=running.report) == 0
    return words, RunDir(tmp_path / "runs/x/seed-1")


def train(words: list[str]) -> Result:
    return CliRunner().invoke(app, ["train", *words, "--seeds", "2", "--name", "x", "--device", "cpu"])


# Fast: exit codes and what is reported, which seeds are trained, left and resumed, what is refused (above).
@pytest.mark.slow
def test_a_seed_that_fails_is_named_at_the_end_and_the_others_are_reported(half: tuple[list[str], RunDir]) -> None:
    words, second = half
    with second.lock:  # another process trains in it
        result = train(words)
    assert result.exit_code == 2
    assert "failed: seed 1 (exit code 2)" in result.output
    assert (second.path.parent / "report.html").is_file()


@pytest.mark.slow
def test_the_same_command_goes_on_with_what_is_left(half: tuple[list[str], RunDir]) -> None:
    words, second = half
    result = train(words)
    assert result.exit_code == 0
    assert second.last_step() == 2
    assert "95 % t interval" in result.output
