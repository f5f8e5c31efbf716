"""Shared by all commands: options, the decorator, errors with exit codes, the environment of the libraries."""

from __future__ import annotations

import errno
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

from tinyrl.errors import MAY_BE_MEMORY, Interrupted, OutOfRoom, Stop, no_memory
from tinyrl.runs.launched import VOICE, Options, launched_rank
from tinyrl.runs.signals import StopFlag
from tinyrl.text import escape_control, redact

# Iterations for which an OpenMP thread spins before it sleeps: the most that costs nothing when alone. Two threads on
# two cores, seconds of a GRPO step of a small model, alone and beside a busy process: 300,000 (libgomp's default) 3.2
# alone, 30,000 3.1 and 20, 10,000 3.7 and 12.
SPINS = "30000"
LIBRARIES_GB = 1.0  # least address space of a CPU build of torch with transformers and PEFT
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # of torch; the second is the older name
MOST_LINES = 6
FRAMES = "\nException raised from "  # the start of the stack that torch's C++ appends to a message
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def complete_setting(incomplete: str) -> list[str]:
    from tinyrl.config.recipe import packaged_recipes
    from tinyrl.config.settings import SECTIONS, fields_of

    keys = [f"{section}.{key}=" for section in SECTIONS for key in fields_of(section)]
    return [name for name in [*packaged_recipes(), *keys] if name.startswith(incomplete)]


def settings_argument(help: str, *, before: str = "", default: Any = ...) -> Any:
    """Declare the argument that takes settings, and the words `before` them."""
    metavar = f"{before}[section.key=value]..."
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete_setting)


Json = Annotated[bool, typer.Option("--json", help="print JSON")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="run Python code of a hub model")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]
SHARED: dict[str, tuple[Any, Any]] = {
    "device": (Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to run")], "auto"),
    "trust_remote_code": (TrustRemoteCode, False),
}


def command(function: Callable[..., Any], *, trains: bool = False) -> Callable[..., None]:
    """Wrap a function as a command: errors become messages and exit codes, and it gets --debug.

    A function with a parameter `options` loads models, and gets --device and --trust-remote-code. It may return its
    exit code, or a function that trains and returns it. trains: a signal sets a flag, so that a step can end.
    """
    signature = inspect.signature(function, eval_str=True)
    loads = "options" in signature.parameters
    parameters = [one for one in signature.parameters.values() if one.name != "options"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in ({**(SHARED if loads else {}), "debug": (Debug, False)}).items()
    ]

    def run(*, debug: bool, **given: Any) -> None:
        with StopFlag() if trains else nullcontext(), exit_all_ranks():
            with user_errors(debug):
                if loads:
                    configure_libraries()
                    given["options"] = Options(given.pop("device"), given.pop("trust_remote_code"))
                result: Any = function(**given)
            with user_errors(debug, training=True):
                code: Any = result() if callable(result) else result
            if code:
                raise typer.Exit(code)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


@contextmanager
def exit_all_ranks() -> Iterator[None]:
    """Tell the other processes of a launch when this one ends, so that none waits for it."""
    code = None
    try:
        yield
        code = 0
    except typer.Exit as end:
        code = end.exit_code
        raise
    finally:
        distributed = sys.modules.get("tinyrl.models.parallel")  # absent where an error came before torch
        if distributed is not None and distributed.world().size > 1:
            if code is None:  # a bug, whose traceback would be lost
                traceback.print_exc()
            distributed.leave(1 if code is None else code)


def configure_libraries() -> None:
    """Set environment variables before torch is imported: no progress bars and advice, short spinning, few gaps.

    A variable that is set already stays. OpenMP threads spin while they wait for each other; on a core that another
    process wants, a step then takes ten times as long. Large CPU tensors begin at a page (THP_MEM_ALLOC_ENABLE), so
    that glibc can reuse their memory: a third of a pass's peak was gaps. On a GPU segments grow for the same reason.
    Raises MemoryError where the address space is too small for the libraries, whose C++ would abort or hang.
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


@contextmanager
def user_errors(debug: bool, *, training: bool = False) -> Iterator[None]:
    """Turn errors that a user can fix into at most six lines and an exit code; with `debug` they are raised.

    While `training` a ValueError is a bug: only memory that ran out is reported.
    """
    try:
        yield
    except (ValueError, Stop, *MAY_BE_MEMORY) as error:
        known = _out_of_memory(error) or (None if training else error)
        if debug or not isinstance(known, ValueError | OSError | Stop):
            raise
        raise typer.Exit(_report(known)) from None


def address_space() -> int | None:
    """Return the bytes of address space that a shell or a scheduler allows this process, if it sets a limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _out_of_memory(error: Exception) -> OutOfRoom | None:
    reason, limit = None if isinstance(error, Stop) else no_memory(error), address_space()
    if limit is not None and isinstance(error, SystemError):  # C code was refused memory and did not set an error
        reason = str(error)
    if reason is None:
        return None
    bound = "" if limit is None else f"; a process may have {limit / 1e9:.3g} GB of address space here (`ulimit -v`)"
    return OutOfRoom(f"out of memory ({reason.splitlines()[0][:120]}){bound}")


def _report(error: Exception) -> int:
    """Print an error, on one process of several; return the exit code."""
    code, text = 2, str(error).partition(FRAMES)[0]
    if isinstance(error, Stop):
        code, text = error.exit_code, f"stopped: {error}"
    elif isinstance(error, OSError):
        code = 4 if error.errno in NO_ROOM else 2
        if error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = escape_control(redact(text))  # it may quote any file
    aside = isinstance(error, Interrupted) and launched_rank() > 0  # rank 0 reports it
    if not aside and VOICE.speaks(text):
        print("\n".join(f"tinyrl: {text}".splitlines()[:MOST_LINES]), file=sys.stderr)
    return code
