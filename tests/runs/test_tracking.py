"""Trackers: the real ones where they are installed, ones that fail, and the check before a run starts.

Each real tracker logs in a process of its own, as a run does and then as a resume from an older checkpoint does, and
what it stored is read back.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tinyrl.config.schema import Config
from tinyrl.runs.tracking import Trackers, check_trackers, flat

installed = {name: importlib.util.find_spec(name) is not None for name in ("tensorboard", "wandb")}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed[name], reason=f"{name} is not installed: the extra `track`")


RUN = """
from pathlib import Path
from accelerate import PartialState
from tinyrl.config.schema import Config
from tinyrl.runs.tracking import Trackers

PartialState(cpu=True)
config = Config.model_validate({"method": "grpo"}).written()
line = {"kind": "eval", "prompt": "2 + 2 =", "reward": 1.0, "finish_reason": "eos", "sample": 0}

def log(first, last, value):
    trackers = Trackers([NAME], Path("run-1"), config=config, note=print)
    trackers.start(first)
    for step in range(first, last + 1):
        if step % 2 == 0:
            trackers.log_completions([line | {"completion": f"{step} <b>"}, line | {"kind": "eval-greedy"}], step)
        trackers.log({"reward/mean": value + step, "eval/pass@1": 0.5, "text": "left out", "absent": None}, step)
    trackers.close()

Path("run-1").mkdir()
log(0, 4, 10.0)   # a run that is killed after step 4,
log(3, 5, 10.0)   # and goes on from the checkpoint of step 2
"""


def log_and_read(name: str, read: str, folder: Path, **environment: str) -> Any:
    """What `read`, a script that prints JSON, finds after `RUN` in another process."""
    found: dict[str, str] = {}
    for part, script in {"run": f"NAME = {name!r}\n{RUN}", "read": read}.items():
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "warning: tracker" not in done.stdout, done.stdout
        found[part] = done.stdout
    return json.loads(found["read"].splitlines()[-1])


@needs("tensorboard")
def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    read = """
import json
import os
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("run-1/tensorboard").Reload()
print(json.dumps({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""
    assert log_and_read("tensorboard", read, tmp_path) == {
        "reward/mean": [[0, 10], [1, 11], [2, 12], [3, 13], [4, 14], [5, 15]],
        "eval/pass@1": [[step, 0.5] for step in range(6)],
    }
    stored = [path.read_text() for path in (tmp_path / "run-1" / "tensorboard").rglob("hparams.yml")]
    assert all("grpo.group_size: 8\n" in text for text in stored)
    assert stored


@needs("wandb")
def test_wandb_has_the_right_steps_after_a_resume_and_completions(tmp_path: Path) -> None:
    read = """
import glob, json
from wandb.proto import wandb_internal_pb2 as protocol

def records(file):  # LevelDB's log format: blocks of 32 KiB, parts with CRC (4), length (2) and kind (1)
    data, at, record = open(file, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield protocol.Record.FromString(record)
            record = b""

runs, numbers, tables = [], set(), set()
for file in sorted(glob.glob("run-1/wandb/offline-run-*/*.wandb")):
    for record in records(file):
        if record.HasField("run"):
            runs.append([record.run.project, record.run.display_name, record.run.run_id])
        if record.HasField("history"):
            line = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if "reward/mean" in line:
                numbers.add((line["step"], line["reward/mean"]))
            if "completions.nrows" in line:
                tables.add((line["step"], line["completions.nrows"]))
print(json.dumps([runs, sorted(numbers), sorted(tables)]))
"""
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    runs, numbers, tables = log_and_read("wandb", read, tmp_path, **environment)
    one = (tmp_path / "run-1" / "wandb_id").read_text()
    assert runs
    assert all(run == ["tinyrl", "run-1", one] for run in runs)
    assert numbers == [[step, 10.0 + step] for step in range(6)]
    assert tables == [[0, 1], [2, 1], [4, 1]]


class Good:
    requires_logging_directory = False
    logged: list = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        pass

    def store_init_configuration(self, values: dict) -> None:
        pass

    def log(self, values: dict, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        pass


class Failing(Good):
    calls = 0

    def log(self, values: dict, step: int) -> None:
        type(self).calls += 1
        raise ConnectionError("network down")


class NotStarting(Good):
    def __init__(self, **arguments: Any) -> None:
        raise OSError("no such server")


def test_a_failing_tracker_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "swanlab", Failing)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "aim", Good)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "dvclive", NotStarting)
    notes: list[str] = []
    trackers = Trackers(["swanlab", "aim", "dvclive"], tmp_path, config={}, note=notes.append)
    trackers.start(0)
    for step in range(3):
        trackers.log({"loss": 1.0, "text": "left out", "list": [1]}, step)
    trackers.close()
    assert Failing.calls == 1
    assert ["dvclive" in note and "no such server" in note for note in notes] == [True, False]
    assert ["swanlab" in note and "network down" in note for note in notes] == [False, True]
    assert Good.logged == [(step, {"loss": 1.0}) for step in range(3)]


def test_a_configuration_is_flattened_to_plain_values() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": None, "e": [1, "x"], "f": {}}, "g": True, "h": 0.5, "i": "text"}) == {
        "a.b.c": 1, "a.d": "null", "a.e": '[1, "x"]', "a.f": "{}", "g": True, "h": 0.5, "i": "text",
    }  # fmt: skip
    values = flat(Config.model_validate({"method": "ppo"}).written())
    assert values["ppo.kl_coef"] == 0.05
    assert all(isinstance(value, bool | int | float | str) for value in values.values())


def test_a_tracker_that_is_not_installed_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^run\.trackers: wandb is not installed: pip install wandb$"):
        check_trackers(["wandb"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboardX" or None)
    check_trackers(["tensorboard"])
