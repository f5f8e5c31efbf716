"""Text made harmless, short and visible, and free of secrets; the nearest known name for a mistyped one.

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
_SPACES = re.compile(r"\s+")
SHOWN_CHARACTERS = 80  # of a value that a sentence quotes
ERROR_CHARACTERS = 300  # of a library's message

HIDDEN = "[redacted]"
MASK = "***"  # in the place of what may be secret in a URL
# Names of settings whose values are secret; max_new_tokens, tokenizer and eos_token are not.
SECRET = re.compile(
    r"(?i)(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!special_)token(?!s|iz|_id)|secret|passw(?:or)?d|api[ _-]?key"
    r"|access[ _-]?key|private[ _-]?key|credential|authorization"
)
# A word is looked at from its beginning only, and never given back by letters: else a line of 64 KB takes minutes.
_URL_LOGIN = re.compile(r"((?<!\w)\w++://)[^/\s]*@")
_URL_QUERY = re.compile(r"((?<!\w)\w++://[^\s?\"'<>]*\?)([^\s\"'<>)\]]+)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_NAMED_VALUE = re.compile(
    r"""(?i)((?:api|access|private)\ key|(?<![\w.-])[\w.-]++)(["']?\s*[=:]\s*)"""
    r"""(b?"[^"]*"|b?'[^']*'|(?:(?:bearer|basic|token)\s+)?[^\s,;&()[\]{}"']+)"""
)


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
    """Plain text for a chart, a title or a table cell: one line, at most `limit` characters, no invisible ones."""
    named = "".join(
        f"[{name_unseen(character)}]" if name_unseen(character) else character for character in text[: limit * 4]
    )
    line = _SPACES.sub(" ", named).strip()
    return line if len(line) <= limit and len(text) <= limit * 4 else line[: limit - 1] + "…"


def visible(text: str) -> str:
    """Plain text for a terminal: lines stay, every invisible character (an escape sequence's ESC, too) is named."""
    return "".join(f"[{name_unseen(character)}]" if name_unseen(character) else character for character in text)


def name_unseen(character: str) -> str:
    """How an invisible character is written (ESC, U+202E); "" for a visible one."""
    if character in _KEPT or unicodedata.category(character) not in _UNSEEN:
        return ""
    return "ESC" if character == "\x1b" else f"U+{ord(character):04X}"


def shortened(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Text from a user's file or command line as a sentence can quote it: cut, and without line breaks."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[str], *, most: int = 12) -> str:
    """Names from a file as a sentence can list them: the first ones, each cut, and how many there are besides."""
    known = list(names)
    shown = ", ".join(shortened(name, 40) for name in known[:most])
    return f"{shown} and {len(known) - most:,} more" if len(known) > most else shown


def decode_utf8(raw: bytes, source: str) -> str:
    """The text of a file, without a BOM. Raises ValueError naming the line and the byte that is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)  # utf-8-sig counts without the BOM
        line = raw.count(b"\n", 0, offset) + 1
        raise ValueError(
            f"{source}:{line}: not UTF-8: byte {raw[offset]:#04x} at offset {offset}; save the file as UTF-8"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of a library's error, short enough to be part of a sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:ERROR_CHARACTERS]


def last_line(error: BaseException) -> str:
    """The last line of an error: torch's first line on tensors that do not fit only says that there is an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:ERROR_CHARACTERS]


def number(value: float, *, decimals: int = 3) -> str:
    """A result in a table: so many decimals, and as many digits that count for what is smaller than 0.1."""
    return f"{value:.{decimals}g}" if 0 < abs(value) < 0.1 else f"{value:.{decimals}f}"


def redact(text: str) -> str:
    """Mask userinfo and queries of URLs, and values whose names say that they are keys (api_key=..., Authorization)."""
    text = _URL_QUERY.sub(lambda m: m[1] + _masked_query(m[2]), _URL_LOGIN.sub(rf"\1{MASK}@", text))
    return _NAMED_VALUE.sub(
        lambda m: f"{m[1]}{m[2]}{HIDDEN}" if SECRET.search(m[1]) and not m[3].startswith(MASK) else m[0], text
    )


def is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        return False


def masked(url: str) -> str:
    """A URL without what may be secret in it: its userinfo, the values of its query, its fragment. Other text stays."""
    if not _URL.fullmatch(url):
        return url
    scheme, _, rest = url.partition("://")
    if not is_address(url) and "@" in rest:  # such as a password with a slash
        return f"{scheme}://{MASK}@{rest.rpartition('@')[2].partition('?')[0]}"
    rest, hash_sign, _ = rest.partition("#")
    place, question_mark, query = rest.partition("?")
    host, slash, path = place.partition("/")
    login, at, host = host.rpartition("@")
    shown = f"{scheme}://{MASK if at else login}{at}{host}{slash}{path}{question_mark}{_masked_query(query)}"
    return f"{shown}#{MASK}" if hash_sign else shown


def _masked_query(query: str) -> str:
    pairs = [pair.partition("=") for pair in query.split("&")] if query else []
    return "&".join(f"{name}={MASK}" if equals else MASK for name, equals, _ in pairs)


def whole_address(url: str, *, setting: str) -> str:
    """The URL of a setting with what `masked` took from it, which is in the environment: generation.url's is in
    TINYRL_GENERATION_URL. Raises ValueError, with what to do, where it is not.
    """
    if MASK not in url:
        return url
    variable = f"TINYRL_{setting.upper().replace('.', '_')}"
    whole = os.environ.get(variable)
    if whole is None:
        raise ValueError(
            f"{setting}={shortened(url)} is without its secrets, which no file of a run keeps: set the environment "
            f"variable {variable} to the whole address"
        )
    if masked(whole) != masked(url) or MASK in whole:
        raise ValueError(f"{variable} is the address {shortened(masked(whole))}, and {setting} is {shortened(url)}")
    return whole


def did_you_mean(word: str, known: list[str]) -> str:
    """The end of a sentence that names the nearest of the known names; empty where none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""
