"""tinyrl in a script or a notebook: `train`, `evaluate` and `open_run`, over what the commands use.

    import tinyrl
    run = tinyrl.train("grpo", "starter-grpo", {"run.num_steps": 20}, reward=score, rows=rows)
    run.metrics.frame(); run.samples(); run.report(); run.resume(); run.policy()("a prompt")

What a user can fix is a ValueError with a sentence. An interrupt (the stop button, Ctrl-C) makes a checkpoint and
returns the run; nothing here ends the process. Importing this file loads no torch.
"""

from __future__ import annotations

import html
import operator
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.api.given import INPUTS, Reward, Settings, given, overrides_of, path_of
from tinyrl.cli.options import quiet_libraries
from tinyrl.cli.preflight import check_before_loading, check_evaluation
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted
from tinyrl.evaluation.targets import Asked, policy_at
from tinyrl.runs.records import read_steps, samples_of
from tinyrl.runs.run_dir import RunDir, check_new_run, finite
from tinyrl.runs.run_dir import open_run as open_folder
from tinyrl.runs.signals import StopFlag
from tinyrl.text import number, shortened
from tinyrl.tools.report import write_report

if TYPE_CHECKING:
    from tinyrl.tools.chat.speaker import Speaker

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


_one_at_a_time = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """One run at a time: the device, torch's random numbers and thread count are the process's."""
    if not _one_at_a_time.acquire(blocking=False):
        raise ValueError("a run is going on in this process already; wait for its end, or interrupt it first")
    try:
        yield
    finally:
        _one_at_a_time.release()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C asks for a checkpoint; a second one, or one before a run has begun, is a KeyboardInterrupt. Threads and
    random numbers of the process are as before afterwards.
    """
    import torch

    threads, on_main = torch.get_num_threads(), threading.current_thread() is threading.main_thread()
    try:
        with torch.random.fork_rng(devices=[]), StopFlag(signals=(signal.SIGINT,) if on_main else (), leaves=False):
            yield
    except Interrupted:
        raise KeyboardInterrupt from None  # while it was loading: there is no run yet
    finally:
        torch.set_num_threads(threads)


class Metrics(list[dict[str, Any]]):
    """The lines of metrics.jsonl, one dictionary a step."""

    def frame(self) -> Any:
        """As a pandas data frame, indexed by step. Raises ValueError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ValueError(".frame() needs pandas: pip install pandas") from None
        frame = pandas.DataFrame(list(self))
        return frame.set_index("step") if "step" in frame else frame


class Report:
    """report.html of a run: shown inline in a notebook, without scripts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 720px; border: 0"></iframe>'


class Run:
    """A run folder. exit_code: how its last training here ended (0 done, 3 a guard, 4 no room, 75 interrupted); None
    where it was only opened.
    """

    def __init__(self, folder: RunDir, *, exit_code: int | None = None) -> None:
        self._folder, self.exit_code = folder, exit_code

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Config:
        return self._folder.read_config()

    @property
    def metrics(self) -> Metrics:
        return Metrics(read_steps(self._folder.metrics, []).values())

    @property
    def finished(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["step"] >= self.config.run.num_steps

    def samples(self, *, step: int | None = None, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of samples.jsonl, of a step and a kind (train, eval, eval-greedy) where they are given."""
        return list(samples_of(self._folder.samples, [], kind=kind, step=step))

    def report(self) -> Report:
        """Write report.html and report.png anew, and show the page."""
        return Report(write_report(self.path)[0])

    def resume(
        self,
        settings: Settings | None = None,
        *,
        allow_config_change: bool = False,
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> Run:
        """`tinyrl train --resume RUN`: go on from the newest checkpoint that verifies. A finished run is returned."""
        with alone():
            config = self._folder.read_config(overrides_of(settings))
            check_before_loading(config)
            quiet_libraries()
            from tinyrl.rollout.components import Options
            from tinyrl.training.resume import resume

            options = Options(device=device, trust_remote_code=trust_remote_code)
            with interruptible():
                launch = resume(self._folder, options=options, config=config, allow_config_change=allow_config_change)
                self.exit_code = 0 if launch is None else launch.go(report=write_report)
            return self

    def policy(self, *, device: str = "auto", trust_remote_code: bool = False) -> Speaker:
        """The policy of the newest checkpoint, loaded: `policy("a prompt")` is its answer. Close it, or use `with`."""
        found = policy_at(str(self.path), [])
        quiet_libraries()
        from tinyrl.rollout.components import Options
        from tinyrl.tools.chat.speaker import load_speaker

        return load_speaker(found, options=Options(device=device, trust_remote_code=trust_remote_code))

    def __repr__(self) -> str:
        lines = self.metrics
        step = lines[-1]["step"] if lines else 0
        said = [f"run {self.path}: step {step} of {self.config.run.num_steps}"]
        evaluated = [line for line in lines if isinstance(line.get("eval/reward_mean"), int | float)]
        if evaluated:
            first, last = (number(line["eval/reward_mean"]) for line in (evaluated[0], evaluated[-1]))
            said.append(f"held-out reward {first} -> {last}")
        if self.exit_code:
            how = {3: "stopped by a guard", 4: "no room", 75: "interrupted"}.get(self.exit_code, "not done")
            said.append(f"{how}; go on with .resume()")
        return ", ".join(said)


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
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Run:
    """`tinyrl train METHOD [RECIPE] [settings]`, to its end or to an interrupt; the run says which.

    reward: functions with TRL's signature, or 'file.py:function', one or several, or {function: weight}; rows,
    eval_rows: a file, a hub name, or rows as dictionaries (a data frame too). They are of the task `rows`, and take the
    place of all that a recipe has, unless settings name a task. The same settings, rows and functions give the same run
    as the command, bit for bit.
    Raises ValueError for what can be fixed, and while another run is going on in this process or in that folder.
    """
    method, output_dir, device = path_of("method", method), path_of("output_dir", output_dir), path_of("device", device)
    recipe = None if recipe is None else path_of("recipe", recipe)
    name = None if name is None else path_of("name", name)
    with alone():
        check_new_run(output_dir, name=name, overwrite=overwrite)
        inputs = Path(output_dir) / INPUTS
        overrides = given(overrides_of(settings), reward, rows, eval_rows, inputs)
        config = load_config(method, recipe, overrides=overrides)
        check_before_loading(config)
        quiet_libraries()
        from tinyrl.rollout.components import Options
        from tinyrl.training.launch import start

        options = Options(device=device, trust_remote_code=trust_remote_code)
        words = ["tinyrl", "train", method, *([recipe] if recipe else []), *overrides]
        with interruptible():
            launch = start(
                config, options=options, output_dir=output_dir, name=name, overwrite=overwrite, command=words
            )
            return Run(launch.run, exit_code=launch.go(report=write_report))


def evaluate(
    target: str | os.PathLike[str] | Run,
    *,
    vs: str | os.PathLike[str] | Run | None = None,
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
    """What `tinyrl eval TARGET --json` prints, as a dictionary. Raises ValueError for what can be fixed."""
    what, other = _path(target), None if vs is None else _path(vs)
    asked = Asked(
        task,
        data,
        tuple(overrides_of(settings)),
        split,
        _count("num_prompts", num_prompts),
        _count("samples", samples),
        save_samples,
    )
    with alone():
        check_evaluation(what, asked, vs=other)
        quiet_libraries()
        from tinyrl.evaluation.versus import evaluate_target
        from tinyrl.rollout.components import Options

        options = Options(device=device, trust_remote_code=trust_remote_code)
        with interruptible():
            return finite(evaluate_target(what, asked, vs=other, options=options))


def open_run(path: str | os.PathLike[str]) -> Run:
    return Run(open_folder(path_of("path", path)))


def _count(name: str, value: Any) -> int:
    """A whole number of at least 1, of numpy's types too; ValueError for anything else."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name}={shortened(repr(value))}: it must be a whole number of at least 1")
    return count


def _path(target: Any) -> str:
    return str(target.path) if isinstance(target, Run) else path_of("a run or a model", target)
