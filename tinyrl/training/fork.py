"""Forks: new runs that go on from a checkpoint of another, under other settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tinyrl.config.recipe import written_config
from tinyrl.config.yaml_reader import Source
from tinyrl.rollout.components import Options
from tinyrl.runs.checkpoint import checkpoint_name, checkpoint_of, checkpoint_step, list_checkpoints
from tinyrl.runs.run_dir import RunDir, create_run, open_run, run_of
from tinyrl.training.launch import Launch, undone_on_failure, write_environment
from tinyrl.training.resume import resume
from tinyrl.training.state import CheckpointState, read_state


def origin_of(origin: str) -> tuple[RunDir, Path]:
    """The run and the sound checkpoint that RUN, RUN@STEP or a checkpoint's folder means; of RUN the newest one.

    Raises ValueError, with the steps there are, where it is none.
    """
    name, at, step = origin.rpartition("@")
    if not at or Path(origin).exists() or not re.fullmatch("[0-9]+", step):
        folder = Path(origin)
        return open_run(run_of(folder) or folder), checkpoint_of(folder)
    run = open_run(name)
    folder = run.checkpoints / checkpoint_name(int(step))
    if not folder.is_dir():
        steps = [str(checkpoint_step(each)) for each in list_checkpoints(run.checkpoints)]
        kept = f"those there are: {', '.join(steps)}" if steps else "it has none"
        raise ValueError(
            f"{run.path} has no checkpoint of step {step}; {kept} (run.save_every and run.keep_checkpoints)"
        )
    return run, checkpoint_of(folder)


def fork(
    origin: str, overrides: list[str], *, options: Options, output_dir: str | None, name: str | None, command: list[str]
) -> Launch:
    """A new run that stands where a checkpoint of `origin` (see `origin_of`) stood, with `overrides` laid over the
    checkpoint's settings. Its records begin with the other run's, up to there, and run.origin says where it came from.

    An unchanged fork goes on to the same weights, to the bit, as the other run did. output_dir: default the folder that
    `origin` is in. Raises ValueError, and leaves no folder, where it cannot go on.
    """
    run, checkpoint = origin_of(origin)
    kept = read_state(checkpoint)
    step = kept.run.step
    config = written_config(Source(f"{checkpoint.name} of {run.path}", kept.config), overrides=overrides)
    if kept.run.phase == "rollout" and step >= config.run.num_steps:
        raise ValueError(f"step {step} is the last of {run.path}: say how many steps the fork has, run.num_steps=N")
    section = config.run.model_copy(update={"origin": f"{run.path.resolve()}@{step}"})
    config = config.model_copy(update={"run": section})
    new = create_run(output_dir or str(run.path.parent), name=name, config=config, overwrite=False)
    with undone_on_failure() as undo:
        undo.callback(shutil.rmtree, new.path, ignore_errors=True)
        new.write_config(config)
        copy_until(run, checkpoint, kept, to=new)
        launch = resume(new, options=options, config=config, allow_config_change=True)
        assert launch is not None
        undo.callback(launch.close)
        write_environment(new, launch.trainer, command=command)
        return launch


def copy_until(run: RunDir, checkpoint: Path, kept: CheckpointState, *, to: RunDir) -> None:
    """Copy a checkpoint whose state.json is `kept`, the best one as of then, and the records up to it."""
    best = kept.run.best
    wanted = [run.checkpoints / checkpoint_name(best.step)] if best is not None else []
    for folder in {checkpoint, *(each for each in wanted if each.is_dir())}:
        shutil.copytree(folder, to.checkpoints / checkpoint_name(checkpoint_step(folder)))
    for name, length in kept.records.items():
        if (run.path / name).is_file():
            with (run.path / name).open("rb") as record, (to.path / name).open("wb") as copy:
                copy.write(record.read(length))
