"""Make text short and visible; suggest the nearest known name.

A completion may hold HTML, terminal escapes, bidirectional overrides, invisible characters, lone surrogates, or a
million characters. Nothing is dropped silently: invisible characters are named, and cuts are marked.
"""

import difflib
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

# Line break, tab, and the two joiners that Persian, Indic scripts and emoji need and that reorder nothing.
_KEPT = frozenset("\n\t\u200c\u200d")
# Control, format (bidi overrides, zero-width, tags), surrogate, private use, unassigned, line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
ERROR_CHARACTERS = 300  # of a library's message


class Excerpt(NamedTuple):
    """Start and end of a text, and the number of characters left out between them."""

    head: str
    omitted: int = 0
    tail: str = ""


def excerpt(text: str, limit: int, *, lines: int = 24) -> Excerpt:
    """Cut a long text in the middle: a completion's answer is at its end, a prompt's question too."""
    if len(text) <= limit and text.count("\n") < lines:
        return Excerpt(text)
    head = "\n".join(text[: limit * 2 // 3].split("\n")[: lines * 2 // 3])
    tail = "\n".join(text[max(0, len(text) - limit // 3) :].split("\n")[-(lines // 3) :])
    return Excerpt(head, len(text) - len(head) - len(tail), tail)


def one_line(text: str, limit: int) -> str:
    """Return one line of at most `limit` characters, with invisible characters named."""
    line = " ".join(escape_control(text[: limit * 4]).split())
    return line if len(line) <= limit and len(text) <= limit * 4 else line[: limit - 1] + "…"


def terminal_columns() -> int | None:
    """Return the columns of the terminal that standard output is, 60 at least; None for a file or a pipe."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def hang(text: str, columns: int | None, *, start: str = "", indent: str = "  ") -> str:
    """Break a text into lines of at most so many columns, the first behind `start`, the others behind `indent`; None
    leaves it one line.
    """
    if columns is None:
        return start + text
    wrapper = textwrap.TextWrapper(
        width=columns,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.fill(text)


def escape_control(text: str) -> str:
    """Name every invisible character (ESC, too), for a terminal; line breaks stay."""
    return "".join(f"[{name}]" if (name := name_unseen(character)) else character for character in text)


def name_unseen(character: str) -> str:
    """Return the name of an invisible character (ESC, U+202E); "" for a visible one."""
    if character in _KEPT or unicodedata.category(character) not in _UNSEEN:
        return ""
    return "ESC" if character == "\x1b" else f"U+{ord(character):04X}"


def truncate(text: str, limit: int = 80) -> str:
    """Truncate text from a user's file or command line for a sentence, without line breaks."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def join_truncated(names: Iterable[str], *, most: int = 12) -> str:
    """Join the first names for a sentence, each truncated, with a count of the others."""
    known = list(names)
    shown = ", ".join(truncate(name, 40) for name in known[:most])
    return f"{shown} and {len(known) - most:,} more" if len(known) > most else shown


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode a file, without its BOM. Raises ValueError with its name."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 ({error}); save the file as UTF-8") from None


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, truncated."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:ERROR_CHARACTERS]


def did_you_mean(word: str, known: list[str]) -> str:
    """Return " Did you mean `...`?" with the nearest known name; "" where none is near."""
    near = nearest(word, known, cutoff=0.6)
    return f" Did you mean `{near}`?" if near else ""


def nearest(word: str, known: Iterable[str], *, cutoff: float) -> str:
    """Return the known name that is most similar to a word, whatever their case; "" where none is near enough."""
    by_spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), [*by_spelling], n=1, cutoff=cutoff)
    return by_spelling[close[0]] if close else ""
