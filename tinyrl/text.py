"""Text made harmless, short and visible; the nearest known name for a mistyped one.

A completion may hold HTML, terminal escapes, bidirectional overrides that reorder what is read, invisible characters,
lone surrogates that cannot be encoded, or a million characters.
Nothing is dropped silently: what cannot be shown is named.
"""

import difflib
import os
import re
import unicodedata
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass

# Line break, tab, and the two joiners that Persian, Indic scripts and emoji need and that reorder nothing.
_KEPT = frozenset("\n\t\u200c\u200d")
# Control, format (bidi overrides, zero-width, tags), surrogate, private use, unassigned, line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
SHOWN_CHARACTERS = 80  # of a value that a sentence quotes
ERROR_CHARACTERS = 300  # of a library's message
MASK = "***"  # in the place of what may be secret in a URL
# A word is looked at from its beginning only, and never given back by letters: else a line of 64 KB takes minutes.
_URL_LOGIN = re.compile(r"((?<!\w)\w++://)[^/\s]*@")
_URL_QUERY = re.compile(r"((?<!\w)\w++://[^\s?\"'<>]*\?)([^\s\"'<>)\]]+)")


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


def one_line(text: str, limit: int) -> str:
    """Return plain text for a title or a table cell: one line, at most `limit` characters, invisible ones named."""
    line = " ".join(visible(text[: limit * 4]).split())
    return line if len(line) <= limit and len(text) <= limit * 4 else line[: limit - 1] + "…"


def visible(text: str) -> str:
    """Return plain text for a terminal: lines stay, every invisible character (ESC, too) is named."""
    return "".join(f"[{name}]" if (name := name_unseen(character)) else character for character in text)


def name_unseen(character: str) -> str:
    """Return how an invisible character is written (ESC, U+202E); "" for a visible one."""
    if character in _KEPT or unicodedata.category(character) not in _UNSEEN:
        return ""
    return "ESC" if character == "\x1b" else f"U+{ord(character):04X}"


def shortened(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Truncate text from a user's file or command line for a sentence, without line breaks."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[str], *, most: int = 12) -> str:
    """Join the first names from a file for a sentence, each truncated, and how many there are besides."""
    known = list(names)
    shown = ", ".join(shortened(name, 40) for name in known[:most])
    return f"{shown} and {len(known) - most:,} more" if len(known) > most else shown


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode a file, without its BOM. Raises ValueError naming the line and the byte that is not UTF-8."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"byte {raw[error.start]:#04x} at offset {error.start}"
        raise ValueError(f"{source}:{line}: not UTF-8: {byte}; save the file as UTF-8") from None


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, short enough to be part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:ERROR_CHARACTERS]


def last_line(error: BaseException) -> str:
    """Return the last line of an error: torch's first line on tensors that do not fit only says that there is one."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:ERROR_CHARACTERS]


def number(value: float, *, decimals: int = 3) -> str:
    """Format a result: so many decimals, and as many digits that count for what is smaller than 0.1."""
    return f"{value:.{decimals}g}" if 0 < abs(value) < 0.1 else f"{value:.{decimals}f}"


# ---- URLs ----


def redact(text: str) -> str:
    """Mask the userinfo and the values of the query of each URL in a text."""

    def masked_query(match: re.Match[str]) -> str:
        pairs = (pair.partition("=") for pair in match[2].split("&"))
        return match[1] + "&".join(f"{name}={MASK}" if equals else MASK for name, equals, _ in pairs)

    return _URL_QUERY.sub(masked_query, _URL_LOGIN.sub(rf"\1{MASK}@", text))


def is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        return False


def masked(url: str) -> str:
    """Mask what may be secret in a URL: its userinfo, the values of its query, its fragment. Other text stays."""
    if "://" not in url:
        return url
    if not is_address(url) and "@" in url:  # such as a password with a slash
        return f"{url.partition('://')[0]}://{MASK}@{url.rpartition('@')[2].partition('?')[0]}"
    url, hash_sign, _ = url.partition("#")
    return redact(url) + (f"#{MASK}" if hash_sign else "")


def whole_address(url: str, *, setting: str) -> str:
    """Return the URL of a setting with what `masked` took from it, from the environment: generation.url's is in
    TINYRL_GENERATION_URL. Raises ValueError where it is not, or is another address.
    """
    if MASK not in url:
        return url
    variable = f"TINYRL_{setting.upper().replace('.', '_')}"
    whole = os.environ.get(variable, "")
    if masked(whole) != masked(url) or MASK in whole:
        raise ValueError(
            f"{setting}={shortened(url)} is without its secrets, which no file of a run keeps: set the environment "
            f"variable {variable} to the whole address{f'; it is {shortened(masked(whole))}' if whole else ''}"
        )
    return whole


def did_you_mean(word: str, known: list[str]) -> str:
    """Return " Did you mean `...`?" with the nearest of the known names; "" where none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""
