"""`tinyrl eval` and `tinyrl compare`: policies and reward models on held-out rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import (
    Debug,
    Device,
    Json,
    RunOptions,
    TrustRemoteCode,
    complete_setting,
    ending_together,
    quiet_libraries,
)
from tinyrl.runs.launched import launched
from tinyrl.runs.run_dir import finite

if TYPE_CHECKING:
    from tinyrl.rollout.components import Options

NumPrompts = Annotated[int, typer.Option(min=1, help="how many prompts")]
Samples = Annotated[int, typer.Option(min=1, help="samples a prompt")]
Benchmark = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="public tasks of lm-eval instead: gsm8k, math500, ifeval, ...")
]
FewShot = Annotated[int | None, typer.Option(min=0, help="of --benchmark: examples; default as the task says")]
Limit = Annotated[int | None, typer.Option(min=1, help="of --benchmark: the first documents only")]
TaskFolder = Annotated[str | None, typer.Option(help="of --benchmark: tasks of your own, as lm-eval's YAML")]


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...",
            help="of reward, generation and task, in place of the run's: reward.model=PATH",
            autocompletion=complete_setting,
        ),
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
    best_of: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="each sample of the target is the best of N by the reward")
    ] = 1,
    save_samples: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="write the samples of all sides, a line each")
    ] = None,
    benchmark: Benchmark = None,
    few_shot: FewShot = None,
    limit: Limit = None,
    task_folder: TaskFolder = None,
    json_output: Json = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Evaluate a run, a checkpoint or a model: a policy on held-out prompts, a reward model on held-out rows."""
    quiet_libraries()
    with ending_together(), sentences(debug):
        from tinyrl.cli.preflight import check_evaluation
        from tinyrl.evaluation.targets import Asked

        options = RunOptions(device, trust_remote_code, debug).of_parts()
        if benchmark is not None:
            if vs or task or data or save_samples or best_of > 1:
                raise ValueError("--benchmark has its own data and judge; --vs and such are for held-out rows")
            names = list(filter(None, benchmark.split(",")))
            _benchmark(target, settings or [], names, few_shot, limit, task_folder, json_output, options)
            return
        if few_shot is not None or limit or task_folder:
            raise ValueError("--few-shot, --limit and --task-folder are for --benchmark")
        asked = Asked(task, data, tuple(settings or ()), split, num_prompts, samples, best_of, save_samples)
        check_evaluation(target, asked, vs=vs)
        from tinyrl.evaluation.table import render
        from tinyrl.evaluation.versus import evaluate_target

        result = evaluate_target(target, asked, vs=vs, options=options)
        if launched().rank == 0:
            print(render(result, as_json=json_output))


def _benchmark(
    target: str,
    settings: list[str],
    names: list[str],
    few_shot: int | None,
    limit: int | None,
    folder: str | None,
    json_output: bool,
    options: Options,
) -> None:
    from tinyrl.tools.benchmarks import Asked, benchmark, render
    from tinyrl.tools.chat.target import chat_target

    if launched().world_size > 1:
        raise ValueError("--benchmark works in one process, and several were launched")
    asked = Asked(tuple(names), few_shot, limit, folder)
    result = benchmark(chat_target(target, settings), asked, options=options)
    print(json.dumps(finite(result), default=str) if json_output else render(result))


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY... [section.key=value]...",
            help="runs, checkpoints or models; settings of reward, generation and task for all of them",
            autocompletion=complete_setting,
        ),
    ],
    vs: Annotated[str, typer.Option(help="the policy that the others are compared with: a run, a checkpoint, a model")],
    task: Annotated[str | None, typer.Option(help="the task that all are judged on; default the runs' own")] = None,
    num_prompts: NumPrompts = 512,
    samples: Samples = 1,
    best_of: Annotated[
        int,
        typer.Option(min=1, max=1000, metavar="N", help="a row too for the best of N samples of --vs by the reward"),
    ] = 1,
    json_output: Json = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Judge several policies alike and print one table: reward, KL, length, win rates against --vs."""
    quiet_libraries()
    with ending_together(), sentences(debug):
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

        asked = Asked(task, settings=settings, num_prompts=num_prompts, samples=samples, best_of=best_of)
        options = RunOptions(device, trust_remote_code, debug).of_parts()
        rows = compare_policies(targets, asked, vs=vs, options=options)
        if launched().rank == 0:
            print(render_comparison(rows, as_json=json_output))
