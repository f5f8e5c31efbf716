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
FRAMES = "\nException raised from "  # what torch's C++ adds to an error begins so
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextmanager
def sentences(debug: bool) -> Iterator[None]:
    """Turn errors a user can fix into at most six lines and an exit code; a traceback only with `debug`."""
    try:
        yield
    except (ValueError, Stop, *MAY_BE_MEMORY) as error:
        known = _of_memory(error) or error
        if debug or not isinstance(known, ValueError | OSError | Stop):
            raise
        raise typer.Exit(_tell(known)) from None


@contextmanager
def memory_sentences(debug: bool) -> Iterator[None]:
    """Around a whole command: memory that runs out anywhere, in an import too, is a sentence and exit code 4."""
    try:
        yield
    except (ValueError, *MAY_BE_MEMORY) as error:
        known = _of_memory(error)
        if debug or known is None:
            raise
        sys.exit(_tell(known))


def _of_memory(error: Exception) -> OutOfRoom | None:
    said, limit = None if isinstance(error, Stop) else no_memory(error), address_space()
    if limit is not None and isinstance(
        error, SystemError
    ):  # what Python says where C code was refused memory and kept it quiet
        said = str(error)
    if said is None:
        return None
    bound = "" if limit is None else f"; a process may have {limit / 1e9:.3g} GB of address space here (`ulimit -v`)"
    return OutOfRoom(f"out of memory ({said.splitlines()[0][:120]}){bound}")


def address_space() -> int | None:
    """Bytes that this process may have by a limit which a shell or a scheduler has set, if any."""
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def _tell(error: Exception) -> int:
    from tinyrl.text import redact, visible

    code, said = 2, str(error).partition(FRAMES)[0]
    if isinstance(error, Stop):
        code, said = error.exit_code, f"stopped: {error}"
    elif isinstance(error, OSError):
        code = 4 if error.errno in NO_ROOM else 2
        if error.strerror:
            said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = visible(redact(said))  # it may quote any file
    aside = isinstance(error, Interrupted) and launched_rank() > 0  # rank 0 says that the run has stopped
    if not aside and VOICE.speaks(text):
        print("\n".join(f"tinyrl: {text}".splitlines()[:MOST_LINES]), file=sys.stderr)
    return code
