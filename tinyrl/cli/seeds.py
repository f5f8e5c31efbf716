"""`tinyrl train ... --seeds 3`: the same run once per seed, one after another, each in a process of its own.

The runs are OUTPUT_DIR/NAME/seed-N. Under the same name the same command goes on: finished runs are kept, others
resumed. A seed that fails does not end the others; a stop does, and settings or data that are refused at the first.
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
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import check_name, check_new_run, next_name, open_run, run_stem
from tinyrl.text import terminal_columns

MOST_SEEDS = 100
REFUSED = 2  # exit code of settings or data that are wrong, whatever the seed
STOPPED = (75, 130)  # exit codes of a stop
WAIT_S = 0.2
RUN_SEED = "run.seed="
REPORT = ("report.html", "report.png")


@dataclass(frozen=True)
class SeedRuns:
    """The runs of a command that trains with several seeds. words: its method, recipe and settings, without a seed."""

    words: list[str]
    seeds: list[int]
    given: str  # of --seeds
    folder: Path
    options: Options
    overwrite: bool = False
    finished: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def run(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def command(self, seed: int) -> list[str]:
        """Return the arguments of tinyrl that train a seed, or go on with it."""
        how = ["--device", self.options.device]
        if self.options.trust_remote_code:
            how.append("--trust-remote-code")
        if seed in self.begun:
            return ["train", "--resume", str(self.run(seed)), *how]
        where = ["--name", f"seed-{seed}", "--output-dir", str(self.folder)]
        if self.overwrite:
            where.append("--overwrite")
        return ["train", *self.words, f"{RUN_SEED}{seed}", *where, *how]

    @property
    def again(self) -> str:
        """Return the command that goes on with those that are not finished."""
        where = ["--name", self.folder.name, "--output-dir", str(self.folder.parent)]
        trust = ["--trust-remote-code"] if self.options.trust_remote_code else []
        return shlex.join(["tinyrl", "train", *self.words, "--seeds", self.given, *where, *trust])


def prepare_seeds(
    words: list[str],
    config: Config,
    *,
    seeds: str,
    name: str | None,
    output_dir: str,
    overwrite: bool,
    options: Options,
) -> SeedRuns:
    """Find what is to train, and make the folder of the runs. config: of the words. Raises ValueError for seeds, names
    and folders that cannot be, and for runs that were made with other settings.
    """
    if launched().world_size > 1:
        raise ValueError("--seeds works in one process: leave the launcher out")
    chosen = seeds_of(seeds, config)
    if name is None:
        check_new_run(output_dir, name=None, overwrite=False)
        name = next_name(Path(output_dir), run_stem(config))
    check_name(name, root=Path(output_dir))
    folder = Path(output_dir) / name
    _check_folder(folder)
    plain = [word for word in words if not word.startswith(RUN_SEED)]
    runs = SeedRuns(plain, chosen, given=seeds, folder=folder, options=options, overwrite=overwrite)
    finished = list[int]()
    begun = list[int]()
    for seed in chosen if not overwrite else ():
        state = _state_of(runs.run(seed), config, seed=seed)
        if state is not None:
            (finished if state else begun).append(seed)
    folder.mkdir(parents=True, exist_ok=True)
    return replace(runs, finished=finished, begun=begun)


def seeds_of(text: str, config: Config) -> list[int]:
    """Return the seeds that --seeds names: so many from run.seed on, or those between commas."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,17}", part.strip()) for part in parts):
        raise ValueError(f"--seeds {text}: a number of seeds, such as 3, or the seeds themselves: 3,7,11")
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        numbers = [*range(config.run.seed, config.run.seed + min(numbers[0], MOST_SEEDS + 1))]
    elif "run.seed" in config.given.typed:
        raise ValueError(f"--seeds {text} names the seeds, and run.seed={config.run.seed} another one: leave one out")
    if not 2 <= len(numbers) <= MOST_SEEDS:
        raise ValueError(f"--seeds {text}: 2 to {MOST_SEEDS} seeds; a single one is run.seed=N")
    if len({*numbers}) < len(numbers):
        raise ValueError(f"--seeds {text} names a seed twice")
    return numbers


def _check_folder(folder: Path) -> None:
    """Raise ValueError where a folder holds something other than runs by seed and their report."""
    if not folder.exists():
        return
    others = {file.name for file in folder.iterdir()} - {*REPORT, LOCK} if folder.is_dir() else {folder.name}
    others = {name for name in others if re.fullmatch(r"seed-[0-9]+|\..*", name) is None}
    if others:
        raise ValueError(f"--name {folder.name}: {folder} exists and holds {min(others)}: choose another --name")


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


def train_seeds(runs: SeedRuns) -> int:
    """Train the seeds that are not finished, one after another; write the report, print the table. Returns the exit
    code: of a stop, or else of the first seed that failed. What is refused before any seed has run would be so for all.
    """
    failed: dict[int, int] = {}
    any_ran = bool(runs.finished)
    for place, seed in enumerate(runs.seeds, start=1):
        where = f"seed {seed} ({place} of {len(runs.seeds)}): {runs.run(seed)}"
        if seed in runs.finished:
            print(f"{where} is finished", file=sys.stderr, flush=True)
            continue
        print(where, file=sys.stderr, flush=True)
        code = _run_process([sys.executable, "-m", "tinyrl", *runs.command(seed)])
        if code in STOPPED:
            print(f"stopped; go on with:\n  {runs.again}", flush=True)
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
    print(f"failed: seed {named}. When that is mended, go on with:\n  {runs.again}", flush=True)
    first = next(iter(failed.values()))
    return 128 - first if first < 0 else first  # a signal's number, as shells have it


def _run_process(command: list[str]) -> int:
    """Run a command to its end, and return its exit code; a stop of this process is passed on to it, once. Ctrl-C in a
    terminal reaches both, and SIGTERM after it changes nothing.
    """
    process = subprocess.Popen(command)
    pass_on: Callable[[], None] | None = process.terminate
    while True:
        try:
            return process.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            check_stop()
        except Interrupted:
            if pass_on is not None:
                pass_on()
            pass_on = None


def _report(folders: list[Path], parent: Path) -> None:
    """Write the report of all seeds, and print their table."""
    from tinyrl.tools.report import seed_tables, write_overlay  # with jinja2

    for table in seed_tables(folders):
        lines = table_lines(table.columns, table.rows, terminal_columns())
        print("\n".join(["", "held out, at the last step of each seed", *(line.rstrip() for line in lines)]))
    print("", *write_overlay(folders, parent), sep="\n", flush=True)
