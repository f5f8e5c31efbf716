"""The start of a run: everything a user can fix is checked before its folder is made (training/resume.py: going on)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from tinyrl.config.schema import Config
from tinyrl.errors import EXPLAINED, SEE_CHECK
from tinyrl.models.parallel import check_alike
from tinyrl.models.roles import checkpoint_bytes
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import RunDir, create_run, environment
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.session import Session, out_of_memory_stops
from tinyrl.training.state import Sources, read_sources
from tinyrl.training.trainer import Trainer


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
