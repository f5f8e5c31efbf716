"""Commands that use a policy: `tinyrl export`, `tinyrl chat` and `tinyrl serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from tinyrl.cli.options import TrustRemoteCode, configure_libraries, settings_argument
from tinyrl.cli.together import Needs, Rule
from tinyrl.process.collector import lasting_imports
from tinyrl.process.launched import Options

KEY = "TINYRL_KEY"
Target = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="run, checkpoint (also RUN@best, RUN@STEP) or model")
]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
OF_EXPORT: tuple[Rule, ...] = (Needs("--private", ("--push",), "it is about the repository on the hub"),)


def export(
    run: str = typer.Argument(
        metavar="RUN|CHECKPOINT", help="run, or one of its checkpoints, also as RUN@best or RUN@STEP"
    ),
    merge: bool = typer.Option(False, "--merge", help="write one model, with the adapter merged into its base"),
    dtype: Dtype = typer.Option("auto", help="dtype of the merged model; auto: that of the base checkpoint"),
    output: str | None = typer.Option(
        None, metavar="FOLDER", help="folder to write; default: RUN/export/adapter, model or merged"
    ),
    push: str | None = typer.Option(
        None, metavar="USER/NAME", help="upload the folder to the hub, with its model card"
    ),
    private: bool = typer.Option(False, "--private", help="with --push: make the repository private"),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the policy as a folder for transformers and PEFT, vLLM, llama.cpp: the adapter, or a merged model."""
    configure_libraries()
    with lasting_imports():
        from tinyrl.tools import export as exporting  # with torch

    if push is not None:
        exporting.check_repository(push)
        exporting.check_token()
    announce_loading(run)
    how = {"merge": merge, "dtype": dtype, "output": output, "trust_remote_code": trust_remote_code}
    bundle = exporting.export(run, **how)
    print(bundle.render())
    if push is not None:
        print(f"uploaded   {exporting.push(bundle.folder, push, private=private)}")


def announce_loading(target: str) -> None:
    """Tell that a model is being loaded, which takes seconds to minutes, before the first result."""
    print(f"loading {target} ...", file=sys.stderr, flush=True)


def chat(
    target: Target,
    settings: list[str] | None = settings_argument(
        "settings of task, generation, environment, reward; model.with_images", default=None
    ),
    *,
    options: Options,
) -> None:
    """Chat with a policy or a model: it streams each answer, and can show the reward of the last one."""
    from tinyrl.evaluation.targets import policy_at  # with the tasks: not for --help

    found = policy_at(target, settings or [])
    announce_loading(target)
    with lasting_imports():
        from tinyrl.tools.chat import ChatSession, converse  # with torch

    with ChatSession(found, options=options) as session:
        converse(session)


def serve(
    target: Target,
    settings: list[str] | None = settings_argument(
        "settings of generation, task.chat_template_kwargs, model.with_images", default=None
    ),
    port: int = typer.Option(8000, min=0, max=65535, help="port to listen on; 0: any free port"),
    host: str = typer.Option("127.0.0.1", help=f"address to listen on; a non-local one requires an API key in {KEY}"),
    max_rows: int = typer.Option(32, min=1, max=4096, help="maximum number of completions decoded at once"),
    *,
    options: Options,
) -> None:
    """Answer clients of OpenAI and Anthropic with a policy or a model: chat/completions, completions, responses,
    messages and models at /v1.
    """
    from tinyrl.evaluation.targets import SERVE, policy_at  # with the tasks: not for --help

    found = policy_at(target, settings or [], takes=SERVE)
    announce_loading(target)
    try:
        with lasting_imports():
            from tinyrl.tools.serve import listen, serve  # with torch, and the extra `serve`
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'tinyrl[serve]'") from None
    key = os.environ.get(KEY)
    serve(found, listen(host, port, key=key), key=key, options=options, max_rows=max_rows)
