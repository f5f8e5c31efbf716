"""What commands share: the frame around each, options, libraries that keep quiet, processes that end together."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, Literal

import typer

from tinyrl.cli.errors import address_space, sentences
from tinyrl.runs.launched import Options
from tinyrl.runs.signals import StopFlag

# Turns of the loop in which an OpenMP thread waits before it sleeps: the most that costs nothing when alone. Two
# threads on two cores, seconds of a GRPO step of a small model, alone and beside a process that computes: 300,000 turns
# (libgomp's own) 3.2 alone, 30,000 3.1 and 20, 10,000 3.7 and 12.
SPINS = "30000"
LIBRARIES_GB = 1.0  # of address space that a build of torch for CPUs, transformers and PEFT take at least
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # of torch; the second is the older name


def complete_setting(incomplete: str) -> list[str]:
    from tinyrl.config.recipe import packaged_recipes
    from tinyrl.config.settings import SECTIONS, fields_of

    keys = [f"{section}.{key}=" for section in SECTIONS for key in fields_of(section)]
    return [name for name in [*packaged_recipes(), *keys] if name.startswith(incomplete)]


def setting_words(what: str, *, before: str = "") -> Any:
    """The argument of settings on the command line, and of what stands before them."""
    return typer.Argument(metavar=f"{before}[section.key=value]...", help=what, autocompletion=complete_setting)


Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to run")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run Python code that comes with a hub model")
]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]


def framed(function: Callable[..., Any], *, stops: bool = False) -> Callable[..., None]:
    """A command: `function`, whose errors are sentences without --debug. One that takes `options` loads models, and has
    --device and --trust-remote-code. It may return its exit code, or a function that gives it: what trains, whose
    errors are bugs. stops: a signal sets a flag, and the work in hand is finished.
    """
    signature = inspect.signature(function, eval_str=True)
    loads = "options" in signature.parameters
    shared: dict[str, tuple[Any, Any]] = {"device": (Device, "auto"), "trust_remote_code": (TrustRemoteCode, False)}
    shared = (shared if loads else {}) | {"debug": (Debug, False)}
    parameters = [one for one in signature.parameters.values() if one.name != "options"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in shared.items()
    ]

    def command(*, debug: bool, **given: Any) -> None:
        with StopFlag() if stops else nullcontext(), ending_together():
            with sentences(debug):
                if loads:
                    quiet_libraries()
                    given["options"] = Options(given.pop("device"), given.pop("trust_remote_code"))
                found: Any = function(**given)
            code: Any = found() if callable(found) else found
            if code:
                raise typer.Exit(code)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return command


@contextmanager
def ending_together() -> Iterator[None]:
    """Around what several processes do: one that ends tells the others, and none is left behind."""
    code = None
    try:
        yield
        code = 0
    except typer.Exit as end:
        code = end.exit_code
        raise
    finally:
        distributed = sys.modules.get("tinyrl.models.distributed")  # not yet, where an error came before torch
        if distributed is not None and distributed.world().size > 1:
            if code is None:  # a bug, whose traceback nobody would see after this
                traceback.print_exc()
            distributed.leave(1 if code is None else code)


def quiet_libraries() -> None:
    """Before torch is imported: keep libraries' progress bars and advice from drowning what a run says, and their
    threads from spinning. Raises MemoryError where there is no room for them, which their C++ would end or hang on.

    Threads of OpenMP that wait for each other spin, by default for milliseconds. Where another process has their core,
    they then take turns with it at every barrier, and a step takes ten times as long. A person's own setting is kept.

    torch's large tensors begin at a page (THP_MEM_ALLOC_ENABLE), where glibc can give what one leaves to the next of
    its size. Elsewhere scraps of less than 100 bytes stay between them: a third of a pass's peak was gaps. On a GPU
    segments grow, for micro-batches of every size would leave gaps of their own.
    """
    limit = address_space()
    if limit is not None and limit < LIBRARIES_GB * 1e9:
        raise MemoryError(f"the libraries alone take {LIBRARIES_GB:g} GB of address space")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not ALLOCATOR & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
