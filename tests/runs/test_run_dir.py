"""The run folder: its name, place and lock, records of whole lines only, and no secret in any file."""

import json
import math
import os
import re
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tinyrl.runs import run_dir
from tinyrl.runs.folders import LOCK, FolderLock
from tinyrl.runs.places import run_of
from tinyrl.runs.provenance import provenance
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir, check_new_run, create_run, open_run

CONFIG = config_of({"method": "grpo", "task": {"name": "sort"}})


def create(root: Path, name: str | None = None, *, overwrite: bool = False) -> RunDir:
    run = create_run(str(root), name=name, config=CONFIG, overwrite=overwrite)
    run.write_config(CONFIG)
    return run


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- names and places ----


def test_default_names_count_up(tmp_path: Path):
    root = tmp_path / "runs"
    assert create(root).name == "grpo-sort-1"
    for name in ("grpo-sort-9", "grpo-sort-²", "grpo-sort-x", "ppo-sort-40", "grpo-sorting-7"):
        (root / name).mkdir()
    assert create(root).name == "grpo-sort-10"


def test_names_cannot_leave_the_folder(tmp_path: Path):
    for name in ("../x", ".", "a/b", "/etc", "a\\b", ".hidden", "", "a\n", "x" * 101, "~", "a\0"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=r"^--name "):
                create_run(str(tmp_path / "runs"), name=name, config=CONFIG, overwrite=overwrite)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("name", ["base", "start", "teacher", "policy", "self"])
def test_a_word_for_another_model_is_no_name_of_a_run(name: str, tmp_path: Path):
    for refused in (check_new_run, partial(create_run, config=CONFIG)):
        with pytest.raises(ValueError, match=f"--name {name}"):
            refused(str(tmp_path), name=name, overwrite=True)
        refused(str(tmp_path), name=f"{name}-1", overwrite=True)
    assert names_in(tmp_path) == {f"{name}-1"}


def test_a_run_takes_the_place_of_an_empty_folder_and_of_one_whose_start_was_killed(tmp_path: Path):
    for name, overwrite in product(("empty", "half"), (False, True)):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).mkdir()
        if name == "half":
            (tmp_path / name / LOCK).touch()
        assert names_in(create(tmp_path, name, overwrite=overwrite).path) == {LOCK, "config.yaml", "given.yaml"}
    (tmp_path / "started").mkdir()
    with FolderLock(tmp_path / "started"), pytest.raises(ValueError, match="is in use"):  # by an earlier version
        create(tmp_path, "started")
    assert names_in(tmp_path) == {"empty", "half", "started"}


def test_overwriting_replaces_a_run_and_nothing_else(tmp_path: Path):
    (create(tmp_path, "mine").path / "left over").write_text("x")
    with pytest.raises(ValueError, match=r"mine exists.* --overwrite"):
        create(tmp_path, "mine")
    assert names_in(create(tmp_path, "mine", overwrite=True).path) == {LOCK, "config.yaml", "given.yaml"}

    root, thesis = tmp_path / "runs", tmp_path / "thesis"
    for folder in (root / "photos", root / "project", thesis):
        folder.mkdir(parents=True)
        (folder / "precious").write_text("x")
    (thesis / "config.yaml").write_text("method: grpo\n")  # looks like a run, and lies elsewhere
    (root / "project" / "config.yaml").write_text("database: production\n")
    (root / "link").symlink_to(thesis)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "file").write_text("x")
    for name in ("photos", "project", "link", "dangling", "file"):
        with pytest.raises(ValueError, match=r"is not a tinyrl run"):
            create(root, name, overwrite=True)
    assert all((folder / "precious").is_file() for folder in (root / "photos", root / "project", thesis))
    assert names_in(tmp_path) == {"mine", "runs", "thesis"}


def test_of_several_that_overwrite_a_run_at_once_one_wins_and_the_others_are_refused(tmp_path: Path):
    for _ in range(20):
        barrier = Barrier(3)

        def overwrite(_: int, barrier: Barrier = barrier) -> RunDir | ValueError:
            barrier.wait()
            try:
                return create_run(str(tmp_path), name="mine", config=CONFIG, overwrite=True)
            except ValueError as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            found = [*pool.map(overwrite, range(3))]
        [won] = [one for one in found if isinstance(one, RunDir)]
        assert names_in(won.path) == {LOCK, "config.yaml", "given.yaml"}
        assert names_in(tmp_path) == {"mine"}
        won.lock.check()
        won.lock.release()


def test_what_a_killed_start_left_is_swept_by_the_next_one(tmp_path: Path):
    (left := tmp_path / ".writing-mine-0123456789abcdef").mkdir()
    (left / LOCK).write_text("process 1 on another machine")
    create(tmp_path, "other")
    assert names_in(tmp_path) == {"other"}


def test_an_output_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"^--output-dir .*file is not a folder"):
        check_new_run(str(tmp_path / "file/below"), name=None, overwrite=False)
    check_new_run(str(tmp_path / "not" / "yet"), name="a", overwrite=False)
    assert not (tmp_path / "not").exists()


def test_a_run_is_found_by_its_folder_or_a_checkpoint_and_a_near_name_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = create(Path("runs"), "mine")
    assert open_run("runs/mine").read_config() == CONFIG
    (step := run.checkpoints / "step-000010").mkdir(parents=True)
    assert run_of(step) == Path("runs/mine")
    monkeypatch.chdir(run.checkpoints)
    assert run_of("step-000010") == tmp_path / "runs/mine"
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("somebody else's")
    assert run_of(Path("starter")) is run_of(Path("owner/name")) is None
    for path, hint in {"runs/mien": "`runs/mine`?", "mine": "`runs/mine`?", "runs": ""}.items():
        with pytest.raises(ValueError, match=f"^{path} is not a run.*{re.escape(hint)}$"):
            open_run(path)


# ---- the lock ----


def test_a_lock_is_held_once_and_taken_twice_by_its_holder(tmp_path: Path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take().take()
    with pytest.raises(ValueError, match=rf"{tmp_path} is in use: process {os.getpid()} on "):
        second.take()
    FolderLock(tmp_path, wanted=False).take()  # beside it
    first.release()
    with second, pytest.raises(ValueError, match="is in use"):
        first.take()


def test_a_run_that_is_trained_is_not_overwritten(tmp_path: Path):
    run = create(tmp_path, "mine")
    for refused in (check_new_run, lambda *a, **k: create_run(*a, config=CONFIG, **k)):
        with pytest.raises(ValueError, match="mine is in use: process"):
            refused(str(tmp_path), name="mine", overwrite=True)
    assert (run.path / "config.yaml").is_file()
    run.lock.release()
    again = create(tmp_path, "mine", overwrite=True)
    with pytest.raises(ValueError, match="is in use"):
        FolderLock(again.path).take()


# ---- records ----


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_are_appended_and_what_is_not_finite_is_null(tmp_path: Path):
    run = RunDir(tmp_path)
    run.append_metrics(1, {"loss": 0.5, "kl": math.nan})
    run.append_metrics(2, {"loss": math.inf})
    run.append(run.samples, [{"completion": "é\u2028\ud800", "rewards": {"f": -math.inf}}])
    assert read(run.metrics) == [{"step": 1, "loss": 0.5, "kl": None}, {"step": 2, "loss": None}]
    assert run.samples.read_bytes().isascii()
    assert read(run.samples) == [{"completion": "é\u2028\ud800", "rewards": {"f": None}}]


def test_a_resume_forgets_what_came_after_its_checkpoint(tmp_path: Path):
    run = RunDir(tmp_path)
    run.append_metrics(1, {})
    run.append(run.samples, [{"a": 1}])
    lengths = run.lengths()
    assert lengths == {"metrics.jsonl": len('{"step": 1}\n'), "samples.jsonl": len('{"a": 1}\n'),
                       "tokens.jsonl": 0, "prompts.jsonl": 0, "failed_rewards.jsonl": 0}  # fmt: skip
    run.append_metrics(2, {})
    run.metrics.open("a").write('{"step": 3, "lo')  # killed in the middle of a line
    RunDir(tmp_path, writes=False).cut({})  # a rank that only reads
    run.cut(lengths)
    assert read(run.metrics) == [{"step": 1}]
    assert run.cut({"metrics.jsonl": lengths["metrics.jsonl"]}) == []  # samples are not named: none are kept
    assert read(run.metrics) == [{"step": 1}]
    assert run.samples.read_bytes() == b""


def test_no_record_is_written_or_cut_through_a_link(tmp_path: Path):
    (target := tmp_path / "target").write_text("precious\n")
    (tmp_path / "run").mkdir()
    run = RunDir(tmp_path / "run")
    for file in (run.metrics, run.output):
        file.symlink_to(target)
    run.append_metrics(1, {})
    run.append_reward_output("printed")
    with pytest.raises(OSError, match=f"{run.metrics}"):
        run.cut({})
    assert target.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "reward_output.log"])
def test_a_run_whose_records_are_links_is_refused_with_their_names(name: str, tmp_path: Path):
    run = RunDir(tmp_path)
    run.append_metrics(1, {})
    run.append_reward_output("printed")
    run.check_files()
    (tmp_path / name).rename(tmp_path / "target")
    (tmp_path / name).symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match=f"{tmp_path / name} is a link to {tmp_path / 'target'}"):
        run.check_files()


def test_a_record_that_is_longer_than_what_is_read_at_a_time_is_cut_to_whole_lines(tmp_path: Path):
    run = RunDir(tmp_path)
    run.metrics.write_bytes(b"x" * 70_000 + b"\n" + b"y" * 200_000)
    [warning] = run.cut({"metrics.jsonl": 270_001})
    assert "200,000 of its 270,001 bytes" in warning
    assert run.metrics.stat().st_size == 70_001
    run.metrics.write_bytes(b"y" * 200_000)
    run.cut({"metrics.jsonl": 200_000})
    assert run.metrics.read_bytes() == b""


def test_a_length_that_no_record_has_costs_no_memory(tmp_path: Path):
    run = RunDir(tmp_path)
    run.append_metrics(1, {})
    [warning] = run.cut({"metrics.jsonl": 10**12})
    assert "999,999,999,988 of its 1,000,000,000,000 bytes" in warning
    assert run.metrics.read_bytes() == b'{"step": 1}\n'


def test_lines_of_a_checkpoint_that_are_lost_are_warned_of(tmp_path: Path):
    run = RunDir(tmp_path)
    for step in (1, 2):
        run.append(run.samples, [{"step": step, "completion": "x" * 1000}])
    lengths = run.lengths()
    os.truncate(run.samples, lengths["samples.jsonl"] // 2 + 20)
    [warning] = run.cut(lengths)
    assert warning.startswith("warning: samples.jsonl: ")
    assert [row["step"] for row in read(run.samples)] == [1]


def test_a_flush_puts_what_was_written_on_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, flushed = RunDir(tmp_path), list[str]()
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    run.append_metrics(1, {})
    run.append_metrics(2, {})
    assert run.lengths()["metrics.jsonl"] == 2 * len('{"step": 1}\n')
    assert flushed == []
    run.flush()
    run.flush()
    assert flushed == [str(run.metrics)]
    run.append(run.samples, [{"a": 1}])
    run.flush()
    assert flushed == [str(run.metrics), str(run.samples)]


def test_a_full_disk_loses_no_line_and_leaves_no_half_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A limit on the size of files ends a write in the middle of a line, as a full disk does."""
    run = RunDir(tmp_path)
    run.append_metrics(1, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len('{"step": 1}\n{"st'), before[1]))
    try:
        run.append_metrics(2, {})
        run.append_metrics(3, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.metrics.read_bytes() == b'{"step": 1}\n'
    run.append_metrics(4, {})
    assert [line["step"] for line in read(run.metrics)] == [1, 2, 3, 4]
    [warning] = capsys.readouterr().err.splitlines()
    assert f"{run.metrics}: File too large" in warning


def test_a_record_stays_within_its_room_and_a_resume_cuts_it(tmp_path: Path) -> None:
    run, line = RunDir(tmp_path), {"step": 1, "piece": "x" * 80}
    size = len(json.dumps(line)) + 1
    for _ in range(2):
        run.append(run.tokens, [line] * 3, most_bytes=2 * size)
    assert run.tokens.stat().st_size == 2 * size
    before = run.lengths()
    run.append(run.tokens, [line], most_bytes=1000)
    run.cut(before)
    assert run.tokens.stat().st_size == 2 * size


def test_what_a_reward_prints_is_kept_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    for text in ("a\n", "c \ud800\n"):
        run.append_reward_output(text)
    assert run.output.read_text() == "a\nc ?\n"
    monkeypatch.setattr(run_dir, "MOST_OUTPUT", 100)
    for number in range(25):
        run.append_reward_output(f"line {number:04}\n")  # 10 bytes
        assert run.output.stat().st_size <= 100
    first, *kept = run.output.read_text().splitlines()
    assert "left out" in first
    assert [int(line.split()[1]) for line in kept] == list(range(25 - len(kept), 25))


@pytest.mark.whole
def test_the_command_is_recorded_without_logins_and_queries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # not a git repository
    facts = provenance(["tinyrl", "task.data=https://me:pa@ss@host/x?a=1&token=abc", "a b"], seed=7)
    assert facts["command"] == "tinyrl 'task.data=https://***@host/x?a=***&token=***' 'a b'"
    assert (facts["seed"], facts["git"]) == (7, None)
    assert facts["tinyrl_git"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", facts["tinyrl_git"])
    assert {"python", "torch"} <= set(facts["versions"])
