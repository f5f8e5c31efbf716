"""Text that a model or a data set wrote, made harmless and visible.

A completion may hold HTML, terminal escapes, bidirectional overrides that reorder what is read, invisible
characters, lone surrogates that cannot be encoded, or a million characters. Nothing is dropped silently: what cannot be
shown is named.
"""

import html
import re
import unicodedata
from dataclasses import dataclass
from itertools import groupby

# Line break, tab, and the two joiners that Persian, Indic scripts and emoji need and that reorder nothing.
_KEPT = frozenset("\n\t\u200c\u200d")
# Control, format (bidi overrides, zero-width, tags), surrogate, private use, unassigned, line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Excerpt:
    """The start and the end of a text, and how many characters between them were left out."""

    head: str
    omitted: int = 0
    tail: str = ""


def excerpt(text: str, limit: int, *, lines: int = 24) -> Excerpt:
    """Cut a long text in the middle: a completion's answer is at its end, a prompt's question too."""
    if len(text) <= limit and text.count("\n") < lines:
        return Excerpt(text)
    head = "\n".join(text[: limit * 2 // 3].split("\n")[: lines * 2 // 3])
    rest = text[max(0, len(text) - limit // 3) :]
    tail = "\n".join(rest.split("\n")[-(lines // 3) :])
    return Excerpt(head, len(text) - len(head) - len(tail), tail)


def text_html(text: str | Excerpt) -> str:
    """HTML of a text: escaped, and every character that cannot be seen named as U+XXXX."""
    if isinstance(text, Excerpt):
        if not text.omitted:
            return text_html(text.head)
        note = f'<span class="cut">… {text.omitted:,} characters left out …</span>'
        return f"{text_html(text.head)}\n{note}\n{text_html(text.tail)}"
    parts = []
    for name, run in groupby(text.replace("\r\n", "\n"), _name):
        characters = list(run)
        if not name:
            parts.append(html.escape("".join(characters)))
        else:
            times = f"×{len(characters)}" if len(characters) > 1 else ""
            parts.append(f'<span class="unseen">{name}{times}</span>')
    return "".join(parts)


def one_line(text: str, limit: int) -> str:
    """Plain text for a chart, a title or a table cell: one line, at most `limit` characters, no invisible ones."""
    named = "".join(f"[{_name(character)}]" if _name(character) else character for character in text[: limit * 4])
    line = _SPACES.sub(" ", named).strip()
    return line if len(line) <= limit and len(text) <= limit * 4 else line[: limit - 1] + "…"


def visible(text: str) -> str:
    """Plain text for a terminal: lines stay, every character that cannot be seen (an escape sequence's ESC, too) is
    named.
    """
    return "".join(f"[{_name(character)}]" if _name(character) else character for character in text)


def _name(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _UNSEEN:
        return ""
    return "ESC" if character == "\x1b" else f"U+{ord(character):04X}"
