"""The start of a run: everything a user can fix is checked before its folder is made.

A resume goes on from the newest checkpoint that verifies; a fork is a new run that goes on so from another one's.
Rows, model files and user functions with their local imports have hashes: a resume under another one is refused as
one under another setting is; other versions of libraries are only noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyrl.config.changes import Change, by_setting
from tinyrl.config.derive import derive_over, read_written
from tinyrl.config.refusal import Source, refusals_at
from tinyrl.config.removed import ignore_neutral
from tinyrl.config.schema import Config
from tinyrl.models.memory import checkpoint_bytes
from tinyrl.models.parallel import check_alike
from tinyrl.process.launched import Options
from tinyrl.rollout.load import resolve_threads
from tinyrl.rollout.prepared import PreparedRun, prepare
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.best import Gains
from tinyrl.runs.places import checkpoint_of, run_of
from tinyrl.runs.provenance import ImageTokens, provenance
from tinyrl.runs.records import REWARD_CHANGED, json_object, reward_changes
from tinyrl.runs.resolve import absolute_paths, model_facts
from tinyrl.runs.run_dir import RunDir, check_new_run, create_run, open_run
from tinyrl.training.changes import (
    MOST_SHOWN,
    ChangedInput,
    change_invalidates,
    change_is_of_reward,
    changed_inputs,
    check_changes,
    check_schedule,
    newer_images,
    notes_of,
    other_versions,
    refuse,
)
from tinyrl.training.code_inputs import carried_files, code_of, with_imports
from tinyrl.training.inputs import named_inputs, read_sources
from tinyrl.training.load import load_method
from tinyrl.training.method import Method
from tinyrl.training.run import OnStep, Run, out_of_memory_stops
from tinyrl.training.run_state import CheckpointState, InputHashes
from tinyrl.training.saver import check_saves
from tinyrl.training.step import schedule_notes
from tinyrl.workers.foreign_code import tell_code


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
        notes = _notes_of_start(method)
        if policy.device.type == "cpu":  # numbers depend on what run.threads=auto came to
            run_section = config.run.model_copy(update={"threads": torch.get_num_threads()})
            config = config.model_copy(update={"run": run_section})
        if world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(policy), copies=copies)
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
    if (expander := method.policy.image_expander) is not None:
        facts["images"] = asdict(ImageTokens.of(expander.token_counts()))
    if forked_from is not None:
        facts[REWARD_CHANGED] = reward_changes(folder.read_environment())
    folder.write_environment(facts)


# ---- resuming and forking ----


@dataclass(frozen=True)
class Kept:
    """Where a run goes on: its newest sound checkpoint, or its beginning. since: how messages call that; config: the
    settings there, with absolute paths; options: those of the start, where the command line leaves them open; notes: on
    checkpoints and records that are damaged.
    """

    checkpoint: Path | None
    state: CheckpointState | None
    since: str
    config: dict[str, Any]
    options: Options
    notes: list[str]

    @property
    def inputs(self) -> InputHashes:
        return self.state.sources if self.state is not None else InputHashes()


@dataclass(frozen=True)
class RunChanges:
    """What is another than at the checkpoint, and allowed. read: the hashes of files that settings name; sources: those
    with what workers have imported; notes: on versions, and a schedule that is stretched.
    """

    changes: Sequence[Change | ChangedInput]
    read: InputHashes
    sources: Callable[[], InputHashes]
    notes: list[str]


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
    ValueError. Nothing of the run is changed before all of it is loaded; then the checkpoint, config.yaml and
    given.yaml are written anew under another configuration.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(folder.lock)
        kept = _read(folder, options)
        check_changes(kept.config, prepared.config, since=kept.since, allowed=allow_config_change)
        method = _load(prepared, options=kept.options, undo=undo, also=kept.since)
        config = _with_steps(prepared.config, method)
        compared = _compare(method, config, kept, allowed=allow_config_change)
        notes = _notes_of_start(method)
        run = Run(method, folder, config=method.config, sources=compared.sources, until=until, on_step=on_step)
        notes = [*kept.notes, *notes, *_restore(run, kept, compared)]
        if run.finished:
            return None
        if compared.changes:
            _write_changes(run, config, kept, compared)
        for note in notes:
            run.display.note(note)
        undo.pop_all()
        return run


def _read(folder: RunDir, given: Options) -> Kept:
    """Read where a run goes on; leftovers of a killed save are deleted. Raises ValueError where there is nothing to go
    on from, and something to lose.
    """
    folder.check_files()
    if folder.writes:
        checkpoints.sweep(folder.checkpoints)
    checkpoint, problems = checkpoints.newest_sound(folder.checkpoints)
    if checkpoint is None:
        refuse_to_begin_again(folder, problems)
    state = CheckpointState.read(checkpoint) if checkpoint else None
    since = checkpoint.name if checkpoint else "it was made"
    options, lost = started_with(folder, given)
    return Kept(
        checkpoint=checkpoint,
        state=state,
        since=since,
        config=absolute_paths(state.config if state else folder.read_config().written()),
        options=options,
        notes=[f"warning: {problem}; using {since} instead" for problem in problems[:1]] + lost,
    )


def _with_steps(config: Config, method: Method) -> Config:
    """Return the configuration with the number of steps that run.epochs gives, now that rows are prepared."""
    return config if config.run.epochs is None else config.model_copy(update={"run": method.config.run})


def _compare(method: Method, config: Config, kept: Kept, *, allowed: bool) -> RunChanges:
    """Compare settings, files and rows with those of the checkpoint. Raises ValueError for a change that is not
    `allowed`.
    """
    since = kept.since
    settings = check_changes(kept.config, config, since=since, allowed=allowed)
    stretched = list[str]()
    if kept.state is not None:
        method.add_judge_requests(kept.state.judge_requests)
        stretched = check_schedule(kept.config, config, step=kept.state.run.step, allowed=allowed)
    known = kept.inputs
    method.start_code()  # which says what it imports
    code = code_of(config)
    carried = carried_files(known.files, code, changed={change.setting for change in settings})
    read = read_sources(named_inputs(config), rows=method.row_fingerprints, known=known.files)
    sources = partial(with_imports, read, code, method.workers, carried=carried)
    inputs = changed_inputs(method, known, sources)
    if inputs and kept.checkpoint is not None and method.policy.images is not None:
        images = method.policy.images.expander.images.values()
        inputs = [*newer_images(images, kept.checkpoint), *inputs]
    refuse("what the run reads has changed", inputs, since=since, allowed=allowed)
    return RunChanges(changes=[*settings, *inputs], read=read, sources=sources, notes=stretched)


def _notes_of_start(method: Method) -> list[str]:
    """Set the threads and check what can only be checked now; return the lines that a start shows."""
    notes = [resolve_threads(method.policy), method.epoch_note(), *schedule_notes(method.config), *method.check()]
    return [*notes, method.policy.describe_passes()]


def _restore(run: Run, kept: Kept, compared: RunChanges) -> list[str]:
    """Put a run where the checkpoint was; return notes. Raises ValueError, which names the changes, where the
    checkpoint does not fit, as where lora.r is another.
    """
    if kept.checkpoint is None or kept.state is None:
        run.folder.cut({})
        return []
    changed = notes_of(compared.changes, since=kept.since)
    try:
        notes = run.restore(kept.checkpoint, kept.state)
    except ValueError as error:
        raise ValueError("\n".join([str(error), *changed])) from error
    if any(change_invalidates(change) for change in compared.changes):
        run.method.forget()
    if any(map(change_is_of_reward, compared.changes)):
        run.forget_scores()
    notes += other_versions(kept.inputs, compared.read, since=kept.since)
    notes += [*changed, *compared.notes]
    where = f"at step {run.state.step} of {run.config.run.num_steps} from {kept.since}"
    return [*notes, f"resuming {run.folder.path} {where}"]


def _write_changes(run: Run, config: Config, kept: Kept, compared: RunChanges) -> None:
    """Write the checkpoint and the configuration anew; of a changed reward also which steps were under the former."""
    if kept.checkpoint is not None:
        run.save()
    run.folder.write_config(config)
    if kept.state is not None and any(map(change_is_of_reward, compared.changes)):
        note_reward_change(run.folder, step=kept.state.run.step)


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
    """Make a run that goes on from a checkpoint of `origin` (RUN, RUN@STEP, RUN@best or a checkpoint's folder), with
    `overrides` laid over its settings; unchanged, to the same weights to the bit. Its records begin with the other
    run's, up to there, and its env.json names it. output_dir: default the folder that `origin` is in. Raises
    ValueError, and leaves no folder, where it cannot go on.
    """
    old = open_run(run_of(origin) or origin)
    checkpoint = checkpoint_of(origin)
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
    prepared = prepare(config, goes_on=True)
    new = create_run(runs, name=name, config=prepared.config, overwrite=False)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, new.path, ignore_errors=True)
        changed = [before for before in reward_changes(old.read_environment()) if before <= step]
        # what else there is to write is known once it is loaded
        new.write_environment({"options": asdict(options), REWARD_CHANGED: changed})
        copy = new.checkpoints / checkpoints.checkpoint_name(step)
        shutil.copytree(checkpoint, copy)
        _begin_scores(old, new, kept, copy)
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


def _begin_scores(old: RunDir, new: RunDir, kept: CheckpointState, copy: Path) -> None:
    """Copy the best checkpoint into a fork, and let it count evaluations without a gain anew. Where no best one
    verifies, it is forgotten, and the fork's own best is kept. kept: the state of the checkpoint that it goes on from;
    copy: that checkpoint in the fork, which is written anew where its state changes.
    """
    best = kept.run.best
    changes = kept.run.gains.without_gain > 0
    kept.run.gains = Gains() if changes else kept.run.gains
    if best is not None and best.step != kept.run.step:
        name = checkpoints.checkpoint_name(best.step)
        of_best = old.checkpoints / name
        if of_best.is_dir() and checkpoints.problem_with(of_best) is None:
            shutil.copytree(of_best, new.checkpoints / name)
        else:
            kept.run.best = None
            changes = True
    if changes:
        kept.write(copy)
        checkpoints.seal(copy, kept.run.step)
