"""`tinyrl train ... --seeds 3`, and `seeds=3` in Python: the same run once per seed, one after another.

The runs are OUTPUT_DIR/NAME/seed-N; those of the command are processes of their own. Under the same name the same
command goes on: finished runs are kept, others resumed. A seed that fails does not end the others; a stop does, and
settings or data that are refused at the first.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinyrl.cli.evaluate import table_lines
from tinyrl.config.changes import changed_settings
from tinyrl.config.given import Given
from tinyrl.config.methods import and_list
from tinyrl.config.schema import Config
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Options, launched
from tinyrl.process.signals import check_stop
from tinyrl.runs.best import is_finished
from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.folders import LOCK
from tinyrl.runs.records import is_run, read_steps
from tinyrl.runs.run_dir import check_name, check_new_run, next_name, open_run, run_stem
from tinyrl.text import join_truncated, terminal_columns

MOST_SEEDS = 100
REFUSED = 2  # exit code of settings or data that are wrong, whatever the seed
STOPPED = (75, 130)  # exit codes of a stop
WAIT_S = 0.2
RUN_SEED = "run.seed="
REPORT = ("report.html", "report.png")


@dataclass(frozen=True)
class SeedRuns:
    """The runs of several seeds in a folder. finished, begun: seeds that were so before."""

    seeds: list[int]
    folder: Path
    overwrite: bool = False
    finished: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def run(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"


@dataclass(frozen=True)
class SeedCommands:
    """The command of each seed's run. words: method, recipe and settings; given: of --seeds."""

    runs: SeedRuns
    words: list[str]
    given: str
    options: Options

    def train(self, seed: int) -> int:
        """Train a seed in a process of its own; returns its exit code."""
        return _run_process([sys.executable, "-m", "tinyrl", *self.of(seed)])

    def of(self, seed: int) -> list[str]:
        """Return the arguments of tinyrl that train a seed, or go on with it."""
        how = ["--device", self.options.device]
        if self.options.trust_remote_code:
            how.append("--trust-remote-code")
        if seed in self.runs.begun:
            return ["train", "--resume", str(self.runs.run(seed)), *how]
        where = ["--name", f"seed-{seed}", "--output-dir", str(self.runs.folder)]
        if self.runs.overwrite:
            where.append("--overwrite")
        return ["train", *with_seed(self.words, seed), *where, *how]

    @property
    def again(self) -> str:
        """Return the command that goes on with those that are not finished."""
        words = [word for word in self.words if not word.startswith(RUN_SEED)]
        where = ["--name", self.runs.folder.name, "--output-dir", str(self.runs.folder.parent)]
        trust = ["--trust-remote-code"] if self.options.trust_remote_code else []
        return shlex.join(["tinyrl", "train", *words, "--seeds", self.given, *where, *trust])


def with_seed(words: list[str], seed: int) -> list[str]:
    """Return the words of a command, or settings as it has them, with a seed."""
    return [*(word for word in words if not word.startswith(RUN_SEED)), f"{RUN_SEED}{seed}"]


def prepare_seeds(
    config: Config, *, seeds: int | list[int], name: str | None, output_dir: str, overwrite: bool
) -> SeedRuns:
    """Find what is to train, and make the folder of the runs. seeds: so many from run.seed on, or these. Raises
    ValueError for seeds, names and folders that cannot be, and for runs that were made with other settings.
    """
    if launched().world_size > 1:
        raise ValueError("--seeds works in one process: leave the launcher out")
    chosen = chosen_seeds(seeds, config)
    if name is None:
        check_new_run(output_dir, name=None, overwrite=False)
        name = next_name(Path(output_dir), run_stem(config))
    check_name(name, root=Path(output_dir))
    folder = Path(output_dir) / name
    _check_folder(folder)
    runs = SeedRuns(chosen, folder, overwrite=overwrite)
    finished = list[int]()
    begun = list[int]()
    for seed in chosen if not overwrite else ():
        state = _state_of(runs.run(seed), config, seed=seed)
        if state is not None:
            (finished if state else begun).append(seed)
    folder.mkdir(parents=True, exist_ok=True)
    return replace(runs, finished=finished, begun=begun)


def typed_seeds(text: str) -> int | list[int]:
    """Return what --seeds says: how many, or those between commas."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,17}", part.strip()) for part in parts):
        raise ValueError(f"--seeds {text}: a number of seeds, such as 3, or the seeds themselves: 3,7,11")
    numbers = [int(part) for part in parts]
    return numbers if len(numbers) > 1 else numbers[0]


def chosen_seeds(seeds: int | list[int], config: Config) -> list[int]:
    """Return the seeds: so many from run.seed on, or those that are named. Raises ValueError for too few, too many, and
    for one that is named twice.
    """
    if isinstance(seeds, int):
        numbers = [*range(config.run.seed, config.run.seed + min(seeds, MOST_SEEDS + 1))]
        given = f"--seeds {seeds}"
    else:
        numbers = seeds
        given = f"--seeds {join_truncated(map(str, seeds))}"
        if "run.seed" in config.given.typed:
            raise ValueError(f"{given} names the seeds, and run.seed={config.run.seed} another one: leave one out")
    if not 2 <= len(numbers) <= MOST_SEEDS:
        raise ValueError(f"{given}: 2 to {MOST_SEEDS} seeds; a single one is run.seed=N")
    if len({*numbers}) < len(numbers):
        raise ValueError(f"{given} names a seed twice")
    return numbers


def _check_folder(folder: Path) -> None:
    """Raise ValueError where a folder holds something other than runs, as of seeds and forks of them, and a report."""
    if not folder.exists():
        return
    files = [*folder.iterdir()] if folder.is_dir() else [folder]
    others = {file.name for file in files if not is_run(file)} - {*REPORT, LOCK}
    others = {name for name in others if re.fullmatch(r"seed-[0-9]+|\..*", name) is None}
    if others or is_run(folder):
        raise ValueError(
            f"--name {folder.name}: {folder} exists and holds {min(others, default='a run')}: choose another --name"
        )


def _state_of(folder: Path, config: Config, *, seed: int) -> bool | None:
    """Return whether a seed's run is finished, with its checkpoint; None where there is none. Raises ValueError for a
    run that was made with other settings.
    """
    if not (folder / "config.yaml").is_file():
        return None
    run = open_run(folder)
    of_seed = replace(config.given, values=Given(config.given.values).over([f"{RUN_SEED}{seed}"]).values)
    wanted = config.with_given(of_seed).written_given()
    had = run.read_config().written_given()
    if had != wanted:
        changes = changed_settings(had or {}, wanted or {})
        what = f": {changes[0]}" if changes else ""
        raise ValueError(f"{folder} was made with other settings{what}. Choose another --name, or --overwrite")
    steps = read_steps(run.metrics, [])
    there = list_checkpoints(run.checkpoints)
    return is_finished(run, steps) and bool(there) and there[-1].name.endswith(f"{max(steps):06d}")


# ---- one after another ----


def train_seeds(runs: SeedRuns, train: Callable[[int], int], *, again: str) -> int:
    """Train the seeds that are not finished, one after another; write the report, print the table. train: trains a
    seed, or goes on with it, and returns its exit code; again: how to go on with those that are not finished. Returns
    the exit code: of a stop, or else of the first seed that failed. What is refused before any seed has run would be so
    for all.
    """
    failed: dict[int, int] = {}
    any_ran = bool(runs.finished)
    for place, seed in enumerate(runs.seeds, start=1):
        where = f"seed {seed} ({place} of {len(runs.seeds)}): {runs.run(seed)}"
        if seed in runs.finished:
            print(f"{where} is finished", file=sys.stderr, flush=True)
            continue
        print(where, file=sys.stderr, flush=True)
        code = train(seed)
        if code in STOPPED:
            print(f"stopped; go on with:\n  {again}", flush=True)
            return code
        if code == REFUSED and not any_ran:
            with suppress(OSError):  # runs are there
                runs.folder.rmdir()
            return code
        any_ran = True
        if code:
            failed[seed] = code
    done = [runs.run(seed) for seed in runs.seeds if seed not in failed]
    if done:
        _report(done, runs.folder)
    if not failed:
        return 0
    named = and_list([f"{seed} (exit code {code})" for seed, code in failed.items()])
    print(f"failed: seed {named}. When that is mended, go on with:\n  {again}", flush=True)
    first = next(iter(failed.values()))
    return 128 - first if first < 0 else first  # a signal's number, as shells have it


def _run_process(command: list[str]) -> int:
    """Run a command to its end, and return its exit code. A stop of this process is passed on to it, once, and the exit
    code is then that of a stop: Ctrl-C in a terminal reaches both, and a command that has saved before SIGTERM comes is
    ended by that.
    """
    process = subprocess.Popen(command)
    is_stopped = False
    while True:
        try:
            code = process.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        try:
            check_stop()
        except Interrupted:
            if code is None and not is_stopped:
                process.terminate()
            is_stopped = True
        if code is not None:
            return STOPPED[0] if is_stopped and code not in STOPPED else code


def _report(folders: list[Path], parent: Path) -> None:
    """Write the report of all seeds, and print their table."""
    from tinyrl.tools.report import seed_tables, write_overlay  # with jinja2

    for table in seed_tables(folders):
        lines = table_lines(table.columns, table.rows, terminal_columns())
        print("\n".join(["", "held out, at the last step of each seed", *(line.rstrip() for line in lines)]))
    print("", *write_overlay(folders, parent), sep="\n", flush=True)
