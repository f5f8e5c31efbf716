"""The run folder: its name and place, records of whole lines only, and no secret in any file."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.schema import Config
from tinyrl.runs import run_dir
from tinyrl.runs.records import json_lines
from tinyrl.runs.run_dir import RunDir, check_new_run, create_run, environment, open_run, run_of

CONFIG = Config.model_validate({"method": "grpo", "task": {"name": "sort"}})


def create(root: Path, name: str | None = None, *, overwrite: bool = False) -> RunDir:
    run = create_run(str(root), name=name, config=CONFIG, overwrite=overwrite)
    run.write_config(CONFIG)
    return run


def test_default_names_count_up(tmp_path: Path):
    root = tmp_path / "runs"
    assert create(root).name == "grpo-sort-1"
    assert create(root).name == "grpo-sort-2"
    for name in ("grpo-sort-9", "grpo-sort-²", "grpo-sort-x", "ppo-sort-40", "grpo-sorting-7"):
        (root / name).mkdir()
    assert create(root).name == "grpo-sort-10"


def test_two_runs_that_start_at_the_same_moment_get_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = Path.mkdir

    def somebody_is_faster(path: Path, *arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", plain)
        plain(path, *arguments, **named)
        plain(path, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", somebody_is_faster)
    assert create(tmp_path / "runs").name == "grpo-sort-2"


@pytest.mark.parametrize(
    "name", ["../x", "..", ".", "a/b", "/etc", "a\\b", ".hidden", "-x", "", "a b", "a\n", "é", "x" * 101, "~", "a\0"]
)
def test_names_cannot_leave_the_folder(tmp_path: Path, name: str):
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"^--name .* a run's name is made of .* stays inside"):
            create_run(str(tmp_path / "runs"), name=name, config=CONFIG, overwrite=overwrite)
    assert not (tmp_path / "runs").exists()
    assert list(tmp_path.iterdir()) == []


def test_overwriting_replaces_a_run_and_an_empty_folder(tmp_path: Path):
    (create(tmp_path, "mine").path / "left over").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("mine", "empty", "new"):
        assert {p.name for p in create(tmp_path, name, overwrite=True).path.iterdir()} == {".lock", "config.yaml"}


def test_overwriting_leaves_what_is_no_run_alone(tmp_path: Path):
    root = tmp_path / "runs"
    thesis = tmp_path / "thesis"
    for folder in (root / "photos", thesis):
        folder.mkdir(parents=True)
        (folder / "precious").write_text("x")
    (thesis / "config.yaml").write_text("method: grpo\n")  # looks like a run, and lies elsewhere
    (root / "project").mkdir()
    (root / "project" / "config.yaml").write_text("database: production\n")
    (root / "link").symlink_to(thesis)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "file").write_text("x")
    for name in ("photos", "project", "link", "dangling", "file"):
        with pytest.raises(ValueError, match=r"--overwrite: .* is not a tinyrl run"):
            create(root, name, overwrite=True)
    assert (root / "photos" / "precious").is_file()
    assert (thesis / "precious").is_file()


def test_an_output_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"^--output-dir .*: .*file is no folder that can be written to"):
            check_new_run(str(tmp_path / place), name=None, overwrite=False)
    check_new_run(str(tmp_path / "not" / "yet"), name="a", overwrite=False)
    assert not (tmp_path / "not").exists()


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = create(Path("runs"), "mine")
    assert open_run("runs/mine").read_config() == CONFIG
    step = run.checkpoints / "step-000010"
    step.mkdir(parents=True)
    assert run_of(step) == run_of(run.path) == Path("runs/mine")
    Path("config.yaml").write_text("somebody else's")
    assert run_of(Path("starter")) is None
    assert run_of(Path("owner/name")) is None
    monkeypatch.chdir(run.checkpoints)
    assert run_of(Path("step-000010")) == tmp_path / "runs/mine"
    monkeypatch.chdir(tmp_path)
    for path, end in {
        "runs/mien": "Did you mean `runs/mine`?",
        "mine": "Did you mean `runs/mine`?",
        "runs": "it has no config.yaml.",
        "runs/mine/checkpoints/step-000010": "Its run is runs/mine",
        "x" * 300: "it does not exist.",
    }.items():
        with pytest.raises(ValueError, match=f"^{path} is not a run") as caught:
            open_run(path)
        assert str(caught.value).endswith(end)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_are_appended_and_what_is_not_finite_is_null(tmp_path: Path):
    run = RunDir(tmp_path)
    run.append_metrics(1, {"loss": 0.5, "kl": math.nan})
    run.append_metrics(2, {"loss": math.inf})
    run.append_samples([{"completion": "é\u2028\ud800", "rewards": {"f": -math.inf}}])
    assert read(run.metrics) == [{"step": 1, "loss": 0.5, "kl": None}, {"step": 2, "loss": None}]
    assert run.samples.read_bytes().isascii()
    assert read(run.samples) == [{"completion": "é\u2028\ud800", "rewards": {"f": None}}]


def test_a_resume_forgets_what_came_after_its_checkpoint(tmp_path: Path):
    run = RunDir(tmp_path)
    names = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl", "prompts.jsonl", "failed_rewards.jsonl")
    nothing = dict.fromkeys(names, 0)
    assert run.lengths() == nothing
    run.append_metrics(1, {})
    run.append_samples([{"a": 1}])
    lengths = run.lengths()
    written = {"metrics.jsonl": len('{"step": 1}\n'), "samples.jsonl": len('{"a": 1}\n')}
    assert lengths == nothing | written
    run.append_metrics(2, {})
    run.metrics.open("a").write('{"step": 3, "lo')  # killed in the middle of a line
    run.cut(lengths)
    assert read(run.metrics) == [{"step": 1}]
    assert run.cut({"metrics.jsonl": lengths["metrics.jsonl"]}) == []  # samples are not named: none are kept
    assert read(run.metrics) == [{"step": 1}]
    assert run.samples.read_bytes() == b""
    run.cut({})
    assert run.metrics.read_bytes() == b""


@pytest.mark.parametrize("size", [1, 600, 3_000_000])
@pytest.mark.parametrize("left", ["nothing", "no file", "half", "half a line"])
def test_what_a_checkpoint_counts_and_is_lost_is_said_and_marked(tmp_path: Path, left: str, size: int):
    run = RunDir(tmp_path)
    for step in (1, 2):
        run.append_samples([{"step": step, "completion": "x" * size}])
    lengths = run.lengths()
    whole = lengths["samples.jsonl"] // 2
    os.truncate(run.samples, {"half": whole, "half a line": whole + 20}.get(left, 0))
    if left == "no file":
        run.samples.unlink()
    for _ in range(2):  # a kill before the next checkpoint: the marks are as long as what is lost
        kept = [1] if left.startswith("half") else []
        [said] = run.cut(lengths, step=2)
        assert said.startswith("warning: samples.jsonl: ")
        assert f"{lengths['samples.jsonl'] - len(kept) * whole:,}" in said
        assert run.lengths() == lengths
        run.append_samples([{"step": 3}])
        notes: list[str] = []
        assert [row["step"] for row in json_lines(run.samples, notes)] == [*kept, 3]
        assert [row["step"] for row in json_lines(run.samples, notes, containing=b"3")] == [3]
        assert notes[0] == notes[1]
        assert "a gap" in notes[0]


def test_records_are_on_the_disk_before_a_checkpoint_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, events = RunDir(tmp_path), []
    run.append_metrics(1, {})
    run.append_samples([{"a": 1}])
    plain = Path.stat

    def flushed(number: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))

    def counted(path: Path, **named: Any) -> os.stat_result:
        events.append(f"length of {path.name}")
        return plain(path, **named)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "stat", counted)
    run.lengths()
    for name in ("metrics.jsonl", "samples.jsonl"):
        last = len(events) - 1 - events[::-1].index(f"length of {name}")
        assert events.index(name) < last


def test_a_full_disk_loses_no_line_and_leaves_no_half_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    run = RunDir(tmp_path, warn=said.append)
    run.append_metrics(1, {})
    plain, full = Path.open, [True]

    def fills_up(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if mode == "ab" and full[0]:
            with plain(path, mode) as file:
                file.write(b'{"st')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, mode, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fills_up)
        run.append_metrics(2, {})
        run.append_metrics(3, {})
        run.append_samples([{"a": 1}])
        assert run.metrics.read_bytes() == b'{"step": 1}\n'
        full[0] = False
        run.append_metrics(4, {})
        run.append_samples([{"a": 2}])
    assert [line["step"] for line in read(run.metrics)] == [1, 2, 3, 4]
    assert read(run.samples) == [{"a": 1}, {"a": 2}]
    [warning] = said
    assert f"{run.metrics}: No space left on device" in warning


def test_environment_repeats_the_command_without_logins_and_queries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # not a git repository
    facts = environment(["tinyrl", "task.data=https://me:pa@ss@host/x?a=1&token=abc", "a b"], seed=7)
    assert facts["command"] == "tinyrl 'task.data=https://***@host/x?a=***&token=***' 'a b'"
    assert (facts["seed"], facts["git"]) == (7, None)
    assert {"python", "torch"} <= set(facts["versions"])


def test_a_long_run_keeps_every_second_fourth_or_eighth_turn_of_samples_and_turn_0(tmp_path: Path):
    run = create(tmp_path, "thinned")
    for turn in [*range(1, 65), 0]:
        run.append_samples([{"step": turn, "completion": "x" * 400}], turn=turn, most_bytes=60)
    kept = [json.loads(line)["step"] for line in run.samples.read_text().splitlines()]
    assert kept == [8, 16, 24, 32, 40, 48, 56, 64, 0]  # a line of some 430 bytes is at most 8 x 60
    assert run.lengths()["samples.jsonl"] == run.samples.stat().st_size


def test_what_a_reward_prints_is_kept_and_a_later_sitting_marked(tmp_path: Path) -> None:
    for texts in (("a\n", "b\n"), ("c \ud800\n",)):
        run = RunDir(tmp_path)
        for text in texts:
            run.append_reward_output(text)
    assert (tmp_path / "reward_output.log").read_text() == "a\nb\n--- resumed ---\nc ?\n"


def test_the_end_is_kept_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MOST_OUTPUT", 100)
    run = RunDir(tmp_path)
    for number in range(25):
        run.append_reward_output(f"line {number:04}\n")  # 10 bytes
        assert (tmp_path / "reward_output.log").stat().st_size <= 100
    first, *kept = (tmp_path / "reward_output.log").read_text().splitlines()
    assert "left out" in first
    assert [int(line.split()[1]) for line in kept] == list(range(25 - len(kept), 25))


def test_a_disk_that_refuses_is_warned_of_once(tmp_path: Path) -> None:
    warned: list[str] = []
    (tmp_path / "reward_output.log").mkdir()
    run = RunDir(tmp_path, warn=warned.append)
    run.append_reward_output("a\n")
    run.append_reward_output("b\n")
    [warning] = warned
    assert "reward_output.log" in warning
