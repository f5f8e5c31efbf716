"""`tinyrl check`: report whether a run will work and what it costs; `tinyrl doctor`: diagnose a run there is."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import typer

from tinyrl.cli.options import Json, settings_argument
from tinyrl.cli.together import Excludes, Needs, Rule, refuse
from tinyrl.cli.train import typed_config
from tinyrl.config.refusal import refusals_at
from tinyrl.process.launched import Options
from tinyrl.runs.finding import as_json, counted, in_words
from tinyrl.runs.findings import find, render
from tinyrl.runs.places import reported_at
from tinyrl.runs.records import json_safe, read_run
from tinyrl.runs.show import image_lines

SAMPLING = ("--prompts", "--samples", "--write")  # options of the part that samples
WITH_MODELS = (*SAMPLING, "--minutes")
OF_CHECK: tuple[Rule, ...] = (
    Needs("--memory", ("--offline",), "it is the memory of another machine"),
    Excludes("--offline", ("--quick", *WITH_MODELS), "it is arithmetic, without rows and models"),
    Excludes("--quick", WITH_MODELS, "it loads no model"),
)


def check(
    words: list[str] = settings_argument(
        "as for `tinyrl train`; a recipe names its method", before="[METHOD] [RECIPE] "
    ),
    quick: bool = typer.Option(False, "--quick", help="check only rows, reward and tokenizer; load no weights"),
    offline: bool = typer.Option(
        False, "--offline", help="only estimate memory and disk, for this machine or --memory"
    ),
    memory: str | None = typer.Option(
        None, metavar="GB", help="with --offline: GPU memory of another machine in GB, such as 24"
    ),
    prompts: int = typer.Option(64, min=1, help="maximum number of training prompts to sample from"),
    samples: int | None = typer.Option(None, min=2, help="completions per prompt; default: a group, at least 8"),
    minutes: float = typer.Option(
        2.0, min=0.01, help="time limit for the largest step, if it fits, and for sampling in what that leaves"
    ),
    write: str | None = typer.Option(
        None, metavar="ROWS.jsonl", help="write the rows to this file, with a column pass_rate"
    ),
    json_output: Json = False,
    *,
    options: Options,
    context: typer.Context,
) -> int:
    """Report whether a run will work and what it costs. Exit code 3: a finding would keep it from learning."""
    begun = time.perf_counter()
    sections = []
    config = typed_config(words)
    if not config.samples:
        refuse(context, SAMPLING, f"on `{config.method}`, which samples nothing")
    from tinyrl.tools import check as page  # with the tasks: not for --help

    checked = page.check(
        config,
        options=options,
        quick=quick,
        offline=offline,
        memory=memory,
        write=None if write is None else Path(write),
        prompts=prompts,
        samples=samples,
        minutes=minutes,
    )
    with refusals_at(config.given.places):
        for section in checked:
            sections.append(section)
            if not json_output:
                print(section.render(), flush=True)
    found = [finding for section in sections for finding in section.findings]
    if json_output:
        facts = {section.name: section.facts for section in sections}
        print(json.dumps(json_safe({**facts, "findings": as_json(found)}), default=str))
    else:
        what = counted(found) if found else "nothing found that would keep it from learning"
        print(f"\n{what}, in {time.perf_counter() - begun:.0f} s")
        for paragraph in in_words(found):
            print(f"\n{paragraph}")
    return page.exit_code(found)


def doctor(
    run: str = typer.Argument(metavar="RUN", help="a run, or the folder of a command with --seeds"),
    json_output: Json = False,
) -> None:
    """Diagnose a run by its metrics: what is wrong, what to change."""
    notes = list[str]()
    opened = [read_run(folder) for folder in reported_at(run, notes)]
    found = {one.name: find(one) for one in opened}
    if json_output:
        each = {name: as_json(findings) for name, findings in found.items()}
        print(json.dumps(each if len(opened) > 1 else each[opened[0].name]))
    else:
        texts = ["\n".join([render(one, found[one.name]), *image_lines(one.env)]) for one in opened]
        print("\n\n".join(texts))
    for one in opened:
        notes += [f"{one.name}: {note}" if len(opened) > 1 else note for note in one.notes]
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)
