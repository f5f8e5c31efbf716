"""Error messages and exit codes of the command line."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tinyrl.errors import Interrupted, Stop
from tinyrl.runs.launched import VOICE, launched_rank

MOST_LINES = 6
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextmanager
def sentences(debug: bool) -> Iterator[None]:
    """Turn errors a user can fix into at most six lines and an exit code; a traceback only with `debug`."""
    try:
        yield
    except (ValueError, OSError, Stop) as error:
        if debug:
            raise
        from tinyrl.text import redact, visible

        text = visible(redact(_sentence(error)))  # it may quote any file
        aside = isinstance(error, Interrupted) and launched_rank() > 0  # rank 0 says that the run has stopped
        if not aside and VOICE.speaks(text):
            print("\n".join(f"tinyrl: {text}".splitlines()[:MOST_LINES]), file=sys.stderr)
        raise typer.Exit(_exit_code(error)) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, Stop):
        return f"stopped: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _exit_code(error: Exception) -> int:
    if isinstance(error, Stop):
        return error.exit_code
    return 4 if isinstance(error, OSError) and error.errno in NO_ROOM else 2
