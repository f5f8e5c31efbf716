"""Shared by all commands: options, the decorator, errors with exit codes, the environment of the libraries."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from tinyrl.cli.together import Rule, check_not_empty, check_together
from tinyrl.config.methods import is_method
from tinyrl.process.errors import MAY_BE_MEMORY, Interrupted, OutOfRoom, Signalled, Stop, UnknownSettings, no_memory
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag
from tinyrl.text import escape_control, nearest
from tinyrl.urls import mask_url

if TYPE_CHECKING:
    from tinyrl.models.parallel import World

# Iterations for which an OpenMP thread spins before it sleeps: the most that costs nothing when alone. Two threads on
# two cores, seconds of a GRPO step of a small model, alone and beside a busy process: 300,000 (libgomp's default) 3.2
# alone, 30,000 3.1 and 20, 10,000 3.7 and 12.
SPINS = "30000"
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # of torch; the second is the older name
MOST_LINES = 6
NEGATIVE = re.compile(r"-[\d.]+")  # a number, and no option
TRAINING = ("train", "check")
OF_SAMPLING = ("generation.", "task.", "reward.")  # settings of commands that do not train
SETTING = re.compile(r"[a-z_]+(\.[\w.]+)?=")
CTRL_C = 130  # exit code of a command that Ctrl-C ended with nothing to resume
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def settings_argument(help: str, *, before: str = "", default: Any = ...) -> Any:
    """Declare the argument that takes settings, and the words `before` them."""
    return typer.Argument(default, metavar=f"{before}[section.key=value]...", help=help)


Json = Annotated[bool, typer.Option("--json", help="print JSON")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="allow a model to run its own Python code")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]
SHARED: dict[str, tuple[Any, Any]] = {
    "device": (Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="device to run on")], "auto"),
    "trust_remote_code": (TrustRemoteCode, False),
}


class CommandWithSettings(TyperCommand):
    """A command that says how settings are written where one was given as an option."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if any("section.key=value" in (one.metavar or "") for one in self.params):
            own = set[str]()
            for one in self.get_params(ctx):
                own |= {*one.opts, *one.secondary_opts}
            options = unknown_options(args, own)
            answer = answer_for(options, args, own=own, trains=ctx.info_name in TRAINING)
            if answer:
                ctx.fail(f"No such option: {', '.join(options)}. {answer}")
        return super().parse_args(ctx, args)


def unknown_options(args: Sequence[str], own: Collection[str]) -> dict[str, list[str]]:
    """Return the options that are none of a command's own, with the words behind each: those of its value."""
    found = dict[str, list[str]]()
    words: list[str] | None = None  # behind an unknown option
    for word in args:
        option, equals, value = word.partition("=")
        is_option = word.startswith("-") and NEGATIVE.fullmatch(word) is None
        if word == "--":
            break
        if option.startswith("--") and option not in own:
            words = found.setdefault(option, [value] if equals else [])
            words = None if equals else words
        elif is_option or SETTING.match(word) or is_method(word):
            words = None
        elif words is not None:
            words.append(word)
    return found


def answer_for(options: Mapping[str, Sequence[str]], args: list[str], *, own: Collection[str], trains: bool) -> str:
    """Return how settings that were given as options are written; "" where no library has them, and where each is
    nearly one of the command's own, which typer names. trains: of a command that takes all settings, and not those of
    sampling alone.
    """
    if not options:
        return ""
    from tinyrl.config.foreign_names import is_name, setting_named  # with the schema: not for --help
    from tinyrl.config.foreign_options import answer_to_options
    from tinyrl.config.given import apply_overrides
    from tinyrl.config.recipe import missing_of_own, names_own

    method = method_typed(args)
    overrides = [word for word in args if SETTING.match(word)]
    values = dict[str, Any]()
    with suppress(ValueError):  # of which its own command tells
        values = apply_overrides({}, overrides)
    missing = [] if method is None or names_own(overrides) else missing_of_own(method, overrides)
    typed = {option.lstrip("-").replace("-", "_"): words for option, words in options.items()}
    if not any(is_name(name, method) for name in typed) and all(nearest(one, own, cutoff=0.8) for one in options):
        return ""
    if not trains:
        typed = {name: words for name, words in typed.items() if setting_named(name, method).startswith(OF_SAMPLING)}
    return answer_to_options(typed, method, values=values, missing=missing)


def method_typed(args: list[str]) -> str | None:
    """Return the first of the words that is a method, or a recipe that names its own; None where there is neither."""
    from tinyrl.config.recipe import method_of  # with the schema: not for --help

    for word in args:
        if word.startswith("-"):
            continue
        with suppress(ValueError):
            return method_of([word])[0]
    return None


def command(
    function: Callable[..., int | None], *, stops: bool = False, rules: Sequence[Rule] = ()
) -> Callable[..., None]:
    """Wrap a function as a command: errors become messages and exit codes, and it gets --debug.

    A function with a parameter `options` loads models, and gets --device and --trust-remote-code. It may return its
    exit code. One with a parameter `context` gets typer's. stops: a signal sets a flag, so that a piece of work can
    end; rules: which of its options go together.
    """
    return _wrapped(function, lambda code, debug: code or 0, stops=stops, rules=rules)


def training_command(
    function: Callable[..., Callable[[], int] | None], *, rules: Sequence[Rule] = ()
) -> Callable[..., None]:
    """Wrap a function that prepares a run and returns what trains it (None: nothing is left to do) as a command, which
    ends with the exit code of the training.
    """

    def train(run: Callable[[], int] | None, debug: bool) -> int:
        if run is None:
            return 0
        with user_errors(debug, training=True):
            return run()

    return _wrapped(function, train, stops=True, rules=rules)


def _wrapped(
    function: Callable[..., Any], finish: Callable[[Any, bool], int], *, stops: bool, rules: Sequence[Rule]
) -> Callable[..., None]:
    """Wrap a function as a command; finish: makes the exit code of what it returned, and of --debug."""
    signature = inspect.signature(function, eval_str=True)
    loads = "options" in signature.parameters
    parameters = [one for one in signature.parameters.values() if one.name not in ("options", "context")]
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in ({**(SHARED if loads else {}), "debug": (Debug, False)}).items()
    ]

    def run(*, debug: bool, context: typer.Context, **given: Any) -> None:
        code: int | None = None
        try:
            with StopFlag() if stops else nullcontext():
                with user_errors(debug):
                    check_not_empty(context)
                    check_together(context, rules)
                    given = {name: _with_home(value) for name, value in given.items()}
                    if "context" in signature.parameters:
                        given["context"] = context
                    if loads:
                        configure_libraries()
                        given["options"] = Options(given.pop("device"), given.pop("trust_remote_code"))
                    result = function(**given)
                code = finish(result, debug)
        except typer.Exit as end:
            code = end.exit_code
        finally:
            _leave_launch(code)
        raise typer.Exit(code or 0)

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _leave_launch(code: int | None) -> None:
    """End this process of a launch of several, which do not wait for each other. code: None for a bug."""
    if connected_world() is None:
        return
    if code is None:  # its traceback would be lost
        traceback.print_exc()
    sys.modules["tinyrl.models.parallel"].leave(1 if code is None else code)


def _with_home(value: Any) -> Any:
    """Return an argument with the home folder for a leading ~, which the shell leaves as in --output-dir=~/runs."""
    if isinstance(value, list):
        return [_with_home(one) for one in value]
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value.expanduser() if isinstance(value, Path) else value


def connected_world() -> World | None:
    """Return the ranks of a launch of several processes, once they are connected."""
    parallel = sys.modules.get("tinyrl.models.parallel")  # absent where an error came before torch
    return parallel.world() if parallel is not None and parallel.world().size > 1 else None


def configure_libraries() -> None:
    """Set environment variables before torch is imported: no progress bars and advice, short spinning, few gaps.

    A variable that is set already stays. OpenMP threads spin while they wait for each other; on a core that another
    process wants, a step then takes ten times as long. Large CPU tensors begin at a page (THP_MEM_ALLOC_ENABLE), so
    that glibc can reuse their memory: a third of a pass's peak was gaps. On a GPU segments grow for the same reason.
    """
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
    """Turn errors that a user can fix into lines and an exit code; with `debug` they are raised.

    At most six lines are shown, but of UnknownSettings all.

    While `training` a ValueError is a bug: only memory that ran out is reported.
    """
    try:
        yield
    except (ValueError, Stop, *MAY_BE_MEMORY) as error:
        known: Exception | None = None if training else error
        if not isinstance(error, Stop) and (reason := no_memory(error)) is not None:
            known = OutOfRoom(f"out of memory ({reason.splitlines()[0][:120]})")
        if isinstance(error, BrokenPipeError) and reader_is_gone():  # as of `tinyrl list recipes | head -1`
            raise typer.Exit(0) from None
        if debug or not isinstance(known, ValueError | OSError | Stop):
            raise
        raise typer.Exit(_report(known)) from None


def reader_is_gone() -> bool:
    """Return whether nobody reads the standard output any more; what is left of it then goes nowhere."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _report(error: Exception) -> int:
    """Print an error, on one process of several; return the exit code."""
    code = 2
    text = str(error)
    if isinstance(error, Stop):
        code = error.exit_code
        text = f"stopped: {error}"
        if isinstance(error, Signalled) and error.name == "SIGINT":  # a run that has begun saves, and ends otherwise
            code = CTRL_C
            text = "stopped by Ctrl-C; no step was taken, and there is nothing to resume"
    elif isinstance(error, OSError):
        code = 4 if error.errno in NO_ROOM else 2
        if error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = escape_control(mask_url(text))  # it may quote any file
    world = connected_world()
    prints = world.speaks() if world is not None else os.environ.get("LOCAL_RANK", "0") == "0"  # until connected
    if isinstance(error, Interrupted):  # rank 0 reports it
        prints = prints and os.environ.get("RANK", "0") == "0"
    if prints:
        lines = f"tinyrl: {text}".splitlines()
        shown = lines if isinstance(error, UnknownSettings) else lines[:MOST_LINES]
        print("\n".join(shown), file=sys.stderr)
    return code
