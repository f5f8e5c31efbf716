"""Tests before training: `tinyrl doctor` of a machine, a model or a run, `reward test` and `env test` of one's code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyrl.cli.options import Json
from tinyrl.runs.launched import Options

if TYPE_CHECKING:
    from tinyrl.data.readers import Row
    from tinyrl.rewards.functions import FunctionReward
    from tinyrl.rewards.judge import JudgeReward
    from tinyrl.tasks import Task


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN|MODEL]", help="a run's folder, or a model; default: this machine")
    ] = None,
    json_output: Json = False,
    *,
    options: Options,
) -> int:
    """Diagnose a run (by its metrics), a model (whether its numbers agree), or this machine."""
    from tinyrl.runs.run_dir import meant_a_run, named_run, open_run

    if target is None:
        from tinyrl.tools import machine

        facts = machine.look_at_machine()
        print(json.dumps(facts) if json_output else machine.render(facts))
    elif (path := named_run(target)) is not None:
        from tinyrl.runs.diagnosis import as_json, examples_in, render
        from tinyrl.runs.findings import find
        from tinyrl.runs.records import read_run

        run = read_run(path)
        found = find(run)
        print(json.dumps(as_json(found, examples_in(run))) if json_output else render(run, found))
    elif meant_a_run(target):
        open_run(target)  # says what is wrong with the name
    else:
        from tinyrl.cli.preflight import check_model_path
        from tinyrl.config.recipe import build_config

        check_model_path("model", target)
        config = build_config({"method": "grpo", "model": {"path": target}, "task": {"name": "sort"}})
        from tinyrl.training.model_checks import check_model, render_checks

        checks = check_model(config, options=options)
        print(json.dumps([vars(one) for one in checks]) if json_output else render_checks(checks))
        return 2 * any(one.result == "wrong" for one in checks)
    return 0


# ---- user code tried on rows, without a model ----

Data = Annotated[str, typer.Option(help="rows to try it on: .jsonl, .json, .csv, .parquet or a hub name")]
TaskName = Annotated[str, typer.Option(help="task that provides prompts and gold answers")]
JudgeSettings = Annotated[
    list[str] | None, typer.Argument(metavar="[name=value]...", help="of a judge: url, model, rubric, mode ...")
]
Use = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION|judge")]
Timeout = Annotated[float, typer.Option(min=0.1, help="seconds a call may take")]


def reward_test(
    use: Use,
    data: Data,
    settings: JudgeSettings = None,
    task: TaskName = "rows",
    num_rows: Annotated[int, typer.Option(min=1, help="how many rows")] = 64,
    timeout: Timeout = 60.0,
) -> int:
    """Score gold answers, empty and random texts: scores, time per call, failures, spread."""
    from tinyrl.rewards.judge import JudgeReward
    from tinyrl.rewards.trial import render, render_judge, try_function, try_judge

    reward = _reward(use, settings or [], timeout)
    graded_as, rows = _rows(task, data, num_rows)
    if isinstance(reward, JudgeReward):
        reward.start()
        judged = try_judge(reward, graded_as, rows)
        print(render_judge(judged))
        return 3 * judged.is_weak
    trial = try_function(use, graded_as, rows, timeout_s=timeout)
    print(render(trial))
    return 3 * trial.would_stop_a_run


def reward_attack(
    use: Use,
    data: Data,
    settings: JudgeSettings = None,
    task: TaskName = "rows",
    num_rows: Annotated[int, typer.Option(min=2, help="how many rows")] = 8,
    timeout: Timeout = 60.0,
) -> int:
    """Look for texts that score high and are wrong, before a policy finds them. Exits with 3 if there are some."""
    from tinyrl.rewards.attack import attack, render

    reward = _reward(use, settings or [], timeout)
    graded_as, rows = _rows(task, data, num_rows)
    try:
        reward.start()
        found = attack(reward, use, graded_as, rows)
    finally:
        reward.close()
    print(render(found))
    return 3 * bool(found.holes or found.is_blind)


def _rows(task: str, data: str, num_rows: int) -> tuple[Task, list[Row]]:
    from tinyrl.tasks import load_rows, load_task

    graded_as = load_task(task)
    return graded_as, load_rows(graded_as, "eval", eval_data=data, max_samples=num_rows, verified=False)


def _reward(use: str, settings: list[str], timeout: float) -> FunctionReward | JudgeReward:
    """Make the reward of a function, or of a judge as `settings` have it; it is not started."""
    import yaml

    from tinyrl.config.recipe import build_config
    from tinyrl.rewards.functions import FunctionReward
    from tinyrl.rewards.judge import JudgeReward

    if use != "judge":
        if settings:
            raise ValueError(f"{settings[0]}: settings are for a judge")
        return FunctionReward(use, timeout_s=timeout)
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting}: name=value, such as url=http://127.0.0.1:8000/v1")
        values[name] = value if name in ("url", "model", "rubric") else yaml.safe_load(value)
    written = {"method": "grpo", "reward": {"functions": [{"use": "judge", **values}]}}
    [judged_by] = build_config(written).reward.functions
    return JudgeReward(judged_by, timeout_s=timeout)


def environment_test(
    use: Annotated[list[str], typer.Argument(metavar="FILE.py:NAME|search|python")],
    data: Data,
    task: TaskName = "rows",
    tools: Annotated[bool, typer.Option("--tools", help="these are tools that the model may call")] = False,
    corpus: Annotated[str | None, typer.Option(help="of search: passages, or a retrieval server's URL")] = None,
    num_rows: Annotated[int, typer.Option(min=1, help="how many rows")] = 16,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="seconds a call may take; 30, python 5")
    ] = None,
    max_observation_tokens: Annotated[int, typer.Option(min=1, help="length at which a reply is cut")] = 256,
) -> int:
    """Answer scripted turns (gold answers, calls, nothing, nonsense): replies, time per call, failures, repeatable."""
    from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS, EnvironmentConfig
    from tinyrl.environments.environment import Environment
    from tinyrl.environments.trial import CHARS_A_TOKEN, render, try_environment
    from tinyrl.tasks.prompts import row_columns
    from tinyrl.workers.loading import parse_use

    if len(use) > 1 and not tools:
        raise ValueError(f"one environment at a time, and these are {len(use)}; several tools need --tools")
    for each in use if tools or use[0] not in BUILT_IN_ENVIRONMENTS else []:
        parse_use(each, setting="environment.tools" if tools else "environment.use", classes=True)
    graded_as, rows = _rows(task, data, num_rows)
    config = EnvironmentConfig(
        use=None if tools else use[0],
        tools=use if tools else [],
        corpus=corpus,
        timeout_s=timeout,
        max_observation_tokens=max_observation_tokens,
    )
    environment = Environment(
        config, task=task, respond=None, use=None, stop=(), length=lambda text: len(text) // CHARS_A_TOKEN
    )
    try:
        environment.start()  # its imports are not part of a call's time
        gold = [graded_as.gold(row) for row in rows]
        trial = try_environment(environment, [graded_as.prompt(row) for row in rows], row_columns(rows), gold=gold)
    finally:
        environment.close()
    print(render(trial))
    return 3 * trial.would_stop_a_run
