"""`tinyrl doctor`: of this machine, of a model, of a run."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug, Device, TrustRemoteCode
from tinyrl.cli.train import quiet_libraries


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|MODEL]", help="a run's folder, or a model; default: this machine"),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Look for what is wrong: with a run (what its metrics say), a model (whether its numbers agree), this machine."""
    quiet_libraries()
    with sentences(debug):
        from tinyrl.runs.run_dir import meant_a_run, named_run, open_run

        if target is None:
            _machine(json_output)
        elif (run := named_run(target)) is not None:
            _run(run, json_output)
        elif meant_a_run(target):
            open_run(target)  # says what is wrong with the name
        else:
            _model(target, json_output, device=device, trust_remote_code=trust_remote_code)


def _run(path: Path, json_output: bool) -> None:
    from tinyrl.runs.diagnosis import as_json, findings, render
    from tinyrl.runs.records import read_run

    run = read_run(path)
    found = findings(run)
    print(json.dumps(as_json(run, found)) if json_output else render(run, found))


def _machine(json_output: bool) -> None:
    from tinyrl.models.device import look_at_machine

    facts = look_at_machine()
    if json_output:
        print(json.dumps(facts))
    else:
        width = max(60, min(shutil.get_terminal_size().columns, 110))
        for topic, lines in facts.items():
            for line in lines:
                print(textwrap.fill(line, width, initial_indent=f"{topic:12}", subsequent_indent=" " * 12))


def _model(path: str, json_output: bool, *, device: str, trust_remote_code: bool) -> None:
    from tinyrl.cli.preflight import check_model_path
    from tinyrl.components import Options
    from tinyrl.config.recipe import build_config
    from tinyrl.config.yaml_reader import Source

    check_model_path("model", path)
    config = build_config(Source("settings", {"method": "grpo", "model": {"path": path}, "task": {"name": "sort"}}))
    from tinyrl.training.model_checks import check_model, render_checks

    checks = check_model(config, options=Options(device=device, trust_remote_code=trust_remote_code))
    print(json.dumps([vars(one) for one in checks]) if json_output else render_checks(checks))
    if any(one.result == "wrong" for one in checks):
        raise typer.Exit(2)
