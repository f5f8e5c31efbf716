"""Checks of settings before torch is imported and rows are read: model folders, rewards, the task. `check_images` is
for settings that rows with images do not go with, and is called once these are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tinyrl.config.conflicts import check_data_given, training_conflicts
from tinyrl.config.marks import Named
from tinyrl.config.refusal import Refusal, raise_first
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import reader_of
from tinyrl.models.reading import is_reward_adapter, resolve_model_path
from tinyrl.process.launched import launched
from tinyrl.rewards.budget import check_judge_budgets
from tinyrl.rewards.rubric import check_rubrics
from tinyrl.runs.places import named_run
from tinyrl.runs.resolve import has_vision_tower
from tinyrl.runs.tracking import check_trackers
from tinyrl.tasks import Task, task_of
from tinyrl.text import truncate
from tinyrl.urls import is_address, mask_url
from tinyrl.workers.loading import parse_use

THREADS_A_CORE = 4  # more only wait for each other, and some thousands end the process


def check_before_loading(config: Config) -> Task:
    """Check what would stop a run before its first step, and needs neither its rows nor a model to be found; return
    its task, which is loaded here. Raises Refusal.
    """
    raise_first(training_conflicts(config))
    if config.generation.engine == "server" and launched().world_size > 1:
        raise Refusal(
            ("generation.engine",),
            "generation.engine=server samples for one process: leave the launcher out, or take auto",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.run.threads != "auto" and config.run.threads > THREADS_A_CORE * cores:
        most = f"at most {THREADS_A_CORE * cores} on the {cores} cores of this machine"
        raise Refusal(
            ("run.threads",), f"run.threads={config.run.threads}: {most}; auto chooses them by the model's width"
        )
    check_trackers(config.run.trackers)
    if config.learns_from_teacher and config.teacher.path is None:
        raise Refusal(
            ("teacher.path",), "teacher.path is missing: a run, an adapter, a model, a server's address, self or start"
        )
    task = task_of(config)
    check_task(config, task)
    check_named(config, task)
    check_rubrics(config)
    if config.run.epochs is None:  # else the number of steps is known when rows are (load.py)
        check_judge_budgets(config)
    return task


def check_task(config: Config, task: Task) -> None:
    """Raise ValueError where a task needs rows and has none, or has episodes and the method takes given answers."""
    if not config.samples or task.name == "rows":
        check_data_given(config)
    if config.method == "distill" and config.distill.on_policy_fraction < 1 and task.has_turns:
        fraction = config.distill.on_policy_fraction
        raise Refusal(
            ("distill.on_policy_fraction", "task.name"),
            f"distill.on_policy_fraction={fraction} takes given answers, and task.name={config.task.name} has episodes",
        )


def check_named(config: Config, task: Task, *, sections: tuple[str, ...] | None = None) -> None:
    """Raise Refusal for a setting (of `sections`; None: of all) that names something that does not exist."""
    for named in config.named():
        section = named.place[0]
        generated = section == "task" and task.generate is not None  # task.data is a name that the task knows
        if (sections is None or section in sections) and not (named.kind == "rows" and generated):
            problem = _problem_with(named)
            if problem is not None:
                raise Refusal((named.setting,), problem)


def _problem_with(named: Named) -> str | None:
    """Return what is wrong with a value that names something, in a sentence; None where it is there."""
    try:
        match named.kind:
            case "model":
                check_model_path(named.label, named.value)
            case "rows":
                reader_of(named.value)
            case "code":
                parse_use(named.value, setting=named.label)
            case "file" if not named.names.made and not os.path.isfile(os.path.expanduser(named.value)):
                return f"{named.label}={truncate(named.value, 300)}: there is no such file"
            case "server" if not is_address(named.value):
                url = truncate(mask_url(named.value))
                return f"{named.label}={url} is not the address of a server: http://HOST:PORT"
            case _:
                pass
    except ValueError as error:
        return f"{named.label}: {error}" if named.kind == "rows" else str(error)
    return None


def check_model_path(key: str, path: str | None) -> None:
    """Check an embedded model, a run with a checkpoint, a folder with safetensors, or possibly a hub name."""
    if path is None or starter_path(path) is not None:
        return
    if (run := named_run(path)) is None:
        resolve_model_path(path, key=key, adapters=True)
    elif not any((run / "checkpoints").glob("step-*")):
        raise ValueError(f"{key}={path}: this run has no checkpoint yet")


# ---- images ----


def check_images(config: Config) -> None:
    """Raise Refusal for settings of a run whose rows have images, under which something would not see them."""
    raise_first(_blind_settings(config))
    check_sees_images(config)


def _blind_settings(config: Config) -> Iterator[Refusal]:
    """Yield settings under which something reads prompts without their images."""
    images = "the rows of task.data have images, which"
    if not config.samples:
        return
    reward = config.reward
    if reward.model is not None and not is_reward_adapter(reward.model):
        yield Refusal(
            ("reward.model", "task.data"),
            f"{images} reward.model={reward.model} does not see: it is a model of its own; an adapter on "
            "model.path sees them",
        )
    teacher = config.teacher
    if config.learns_from_teacher and teacher.kind == "server":
        yield Refusal(("teacher.path", "task.data"), f"{images} a teacher at an address is not sent")
    if config.learns_from_teacher and teacher.kind == "model" and has_vision_tower(str(teacher.path)) is False:
        yield Refusal(
            ("teacher.path", "task.data"),
            f"{images} teacher.path={teacher.path} does not see: its config.json has no vision_config",
        )
    if config.generation.engine == "server":
        yield Refusal(("generation.engine", "task.data"), f"{images} generation.engine=server is not sent")


def image_notes(config: Config) -> list[str]:
    """Return a warning for each judge that is not shown the images of the rows: it may judge by a reference answer."""
    return [
        f"warning: the judge {function.model} does not see the images of the rows; images: true in reward.functions "
        "shows them"
        for function in config.reward.functions
        if function.is_judge and not function.images
    ]


def check_sees_images(config: Config) -> None:
    """Raise Refusal where config.json of the model is here and names no vision tower."""
    path = config.model.path
    if has_vision_tower(path) is False:
        raise Refusal(
            ("model.path", "task.data"),
            f"the rows of task.data have images, and model.path={path} has no vision tower (no vision_config in its "
            "config.json). task.columns.unused=images leaves their column out",
        )
