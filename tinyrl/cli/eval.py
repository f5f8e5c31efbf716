"""`tinyrl eval` and `tinyrl compare`: policies and reward models on held-out rows."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tinyrl.cli.options import Json, setting_words
from tinyrl.runs.launched import Options, launched

NumPrompts = Annotated[int, typer.Option(min=1, help="how many prompts")]
Samples = Annotated[int, typer.Option(min=1, help="samples a prompt")]


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL")],
    settings: Annotated[
        list[str] | None, setting_words("of reward, generation and task, in place of the run's: reward.model=PATH")
    ] = None,
    vs: Annotated[
        str | None,
        typer.Option(help="base, start, teacher, a run, a checkpoint or a model; judged as the first one is"),
    ] = None,
    task: Annotated[str | None, typer.Option(help="another task than the run's")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="rows in place of the held-out ones")] = None,
    split: Annotated[
        Literal["eval", "train"], typer.Option(help="held-out prompts, or those of training (has it memorised?)")
    ] = "eval",
    num_prompts: NumPrompts = 512,
    samples: Samples = 1,
    save_samples: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="write the samples of all sides, a line each")
    ] = None,
    json_output: Json = False,
    *,
    options: Options,
) -> None:
    """Evaluate a run, a checkpoint or a model: a policy on held-out prompts, a reward model on held-out rows."""
    from tinyrl.cli.preflight import check_evaluation
    from tinyrl.evaluation.targets import Asked

    asked = Asked(task, data, tuple(settings or ()), split, num_prompts, samples, save_samples)
    check_evaluation(target, asked, vs=vs)
    from tinyrl.evaluation.table import render
    from tinyrl.evaluation.versus import evaluate_target

    result = evaluate_target(target, asked, vs=vs, options=options)
    if launched().rank == 0:
        print(render(result, as_json=json_output))


def compare(
    words: Annotated[
        list[str],
        setting_words(
            "runs, checkpoints or models; settings of reward, generation and task for all of them",
            before="POLICY... ",
        ),
    ],
    vs: Annotated[str, typer.Option(help="the policy that the others are compared with: a run, a checkpoint, a model")],
    task: Annotated[str | None, typer.Option(help="the task that all are judged on; default the runs' own")] = None,
    num_prompts: NumPrompts = 512,
    samples: Samples = 1,
    json_output: Json = False,
    *,
    options: Options,
) -> None:
    """Judge several policies alike and print one table: reward, KL, length, win rates against --vs."""
    from tinyrl.cli.preflight import check_evaluation
    from tinyrl.evaluation.targets import Asked

    settings = tuple(word for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    if not targets:
        raise ValueError("which policies? tinyrl compare RUN... --vs RUN")
    for target in (*targets, vs):
        check_evaluation(target, Asked(task, settings=settings), vs=vs)
    from tinyrl.evaluation.table import render_comparison
    from tinyrl.evaluation.versus import compare_policies

    asked = Asked(task, settings=settings, num_prompts=num_prompts, samples=samples)
    rows = compare_policies(targets, asked, vs=vs, options=options)
    if launched().rank == 0:
        print(render_comparison(rows, as_json=json_output))
