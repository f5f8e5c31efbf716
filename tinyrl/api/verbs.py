"""tinyrl in a script or a notebook: `train`, `evaluate` and `open_run`, over what the commands use.

    import tinyrl
    run = tinyrl.train("grpo", "starter-grpo", {"run.num_steps": 20}, reward=score, rows=rows)
    run.metrics.frame(); run.samples(); run.report(); run.resume(); run.policy()("a prompt")

What a user can fix is a ValueError with a sentence. An interrupt (the stop button, Ctrl-C) makes a checkpoint and
returns the run; nothing here ends the process. Importing this file loads no torch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinyrl.api.given import INPUTS, Reward, Settings, given, overrides_of, path_of
from tinyrl.api.run import Run, alone, interruptible
from tinyrl.cli.options import quiet_libraries
from tinyrl.cli.preflight import check_before_loading, check_evaluation
from tinyrl.config.recipe import load_config
from tinyrl.evaluation.targets import Asked
from tinyrl.runs.run_dir import check_new_run, finite
from tinyrl.runs.run_dir import open_run as open_folder
from tinyrl.text import shortened

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


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
        from tinyrl.tools.report import write_report
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
    best_of: int = 1,
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
        _count("best_of", best_of),
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
