"""`tinyrl serve`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug, Device, RunOptions, TrustRemoteCode, complete_setting, quiet_libraries

KEY = "TINYRL_KEY"


def serve(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...",
            help="of task and generation, in place of the run's",
            autocompletion=complete_setting,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    host: Annotated[str, typer.Option(help=f"other than this machine's own needs a key, in {KEY}")] = "127.0.0.1",
    max_rows: Annotated[int, typer.Option(min=1, max=4096, help="completions decoded at a time")] = 32,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Answer OpenAI clients with a policy or a model: /v1/chat/completions, /v1/completions, /v1/models."""
    quiet_libraries()
    with sentences(debug):
        from tinyrl.tools.chat.target import chat_target

        found = chat_target(target, settings or [])
        try:
            from tinyrl.tools.serve import Address, check_address, serve
        except ImportError as error:
            raise ValueError(f"{error.name} is not installed: pip install 'tinyrl[serve]'") from None
        address = Address(host, port, os.environ.get(KEY))
        check_address(address)
        serve(found, address, options=RunOptions(device, trust_remote_code, debug).of_parts(), max_rows=max_rows)
