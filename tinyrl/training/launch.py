"""The start of a run: everything a user can fix is checked before its folder is made.

A resume goes on from the newest checkpoint that verifies; a fork is a new run that goes on so from another one's.
Rows, model files and people's functions with their local imports have hashes: a resume under another one is refused as
one under another setting is; other versions of libraries are only noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from tinyrl.config.changes import Change, by_setting, changed_settings
from tinyrl.config.derive import READS, derive_over, read_written
from tinyrl.config.marks import Named
from tinyrl.config.methods import and_list
from tinyrl.config.refusal import Source, refusals_at
from tinyrl.config.removed import given_removed, ignore_neutral
from tinyrl.config.schema import Config, without_secrets
from tinyrl.config.sections import starter_path
from tinyrl.models.parallel import check_alike
from tinyrl.process.launched import Options
from tinyrl.rollout.load import resolve_threads
from tinyrl.rollout.prepared import PreparedRun, prepare
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.provenance import provenance, versions
from tinyrl.runs.records import REWARD_CHANGED, json_object, reward_changes
from tinyrl.runs.resolve import absolute_paths, model_facts
from tinyrl.runs.run_dir import RunDir, check_new_run, create_run, open_run, run_of
from tinyrl.training.code_inputs import carried_files, code_of, same_module, with_imports
from tinyrl.training.load import load_method
from tinyrl.training.method import Method
from tinyrl.training.run import (
    OF_A_RUN,
    CheckpointState,
    InputHashes,
    OnStep,
    Run,
    SourceFile,
    out_of_memory_stops,
)
from tinyrl.training.saves import check_saves
from tinyrl.training.step import rate_factor, schedule_notes
from tinyrl.workers.fingerprint import fingerprint
from tinyrl.workers.foreign_code import tell_code
from tinyrl.workers.loading import parse_use


@out_of_memory_stops("before the first step")
def start(
    prepared: PreparedRun,
    *,
    options: Options,
    output_dir: str,
    name: str | None,
    overwrite: bool,
    command: list[str],
    until: int | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Load everything, check it, and make the run's folder. until, on_step: as `Run` has them. Raises ValueError before
    anything is written.
    """
    with contextlib.ExitStack() as undo:
        method = _load(prepared, options=options, undo=undo)
        policy = method.policy
        world = method.world
        config = method.config  # with the date of the run
        notes = [resolve_threads(policy), method.epoch_note(), *schedule_notes(config), *method.check()]
        notes.append(policy.describe_passes())
        if policy.device.type == "cpu":  # numbers depend on what run.threads=auto came to
            run_section = config.run.model_copy(update={"threads": torch.get_num_threads()})
            config = config.model_copy(update={"run": run_section})
        if world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=policy.checkpoint_bytes(), copies=copies)
        own = create_run(output_dir, name=name, config=config, overwrite=overwrite) if world.is_main else None
        path = world.on_main(lambda: str(own.path) if own else "")
        folder = own or RunDir(Path(path), writes=False)  # rank 0 holds it; the other processes write nothing into it
        undo.callback(folder.lock.release)
        write_environment(folder, method, options=options, command=command)
        sources: Callable[[], InputHashes] = InputHashes
        if folder.writes:  # beside the training: large weights take seconds
            code = code_of(config)
            inputs = named_inputs(config)
            pool = ThreadPoolExecutor(1)
            read = pool.submit(read_sources, inputs, rows=method.row_fingerprints, known={})
            pool.shutdown(wait=False)
            sources = lambda: with_imports(read.result(), code, method.workers, carried={})  # noqa: E731
        run = Run(method, folder, config=config, sources=sources, until=until, on_step=on_step)
        for note in (f"run {folder.path}", *notes):
            run.display.note(note)
        undo.pop_all()
        return run


def _load(prepared: PreparedRun, *, options: Options, undo: contextlib.ExitStack, also: str = "") -> Method:
    """Load the method, alike in all processes; `undo` closes it. also: what else the processes must agree on."""
    with refusals_at(prepared.config.given.places):
        method = load_method(prepared, options=options)
    undo.callback(method.close)
    _check_alike(method, also)
    if method.world.is_main:  # which writes checkpoints
        check_saves(method)
    return method


def _check_alike(method: Method, checkpoint: str) -> None:
    """Raise ValueError, on every process, where one has read other settings, rows or prompts than rank 0."""
    if method.world.size == 1:
        return
    inputs = {"method": method.config.method, **by_setting(method.config.written())}
    inputs |= {"rows": method.row_fingerprints, "checkpoint": checkpoint}
    if collector := getattr(method, "collector", None):
        prompts = [prompt.tokens for prompt in collector.train_prompts + collector.eval_prompts]
        inputs |= {"prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(), "engine": collector.engine.name}
    advice = "Start all with the same command, files and versions; no environment may open its episodes at random"
    check_alike(method.world, inputs, what="settings or inputs", advice=advice)


def write_environment(
    folder: RunDir, method: Method, *, options: Options, command: list[str], forked_from: str | None = None
) -> None:
    """Write env.json of a run that trains `method`; forked_from: RUN@STEP of the checkpoint that a fork begins with,
    whose records of a changed reward are kept.
    """
    device = method.policy.device
    processes = method.world.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = provenance(
        command,
        options={"device": device.type, "trust_remote_code": options.trust_remote_code},
        device=name if processes == 1 else f"{processes} processes, each {name}",
        threads=torch.get_num_threads(),
        seed=method.config.run.seed,
        dtype=str(method.policy.causal.dtype).removeprefix("torch."),
        forked_from=forked_from,
    )
    if forked_from is not None:
        facts[REWARD_CHANGED] = reward_changes(folder.read_environment())
    folder.write_environment(facts)


# ---- resuming and forking ----


@out_of_memory_stops("before the first step")
def resume(
    folder: RunDir,
    prepared: PreparedRun,
    *,
    options: Options,
    allow_config_change: bool = False,
    until: int | None = None,
    on_step: OnStep | None = None,
) -> Run | None:
    """Go on from the newest checkpoint that verifies, or from the beginning. None: the run is finished.

    Its configuration and the files it names may differ from the checkpoint's only with `allow_config_change`, else
    ValueError. Nothing of the run is changed before all of it is loaded; then the
    checkpoint and config.yaml are written anew under another configuration.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(folder.lock)
        folder.check_files()
        if folder.writes:
            checkpoints.sweep(folder.checkpoints)
        checkpoint, warnings = checkpoints.newest_sound(folder.checkpoints)
        if checkpoint is None:
            refuse_to_begin_again(folder, warnings)
        kept = CheckpointState.read(checkpoint) if checkpoint else None
        since = checkpoint.name if checkpoint else "it was made"
        config = prepared.config
        before = absolute_paths(kept.config if kept else folder.read_config().written())
        settings = check_changes(before, config, since=since, allowed=allow_config_change)
        options, lost = started_with(folder, options)
        notes = [f"warning: {problem}; using {since} instead" for problem in warnings[:1]] + lost
        method = _load(prepared, options=options, undo=undo, also=since)
        if kept is not None:
            method.add_judge_requests(kept.judge_requests)
        if config.run.epochs is not None:  # which gives the number of steps now
            config = config.model_copy(update={"run": method.config.run})
            settings = check_changes(before, config, since=since, allowed=allow_config_change)
        stretched = check_schedule(before, config, step=kept.run.step, allowed=allow_config_change) if kept else []
        known = kept.sources if kept else InputHashes()
        method.start_code()  # which says what it imports
        code = code_of(config)
        carried = carried_files(known.files, code, changed={change.setting for change in settings})
        read = read_sources(named_inputs(config), rows=method.row_fingerprints, known=known.files)
        sources = partial(with_imports, read, code, method.workers, carried=carried)
        inputs = _changed_inputs(method, known, sources)
        refuse("what the run reads has changed", inputs, since=since, allowed=allow_config_change)
        changes = [*settings, *inputs]
        notes += [resolve_threads(method.policy), method.epoch_note(), *schedule_notes(method.config), *method.check()]
        notes.append(method.policy.describe_passes())
        run = Run(method, folder, config=method.config, sources=sources, until=until, on_step=on_step)
        if checkpoint is None or kept is None:
            folder.cut({})
        else:
            notes += _restored(run, checkpoint, kept, changes=changes)
            notes += other_versions(known, read, since=since)
            if any(change_invalidates(change) for change in changes):
                method.forget()
            notes += _notes_of(changes, since=since) + stretched
            notes.append(f"resuming {folder.path} at step {run.state.step} of {config.run.num_steps} from {since}")
        if run.finished:
            return None
        if changes:
            if checkpoint is not None:
                run.save()
            folder.write_config(config)
            if kept is not None and any(map(change_is_of_reward, changes)):
                note_reward_change(folder, step=kept.run.step)
        for note in notes:
            run.display.note(note)
        undo.pop_all()
        return run


def _restored(
    run: Run, checkpoint: Path, kept: CheckpointState, *, changes: Sequence[Change | ChangedInput]
) -> list[str]:
    """Restore a run; return notes on damaged records. Raises ValueError, which names the changes, where the checkpoint
    does not fit, as where lora.r is another.
    """
    try:
        return run.restore(checkpoint, kept)
    except ValueError as error:
        raise ValueError("\n".join([str(error), *_notes_of(changes, since=checkpoint.name)])) from error


def _notes_of(changes: Sequence[Change | ChangedInput], *, since: str) -> list[str]:
    """Name the changes, and which setting a value follows from that nobody gave."""
    changed = {change.setting for change in changes if isinstance(change, Change)}
    notes = list[str]()
    for change in changes:
        reads = READS.get(change.setting, ()) if isinstance(change, Change) else ()
        follows = [setting for setting in reads if setting in changed]
        because = f" (follows from {and_list(follows)})" if follows else ""
        notes.append(f"changed since {since}: {change}{because}")
    return notes


def other_versions(known: InputHashes, sources: InputHashes, *, since: str) -> list[str]:
    """Warn of libraries whose versions are other ones than at a checkpoint."""
    now = sources.versions
    others = [
        f"{name} {old}, now {now[name]}" for name, old in sorted(known.versions.items()) if now.get(name, old) != old
    ]
    if not others:
        return []
    return [f"warning: numbers may differ in their last digits, other versions than at {since}: {', '.join(others)}"]


def note_reward_change(folder: RunDir, *, step: int) -> None:
    """Write into env.json that numbers up to `step` are of another reward than those after it."""
    facts = folder.read_environment()
    if not facts:  # gone or damaged, of which the resume warns
        return
    earlier = [before for before in reward_changes(facts) if before < step]
    folder.write_environment({**facts, REWARD_CHANGED: [*earlier, step]})


def refuse_to_begin_again(folder: RunDir, problems: list[str]) -> None:
    """Raise ValueError where a run without a sound checkpoint has something to lose: steps on record, or checkpoints,
    of which `problems` says why they do not verify.
    """
    again = "To begin again: `tinyrl train` with --name and --overwrite"
    if problems:
        lines = [f"none of the checkpoints in {folder.checkpoints} verifies:"]
        lines += [f"  {problem}" for problem in problems[:MOST_SHOWN]]
        raise ValueError("\n".join([*lines, f"Put sound ones back. {again}"]))
    if folder.last_step() > 0:
        raise ValueError(
            f"{folder.path} has steps on record and no checkpoint to go on from in {folder.checkpoints}.\n"
            f"Was it moved, or is its disk not mounted? {again}"
        )


def started_with(folder: RunDir, given: Options) -> tuple[Options, list[str]]:
    """Return the options of a resume, with the device of the start where the command line names none, and a warning
    where env.json, which has the options of the start, is gone or damaged.

    Raises ValueError for a run started with --trust-remote-code that is resumed without: a run's folder may come from
    anybody, so only the command line lets code of a model run.
    """
    file = folder.path / "env.json"
    kept: Any = None
    problem = f"{file} has no options of the start"
    try:
        kept = json_object(file).get("options")
    except OSError as error:
        problem = f"{file} cannot be read: {error.strerror}"
    except ValueError as error:
        problem = str(error)
    if not isinstance(kept, dict):
        return given, [f"warning: {problem}; --device and --trust-remote-code are those of this command alone"]
    if kept.get("trust_remote_code") and not given.trust_remote_code:
        raise ValueError(
            f"{folder.path} was started with --trust-remote-code: "
            f"`{shlex.join(['tinyrl', 'train', '--resume', str(folder.path), '--trust-remote-code'])}`"
        )
    on_cpu = given.device == "auto" and kept.get("device") == "cpu"
    return replace(given, device="cpu") if on_cpu else given, []


def fork(
    origin: str,
    overrides: list[str],
    *,
    options: Options,
    output_dir: str | None,
    name: str | None,
    command: list[str],
    until: int | None = None,
) -> Run:
    """Make a run that goes on from a checkpoint of `origin` (RUN, RUN@STEP or a checkpoint's folder), with `overrides`
    laid over its settings; unchanged, to the same weights to the bit. Its records begin with the other run's, up to
    there, and its env.json names it. output_dir: default the folder that `origin` is in. Raises ValueError, and
    leaves no folder, where it cannot go on.
    """
    path, (run_path, at, number) = Path(origin), origin.rpartition("@")
    if at and number.isdecimal() and not path.exists():
        path = open_run(run_path).checkpoints / checkpoints.checkpoint_name(int(number))
        if not path.is_dir():
            raise ValueError(f"{run_path} has no checkpoint of step {number}: `tinyrl show {run_path}` lists those")
    old = open_run(run_of(path) or path)
    checkpoint = checkpoints.checkpoint_of(path)
    kept = CheckpointState.read(checkpoint)
    step = kept.run.step
    source = Source(f"{checkpoint.name} of {old.path}")
    config = read_written(ignore_neutral(kept.config), source, kept.given)
    if overrides:
        config = derive_over(config, overrides, model_facts)
    tell_code(old.path, config)
    last = f"step {step} is the last of {old.path}: say how many steps the fork has, run.num_steps=N"
    epochs = config.run.epochs  # steps are known when rows are read
    if kept.run.phase == "rollout" and step >= config.run.num_steps and epochs is None:
        if "run.num_steps" in config.given.typed:
            raise ValueError(
                f"run.num_steps={config.run.num_steps} counts from step 0, and the fork begins after step {step}: "
                f"{step + 1} or more"
            )
        raise ValueError(last)
    runs = output_dir or str(old.path.parent)
    check_new_run(runs, name=name, overwrite=False)
    prepared = prepare(config)
    new = create_run(runs, name=name, config=prepared.config, overwrite=False)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, new.path, ignore_errors=True)
        changed = [before for before in reward_changes(old.read_environment()) if before <= step]
        # what else there is to write is known once it is loaded
        new.write_environment({"options": asdict(options), REWARD_CHANGED: changed})
        copy = new.checkpoints / checkpoints.checkpoint_name(step)
        shutil.copytree(checkpoint, copy)
        copy_best(old, new, kept, copy)
        for record in filter(Path.is_file, map(old.path.joinpath, new.lengths())):
            shutil.copyfile(record, new.path / record.name)  # which the resume cuts
        run = resume(new, prepared, options=options, allow_config_change=True, until=until)
        if run is None:
            raise ValueError(last)
        undo.callback(run.method.close)
        undo.callback(run.close)
        forked_from = f"{old.path.resolve()}@{step}"
        write_environment(new, run.method, options=options, command=command, forked_from=forked_from)
        undo.pop_all()
        return run


def copy_best(old: RunDir, new: RunDir, kept: CheckpointState, copy: Path) -> None:
    """Copy the checkpoint of the best evaluation into a fork. Where there is none that verifies, forget the best in the
    `copy` of the checkpoint that it goes on from, whose state is `kept`: the fork's own best is then kept.
    """
    best = kept.run.best
    if best is None or best.step == kept.run.step:
        return
    name = checkpoints.checkpoint_name(best.step)
    of_best = old.checkpoints / name
    if of_best.is_dir() and checkpoints.problem_with(of_best) is None:
        shutil.copytree(of_best, new.checkpoints / name)
    else:
        kept.run.best = None
        kept.write(copy)
        checkpoints.seal(copy, kept.run.step)


# ---- settings that have changed ----


def check_changes(before: dict[str, Any], config: Config, *, since: str, allowed: bool) -> list[Change]:
    """Compare a checkpoint's configuration with the one it is resumed under; return the differences.

    Raises ValueError for another method, and for differences that are not `allowed`, other than more steps and what a
    run keeps.
    """
    method = before.get("method")
    if method != config.method:
        raise ValueError(f"{since} was written by `tinyrl train {method}`; {config.method} cannot go on with it")
    changes = changed_settings(without_secrets(before), config.written())
    for name, value in given_removed(before).items():
        changes.append(Change(setting=name, before=value, now=None, removed=True))
    refused = [change for change in changes if not (_is_longer(change) or config.only_keeps(change.setting))]
    refuse("settings have changed", refused, since=since, allowed=allowed)
    return changes


def _is_longer(change: Change) -> bool:
    """Return whether a change gives a run more steps."""
    if change.setting not in ("run.num_steps", "run.epochs"):
        return False
    known = isinstance(change.before, int | float) and isinstance(change.now, int | float)
    return known and change.before < change.now


def check_schedule(before: dict[str, Any], config: Config, *, step: int, allowed: bool) -> list[str]:
    """Return a note where a schedule is stretched, so that the learning rate jumps behind `step` finished steps. Raises
    ValueError, with the rate before and after, where that is not `allowed`.
    """
    then = before["optim"]
    now = config.optim
    schedule_then = {"num_steps": before["run"]["num_steps"], "warmup_steps": then["warmup_steps"]}
    schedule_now = {"num_steps": config.run.num_steps, "warmup_steps": now.warmup_steps}
    planned = rate_factor(then["schedule"], step, **schedule_then)
    factor = rate_factor(now.schedule, step, **schedule_now)
    if math.isclose(planned, factor):
        return []
    rate_before = then["learning_rate"] * rate_factor(then["schedule"], max(0, step - 1), **schedule_then)
    rate_after = (now.learning_rate or 0.0) * factor
    steps = f"{config.run.num_steps} steps"
    what = f"optim.schedule={now.schedule} over {steps}, {then['schedule']} over {schedule_then['num_steps']} before"
    rates = f"the learning rate of step {step} was {rate_before:.3g}, that of step {step + 1} is {rate_after:.3g}"
    if not allowed:
        raise ValueError(f"{what}: {rates}. Put run.num_steps back, or go on like that: --allow-config-change")
    return [f"{what}: {rates}"]


def change_invalidates(change: Change | ChangedInput) -> bool:
    """Return whether a change makes wrong what a method keeps of its rows and frozen models."""
    if isinstance(change, ChangedInput) or change.setting == "run.seed":
        return True
    return not change.setting.startswith(("optim.", "run."))


def change_is_of_reward(change: Change | ChangedInput) -> bool:
    """Return whether rewards may be others after a change: of a reward's settings or files, of the task's rule, or of
    an environment's functions, which may give rewards.
    """
    name = change.name if isinstance(change, ChangedInput) else change.setting
    of_reward = name.startswith(("reward.", "task.name", "task.grading", "environment.name", "environment.tools"))
    return of_reward and name != "reward.timeout_s"


MOST_SHOWN = 3  # changes in an error


def refuse(what: str, changes: Sequence[Change | ChangedInput], *, since: str, allowed: bool) -> None:
    """Raise ValueError, with the first of the changes, when there are some and they are not allowed."""
    if not changes or allowed:
        return
    more = [f"  and {len(changes) - MOST_SHOWN} more"] if len(changes) > MOST_SHOWN else []
    lines = [f"{what} since {since}, so the run would not go on as it began:"]
    lines += [f"  {change}" for change in changes[:MOST_SHOWN]] + more
    raise ValueError("\n".join([*lines, "Put them back, or go on with the new values: --allow-config-change"]))


# ---- what a run reads ----


@dataclass(frozen=True)
class ChangedInput:
    """A file, or rows, that are not what they were."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt")  # files of a folder that numbers depend on


@dataclass(frozen=True)
class NamedInputs:
    """What the settings name, as it was found when the run was loaded. files: by "setting: file"; functions:
    fingerprints of those that this process defined, by "setting: use".
    """

    files: dict[str, Path]
    functions: dict[str, str]


def named_inputs(config: Config) -> NamedInputs:
    """List the inputs that a run's settings name."""
    return NamedInputs(files=dict(_files(config)), functions=_fingerprints(config))


def read_sources(inputs: NamedInputs, *, rows: dict[str, str], known: Mapping[str, SourceFile]) -> InputHashes:
    """Hash a run's inputs; `known` files again only where size or time of change differ. A file that cannot be read any
    more is among the `unread`.
    """
    files: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    for name, path in inputs.files.items():
        try:
            files[name] = _hashed(path, known=known.get(name))
        except OSError as error:
            unread[name] = f"it cannot be read any more ({error.strerror})"
    return InputHashes(rows=rows, files=files, unread=unread, functions=inputs.functions, versions=versions())


def _hashed(path: Path, *, known: SourceFile | None) -> SourceFile:
    """Hash a file, or return what is `known` of it where size and time of change are the same. Raises OSError."""
    stat = path.stat()
    if known is not None and (known.bytes, known.modified) == (stat.st_size, stat.st_mtime_ns):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceFile(bytes=stat.st_size, modified=stat.st_mtime_ns, sha256=digest)


def changed_sources(before: InputHashes, now: InputHashes) -> list[ChangedInput]:
    """List the inputs that have changed. One that only `now` has came with a setting, whose change is noted."""
    changes: list[ChangedInput] = []
    for name, rows in before.rows.items():
        if now.rows.get(name) != rows:
            changes.append(ChangedInput(f"{name} rows", "have changed"))
    for name, function in before.functions.items():
        if now.functions.get(name) != function:
            changes.append(ChangedInput(name, "is another function"))
    for name, file in before.files.items():
        there = now.files.get(name) or same_module(name, file, now.files)
        if there is None:
            changes.append(ChangedInput(name, "is not there any more"))
        elif there.sha256 != file.sha256:
            changes.append(ChangedInput(name, "has changed"))
    for name in before.unread:
        changes.append(ChangedInput(name, "has no hash, as it was gone when it was to be read: it may be another one"))
    return changes


def _changed_inputs(method: Method, before: InputHashes, now: Callable[[], InputHashes]) -> list[ChangedInput]:
    """List the inputs that have changed by rank 0, whose workers have loaded all code."""
    changed = method.world.on_main(lambda: [asdict(one) for one in changed_sources(before, now())])
    return [ChangedInput(**one) for one in changed]


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield (label, file) for every file that the settings name, but those of rows: the rows that are read have
    fingerprints, and a file may have rows that task.max_samples leaves out.
    """
    for named in config.named():
        match named.kind:
            case "model":
                revision = config.model.revision if named.setting == "model.path" else None
                yield from _files_of_model(named, revision=revision)
            case "code":
                source = parse_use(named.value, setting=named.label)
                if source.file is not None:  # what it imports is known to the worker that loads it
                    yield f"{named.setting}: {named.value.rpartition(':')[0]}", source.file
            case "file" if not named.names.made and os.path.isfile(named.value):
                yield f"{named.setting}: {os.path.basename(named.value)}", Path(named.value)
            case _:  # rows, the hub, a server, a word
                pass


def _fingerprints(config: Config) -> dict[str, str]:
    """Return fingerprints of the functions that this process defined, by "setting: use"."""
    found: dict[str, str] = {}
    for named in config.named():
        if named.kind == "code":
            function = parse_use(named.value, setting=named.label).here
            if function is not None:
                found[f"{named.setting}: {named.value}"] = fingerprint(function)
    return found


def _files_of_model(named: Named, *, revision: str | None) -> Iterator[tuple[str, Path]]:
    folder = starter_path(named.value) or Path(named.value).expanduser()
    if not folder.is_dir():  # a hub name
        cached = try_to_load_from_cache(named.value, "config.json", revision=revision)
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    for file in sorted([*folder.iterdir(), *folder.glob("critic/*")]):
        if file.suffix in OF_A_MODEL and file.name not in OF_A_RUN and file.is_file():
            yield f"{named.setting}: {file.relative_to(folder)}", file
