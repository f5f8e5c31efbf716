"""`tinyrl sweep`: a recipe under several settings and seeds, side by side."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyrl.cli.options import Json
from tinyrl.cli.train import WORDS, OutputDir, config_of
from tinyrl.errors import Interrupted
from tinyrl.runs.launched import Options

if TYPE_CHECKING:
    from tinyrl.tools.sweep import Sweep


def sweep(
    words: Annotated[list[str] | None, WORDS] = None,
    name: Annotated[str | None, typer.Option(help="name of the sweep's folder; default sweep-<n>")] = None,
    output_dir: OutputDir = "runs",
    resume: Annotated[str | None, typer.Option(metavar="FOLDER", help="go on with a sweep; needs nothing else")] = None,
    halve: Annotated[
        bool, typer.Option("--halve", help="leave the worse half of the settings on the way, where that can be told")
    ] = False,
    at_once: Annotated[int | None, typer.Option(min=1, help="runs at a time; default one a core, on a GPU one")] = None,
    json_output: Json = False,
    *,
    options: Options,
) -> int:
    """Train a recipe under several settings and seeds (run.seed=1,2,3), and say which can be told apart."""
    from tinyrl.tools.sweep import Sweep, members, render, run, to_json

    if resume is not None:
        if words or name or halve:
            raise ValueError("--resume needs nothing else: sweep.json of the folder says everything")
        folder = Path(resume)
        given = Sweep.read(folder)
    else:
        given = _new(words or [], halve=halve, at_once=at_once, options=options)
        folder = _folder(Path(output_dir), name)
    runs = members(given, folder, config_of=config_of)
    if resume is None:
        folder.mkdir(parents=True)
        given.write(folder)
    told = "" if json_output else f"sweep {folder}: {len(runs)} runs, {given.at_once} at a time"
    print(told, end="\n" * bool(told), flush=True)
    try:
        code = run(given, folder, runs, tell=lambda line: None if json_output else print(line, flush=True))
    except Interrupted:
        print(f"stopped; nothing is lost. Go on with:\n  tinyrl sweep --resume {folder}")
        raise
    print(json.dumps(to_json(runs)) if json_output else f"\n{render(runs)}\n\nreport   {folder}/report.html")
    return code


def _new(words: list[str], *, halve: bool, at_once: int | None, options: Options) -> Sweep:
    from tinyrl.config.recipe import method_of
    from tinyrl.tools.sweep import Sweep, axes_of, rungs, side_by_side

    method, settings = method_of(words)
    shared, axes = axes_of(method or "", settings)  # config_of says that there is none
    first = config_of(method, [*shared, *(f"{key}={values[0]}" for key, values in axes.items())])
    import torch

    threads, count = first.run.threads, math.prod(map(len, axes.values()))
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        best = 1
    else:
        if threads == "auto" and "run.threads" not in axes:
            shared, threads = [*shared, "run.threads=1"], 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        best = side_by_side(count, max(1, cores // (threads if isinstance(threads, int) else 1)))
    of_each = ["--device", options.device] + ["--trust-remote-code"] * options.trust_remote_code
    given = Sweep(first.method, shared, axes, halve, at_once or best, of_each)
    if halve:
        rungs(2, first)  # says what is missing
    return given


def _folder(output_dir: Path, name: str | None) -> Path:
    if name is not None:
        if (output_dir / name).exists():
            raise ValueError(f"{output_dir / name} exists; go on with it (--resume), or give another --name")
        return output_dir / name
    number = 1
    while (output_dir / f"sweep-{number}").exists():
        number += 1
    return output_dir / f"sweep-{number}"
