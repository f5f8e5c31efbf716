"""tinyrl in a script or a notebook: `train`, `evaluate` and `open_run`, on the code of the commands.

    import tinyrl
    run = tinyrl.train("grpo", "starter-grpo", {"run.num_steps": 20}, reward=score, rows=rows)
    run.metrics; run.samples(); run.report(); run.resume(); run.policy()("a prompt")

Errors that a user can fix are ValueErrors. An interrupt (the stop button, Ctrl-C) makes a checkpoint and returns the
run; nothing here ends the process. Importing this file loads no torch.
"""

from __future__ import annotations

import hashlib
import html
import json
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tinyrl.cli.options import configure_libraries
from tinyrl.cli.seeds import REFUSED, SeedRuns, prepare_seeds, train_seeds, with_seed
from tinyrl.cli.train import print_note
from tinyrl.config.given import as_override
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.config.settings import SECTIONS
from tinyrl.config.trl_config import settings_of
from tinyrl.data.image_files import ImageFiles
from tinyrl.data.sources import row_with_images
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked, policy_at
from tinyrl.process.errors import CodeChanged, Interrupted
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.best import is_finished
from tinyrl.runs.folders import write_atomic
from tinyrl.runs.places import goes_on_from_newest, run_at
from tinyrl.runs.records import is_run, json_safe, read_steps, samples_of
from tinyrl.runs.resolve import changed_config, model_facts
from tinyrl.runs.run_dir import RunDir, check_new_run
from tinyrl.tasks.own import close_workers
from tinyrl.text import truncate
from tinyrl.tools.report import write_overlay, write_report
from tinyrl.workers.foreign_code import tell_code
from tinyrl.workers.loading import uses_of

if TYPE_CHECKING:
    from tinyrl.tools.chat import ChatSession

Settings = Mapping[str, Any]  # {"run.num_steps": 20} or {"run": {"num_steps": 20}}
Reward = str | Callable[..., Any]  # 'file.py:function', a function, a functools.partial, or an object with __call__
Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
OnStep = Callable[[dict[str, Any]], object]  # given a line of metrics.jsonl; "stop" ends the run
ARGUMENTS = {"reward.functions": "reward", "task.data": "rows", "task.eval_data": "eval_rows"}  # of `train`
_running = threading.Lock()


@overload
def train(
    method: str,
    recipe: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    *,
    reward: Reward | list[Reward] | dict[Any, float] | None = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    name: str | None = None,
    output_dir: str | os.PathLike[str] = "runs",
    overwrite: bool = False,
    seeds: None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    on_step: OnStep | None = None,
) -> OpenedRun: ...
@overload
def train(
    method: str,
    recipe: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    *,
    reward: Reward | list[Reward] | dict[Any, float] | None = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    name: str | None = None,
    output_dir: str | os.PathLike[str] = "runs",
    overwrite: bool = False,
    seeds: int | Sequence[int],
    device: str = "auto",
    trust_remote_code: bool = False,
    on_step: OnStep | None = None,
) -> OpenedSeeds: ...
def train(
    method: str,
    recipe: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    *,
    reward: Reward | list[Reward] | dict[Any, float] | None = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    name: str | None = None,
    output_dir: str | os.PathLike[str] = "runs",
    overwrite: bool = False,
    seeds: int | Sequence[int] | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    on_step: OnStep | None = None,
) -> OpenedRun | OpenedSeeds:
    """Run `tinyrl train METHOD [RECIPE] [settings]` to its end or to an interrupt; see `OpenedRun.exit_code`.

    reward: functions with TRL's signature, or 'file.py:function', one or several, or {function: weight}; rows,
    eval_rows: a file, a hub name, or rows as dictionaries, which replace those of a recipe and, unless settings name
    one, its task. Rows that are in no file are written to one named by their content, in OUTPUT_DIR/inputs. A function
    that is in no module's file is called in this process: resume such a run where it is defined. seeds: as --seeds of
    the command, how many or which: the runs are trained one after another in this process, in OUTPUT_DIR/NAME, and the
    same call under the same name goes on. on_step is called with the metrics of each step (and of the evaluation before
    the first, "step" 0) once they are written; where it returns "stop", the run ends with a checkpoint and exit code 0.
    The same arguments give the same run as the command, bit for bit.
    Raises ValueError for what a user can fix, and while another run is going on in this process or in that folder.
    """
    folder = _path(output_dir)
    inputs = Path(folder).absolute() / "inputs"
    how: dict[str, Any] = {"options": Options(device, trust_remote_code), "on_step": on_step}
    with alone():
        if seeds is None:
            check_new_run(folder, name=name, overwrite=overwrite)
        given = {"reward.functions": reward, "task.data": rows, "task.eval_data": eval_rows}
        asked = _AskedRun(
            method=method,
            recipe=None if recipe is None else _path(recipe),
            overrides=overrides_from(settings, reward, rows, eval_rows, inputs=inputs),
            arguments={key: ARGUMENTS[key] for key, value in given.items() if value is not None},
        )
        if seeds is None:
            return asked.train(name=name, output_dir=folder, overwrite=overwrite, **how)
        runs = prepare_seeds(
            asked.config(), seeds=whole_numbers(seeds), name=name, output_dir=folder, overwrite=overwrite
        )
    return _train_seeds(runs, asked, **how)


def whole_numbers(seeds: int | Sequence[int]) -> int | list[int]:
    """Return how many seeds, or which, as Python's own numbers. Raises ValueError for what is none, such as text."""
    try:
        return [operator.index(seed) for seed in seeds] if isinstance(seeds, Iterable) else operator.index(seeds)
    except TypeError:
        shown = truncate(repr(seeds), 60)
        raise ValueError(f"seeds={shown}: a number of seeds, such as 3, or the seeds themselves: [3, 7, 11]") from None


@dataclass(frozen=True)
class _AskedRun:
    """A run as the arguments of `train` describe it. overrides: as the command line has them; arguments: the names, as
    refusals have them, of arguments that settings were given by.
    """

    method: str
    recipe: str | None
    overrides: list[str]
    arguments: dict[str, str]

    def config(self) -> Config:
        how: dict[str, Any] = {"arguments": self.arguments, "note": print_note, "facts": model_facts}
        return load_config(self.method, self.recipe, overrides=self.overrides, **how)

    def train(self, *, name: str | None, output_dir: str, overwrite: bool, **how: Any) -> OpenedRun:
        """Train it in a new folder; how: options and on_step."""
        from tinyrl.training.launch import start  # with torch

        launch = start(
            prepare(self.config()),  # with the rows, which are let go once they are loaded
            output_dir=output_dir,
            name=name,
            overwrite=overwrite,
            command=["tinyrl", "train", self.method, *([self.recipe] if self.recipe else []), *self.overrides],
            **how,
        )
        return OpenedRun(launch.folder, exit_code=launch.go(report=write_report))


def _train_seeds(runs: SeedRuns, asked: _AskedRun, *, options: Options, on_step: OnStep | None) -> OpenedSeeds:
    """Train the seeds that are not finished, or go on with them. Raises ValueError where the first is refused."""
    refused: dict[int, ValueError] = {}

    def train_one(seed: int) -> int:
        path = runs.run(seed)
        try:
            if seed in runs.begun:
                device = {"device": options.device, "trust_remote_code": options.trust_remote_code}
                return open_run(path).resume(**device, on_step=on_step).exit_code or 0
            one = replace(asked, overrides=with_seed(asked.overrides, seed))
            where: dict[str, Any] = {"name": path.name, "output_dir": str(runs.folder), "overwrite": runs.overwrite}
            with alone():
                check_new_run(str(runs.folder), name=path.name, overwrite=runs.overwrite)
                return one.train(**where, options=options, on_step=on_step).exit_code or 0
        except ValueError as error:
            refused[seed] = error
            print(f"tinyrl: {error}", file=sys.stderr)
            return REFUSED

    code = train_seeds(runs, train_one, again=f"the same call, with name={runs.folder.name!r}")
    if code == REFUSED and not any(runs.run(seed).exists() for seed in runs.seeds):
        raise next(iter(refused.values()))
    return OpenedSeeds(runs.folder, [runs.run(seed) for seed in runs.seeds], exit_code=code)


def evaluate(
    target: str | os.PathLike[str],
    *,
    vs: str | os.PathLike[str] | None = None,
    task: str | None = None,
    data: str | None = None,
    settings: Settings | None = None,
    split: str = "eval",
    num_prompts: int = 512,
    samples: int = 1,
    save_samples: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return what `tinyrl eval TARGET --json` prints. Raises ValueError for what a user can fix."""
    if min(num_prompts, samples) < 1:
        raise ValueError(f"num_prompts={num_prompts}, samples={samples}: at least 1 of each")
    saved = None if save_samples is None else _path(save_samples)
    asked = Asked(task, data, tuple(overrides_from(settings)), split, num_prompts, samples, saved)
    path = _path(target)
    other = None if vs is None else _path(vs)
    options = Options(device, trust_remote_code)
    with alone():
        prepared = prepare_evaluation(path, asked, vs=other)
        from tinyrl.tools.compare import evaluate_target  # with torch

        return json_safe(evaluate_target(prepared, options=options).as_json())


def open_run(path: str | os.PathLike[str]) -> OpenedRun:
    """Open a run by its folder, or by a checkpoint: RUN@STEP, RUN@best or the checkpoint's folder, of which `samples`
    and `policy` then are. Raises ValueError where there is none.
    """
    at = run_at(_path(path))
    return OpenedRun(at.run, checkpoint=at.step)


class OpenedRun:
    """A run folder. exit_code: of its last training here (0 done, 3 a guard, 4 no room, 75 interrupted); None where it
    was only opened. checkpoint: the step of the one by which it was opened.
    """

    def __init__(self, folder: RunDir, *, exit_code: int | None = None, checkpoint: int | None = None) -> None:
        self._folder = folder
        self.checkpoint = checkpoint
        self.exit_code = exit_code
        self.path = folder.path
        self.name = folder.path.resolve().name

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Config:
        return self._folder.read_config()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl: a dictionary a step."""
        return list(read_steps(self._folder.metrics, []).values())

    @property
    def finished(self) -> bool:
        return is_finished(self._folder, read_steps(self._folder.metrics, []))

    def samples(self, *, step: int | None = None, kind: str | None = None) -> list[dict[str, Any]]:
        """Return lines of samples.jsonl, of a step and a kind (train, eval, eval-greedy) where they are given."""
        step = self.checkpoint if step is None else step
        return list(samples_of(self._folder.samples, [], kind=kind, step=step))

    def report(self) -> Report:
        """Write report.html and report.png anew, and show the page in a notebook."""
        return Report(write_report(self.path)[0])

    def resume(
        self,
        settings: Settings | None = None,
        *,
        allow_config_change: bool = False,
        device: str = "auto",
        trust_remote_code: bool = False,
        on_step: OnStep | None = None,
    ) -> OpenedRun:
        """Go on from the newest checkpoint that verifies, as `tinyrl train --resume RUN`; return a finished run."""
        if self.checkpoint is not None:
            raise ValueError(goes_on_from_newest(self.path, f"{self.path}@{self.checkpoint}"))
        options = Options(device, trust_remote_code)
        with alone():
            config = changed_config(self._folder, overrides_from(settings))
            tell_code(self.path, config)
            from tinyrl.training.launch import resume  # with torch

            launch = resume(
                self._folder,
                prepare(config, goes_on=True),
                options=options,
                allow_config_change=allow_config_change,
                on_step=on_step,
            )
            self.exit_code = 0 if launch is None else launch.go(report=write_report)
        return self

    def policy(
        self, *, at: int | Literal["best"] | None = None, device: str = "auto", trust_remote_code: bool = False
    ) -> ChatSession:
        """Load the policy of a step's checkpoint or of the best one; default: the one by which the run was opened, or
        the newest. `policy("a prompt")` is its answer. Close it, or use `with`.
        """
        at = self.checkpoint if at is None else at
        target = policy_at(str(self.path) if at is None else f"{self.path}@{at}", [])
        configure_libraries()
        from tinyrl.tools.chat import ChatSession  # with torch

        return ChatSession(target, options=Options(device, trust_remote_code))

    def __repr__(self) -> str:
        metrics = self.metrics
        text = f"run {self.path}: step {metrics[-1]['step'] if metrics else 0} of {self.config.run.num_steps}"
        if self.exit_code:
            how = {3: "stopped by a guard", 4: "no room", 75: "interrupted"}.get(self.exit_code, "not done")
            text += f", {how}; go on with .resume()"
        return text


class OpenedSeeds(Sequence[OpenedRun]):
    """The runs of several seeds, in their order, without those that are not begun. path: of their folder; exit_code: of
    a stop, or of the first seed that failed, as a run's; 0 where all are done.
    """

    def __init__(self, path: Path, runs: list[Path], *, exit_code: int) -> None:
        self.path = path
        self.exit_code = exit_code
        self._runs = [OpenedRun(RunDir(run)) for run in runs if is_run(run)]

    def __fspath__(self) -> str:
        return str(self.path)

    @overload
    def __getitem__(self, place: int) -> OpenedRun: ...
    @overload
    def __getitem__(self, place: slice) -> list[OpenedRun]: ...
    def __getitem__(self, place: int | slice) -> OpenedRun | list[OpenedRun]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    def report(self) -> Report:
        """Write the report of all seeds anew, and show the page in a notebook. Raises ValueError where no seed has a
        finished step.
        """
        begun = [run.path for run in self if run.metrics]
        if not begun:
            raise ValueError(f"{self.path}: no seed has a finished step yet")
        return Report(write_overlay(begun, self.path)[0])

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._runs))


class Report:
    """report.html of a run, or of several seeds: shown inline in a notebook, without scripts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 720px; border: 0"></iframe>'


@contextmanager
def alone() -> Iterator[None]:
    """Allow one run at a time: device, random numbers and thread count are the process's, and restored afterwards.

    Ctrl-C asks for a checkpoint; a second one, or one before a run has begun, is a KeyboardInterrupt.
    """
    if not _running.acquire(blocking=False):
        raise ValueError("a run is going on in this process already; wait for its end, or interrupt it first")
    try:
        configure_libraries()
        import torch

        threads = torch.get_num_threads()
        on_main = threading.current_thread() is threading.main_thread()
        try:
            with torch.random.fork_rng(devices=[]), StopFlag(signals=(signal.SIGINT,) if on_main else (), leaves=False):
                yield
        except CodeChanged as changed:
            raise ValueError(str(changed)) from None
        except Interrupted:
            raise KeyboardInterrupt from None
        finally:
            torch.set_num_threads(threads)
    finally:
        close_workers()  # of own tasks, which a refused run has loaded too; they are loaded anew next time
        _running.release()


# ---- from TRL ----


@dataclass(frozen=True)
class TrlRun:
    """A run as TRL's objects describe it. settings: of the command line; notes: what was counted, added or is not
    needed; name: of the run. `train` begins it.
    """

    method: str
    settings: dict[str, Any]
    notes: list[str]
    reward: Reward | list[Reward] | dict[Any, float] | None = None
    rows: Rows | None = None
    eval_rows: Rows | None = None
    name: str | None = None

    @overload
    def train(self, settings: Settings | None = None, *, seeds: None = None, **options: Any) -> OpenedRun: ...
    @overload
    def train(self, settings: Settings | None = None, *, seeds: int | Sequence[int], **options: Any) -> OpenedSeeds: ...
    def train(self, settings: Settings | None = None, **options: Any) -> OpenedRun | OpenedSeeds:
        """Train it; settings: over those of TRL's objects; options: of `train`, such as output_dir."""
        for note in self.notes:
            print_note(f"from TRL: {note}")
        given: dict[str, Any] = {"reward": self.reward, "rows": self.rows, "eval_rows": self.eval_rows}
        options = {"name": self.name, **options}
        return train(self.method, None, {**self.settings, **(settings or {})}, **given, **options)


def from_trl(
    args: object,
    *,
    model: str | None = None,
    peft_config: object | None = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    leave_out: Sequence[str] = (),
    **others: Any,
) -> TrlRun:
    """Convert what TRL's trainers take into a run: `from_trl(GRPOConfig(...), model=..., reward_funcs=[f]).train()`.

    args: a GRPOConfig, PPOConfig, SFTConfig, DPOConfig or RewardConfig; model: a folder or a hub name; peft_config:
    PEFT's LoraConfig, without one the whole model trains, as in TRL; reward_funcs: functions, with the `reward_weights`
    of args, and a reward model by its folder or hub name; datasets: of `datasets`, or whatever `rows` of `train` takes.
    leave_out: fields to ignore that cannot be taken; others: further arguments of TRL's trainer, such as a PPOTrainer's
    reward_model, by its folder or hub name. Raises ValueError, which names all that cannot be taken.
    """
    given_too = {name: value for name, value in others.items() if value is not None}
    taken = settings_of(args, peft_config, model=model, others=given_too)
    notes = [*taken.notes]
    refused = [why for name, why in taken.refused.items() if name not in leave_out]
    if refused:
        raise ValueError("\n".join([*refused, "from_trl(leave_out=[...]) ignores the fields that it names"]))
    settings = dict(taken.settings)
    if model is not None:
        settings["model.path"] = model
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    weights = getattr(args, "reward_weights", None) or [1.0] * len(given)
    weighted = dict(zip(given, weights, strict=True)) if reward_funcs is not None else {}
    models = [each for each in weighted if isinstance(each, str) and ":" not in each]
    if models[1:] or any(weighted[model] != 1.0 for model in models):
        raise ValueError(f"reward_funcs: one reward model of weight 1 is taken, not {', '.join(models)}")
    if models:
        settings["reward.model"] = models[0]
    reward = {each: weight for each, weight in weighted.items() if each not in models} or None
    if train_dataset is not None and eval_dataset is None:
        notes.append("without eval_dataset some rows are held out for evaluations; TRL trains on all of them")
    if (folder := getattr(args, "output_dir", None)) not in (None, "trainer_output"):
        notes.append(f"output_dir={folder} is not used: give the folder of runs to train(output_dir=...)")
    name = getattr(args, "run_name", None)
    return TrlRun(
        taken.method, settings, notes, reward=reward, rows=train_dataset, eval_rows=eval_dataset, name=name or None
    )


# ---- arguments as the command line has them ----


def _path(path: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(path))


def overrides_from(
    settings: Settings | None, reward: Any = None, rows: Any = None, eval_rows: Any = None, *, inputs: Path = Path()
) -> list[str]:
    """Return settings, rewards and rows as `section.key=value`; rows are written to a file in the folder `inputs`."""
    flat: dict[str, Any] = {}
    if settings is not None and not isinstance(settings, Mapping):
        raise ValueError(f"settings are {{'section.key': value}}, not {truncate(repr(settings))}")
    for key, value in (settings or {}).items():
        section = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, Mapping) else None
        flat |= section if section is not None and key in SECTIONS else {key: value}
    if reward is not None:
        several = reward if isinstance(reward, list | tuple | Mapping) else [reward]
        pairs = [*several.items()] if isinstance(several, Mapping) else [(each, 1.0) for each in several]
        uses = uses_of(each for each, _ in pairs)
        flat["reward.functions"] = [
            {"use": use, "weight": weight} for use, (_, weight) in zip(uses, pairs, strict=True)
        ]
    if rows is not None:  # in place of a recipe's rows and of its task
        flat.setdefault("task.name", "rows")
        if eval_rows is None:
            flat.setdefault("task.eval_data", None)
    for key, source in (("task.data", rows), ("task.eval_data", eval_rows)):
        if source is not None:
            files = ImageFiles(base=Path.cwd(), fetch=flat.get("task.fetch_images") is True)
            flat[key] = source if isinstance(source, str | os.PathLike) else _write_rows(source, inputs, files)
    return [as_override(key, _plain(key, value)) for key, value in flat.items()]


def _write_rows(rows: Iterable[Mapping[str, Any]], inputs: Path, files: ImageFiles) -> Path:
    """Write rows as a .jsonl file named by its content, with images of any form as files. Raises ValueError for what is
    not a list of dictionaries.
    """
    text = ""
    if not isinstance(rows, Iterable):
        raise ValueError(f"rows are dictionaries, a file or a hub name, not {truncate(repr(rows))}")
    for number, row in enumerate(rows, start=1):
        place = f"row {number}"
        if not isinstance(row, Mapping):
            hint = "; of a data frame give frame.to_dict('records')" if hasattr(rows, "to_dict") else ""
            raise ValueError(f"{place}: {truncate(repr(row))} is not a dictionary of columns{hint}")
        text += json.dumps(_plain(place, row_with_images(row, files, place))) + "\n"
    file = inputs / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    return file


def _plain(place: str, value: Any) -> Any:
    """Convert to JSON's types: NaN to null, paths to text, numbers of numpy and torch to Python's. Raises ValueError
    for anything else.
    """

    def converted(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else os.fspath(other)

    try:
        return json.loads(json.dumps(value, default=converted), parse_constant=_nan_to_null)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {truncate(repr(value))} is not JSON: {error}") from None


def _nan_to_null(name: str) -> None:
    """Read NaN as null. Raises ValueError for Infinity, which JSON has not either."""
    if name != "NaN":
        raise ValueError(f"{name} has no place in JSON")
