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
from pathlib import Path
from typing import Any

import torch

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config, without_secrets
from tinyrl.errors import EXPLAINED, SEE_CHECK
from tinyrl.models.parallel import check_alike
from tinyrl.rollout.load import load_method, resolve_threads
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.launched import Options
from tinyrl.runs.records import read_steps
from tinyrl.runs.resolve import absolute_paths, resolve
from tinyrl.runs.run_dir import RunDir, create_run, environment, open_run, run_of
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.method import Method
from tinyrl.training.run import Run, out_of_memory_stops
from tinyrl.training.state import InputHashes, changed_sources, read_sources, read_state
from tinyrl.training.step import stretched_schedule


def start(
    config: Config, *, options: Options, output_dir: str, name: str | None, overwrite: bool, command: list[str]
) -> Run:
    """Load everything, check it, and make the run's folder. Raises ValueError before anything is written."""
    check_trackers(config.run.trackers)
    with contextlib.ExitStack() as undo:
        method = _load(resolve(config), options=options, undo=undo)
        policy, world = method.policy, method.world
        with out_of_memory_stops("before the first step"):
            notes = [resolve_threads(policy), *method.check()]
        if policy.accelerator.device.type == "cpu":  # numbers depend on what run.threads=auto came to
            run_section = policy.config.run.model_copy(update={"threads": torch.get_num_threads()})
            policy.config = policy.config.model_copy(update={"run": run_section})
        config = policy.config  # with the date of the run
        if world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=policy.checkpoint_bytes(), copies=copies)
        own = create_run(output_dir, name=name, config=config, overwrite=overwrite) if world.is_main else None
        path = world.on_main(lambda: str(own.path) if own else "")
        folder = own or RunDir(Path(path), writes=False)  # rank 0 holds it; the other processes write nothing into it
        undo.callback(folder.lock.release)
        folder.write_config(config)
        write_environment(folder, method, options=options, command=command)
        sources = InputHashes
        if folder.writes:  # beside the training: large weights take seconds
            pool = ThreadPoolExecutor(1)
            sources = pool.submit(read_sources, config, rows=method.row_fingerprints, known={}).result
            pool.shutdown(wait=False)
        run = Run(method, folder, sources=sources)
        for note in (f"run {folder.path}", *notes, *[SEE_CHECK] * any(note.startswith(EXPLAINED) for note in notes)):
            run.display.note(note)
        undo.pop_all()
        return run


def _load(config: Config, *, options: Options, undo: contextlib.ExitStack, also: str = "") -> Method:
    """Load the method, alike in all processes; `undo` closes it. also: what else the processes must agree on."""
    with out_of_memory_stops("before the first step"):
        method: Method = load_method(config, options=options)
        undo.callback(method.close)
        _check_alike(method, also)
    return method


def _check_alike(method: Method, checkpoint: str) -> None:
    """Raise ValueError, on every process, where one has read other settings, rows or prompts than rank 0."""
    sections = {name: own for name, own in method.config.written().items() if isinstance(own, dict)}
    prompts = [p.tokens for kind in ("train_prompts", "eval_prompts") for p in getattr(method, kind, ())]
    inputs = {
        "method": method.config.method,
        **{f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()},
        "rows": method.row_fingerprints,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "checkpoint": checkpoint,
    }
    advice = "Start all with the same command, files and versions; no environment may open its episodes at random"
    check_alike(method.world, inputs, what="settings or inputs", advice=advice)


def write_environment(folder: RunDir, method: Method, *, options: Options, command: list[str]) -> None:
    """Write env.json of a run that trains `method`."""
    device, processes = method.policy.accelerator.device, method.world.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = environment(
        command,
        options={"device": device.type, "trust_remote_code": options.trust_remote_code},
        device=name if processes == 1 else f"{processes} processes, each {name}",
        threads=torch.get_num_threads(),
        seed=method.config.run.seed,
        dtype=str(method.policy.causal.dtype).removeprefix("torch."),
    )
    folder.write_environment(facts)


# ---- resuming and forking ----

MOST_SHOWN = 3  # changes in an error


def resume(
    folder: RunDir, *, options: Options, config: Config | None = None, allow_config_change: bool = False
) -> Run | None:
    """Go on from the newest checkpoint that verifies, or from the beginning. None: the run is finished.

    `config` (default: the run's config.yaml) and the files it names may differ from the checkpoint's only with
    `allow_config_change`, else ValueError. Nothing of the run is changed before all of it is loaded, and config.yaml
    only with a checkpoint under another configuration.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(folder.lock)
        checkpoint, warnings = checkpoints.newest_sound(folder.checkpoints)
        if checkpoint is None and not warnings:
            _check_beginning(folder)
        kept, since = (read_state(checkpoint), checkpoint.name) if checkpoint else (None, "it was made")
        config = resolve(config or folder.read_config())
        before = absolute_paths(kept.config if kept else folder.read_config().written())
        if config.run.threads == "auto":  # as the run has it
            run_section = config.run.model_copy(update={"threads": before["run"].get("threads", "auto")})
            config = config.model_copy(update={"run": run_section})
        changes = check_changes(before, config, since=since, allowed=allow_config_change)
        options, notes = started_with(folder, options)
        notes += [f"warning: {w}; using {checkpoint.name if checkpoint else 'the start'} instead" for w in warnings[:1]]
        method = _load(config, options=options, undo=undo, also=since)
        with out_of_memory_stops("before the first step"):
            known = kept.sources if kept else InputHashes()
            sources = read_sources(config, rows=method.row_fingerprints, known=known.files)
            what = "what the run reads has changed"
            changes += refuse(what, changed_sources(known, sources), since=since, allowed=allow_config_change)
            notes += [resolve_threads(method.policy), *method.check()]
            run = Run(method, folder, sources=lambda: sources)
            if checkpoint is None or kept is None:
                folder.cut({})
            else:
                notes += run.restore(checkpoint, kept)
                now = sources.versions
                others = [f"{n} {v}, now {now[n]}" for n, v in sorted(known.versions.items()) if now.get(n, v) != v]
                if others:
                    what = f"numbers may differ in their last digits, other versions than at {since}"
                    notes.append(f"warning: {what}: {', '.join(others)}")
                if any(not line.startswith(("optim.", "run.")) or line.startswith("run.seed:") for line in changes):
                    method.forget()  # a step no longer samples the same
                    run.state.controllers.exact_sampling = None
                notes += [f"changed since {since}: {change}" for change in changes]
                step, steps = run.state.step, config.run.num_steps
                were = kept.setting("run", "num_steps")
                notes += filter(None, [stretched_schedule(config.optim, step=step, before=were or steps, now=steps)])
                notes.append(f"resuming {folder.path} at step {step} of {steps} from {since}")
        if run.finished:
            return None
        run.new_config = bool(changes)
        for note in notes:
            run.display.note(note)
        undo.pop_all()
        return run


def started_with(folder: RunDir, given: Options) -> tuple[Options, list[str]]:
    """Return the options of a resume: the device of the start, where the command line names none; a note for another.

    Raises ValueError for a run started with --trust-remote-code that is resumed without: a run's folder may come from
    anybody, so only the command line lets code of a model run.
    """
    try:
        kept = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))["options"]
        device, trusted = kept["device"], kept["trust_remote_code"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return given, []
    if trusted and not given.trust_remote_code:
        raise ValueError(
            f"{folder.path} was started with --trust-remote-code: "
            f"`{shlex.join(['tinyrl', 'train', '--resume', str(folder.path), '--trust-remote-code'])}`"
        )
    now = given.device
    if now == "auto":
        now = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    notes = [f"warning: {folder.path} was started on {device}, and goes on on {now}"] if now != device else []
    if given.trust_remote_code and not trusted:
        notes.append(f"warning: {folder.path} was started without --trust-remote-code")
    return replace(given, device=now), notes


def _check_beginning(folder: RunDir) -> None:
    """Raise ValueError for a run past its beginning without a checkpoint: to begin again would delete the record."""
    last = max(read_steps(folder.metrics, []), default=0) if folder.metrics.is_file() else 0
    if last > 0:
        what = "is empty" if folder.checkpoints.is_dir() else "does not exist"
        raise ValueError(
            f"{folder.path} has come to step {last} and has no checkpoint to go on from: {folder.checkpoints} {what}.\n"
            "Was it moved, or is its disk not mounted? To begin again: `tinyrl train` with --name and --overwrite"
        )


# ---- forks ----


def fork(
    origin: str, overrides: list[str], *, options: Options, output_dir: str | None, name: str | None, command: list[str]
) -> Run:
    """Make a run that goes on from a checkpoint of `origin` (RUN, RUN@STEP or a checkpoint's folder), with `overrides`
    laid over its settings; unchanged, to the same weights to the bit. Its records begin with the other run's, up to
    there, and run.forked_from names it. output_dir: default the folder that `origin` is in. Raises ValueError, and
    leaves no folder, where it cannot go on.
    """
    old, checkpoint = _origin_of(origin)
    kept = read_state(checkpoint)
    step = kept.run.step
    config = build_config(kept.config, overrides, source=f"{checkpoint.name} of {old.path}")
    if kept.run.phase == "rollout" and step >= config.run.num_steps:
        raise ValueError(f"step {step} is the last of {old.path}: say how many steps the fork has, run.num_steps=N")
    section = config.run.model_copy(update={"forked_from": f"{old.path.resolve()}@{step}"})
    config = config.model_copy(update={"run": section})
    new = create_run(output_dir or str(old.path.parent), name=name, config=config, overwrite=False)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, new.path, ignore_errors=True)
        new.write_config(config)
        best = {old.checkpoints / checkpoints.checkpoint_name(kept.run.best.step)} if kept.run.best else set()
        for each in {checkpoint, *filter(Path.is_dir, best)}:
            copy = checkpoints.checkpoint_name(checkpoints.checkpoint_step(each))
            shutil.copytree(each, new.checkpoints / copy)
        for record in filter(Path.is_file, map(old.path.joinpath, new.lengths())):
            shutil.copyfile(record, new.path / record.name)  # which the resume cuts
        run = resume(new, options=options, config=config, allow_config_change=True)
        assert run is not None
        undo.callback(run.method.close)
        undo.callback(run.close)
        write_environment(new, run.method, options=options, command=command)
        undo.pop_all()
        return run


def _origin_of(origin: str) -> tuple[RunDir, Path]:
    """Find the run and the sound checkpoint of an origin; of RUN the newest one. Raises ValueError for no such step."""
    name, at, step = origin.rpartition("@")
    if not at or Path(origin).exists() or not re.fullmatch("[0-9]+", step):
        path = Path(origin)
        return open_run(run_of(path) or path), checkpoints.checkpoint_of(path)
    folder = open_run(name)
    checkpoint = folder.checkpoints / checkpoints.checkpoint_name(int(step))
    if not checkpoint.is_dir():
        steps = [str(checkpoints.checkpoint_step(each)) for each in checkpoints.list_checkpoints(folder.checkpoints)]
        kept = f"those there are: {', '.join(steps)}" if steps else "it has none"
        raise ValueError(
            f"{folder.path} has no checkpoint of step {step}; {kept} (run.save_every and run.keep_checkpoints)"
        )
    return folder, checkpoints.checkpoint_of(checkpoint)


# ---- settings that have changed ----


def check_changes(before: dict[str, Any], config: Config, *, since: str, allowed: bool) -> list[str]:
    """Compare a checkpoint's configuration with the one it is resumed under; returns a line for each difference.
    Raises ValueError for another method, and for differences, besides more steps, that are not `allowed`.
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
    """Return the changes. Raises ValueError, with the first of them, when there are some and they are not allowed."""
    if not changes or allowed:
        return changes
    more = [f"  and {len(changes) - MOST_SHOWN} more"] if len(changes) > MOST_SHOWN else []
    lines = [f"{what} since {since}, so the run would not go on as it began:"]
    lines += [f"  {change}" for change in changes[:MOST_SHOWN]] + more
    raise ValueError("\n".join([*lines, "Put them back, or go on with the new values: --allow-config-change"]))


def changed_settings(before: dict[str, Any], now: dict[str, Any], *, within: str = "") -> list[str]:
    """List settings with two values. One that only one side has is left out: another version wrote it."""
    changes = []
    for key in sorted(before.keys() & now.keys()):
        old, new = before[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_settings(old, new, within=f"{within}{key}.")
        elif old != new:
            changes.append(f"{within}{key}: {json.dumps(old)} then, {json.dumps(new)} now")
    return changes
