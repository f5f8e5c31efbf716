"""Checks before torch is imported: model folders, rewards, the task and its rows, which are read here and kept."""

from __future__ import annotations

import os
from pathlib import Path

from tinyrl.config.marks import Named
from tinyrl.config.schema import Config, check_training
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import reader_of
from tinyrl.evaluation.targets import Asked, check_asked, check_side, find
from tinyrl.models.reading import resolve_model_path
from tinyrl.process.launched import launched
from tinyrl.rewards.budget import check_judge_budgets
from tinyrl.rewards.rubric import check_rubrics
from tinyrl.runs.run_dir import OWN_SIDES, named_run, run_of
from tinyrl.runs.tracking import check_trackers
from tinyrl.tasks import load_task
from tinyrl.tasks.run_rows import check_data_given, read_ahead
from tinyrl.text import is_address, mask_url, truncate
from tinyrl.workers.loading import parse_use

THREADS_A_CORE = 4  # more only wait for each other, and some thousands end the process


def check_before_loading(config: Config, *, reads_rows: bool = True) -> None:
    """Raise ValueError for what would stop a run before its first step and needs no model to be found."""
    check_training(config)
    if config.generation.engine == "server" and launched().world_size > 1:
        raise ValueError("generation.engine=server samples for one process: leave the launcher out, or take auto")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.run.threads != "auto" and config.run.threads > THREADS_A_CORE * cores:
        most = f"at most {THREADS_A_CORE * cores} on the {cores} cores of this machine"
        raise ValueError(f"run.threads={config.run.threads}: {most}; auto chooses them by the model's width")
    check_trackers(config.run.trackers)
    if config.learns_from_teacher and config.teacher.path is None:
        raise ValueError("teacher.path is missing: a run, an adapter, a model, a server's address, self or start")
    _check_task(config)
    check_named(config)
    check_rubrics(config)
    if config.run.epochs is None:  # else steps are known when rows are: Method.resolve_epochs
        check_judge_budgets(config)
    if reads_rows:
        read_ahead(config)


def _check_task(config: Config) -> None:
    """Check that there is such a task, and rows for it."""
    task = load_task(config.task.name or "rows", grading=config.task.grading)
    if not config.samples or task.name == "rows":
        check_data_given(config)
    has_episodes = task.respond is not None or task.environment is not None
    if config.method == "distill" and config.distill.on_policy_fraction < 1 and has_episodes:
        fraction = config.distill.on_policy_fraction
        raise ValueError(
            f"distill.on_policy_fraction={fraction} takes given answers, and task.name={config.task.name} has episodes"
        )


def check_named(config: Config, *, sections: tuple[str, ...] | None = None) -> None:
    """Raise ValueError for a setting (of `sections`; None: of all) that names something that does not exist."""
    task = load_task(config.task.name or "rows")
    for named in config.named():
        section = named.place[0]
        generated = section == "task" and task.generate is not None  # task.data is a name that the task knows
        if (sections is None or section in sections) and not (named.kind == "rows" and generated):
            _check_named(named)


def _check_named(named: Named) -> None:
    match named.kind:
        case "model":
            check_model_path(named.label, named.value)
        case "rows":
            try:
                reader_of(named.value)
            except ValueError as error:
                raise ValueError(f"{named.label}: {error}") from None
        case "code":
            parse_use(named.value, setting=named.label)
        case "file" if not named.names.made and not os.path.isfile(os.path.expanduser(named.value)):
            raise ValueError(f"{named.label}={truncate(named.value, 300)}: there is no such file")
        case "server" if not is_address(named.value):
            url = truncate(mask_url(named.value))
            raise ValueError(f"{named.label}={url} is not the address of a server: http://HOST:PORT")
        case _:
            pass


def check_evaluation(target: str, asked: Asked, *, vs: str | None = None) -> None:
    """Raise ValueError for targets, tasks, rows, settings and options that `tinyrl eval` cannot use."""
    check_side(vs)
    found = find(target, asked)
    for name in (target, *([vs] if vs not in (None, *OWN_SIDES) else [])):
        if run_of(Path(name)) is None:
            check_model_path("model", name)
    check_asked(found, asked)
    for config in (found.sampled, found.measured):
        if config is not None and not asked.as_it_is:
            _check_task(config)
            check_named(config, sections=("reward", "task"))
            check_rubrics(config)
            check_judge_budgets(config)


def check_model_path(key: str, path: str | None) -> None:
    """Check an embedded model, a run with a checkpoint, a folder with safetensors, or possibly a hub name."""
    if path is None or starter_path(path) is not None:
        return
    if (run := named_run(path)) is None:
        resolve_model_path(path, key=key, adapters=True)
    elif not any((run / "checkpoints").glob("step-*")):
        raise ValueError(f"{key}={path}: this run has no checkpoint yet")
