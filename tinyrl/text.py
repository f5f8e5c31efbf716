"""Make text short, visible and free of secrets; format numbers; suggest the nearest known name.

A completion may hold HTML, terminal escapes, bidirectional overrides, invisible characters, lone surrogates, or a
million characters. Nothing is dropped silently: invisible characters are named, and cuts are marked.
"""

import difflib
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

# Line break, tab, and the two joiners that Persian, Indic scripts and emoji need and that reorder nothing.
_KEPT = frozenset("\n\t\u200c\u200d")
# Control, format (bidi overrides, zero-width, tags), surrogate, private use, unassigned, line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
ERROR_CHARACTERS = 300  # of a library's message
CHARACTER_TOKENS = 8  # no character is made of more
MASK = "***"  # replaces what may be secret in a URL
# A word is matched from its beginning only, without backtracking: else a line of 64 KB takes minutes.
_URL_LOGIN = re.compile(r"((?<!\w)\w++://)[^/\s]*@")
_URL_QUERY = re.compile(r"((?<!\w)\w++://[^\s?\"'<>]*\?)([^\s\"'<>)\]]+)")


_THOUGHT = re.compile(r"<think>|</think>")


def without_thoughts(text: str) -> str:
    """Replace the thoughts of a model's turn by spaces: nothing in them is an answer, or a call of a tool.

    A thought reaches from <think> to the next </think>, or from the beginning to a </think> that nothing opens (its
    opening is the prompt's). One that is not closed reaches to the end, if its <think> begins the turn or a line of it,
    as a prompt and a model's own token do; elsewhere it is a word of the answer.
    """
    shown = list[str]()
    at = 0
    start = None
    for tag in _THOUGHT.finditer(text):
        if tag.group() == "<think>":
            start = tag.start() if start is None else start
            continue
        if start is None and at > 0:  # a word: the turn's thoughts have ended
            continue
        begun = 0 if start is None else start
        shown += [text[at:begun], " " * (tag.end() - begun)]
        at = tag.end()
        start = None
    rest = text[at:]
    if start is not None:
        unclosed = re.search(r"(?m)^[ \t]*<think>", rest)
        if unclosed:
            rest = rest[: unclosed.start()] + " " * (len(rest) - unclosed.start())
    return "".join([*shown, rest])


def ends_in_thought(text: str) -> bool:
    """Return whether a model's turn ends in a thought that is not closed, as `without_thoughts` reads it."""
    behind = text.rpartition("</think>")[2]
    return re.search(r"(?m)^[ \t]*<think>", behind) is not None


def answer_in(text: str) -> str:
    """Return what a model's turn says outside of its thoughts; a turn without any as it is."""
    shown = without_thoughts(text)
    return text if shown == text else shown.strip()


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
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


# ---- numbers ----

ROUNDING_ERROR = 1e-12


def format_number(value: float | None, *, decimals: int = 3, signed: bool = False, missing: str = "-") -> str:
    """Format a result for a table: an integer as it is, else with `decimals`, or as many significant digits below 0.1;
    `missing` for None and NaN. signed: with a plus sign before a positive one.
    """
    if value is None or math.isnan(value):
        return missing
    sign = "+" if signed and value >= 0 else ""
    if isinstance(value, int):
        return f"{sign}{value}"
    return f"{sign}{value:.{decimals}g}" if 0 < abs(value) < 0.1 else f"{sign}{value:.{decimals}f}"


def format_short(value: float) -> str:
    """Format a number for a narrow line: three significant digits, whole from 1,000 on, "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def typeset_number(value: float, *, share: bool = False) -> str:
    """Format a number for the page and its charts: three digits, a real minus sign, 0 for a rounding error, a dash for
    NaN. share: as per cent with one decimal.
    """
    if not math.isfinite(value):
        return "\u2013"
    if share:
        return "< 0.1 %" if 0 < value < 0.0005 else f"{value * 100:.1f}".removesuffix(".0") + " %"
    size = abs(value)
    if size < ROUNDING_ERROR or (value == int(value) and size < 100_000):
        text = f"{int(value):,}"
    elif size < 0.001 or size >= 1e9:
        text = short_power(f"{value:.1e}")
    else:
        text = f"{value:#.3g}" if size < 99.95 else f"{value:,.0f}"
    return text.replace("-", "\u2212")


def short_power(text: str) -> str:
    """Write 5.0e-05 as 5e-5."""
    digits, _, power = text.partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if power else text


def format_seconds(seconds: float) -> str:
    """Format a duration: 8.40 s, 1 min 32 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{typeset_number(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"


def format_clock(seconds: int) -> str:
    """Format a time left: 02:05, 1:02:05."""
    hours = f"{seconds // 3600}:" if seconds >= 3600 else ""
    return f"{hours}{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def format_bytes(count: float) -> str:
    """Format an amount of memory or disk: 1.50 GB, 0.3 MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# ---- URLs ----


def mask_url(text: str) -> str:
    """Mask the userinfo and the values of the query of each URL in a text."""

    def masked_query(match: re.Match[str]) -> str:
        pairs = (pair.partition("=") for pair in match[2].split("&"))
        return match[1] + "&".join(f"{name}={MASK}" if equals else MASK for name, equals, _ in pairs)

    return _URL_QUERY.sub(masked_query, _URL_LOGIN.sub(rf"\1{MASK}@", text))


def is_address(url: str) -> bool:
    """Return whether a text is an http or https address with a host."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, half a bracket
        return False


def resolve_url(url: str, *, setting: str) -> str:
    """Restore the masked parts of a setting's URL from the environment: generation.url from TINYRL_GENERATION_URL.

    Raises ValueError where the variable is missing or holds another address.
    """
    if MASK not in url:
        return url
    variable = f"TINYRL_{setting.upper().replace('.', '_')}"
    whole = os.environ.get(variable, "")
    if MASK in whole or mask_url(whole) != mask_url(url):
        raise ValueError(f"{setting}={truncate(url)} is recorded without secrets: set {variable} to the whole address")
    return whole


class IncrementalDetokenizer:
    """Text of tokens as they come, returned once it is whole: bytes of half a character wait for the others.

    before: tokens in front of them, decoded along: a tokenizer may join or drop spaces there. options: of decoding,
    by default without special tokens.
    """

    def __init__(self, tokenizer: Any, *, before: Iterable[int] = (), **options: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens = [*before]
        self._options: Any = options or {"skip_special_tokens": True}
        self._before, self._out = 0, len(self._tokens)  # text is decoded from `before`; up to `out` it was returned

    def add(self, tokens: list[int], *, at_end: bool = False) -> str:
        self._tokens += tokens
        known, text = (
            str(self._tokenizer.decode(part, **self._options))
            for part in (self._tokens[self._before : self._out], self._tokens[self._before :])
        )
        half = text.endswith("\ufffd") and len(self._tokens) - self._out < CHARACTER_TOKENS
        if len(text) <= len(known) or (half and not at_end):
            return ""
        self._before, self._out = self._out, len(self._tokens)
        return text[len(known) :]

    def end(self) -> str:
        return self.add([], at_end=True)
