"""Runs of tinyrl inside the test process: start, interrupt with a real signal, resume, read the results."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.varied_reward import variety
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag
from tinyrl.rollout.prepared import prepare
from tinyrl.runs import provenance
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir, open_run
from tinyrl.tasks import task_of
from tinyrl.tasks.run_rows import RunRows, rows_of_run
from tinyrl.tools.report import write_report
from tinyrl.training.launch import resume, start
from tinyrl.training.step import RoleOptimizer, role_optimizers
from tinyrl.workers.loading import use_of

VOLATILE = ("time/", "memory/", "tokens_per_second", "judge/", "reward/slowest_seconds")  # of the clock, the machine
# A reward that other processes find again, in a worker of its own; by default it is called in this process, for speed.
IN_A_WORKER: dict[str, Any] = {"functions": [{"use": use_of(variety)}]}
SMALL: dict[str, Any] = {
    "task": {"name": "sort", "max_samples": 64},
    "reward": {"functions": [{"use": use_of(partial(variety))}]},
    "generation": {"max_new_tokens": 6},
    "optim": {"learning_rate": 1e-2},
    "run": {"num_steps": 3, "eval_every": 2, "eval_prompts": 8, "save_every": 2, "threads": 1},
}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"num_prompts": 4, "group_size": 4}},
    "ppo": {"ppo": {"num_prompts": 8, "num_epochs": 2, "minibatch_size": 4}},
}


def config(method: str, path: Path, **sections: Any) -> Config:
    """A small configuration of `method` on the model at `path`; `sections` are laid over it."""
    values: dict[str, Any] = {"method": method, "model": {"path": str(path)}}
    for part in (SMALL, METHODS.get(method, {}), sections):
        for name, fields in part.items():
            values[name] = {**values.get(name, {}), **fields}
    return config_of(values)


def rows_for(config: Config) -> RunRows:
    """Return the rows of a configuration, which need not be one that may train."""
    return rows_of_run(config, task_of(config))


def rows_of(task: str, split: str, **settings: Any) -> list[Row]:
    """The rows of a split of a task, by settings of the section task."""
    rows = rows_for(config_of({"method": "grpo", "task": {"name": task, **settings}}))
    return rows.train if split == "train" else rows.held_out


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a report."""


report: Callable[[Path], object] = write_report


_revision = provenance._revision
_fsync = os.fsync


def whole_runs(wanted: bool) -> None:
    """Whether runs in this process draw their report at the end, and ask git for the revisions in env.json."""
    global report
    report = write_report if wanted else _nothing
    provenance._revision = _revision if wanted else _nothing


def wait_for_disk(wanted: bool) -> None:
    """Whether this process waits until the disk has what it flushes. Only a machine that loses power needs that: what
    a killed process has written is there.
    """
    os.fsync = _fsync if wanted else _nothing


class LookedAt(StopFlag):
    """A flag that calls a function whenever it is looked at."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def check(self) -> None:
        self.then()
        super().check()


class SignalAt(StopFlag):
    """A flag that sends this process a real SIGTERM when it is looked at for the n-th time."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.looks, self.at = 0, at

    def check(self) -> None:
        self.looks += 1
        if self.looks == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        super().check()


def train(
    settings: Config, folder: Path, *, name: str = "run", stop_at: int | None = None, device: str = "cpu"
) -> tuple[int, RunDir, int]:
    """(exit code, run, how often the flag was looked at) of a fresh run."""
    flag = SignalAt(stop_at)
    with flag:
        options = Options(device=device)
        launch = start(
            prepare(settings), options=options, output_dir=str(folder), name=name, overwrite=False, command=["test"]
        )
        code = launch.go(report=report)
        return code, launch.folder, flag.looks


def go_on(
    run: RunDir, *, stop_at: int | None = None, device: str = "cpu", config: Config | None = None, **options: Any
) -> int:
    """Resume a run in a fresh session, with its own settings or others; the exit code. `options` are those of
    `launch.resume`.
    """
    flag = SignalAt(stop_at)
    with flag:
        try:
            opened = open_run(run.path)
            launch = resume(opened, prepare(config or opened.read_config()), options=Options(device=device), **options)
        except Interrupted as stop:  # while loading
            return stop.exit_code
        return 0 if launch is None else launch.go(report=report)


def optimizers_with(**fields: float) -> Callable[..., dict[str, RoleOptimizer]]:
    """In place of role_optimizers: those of settings that the schema refuses."""
    return lambda optim, parameters: role_optimizers(optim.model_copy(update=fields), parameters)


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines() if line.strip()]


def lasting(run: RunDir) -> list[dict[str, Any]]:
    """Metrics without those that depend on the clock or the machine."""
    return [{k: v for k, v in line.items() if not k.startswith(VOLATILE)} for line in metrics(run)]


def weights(run: RunDir, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    folder = run.checkpoints / f"step-{step:06d}"
    files = sorted(p for p in folder.rglob("*.safetensors") if p.name != "random.safetensors")
    return {f"{p.relative_to(folder)}:{k}": v for p in files for k, v in load_file(p).items()}
