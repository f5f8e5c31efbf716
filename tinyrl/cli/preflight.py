"""Checks before torch is imported: model folders, rewards, the task and its rows, which are read here and kept."""

from __future__ import annotations

import os
from pathlib import Path

from tinyrl.config.schema import Config, check_training
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import reader_of
from tinyrl.data.rows import needed_data
from tinyrl.evaluation.targets import Asked, check_asked, find
from tinyrl.models.reading import resolve_model_path
from tinyrl.runs.launched import launched
from tinyrl.runs.run_dir import named_run, run_of
from tinyrl.runs.tracking import check_trackers
from tinyrl.tasks import load_task, read_ahead
from tinyrl.workers.loading import parse_use


def check_before_loading(config: Config, *, reads_rows: bool = True) -> None:
    """Raise ValueError for what would stop a run before its first step and needs no model to be found."""
    check_training(config)
    if config.generation.engine == "server" and launched().world_size > 1:
        raise ValueError("generation.engine=server samples for one process: leave the launcher out, or take auto")
    check_trackers(config.run.trackers)
    model, teacher = config.model, config.teacher
    if config.learns_from_teacher and teacher.path is None:
        raise ValueError("teacher.path is missing: a run, an adapter, a model, a server's address, self or start")
    check_model_path("model.path", model.path)
    check_model_path("model.adapter", model.adapter)
    check_model_path("critic.path", config.critic.path)
    if config.learns_from_teacher and teacher.kind in ("model", "adapter"):
        check_model_path("teacher.path", teacher.path)
    _check_rewards(config)
    for setting, use in config.environment.functions:
        parse_use(use, setting=setting)
    _check_rows(config)
    if reads_rows:
        read_ahead(config)


def _check_rewards(config: Config) -> None:
    check_model_path("reward.model", config.reward.model)
    run, own = config.run, config.own
    evaluations = (run.num_steps // run.eval_every if run.eval_every else 1) + 1 if run.eval_prompts else 0
    prompts = getattr(own, "num_prompts", 0) * (1 + getattr(own, "dynamic_sampling_rounds", 0)) * run.num_steps
    for function in config.reward.functions:
        if not function.is_judge:
            parse_use(function.use)
            continue
        if not os.path.isfile(os.path.expanduser(function.rubric or "")):
            raise ValueError(f"reward.functions: rubric={function.rubric} is no file")
        group = getattr(own, "group_size", 1) if function.mode == "score" else 1  # `rank` asks once a group
        most, needed = function.max_requests, prompts * group + evaluations * run.eval_prompts
        if most is not None and needed > most:
            raise ValueError(f"reward.functions: max_requests={most}, and this run may ask its judge {needed:,} times")


def _check_rows(config: Config) -> None:
    """Check that what rows are read from is there; the rows are checked where they are read."""
    where = config.task
    task = load_task(where.name or "rows", grading=where.grading)
    if not config.samples or task.name == "rows":
        needed_data(config)
    for source in (where.data, where.eval_data, config.ppo.ptx_data):
        if source is not None and task.generate is None:
            reader_of(source)


def check_evaluation(target: str, asked: Asked, *, vs: str | None = None) -> None:
    """Raise ValueError for targets, tasks, rows, settings and options that `tinyrl eval` cannot use."""
    found = find(target, asked)
    for name in (target, *([vs] if vs not in (None, "base", "start", "teacher") else [])):
        if run_of(Path(name)) is None:
            check_model_path("model", name)
    check_asked(found, asked)
    for config in (found.sampled, found.measured):
        if config is not None and not asked.as_it_is:
            _check_rewards(config)
            _check_rows(config)


def check_model_path(key: str, path: str | None) -> None:
    """Check an embedded model, a run with a checkpoint, a folder with safetensors, or possibly a hub name."""
    if path is None or starter_path(path) is not None:
        return
    if (run := named_run(path)) is None:
        resolve_model_path(path, key=key, adapters=True)
    elif not any((run / "checkpoints").glob("step-*")):
        raise ValueError(f"{key}={path}: this run has no checkpoint yet")
