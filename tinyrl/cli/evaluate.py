"""`tinyrl eval`: policies and reward models on held-out rows."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from tinyrl.cli.options import Json, settings_argument
from tinyrl.runs.launched import Options, launched


def evaluate(
    words: Annotated[
        list[str],
        settings_argument(
            "runs, checkpoints or models; settings of reward, generation and task in place of the runs'",
            before="TARGET... ",
        ),
    ],
    vs: Annotated[
        str | None,
        typer.Option(
            help="a run, a checkpoint or a model to compare with; of one target also base, start or teacher. Several "
            "targets are compared with the first one by default"
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="another task than the run's")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="rows in place of the held-out ones")] = None,
    split: Annotated[
        Literal["eval", "train"], typer.Option(help="held-out prompts, or those of training (has it memorised?)")
    ] = "eval",
    num_prompts: Annotated[int, typer.Option(min=1, help="how many prompts")] = 512,
    samples: Annotated[int, typer.Option(min=1, help="samples a prompt")] = 1,
    save_samples: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="write the samples of both sides, a line each")
    ] = None,
    json_output: Json = False,
    *,
    options: Options,
) -> None:
    """Evaluate runs, checkpoints or models on held-out prompts, or a reward model on held-out rows.

    One target: its numbers, with --vs beside another's, paired by prompt. Several policies: one table of reward, KL,
    length and win rates against --vs, all judged alike.
    """
    from tinyrl.cli.preflight import check_evaluation
    from tinyrl.evaluation.targets import Asked

    settings = tuple(word for word in words if "=" in word and not os.path.exists(word))
    targets = [word for word in words if word not in settings]
    asked = Asked(task, data, settings, split, num_prompts, samples, save_samples)
    if not targets:
        raise ValueError("which run, checkpoint or model? tinyrl eval RUN [section.key=value]...")
    if len(targets) == 1:
        check_evaluation(targets[0], asked, vs=vs)
        from tinyrl.evaluation.compare import evaluate_target

        result = evaluate_target(targets[0], asked, vs=vs, options=options)
    else:
        targets = targets if vs is None else [vs, *targets]
        if targets[0] in ("base", "start", "teacher"):
            raise ValueError(f"--vs {vs} is of one run; several are compared with a run, a checkpoint or a model")
        for option in ["--split train"] * (split != "eval") + ["--save-samples"] * (save_samples is not None):
            raise ValueError(f"{option} is for one target, and these are {len(targets)}")
        for target in targets:
            check_evaluation(target, asked, vs=targets[0])
        from tinyrl.evaluation.compare import compare

        result = compare(targets, asked, options=options)
    if launched().rank == 0:
        from tinyrl.evaluation.table import render

        print(render(result, as_json=json_output))
