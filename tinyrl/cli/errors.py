"""Error messages and exit codes of the command line."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tinyrl.errors import MAY_BE_MEMORY, Interrupted, OutOfRoom, Stop, no_memory
from tinyrl.runs.launched import VOICE, launched_rank

MOST_LINES = 6
FRAMES = "\nException raised from "  # the start of the stack that torch's C++ appends to a message
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


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
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def _out_of_memory(error: Exception) -> OutOfRoom | None:
    said, limit = None if isinstance(error, Stop) else no_memory(error), address_space()
    if limit is not None and isinstance(error, SystemError):  # C code was refused memory and did not set an error
        said = str(error)
    if said is None:
        return None
    bound = "" if limit is None else f"; a process may have {limit / 1e9:.3g} GB of address space here (`ulimit -v`)"
    return OutOfRoom(f"out of memory ({said.splitlines()[0][:120]}){bound}")


def _report(error: Exception) -> int:
    """Print an error, on one process of several; return the exit code."""
    from tinyrl.text import redact, visible

    code, said = 2, str(error).partition(FRAMES)[0]
    if isinstance(error, Stop):
        code, said = error.exit_code, f"stopped: {error}"
    elif isinstance(error, OSError):
        code = 4 if error.errno in NO_ROOM else 2
        if error.strerror:
            said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = visible(redact(said))  # it may quote any file
    aside = isinstance(error, Interrupted) and launched_rank() > 0  # rank 0 reports it
    if not aside and VOICE.speaks(text):
        print("\n".join(f"tinyrl: {text}".splitlines()[:MOST_LINES]), file=sys.stderr)
    return code
