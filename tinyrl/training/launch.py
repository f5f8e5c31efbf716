"""The start of a run: everything a user can fix is checked before its folder is made.

A resume goes on from the newest checkpoint that verifies; a fork is a new run that goes on so from another one's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config, without_secrets
from tinyrl.config.yaml_reader import Source
from tinyrl.errors import EXPLAINED, SEE_CHECK
from tinyrl.models.parallel import check_alike
from tinyrl.models.roles import checkpoint_bytes
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.records import read_steps
from tinyrl.runs.resolve import absolute_paths, resolve
from tinyrl.runs.run_dir import RunDir, create_run, environment, open_run, run_of
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.session import Session, Trainer, out_of_memory_stops
from tinyrl.training.state import Sources, changed_sources, read_sources, read_state
from tinyrl.training.update import stretched_schedule


def start(
    config: Config, *, options: Options, output_dir: str, name: str | None, overwrite: bool, command: list[str]
) -> Session:
    """Load everything, check it, and make the run's folder. Raises ValueError before anything is written."""
    check_trackers(config.run.trackers)
    config = resolve(config)
    with contextlib.ExitStack() as undo:
        trainer = load(config, options=options, undo=undo)
        world, config = trainer.world, trainer.config  # with the date of the run
        with out_of_memory_stops("before the first step"):
            notes = [resolve_threads(trainer), *trainer.check()]
        if trainer.accelerator.device.type == "cpu":  # numbers depend on what run.threads=auto came to
            run_section = config.run.model_copy(update={"threads": torch.get_num_threads()})
            config = trainer.config = config.model_copy(update={"run": run_section})
        if world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(trainer.roles), copies=copies)
        made: list[RunDir] = []  # by rank 0, which holds it; the other processes write nothing into it

        def make() -> str:
            made.append(create_run(output_dir, name=name, config=config, overwrite=overwrite))
            return str(made[0].path)

        path = world.on_main(make)
        run = made[0] if made else RunDir(Path(path), writes=False)
        undo.callback(run.lock.release)
        run.write_config(config)
        write_environment(run, trainer, options=options, command=command)
        sources = Sources
        if run.writes:  # beside the training: large weights take seconds
            pool = ThreadPoolExecutor(1)
            reading = partial(read_sources, config, rows=trainer.row_fingerprints, known={})
            sources = pool.submit(reading).result
            pool.shutdown(wait=False)
        session = Session(trainer, run, sources=sources)
        for note in (f"run {run.path}", *notes, *[SEE_CHECK] * any(note.startswith(EXPLAINED) for note in notes)):
            session.display.note(note)
        undo.pop_all()
        return session


def load(config: Config, *, options: Options, undo: contextlib.ExitStack, also: str = "") -> Trainer:
    """The trainer of a run, alike in all processes; `undo` closes it. also: what else the processes must agree on."""
    with out_of_memory_stops("before the first step"):
        trainer: Trainer = trainer_of(config.method)(config, options=options)
        undo.callback(trainer.close)
        if trainer.world.size > 1:
            _check_alike(trainer, also)
    return trainer


def _check_alike(trainer: Trainer, checkpoint: str) -> None:
    """Raise ValueError, on every process, where one has read other settings, rows or prompts than rank 0."""
    sections = {name: own for name, own in trainer.config.written().items() if isinstance(own, dict)}
    prompts = [p.tokens for kind in ("train_prompts", "eval_prompts") for p in getattr(trainer, kind, ())]
    inputs = {
        "method": trainer.config.method,
        **{f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()},
        "rows": trainer.row_fingerprints,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "checkpoint": checkpoint,
    }
    advice = "Start all with the same command, files and versions; no environment may open its episodes at random"
    check_alike(trainer.world, inputs, what="settings or inputs", advice=advice)


def write_environment(run: RunDir, trainer: Trainer, *, options: Options, command: list[str]) -> None:
    """Write env.json of a run that `trainer` trains."""
    device, processes = trainer.accelerator.device, trainer.world.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = environment(
        command,
        options={"device": device.type, "trust_remote_code": options.trust_remote_code},
        device=name if processes == 1 else f"{processes} processes, each {name}",
        threads=torch.get_num_threads(),
        seed=trainer.config.run.seed,
        dtype=str(trainer.roles.causal.dtype).removeprefix("torch."),
    )
    run.write_environment(facts)


# ---- resuming and forking ----

MOST_SHOWN = 3  # changes in an error


def resume(
    run: RunDir, *, options: Options, config: Config | None = None, allow_config_change: bool = False
) -> Session | None:
    """Go on from the newest checkpoint that verifies, or from the beginning. None: the run is finished.

    `config` (default: the run's config.yaml), and the files that the run reads, may differ from the checkpoint's only
    with `allow_config_change`. Raises ValueError otherwise. Nothing of the run is changed before all of it is loaded,
    and config.yaml only when a checkpoint has been written under another configuration.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(run.lock)
        folder, warnings = checkpoints.newest_sound(run.checkpoints)
        if folder is None and not warnings:
            _check_beginning(run)
        kept, since = (read_state(folder), folder.name) if folder else (None, "it was made")
        config = resolve(config or run.read_config())
        before = absolute_paths(kept.config if kept else run.read_config().written())
        if config.run.threads == "auto":  # as the run has it
            run_section = config.run.model_copy(update={"threads": before["run"].get("threads", "auto")})
            config = config.model_copy(update={"run": run_section})
        changes = check_changes(before, config, since=since, allowed=allow_config_change)
        options, notes = started_with(run, options)
        notes += [f"warning: {w}; using {folder.name if folder else 'the start'} instead" for w in warnings[:1]]
        trainer = load(config, options=options, undo=undo, also=since)
        with out_of_memory_stops("before the first step"):
            known = kept.sources if kept else Sources()
            sources = read_sources(config, rows=trainer.row_fingerprints, known=known.files)
            what = "what the run reads has changed"
            changes += refuse(what, changed_sources(known, sources), since=since, allowed=allow_config_change)
            notes += [resolve_threads(trainer), *trainer.check()]
            session = Session(trainer, run, sources=lambda: sources)
            if folder is None or kept is None:
                run.cut({})
            else:
                notes += session.restore(folder, kept)
                now = sources.versions
                others = [f"{n} {v}, now {now[n]}" for n, v in sorted(known.versions.items()) if now.get(n, v) != v]
                if others:
                    what = f"numbers may differ in their last digits, other versions than at {since}"
                    notes.append(f"warning: {what}: {', '.join(others)}")
                if any(not line.startswith(("optim.", "run.")) or line.startswith("run.seed:") for line in changes):
                    trainer.forget()  # a step no longer samples the same
                    session.state.controllers.exact_sampling = None
                notes += [f"changed since {since}: {change}" for change in changes]
                step, steps = session.state.step, config.run.num_steps
                were = kept.setting("run", "num_steps")
                notes += filter(None, [stretched_schedule(config.optim, step=step, before=were or steps, now=steps)])
                notes.append(f"resuming {run.path} at step {step} of {steps} from {since}")
        if session.finished:
            return None
        session.new_config = bool(changes)
        for note in notes:
            session.display.note(note)
        undo.pop_all()
        return session


def started_with(run: RunDir, given: Options) -> tuple[Options, list[str]]:
    """The device that a run was started on, where the command line names none, and a note for another one.

    Raises ValueError for a run started with --trust-remote-code that is resumed without: a run's folder may come from
    anybody, so only the command line lets code of a model run.
    """
    try:
        kept = json.loads((run.path / "env.json").read_text(encoding="utf-8"))["options"]
        device, trusted = kept["device"], kept["trust_remote_code"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return given, []
    if trusted and not given.trust_remote_code:
        raise ValueError(
            f"{run.path} was started with --trust-remote-code: "
            f"`{shlex.join(['tinyrl', 'train', '--resume', str(run.path), '--trust-remote-code'])}`"
        )
    now = given.device
    if now == "auto":
        now = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    notes = [f"warning: {run.path} was started on {device}, and goes on on {now}"] if now != device else []
    if given.trust_remote_code and not trusted:
        notes.append(f"warning: {run.path} was started without --trust-remote-code")
    return replace(given, device=now), notes


def _check_beginning(run: RunDir) -> None:
    """Raise ValueError for a run past its beginning without a checkpoint: to begin again would delete the record."""
    last = max(read_steps(run.metrics, []), default=0) if run.metrics.is_file() else 0
    if last > 0:
        what = "is empty" if run.checkpoints.is_dir() else "does not exist"
        raise ValueError(
            f"{run.path} has come to step {last} and has no checkpoint to go on from: {run.checkpoints} {what}.\n"
            "Was it moved, or is its disk not mounted? To begin again: `tinyrl train` with --name and --overwrite"
        )


# ---- forks ----


def fork(
    origin: str, overrides: list[str], *, options: Options, output_dir: str | None, name: str | None, command: list[str]
) -> Session:
    """A new run that goes on from a checkpoint of `origin` (RUN, RUN@STEP or a checkpoint's folder), with `overrides`
    laid over its settings. Its records begin with the other run's, up to there, and run.forked_from names it.

    An unchanged fork goes on to the same weights, to the bit, as the other run did. output_dir: default the folder that
    `origin` is in. Raises ValueError, and leaves no folder, where it cannot go on.
    """
    run, checkpoint = _origin_of(origin)
    kept = read_state(checkpoint)
    step = kept.run.step
    config = build_config(Source(f"{checkpoint.name} of {run.path}", kept.config), overrides)
    if kept.run.phase == "rollout" and step >= config.run.num_steps:
        raise ValueError(f"step {step} is the last of {run.path}: say how many steps the fork has, run.num_steps=N")
    section = config.run.model_copy(update={"forked_from": f"{run.path.resolve()}@{step}"})
    config = config.model_copy(update={"run": section})
    new = create_run(output_dir or str(run.path.parent), name=name, config=config, overwrite=False)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, new.path, ignore_errors=True)
        new.write_config(config)
        best = {run.checkpoints / checkpoints.checkpoint_name(kept.run.best.step)} if kept.run.best else set()
        for folder in {checkpoint, *(each for each in best if each.is_dir())}:
            copy = checkpoints.checkpoint_name(checkpoints.checkpoint_step(folder))
            shutil.copytree(folder, new.checkpoints / copy)
        for record, length in kept.records.items():
            if (run.path / record).is_file():
                with (run.path / record).open("rb") as file:
                    (new.path / record).write_bytes(file.read(length))
        session = resume(new, options=options, config=config, allow_config_change=True)
        assert session is not None
        undo.callback(session.trainer.close)
        undo.callback(session.close)
        write_environment(new, session.trainer, options=options, command=command)
        undo.pop_all()
        return session


def _origin_of(origin: str) -> tuple[RunDir, Path]:
    """The run and the sound checkpoint that an origin means; of RUN the newest one. Raises ValueError, with the steps
    there are, where it is none.
    """
    name, at, step = origin.rpartition("@")
    if not at or Path(origin).exists() or not re.fullmatch("[0-9]+", step):
        folder = Path(origin)
        return open_run(run_of(folder) or folder), checkpoints.checkpoint_of(folder)
    run = open_run(name)
    folder = run.checkpoints / checkpoints.checkpoint_name(int(step))
    if not folder.is_dir():
        steps = [str(checkpoints.checkpoint_step(each)) for each in checkpoints.list_checkpoints(run.checkpoints)]
        kept = f"those there are: {', '.join(steps)}" if steps else "it has none"
        raise ValueError(
            f"{run.path} has no checkpoint of step {step}; {kept} (run.save_every and run.keep_checkpoints)"
        )
    return run, checkpoints.checkpoint_of(folder)


# ---- settings that have changed ----


def check_changes(before: dict[str, Any], config: Config, *, since: str, allowed: bool) -> list[str]:
    """Compare a checkpoint's configuration with the one it is resumed under; returns a line for each difference.

    Raises ValueError when there are some besides more steps and `allowed` is false, and always when the method is
    another one.
    """
    method = before.get("method")
    if method != config.method:
        raise ValueError(f"{since} was written by `tinyrl train {method}`; {config.method} cannot go on with it")
    changes = changed_settings(without_secrets(before), config.written())
    steps = before.get("run", {}).get("num_steps")
    longer = isinstance(steps, int) and steps < config.run.num_steps
    refused = [change for change in changes if not (longer and change.startswith("run.num_steps:"))]
    refuse("settings have changed", refused, since=since, allowed=allowed)
    return changes


def refuse(what: str, changes: list[str], *, since: str, allowed: bool) -> list[str]:
    """The changes. Raises ValueError, with the first of them, when there are some and they are not allowed."""
    if not changes or allowed:
        return changes
    more = [f"  and {len(changes) - MOST_SHOWN} more"] if len(changes) > MOST_SHOWN else []
    lines = [f"{what} since {since}, so the run would not go on as it began:"]
    lines += [f"  {change}" for change in changes[:MOST_SHOWN]] + more
    raise ValueError("\n".join([*lines, "Put them back, or go on with the new values: --allow-config-change"]))


def changed_settings(before: dict[str, Any], now: dict[str, Any], *, within: str = "") -> list[str]:
    """A line for each setting with two values. One that only one side has is left out: another version wrote it."""
    changes = []
    for key in sorted(before.keys() & now.keys()):
        old, new = before[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_settings(old, new, within=f"{within}{key}.")
        elif old != new:
            changes.append(f"{within}{key}: {json.dumps(old)} then, {json.dumps(new)} now")
    return changes
