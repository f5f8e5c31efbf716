"""Each tracker as it is, offline: a run with all of them, ended behind a checkpoint and resumed; what each has written.

Where a tracker is not installed its test is skipped; with TINYRL_ALL_EXTRAS in the environment it fails.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
SETTINGS = (
    "task.name=sort", "run.num_steps=4", "run.eval_every=2", "run.eval_prompts=4", "run.save_every=2", "run.threads=1",
    "grpo.num_prompts=2", "grpo.group_size=2", "generation.max_new_tokens=4", "run.log_completions=true",
    f"run.trackers=[{','.join(TRACKERS)}]",
)  # fmt: skip
TOKENS = "completion/tokens"
STEPS = [1, 2, 3, 4]

pytestmark = pytest.mark.slow


def need(name: str) -> Any:
    return importlib.import_module(name) if "TINYRL_ALL_EXTRAS" in os.environ else pytest.importorskip(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is killed after step 3 and goes on from the checkpoint of step 2; its trackers write below."""
    for name in TRACKERS:
        need(name)
    folder = tmp_path_factory.mktemp("tracked")
    offline = {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": store(folder), "MLFLOW_DISABLE_TELEMETRY": "true",
    }  # fmt: skip
    projects = ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME", "WANDB_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in projects}

    def tinyrl(*words: str) -> None:
        command = [sys.executable, "-m", "tinyrl", "train", *words]
        done = subprocess.run(command, cwd=folder, env=environment | offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "warning: tracker" not in done.stderr

    tinyrl("grpo", *SETTINGS, "--name", "run", "--until", "3")
    shutil.rmtree(folder / "runs/run/checkpoints/step-000003")
    tinyrl("--resume", "runs/run")
    return folder


def store(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def tokens_of_steps(folder: Path) -> list[tuple[int, float]]:
    """As metrics.jsonl has them."""
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], float(line[TOKENS])) for line in lines if TOKENS in line]
    assert [step for step, _ in found] == STEPS
    return found


def test_tensorboard_has_each_step_once(folder: Path) -> None:
    reader = need("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "runs/run/tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars(TOKENS)] == tokens_of_steps(folder)
    assert [event.step for event in events.Scalars("eval/pass@1")] == [0, 2, 4]


def test_trackio_has_every_step_and_the_completions_in_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step behind the checkpoint is there twice, with the same numbers: trackio forgets none."""
    need("trackio")
    script = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([S.get_runs('tinyrl'), S.get_logs('tinyrl', 'run'), S.get_run_config('tinyrl', 'run')]))"
    )
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))  # which it reads when it is imported
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    runs, logs, config = json.loads(done.stdout.splitlines()[-1])
    assert runs == ["run"]
    assert sorted({(line["step"], line[TOKENS]) for line in logs if TOKENS in line}) == tokens_of_steps(folder)
    tables = {line["step"]: line["completions"] for line in logs if "completions" in line}
    assert sorted(tables) == [0, 2, 4]
    row = tables[2]["_value"][0]
    assert (row["step"], row["kind"]) == (2, "eval")
    assert row["prompt"].startswith("letters:")
    assert config["grpo.group_size"] == 2


BLOCK = 1 << 15
WHOLE, LAST = 1, 4  # kinds of a piece of a record that end it


def wandb_records(file: Path) -> Iterator[Any]:
    """Read a .wandb file: LevelDB's log format behind seven bytes, each record a message of wandb's own."""
    message = need("wandb.proto.wandb_internal_pb2").Record
    data = file.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield message.FromString(record)
            record = b""


def test_wandb_goes_on_in_the_same_run_with_the_completions(folder: Path) -> None:
    files = sorted(folder.glob("runs/run/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    runs = set[tuple[str, str, str]]()
    numbers = list[tuple[int, float]]()
    tables = list[int]()
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                items = record.history.item
                line = {item.key or item.nested_key[0]: item.value_json for item in items}
                if TOKENS in line:
                    numbers.append((json.loads(line["step"]), json.loads(line[TOKENS])))
                if "completions" in line:
                    tables.append(json.loads(line["step"]))
    assert runs == {((folder / "runs/run/wandb_id").read_text(), "tinyrl", "run")}
    wanted = tokens_of_steps(folder)
    assert numbers == [*wanted[:3], *wanted[2:]]  # steps of the second part are put over those of the first by wandb
    assert tables == [0, 2, 4]
    table = json.loads(next(files[0].parent.glob("files/media/table/completions_*.json")).read_text())
    assert table["columns"] == ["step", "kind", "prompt", "completion", "reward"]
    assert len(table["data"]) == 8


def test_mlflow_has_every_step_and_the_settings(folder: Path) -> None:
    """A resume is another run of the same name."""
    client = need("mlflow").MlflowClient(tracking_uri=store(folder))
    runs = client.search_runs([client.get_experiment_by_name("tinyrl").experiment_id], order_by=["start_time"])
    assert [run.info.run_name for run in runs] == ["run", "run"]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    found = [[(one.step, one.value) for one in client.get_metric_history(run.info.run_id, TOKENS)] for run in runs]
    wanted = tokens_of_steps(folder)
    assert found == [wanted[:3], wanted[2:]]
    assert "eval/pass_1" in runs[0].data.metrics
    assert runs[0].data.params["grpo.group_size"] == "2"
