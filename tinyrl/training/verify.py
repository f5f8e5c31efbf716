"""Verification of a run by repetition: stretches between checkpoints are trained again and compared with what is there.

On the machine and versions of a run its steps repeat to the bit (docs/survives.md), so samples, rewards, other metrics
and weights that were written by anything else than these steps are found.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import written_config
from tinyrl.config.yaml_reader import Source
from tinyrl.rollout.components import Options
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.records import VOLATILE, json_lines
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.tracking import Trackers
from tinyrl.text import shortened
from tinyrl.training.launch import Launch, trained_on
from tinyrl.training.resume import changed_settings, copy_until, resume
from tinyrl.training.state import STATE, CheckpointState, changed_sources, changed_versions, read_state

MOST_SHOWN = 6  # differences of a stretch


@dataclass(frozen=True)
class Stretch:
    """The steps between two checkpoints that follow each other; `start` None: the beginning of the run."""

    start: Path | None
    end: Path

    @property
    def after(self) -> int:
        """The last step of which records are older; -1 where all are the stretch's."""
        return -1 if self.start is None else checkpoints.checkpoint_step(self.start)

    @property
    def last(self) -> int:
        return checkpoints.checkpoint_step(self.end)

    def __str__(self) -> str:
        return f"{'start' if self.start is None else f'step {self.after}'} to step {self.last}"


@dataclass
class Found:
    """What a stretch came to. skipped: why it was not repeated; different: a line for each thing that is another."""

    stretch: str
    different: list[str] = field(default_factory=list)
    skipped: str | None = None

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.stretch}: not repeated, {self.skipped}"
        if not self.different:
            return f"{self.stretch}: the same to the bit"
        count = len(self.different)
        shown = [*self.different[:MOST_SHOWN], *([f"and {count - MOST_SHOWN} more"] if count > MOST_SHOWN else [])]
        return "\n  ".join([f"{self.stretch}: {count} difference{'s' * (count > 1)}", *shown])


def verify(run: RunDir, *, options: Options, num: int | None) -> Iterator[Found]:
    """Repeat `num` stretches of a run (None: all), drawn at random, in a folder beside it that is deleted.

    Checkpoints that do not verify are differences, and so are lines of a step that has none when it is repeated. Raises
    ValueError where the run has no checkpoint, or reads other files than it did.
    """
    sound, damaged = list[tuple[Path, CheckpointState]](), list[Found]()
    for folder in checkpoints.list_checkpoints(run.checkpoints):
        problem = checkpoints.problem_with(folder)
        if problem is None:
            sound.append((folder, read_state(folder)))
        else:
            damaged.append(Found(folder.name, [problem]))
    yield from damaged
    for name in run.lengths():
        steps = [row["step"] for row in json_lines(run.path / name, [])]
        if steps != sorted(steps):
            yield Found(name, ["its steps do not stand in order"])
    ends = [(folder, kept) for folder, kept in sound if kept.run.phase == "rollout"]  # not in the middle of a step
    if not ends and not damaged:
        raise ValueError(f"{run.path} has no checkpoint at the end of a step: nothing to compare a repetition with")
    states = dict(ends)
    folders = [folder for folder, _ in ends]
    stretches = [Stretch(start, end) for start, end in zip([None, *folders], folders, strict=False)]
    if num is not None and num < len(stretches):
        stretches = sorted(random.SystemRandom().sample(stretches, num), key=lambda stretch: stretch.last)
    for stretch in stretches:
        begun = None if stretch.start is None else states[stretch.start]
        yield _repeated(run, stretch, begun, states[stretch.end], options=options)


def _repeated(
    run: RunDir, stretch: Stretch, begun: CheckpointState | None, ended: CheckpointState, *, options: Options
) -> Found:
    found = Found(str(stretch))
    config = written_config(Source(f"{stretch.end.name} of {run.path}", ended.config))
    forked = run.read_config().run.origin
    begins_fork = forked is not None and forked.endswith(f"@{stretch.after}")
    if begun is None and forked is not None:
        found.skipped = f"its beginning is that of {forked}"
    elif begun is not None and not begins_fork and (changes := changed_settings(begun.config, ended.config)):
        found.skipped = f"settings were changed in between: {shortened(changes[0])}"
    if found.skipped is not None:
        return found
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=run.path.parent) as folder:
        again = RunDir(Path(folder) / run.name)
        again.path.mkdir()
        again.write_config(config)
        if stretch.start is not None and begun is not None:
            copy_until(run, stretch.start, begun, to=again)
        launch = resume(again, options=options, config=config, allow_config_change=begins_fork, silent=True)
        assert launch is not None
        _train(launch, until=stretch.last, device=_device(run))
        repeated = again.checkpoints / stretch.end.name
        state = read_state(repeated)
        found.different += changed_sources(ended.sources, state.sources)
        found.different += _records(run, again, stretch)
        found.different += _checkpoint(stretch.end, repeated, ended, state)
        if found.different:
            versions = changed_versions(ended.sources, state.sources)
            found.different += [f"other versions, which may change last digits: {change}" for change in versions]
    return found


def _device(run: RunDir) -> str | None:
    """What a run was trained on, by its env.json; None where that does not say."""
    try:
        device: Any = json.loads((run.path / "env.json").read_text(encoding="utf-8"))["device"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return device if isinstance(device, str) else None


def _train(launch: Launch, *, until: int, device: str | None) -> None:
    """Go on with a run, up to the end of step `until`, and save it there."""
    session, here = launch.session, trained_on(launch.trainer)
    session.trackers = Trackers([], launch.run.path, config={}, note=session.display.note)
    session.until = until
    with launch.run.lock:
        try:
            if device not in (None, here):
                raise ValueError(
                    f"the run was trained on {shortened(device)}, and this is {here}: its steps repeat to the bit only "
                    "where they were made"
                )
            launch.trainer.train(session)
            session.save_here()
        finally:
            launch.close()
    if not session.saved:
        raise OSError(f"step {until} of the repetition could not be written to {launch.run.path}")


def _records(run: RunDir, again: RunDir, stretch: Stretch) -> Iterator[str]:
    """A line for each record line that one of the two has and the other has not, in order."""
    for name in again.lengths():
        lines = [_lines(folder.path / name, stretch) for folder in (run, again)]
        for index in range(max(map(len, lines))):
            there, repeated = (each[index] if index < len(each) else {} for each in lines)
            if there == repeated:
                continue
            step = (there or repeated)["step"]
            keys = [key for key in {**there, **repeated} if there.get(key) != repeated.get(key)]
            shown = "; ".join(f"{key} {_shown(there, key)}, repeated {_shown(repeated, key)}" for key in keys[:2])
            yield f"{name}, step {step}, line {index + 1} of the stretch: {shown}"


def _lines(path: Path, stretch: Stretch) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(VOLATILE)}
        for row in json_lines(path, [])
        if stretch.after < row["step"] <= stretch.last
    ]


def _shown(row: dict[str, Any], key: str) -> str:
    return shortened(json.dumps(row[key])) if key in row else "nothing"


def _checkpoint(there: Path, repeated: Path, kept: CheckpointState, state: CheckpointState) -> Iterator[str]:
    """A line for each file of a checkpoint that is another, and for each part of its state.json."""
    files: list[dict[str, Any]] = [
        json.loads((folder / checkpoints.MANIFEST).read_text(encoding="utf-8"))["files"] for folder in (there, repeated)
    ]
    for name in sorted(files[0].keys() | files[1].keys()):
        if name != STATE and files[0].get(name) != files[1].get(name):
            yield f"{there.name}: {name} is another one"
    parts: dict[str, Callable[[CheckpointState], Any]] = {
        "where the run stands": lambda each: each.run,
        "Python's random numbers": lambda each: each.python_random,
        "settings": lambda each: changed_settings(kept.config, each.config),
    }
    yield from (f"{there.name}: {STATE}: {name}" for name, part in parts.items() if part(kept) != part(state))
