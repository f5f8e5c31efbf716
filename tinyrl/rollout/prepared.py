"""What a run begins with: its settings, its task and its rows, found before torch is imported and handed on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinyrl.config.conflicts import conflicts
from tinyrl.config.refusal import Refusal, raise_first, refusals_at
from tinyrl.config.schema import Config
from tinyrl.rollout.model_files import model_refusals
from tinyrl.rollout.preflight import check_before_loading, check_images, image_notes
from tinyrl.runs.resolve import check_room_for_responses, has_vision_tower, resolve
from tinyrl.tasks import Task
from tinyrl.tasks.rewarded import check_hint, check_rewarded
from tinyrl.tasks.run_rows import RunRows, rows_of_run, text_rows


@dataclass(frozen=True)
class PreparedSettings:
    """A configuration with its task. config: as resolved, with absolute paths and checkpoints of runs."""

    config: Config
    task: Task


@dataclass(frozen=True)
class PreparedRun(PreparedSettings):
    """A configuration with its task and its rows."""

    rows: RunRows


def prepare(config: Config, *, goes_on: bool = False) -> PreparedRun:
    """Check a run that is to train, without torch, in the order of what an answer costs; read its rows. goes_on: from a
    checkpoint, so what it has trained on as text stays text.

    1. Settings, and what they name (`prepare_settings`).
    2. Rows, of files or the hub: each is checked, and there must be a reward where the method needs one. Where they
       have images, the model and all that reads prompts must see them.

    Raises ValueError for what a user can fix.
    """
    settings = prepare_settings(config)
    task = settings.task
    with refusals_at(config.given.places):
        text = text_rows(config)  # by the paths that were given, which errors quote
        rows = replace(rows_of_run(config, task), text=text)
        if rows.has_images:
            check_images(settings.config)
            rows = replace(rows, notes=[*rows.notes, *image_notes(config)])
        unshown = unshown_images(config, rows)
        if not goes_on:
            check_shown(settings.config, unshown)
        as_text = [f"warning: {sentence}" for sentence in rows.images_as_text()]
        rows = replace(rows, notes=[*rows.notes, *warnings_of(unshown), *as_text])
        if config.samples:
            check_rewarded(config, task, rows.train)
            check_hint(config, rows.train)
        resolved = with_tower(settings.config, rows)
    return PreparedRun(config=resolved, task=task, rows=rows)


def unshown_images(config: Config, rows: RunRows) -> list[str]:
    """Return sentences on what seems to be an image and is read as text, or not at all."""
    columns = [] if config.environment.agent is not None else rows.unshown_columns()
    return [*rows.unshown_places(), *columns]


def warnings_of(unshown: list[str]) -> list[str]:
    """Return warnings of what `unshown_images` found."""
    return [f"warning: {sentence}: the model does not see it" for sentence in unshown]


def check_shown(config: Config, unshown: list[str]) -> None:
    """Raise Refusal for what `unshown_images` found, where the model has a vision tower, unless model.with_images was
    given: then the rows are meant as text.
    """
    if unshown and config.model.with_images is None and has_vision_tower(config.model.path):
        what = "or task.columns.unused=NAME if a column holds none; model.with_images=true if these are rows of text"
        raise Refusal(
            ("task.data", "model.path"),
            f"{unshown[0]}. model.path={config.model.path} sees images: give a row its own in a column `images`, "
            f"{what}",
        )


def with_tower(config: Config, rows: RunRows) -> Config:
    """Return the configuration with model.with_images where rows have images: config.yaml of the run says so to what
    reads its weights later. Raises ValueError where it was given as false, or conflicts with another setting.
    """
    if not rows.has_images or config.model.with_images:
        return config
    if config.model.with_images is False:
        raise Refusal(("model.with_images",), "model.with_images=false, and rows have images; null follows the rows")
    config = config.model_copy(update={"model": config.model.model_copy(update={"with_images": True})})
    raise_first(conflicts(config))
    return config


def prepare_settings(config: Config) -> PreparedSettings:
    """Check a run's settings and resolve those that depend on the model's folder. Raises ValueError."""
    with refusals_at(config.given.places):
        task = check_before_loading(config)
        resolved = resolve(config)
        raise_first(model_refusals(resolved))
        check_room_for_responses(resolved)
    return PreparedSettings(config=resolved, task=task)
