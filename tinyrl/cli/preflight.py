"""Checks before torch is imported, in under a second: model folders, the task, files of rows and rewards."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tinyrl.config.schema import Config, as_written, check_training
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import hub_name, reader_of
from tinyrl.data.rows import needed_data
from tinyrl.evaluation.targets import Asked, check_asked, find
from tinyrl.models.reading import ADAPTER_FILES, resolve_model_path
from tinyrl.runs.launched import VOICE, launched
from tinyrl.runs.resolve import adapter_settings
from tinyrl.runs.run_dir import meant_a_run, named_run, open_run, run_of
from tinyrl.runs.tracking import check_trackers
from tinyrl.tasks import load_task
from tinyrl.text import first_line, mask_url, truncate
from tinyrl.workers.loading import parse_use

HUB_PATIENCE_S = 5.0


def check_before_loading(config: Config) -> None:
    """Raise ValueError for whatever would stop a run before its first step and needs no model to be found."""
    check_training(config)
    count = launched().world_size
    if count > 1 and config.generation.engine == "server":
        raise ValueError(
            f"generation.engine=server samples for one process, and {count} were launched: leave the launcher out, or "
            "let the processes sample with generation.engine=auto generation.url=null"
        )
    check_trackers(config.run.trackers)
    check_model_path("model.path", config.model.path)
    _check_revisions(config)
    if config.learns_from_teacher and config.teacher.path is None:
        raise ValueError("teacher.path is missing: a run, an adapter, a model, a server's address, self or start")
    if config.learns_from_teacher and config.teacher.kind in ("model", "adapter"):
        check_model_path("teacher.path", str(config.teacher.path))
    if config.critic.path is not None:
        check_model_path("critic.path", config.critic.path)
    if config.model.adapter is not None:
        _check_adapter(config, config.model.adapter)
    _check_rewards(config)
    for setting, use in config.environment.functions:
        parse_use(use, setting=setting, classes=True)
    _check_rows(config)


def _check_adapter(config: Config, path: str) -> None:
    """Check the files of model.adapter, and that lora settings which are given agree with it."""
    folder = Path(path).expanduser()
    if _is_run("model.adapter", path):
        folder = max((folder / "checkpoints").glob("step-*"), default=folder)  # a run's have all the same shape
    else:
        for name in ADAPTER_FILES:
            if not (folder / name).is_file():
                raise ValueError(f"model.adapter={truncate(path, 300)}: {name} is missing there")
    for name, own in adapter_settings(folder).items():
        given = getattr(config.lora, name)
        same = given == own or given == "all-linear" or (isinstance(given, list) and sorted(given) == own)
        if name in config.lora.model_fields_set and not same:
            raise ValueError(
                f"lora.{name}={as_written(given)}, and the adapter of model.adapter={truncate(path, 300)} has "
                f"{as_written(own)}, which stays as it is; leave lora.{name} out"
            )


def go_offline_if_unreachable(config: Config) -> None:
    """Work offline where models or rows are on the hub and it does not answer: what is kept here is used, and the rest
    is missed at once, not after five tries for each file.
    """
    named = (config.model.path, config.critic.path, config.reward.model)
    models = [path for path in named if path and starter_path(path) is None and not os.path.exists(path)]
    rows = [source for source in (config.task.data, config.task.eval_data) if source and hub_name(source)]
    if not (models or rows) or "HF_HUB_OFFLINE" in os.environ:
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    asked = urllib.request.Request(hub, method="HEAD")  # noqa: S310
    try:
        urllib.request.urlopen(asked, timeout=HUB_PATIENCE_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        why = f"{mask_url(hub)} does not answer within {HUB_PATIENCE_S:g} s ({first_line(error)})"
        note = f"warning: {why}: working offline, with cached files only. Set HF_HUB_OFFLINE=0 to wait for it"
        if VOICE.speaks(note):
            print(note, file=sys.stderr)


def _check_rewards(config: Config) -> None:
    if config.reward.model is not None:
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
    where, environment = config.task, config.environment
    task = load_task(where.name or "rows", grading=where.grading)
    if not config.samples:
        needed_data(config)
    elif where.data is None and task.name == "rows":
        raise ValueError(
            "task.data is missing: say where the prompts are (task.data=rows.jsonl) or name a task (see `tinyrl list "
            "tasks`)"
        )
    elif task.environment == "search" and not (environment.name or environment.tools or environment.corpus):
        raise ValueError(
            f"task {task.name} searches, so it needs environment.corpus: a .jsonl or .parquet file of passages, or a "
            "retrieval server's URL"
        )
    for source in (where.data, where.eval_data, config.ppo.ptx_data):
        if source is not None and task.generate is None:
            reader_of(source)


def check_evaluation(target: str, asked: Asked, *, vs: str | None = None) -> None:
    """Raise ValueError for targets, tasks, rows, settings and options that `tinyrl eval` cannot use."""
    found = find(target, asked)
    for name in (target, *([vs] if vs not in (None, "base", "start", "teacher") else [])):
        if run_of(Path(name)) is None:
            if meant_a_run(name):
                open_run(name)  # says what is wrong with the name
            check_model_path("model", name)
    check_asked(found, asked)
    if asked.as_it_is:
        return
    for config in (found.sampled, found.measured):
        if config is not None:
            _check_rewards(config)
            _check_rows(config)


def check_model_path(key: str, path: str) -> None:
    """Check an embedded model, a run, a folder with safetensors, or possibly a hub name."""
    if starter_path(path) is None and not _is_run(key, path):
        resolve_model_path(path, key=key, adapters=True)


def _check_revisions(config: Config) -> None:
    """Raise ValueError for a pin of anything that does not come from the hub: it would be ignored."""
    model, where = config.model, config.task
    if model.revision and (starter_path(model.path) or os.path.isdir(os.path.expanduser(model.path))):
        raise ValueError(f"model.revision={model.revision} is for a hub model, and model.path={model.path} is a folder")
    names = {hub_name(source) for source in (where.data, where.eval_data) if source is not None} - {None}
    if where.revision is not None and len(names) != 1:
        raise ValueError(
            f"task.revision={where.revision} is for one hub data set in task.data and task.eval_data, and they name "
            f"{len(names) or 'none'}"
        )


def _is_run(key: str, path: str) -> bool:
    """Return whether a path names a run, or a checkpoint of one. Raises ValueError for a run without any."""
    run = named_run(path)
    if run is not None and not any((run / "checkpoints").glob("step-*")):
        raise ValueError(f"{key}={path}: this run has no checkpoint yet")
    return run is not None
