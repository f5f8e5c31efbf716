"""Commands that use a policy: `tinyrl export`, `tinyrl chat` and `tinyrl serve`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from tinyrl.cli.options import TrustRemoteCode, configure_libraries, settings_argument
from tinyrl.runs.launched import Options

KEY = "TINYRL_KEY"
Target = Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL")]


def export(
    run: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT")],
    merge: Annotated[bool, typer.Option("--merge", help="one model, the adapter merged into its base")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="of a whole model; auto: as the base's files"),
    ] = "auto",
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where to; default RUN/export/adapter, model or merged")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an exported folder")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="keep a model of which rounding changes over 1 % of greedy tokens")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the policy as a folder for transformers and PEFT, vLLM, llama.cpp: the adapter, or a merged model."""
    configure_libraries()
    from tinyrl.tools.export import export as write

    given = {"merge": merge, "accept_changes": accept_changes, "trust_remote_code": trust_remote_code}
    print(write(run, dtype=dtype, output=output, overwrite=overwrite, **given).render())


def chat(
    target: Target,
    settings: Annotated[
        list[str] | None,
        settings_argument("settings of task, generation, environment and reward, in place of the run's"),
    ] = None,
    *,
    options: Options,
) -> None:
    """Talk to a policy or a model: answers as they are written, beside the start's, with the reward they would get."""
    from tinyrl.evaluation.targets import policy_at

    found = policy_at(target, settings or [])
    from tinyrl.tools.chat import ChatSession, converse

    with ChatSession(found, options=options) as session:
        converse(session)


def serve(
    target: Target,
    settings: Annotated[
        list[str] | None, settings_argument("settings of task and generation, in place of the run's")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    host: Annotated[str, typer.Option(help=f"other than this machine's own needs a key, in {KEY}")] = "127.0.0.1",
    max_rows: Annotated[int, typer.Option(min=1, max=4096, help="completions decoded at a time")] = 32,
    *,
    options: Options,
) -> None:
    """Answer OpenAI clients with a policy or a model: /v1/chat/completions, /v1/completions, /v1/models."""
    from tinyrl.evaluation.targets import policy_at

    found = policy_at(target, settings or [])
    try:
        from tinyrl.tools.serve import listen, serve
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'tinyrl[serve]'") from None
    key = os.environ.get(KEY)
    serve(found, listen(host, port, key=key), key=key, options=options, max_rows=max_rows)
