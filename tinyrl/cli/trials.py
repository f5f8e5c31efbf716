"""`tinyrl reward test` and `tinyrl env test`: people's code tried on their rows, without a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tinyrl.cli.errors import sentences

rewards = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Try a reward before training on it.")
environments = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Try an environment before training.")

Data = Annotated[str, typer.Option(help="rows to try it on: .jsonl, .json, .csv, .parquet or a hub name")]
TaskName = Annotated[str, typer.Option(help="whose prompts and gold answers the rows have")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]


@rewards.command("test")
def reward_test(
    use: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION")],
    data: Data,
    task: TaskName = "rows",
    num_rows: Annotated[int, typer.Option(min=1, help="how many rows")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds a call may take")] = 60.0,
    debug: Debug = False,
) -> None:
    """Judge gold answers, nothing and nonsense: scores, time per call, failures, spread."""
    with sentences(debug):
        from tinyrl.rewards.trial import render, try_function
        from tinyrl.tasks import load_rows, load_task
        from tinyrl.workers.loading import parse_use

        parse_use(use)
        chosen = load_task(task)
        rows = load_rows(chosen, "eval", eval_data=data, max_samples=num_rows, verified=False)
        trial = try_function(use, chosen, rows, timeout_s=timeout)
        print(render(trial))
    if trial.would_stop_a_run:
        raise typer.Exit(3)


@environments.command("test")
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
    max_observation_tokens: Annotated[int, typer.Option(min=1, help="after so many, a reply is cut")] = 256,
    debug: Debug = False,
) -> None:
    """Answer scripted turns (gold answers, calls, nothing, nonsense): replies, time per call, failures, repeatable."""
    with sentences(debug):
        from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS, EnvironmentConfig
        from tinyrl.environments.environment import Environment
        from tinyrl.environments.trial import CHARS_A_TOKEN, render, try_environment
        from tinyrl.tasks import load_rows, load_task
        from tinyrl.workers.loading import parse_use

        if len(use) > 1 and not tools:
            raise ValueError(f"one environment at a time, and these are {len(use)}; of several tools, say --tools")
        for each in use if tools or use[0] not in BUILT_IN_ENVIRONMENTS else []:
            parse_use(each, setting="environment.tools" if tools else "environment.use", classes=True)
        chosen = load_task(task)
        rows = load_rows(chosen, "eval", eval_data=data, max_samples=num_rows, verified=False)
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
            names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "prompts"))
            columns = {name: [row.get(name) for row in rows] for name in names}
            gold = [chosen.gold(row) for row in rows]
            trial = try_environment(environment, [chosen.prompt(row) for row in rows], columns, gold=gold)
        finally:
            environment.close()
        print(render(trial))
    if trial.would_stop_a_run:
        raise typer.Exit(3)
