"""Odd values and texts, and mutations of sound ones, drawn by a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

HUGE = "9" * 400
ESCAPES = "\x1b[31mred\x1b]0;title\x07\r\x08"
TURNED = "\u202etxet\u2066\u200b"

# As YAML, after `section.key=`.
VALUES = (
    "", "null", "~", "nan", ".nan", ".inf", "-.inf", "inf", "1e300", "-1e300", "1e-320", "-1", "-0.0", "0", "1",
    "2", "3",
    "7", "0.5", "1.5", "1000000000", "9223372036854775808", HUGE, "-" + HUGE, "1e999", "0x10", "1_000", "1:2:3",
    "2026-01-01", "true", "false", "yes", "auto", "none", "abc", "[]", "{}", "[1, [2, [3]]]", "[null]",
    "[abc, abc]", "{a: {b: 1}}",
    "{a: 1}", "[{use: nothing}]", "[{use: 'rows.py:missing', weight: 2}]", "'unclosed", "[", "}", "*", "&a [*a]",
    "&a {b: *a}", "!!python/object:os.system {}", "!!binary aGk=", "? a", "- a", "a: b: c", "a b", "é", "日本語",
    "\udcff",
    ESCAPES, TURNED, "\"a\\0b\"", "\"\\ud800\"", "\"\\n\\n\\n\"", "x" * 100_000, "[" * 3000, "{a: " * 500, "/", ".",
    "..", "/dev/null",
    "/dev/zero", "/proc/self/mem", "../../etc/passwd", "rows.jsonl", "nobody/nothing", "http://[", "file.py:f",
    "rows.jsonl:f",
    "%s%n", "$HOME", "'; rm -rf /'", "(((", "starter",
)  # fmt: skip

# As JSON values, in rows and in the files of models and runs.
THINGS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 0.5, 10**9, -(10**9), 2**63, 10**400, 1e308, float("nan"), float("inf"), "",
    " ", "abc", "5", "\n",
    "\0", ESCAPES, TURNED, "\ud800", "é日本", "x" * 30_000, "<eos>", [], {}, [None], [[]], [1, 2], ["a"], {"a": 1},
    [{}],
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"content": "hi"}], [{"role": 1, "content": "hi"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": [{"type": "image"}]}], [{"role": "nobody", "content": "hi"}],
    [{"role": "assistant", "content": "hi"}], [{"role": "user", "content": "hi"}, "bye"], [{"role": ESCAPES,
    "content": ESCAPES}],
    {"role": "user", "content": "hi"}, {"prompt": "hi"}, {"a": {"b": {"c": []}}},
)  # fmt: skip

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "a space": b" ",
    "a mark alone": b"\xef\xbb\xbf",
    "binary": bytes(range(256)) * 20,
    "not UTF-8": b"a: \xff\xfe\n",
    "UTF-16": "model: {}\n".encode("utf-16"),
    "zeros": b"\0" * 3000,
    "null": b"null",
    "a number": b"5",
    "a text": b'"abc"',
    "a list": b"[]",
    "a list of lists": b"[[1], [2]]",
    "a mapping": b"{}",
    "a list of mappings": b"[{}]",
    "nested deep": b"[" * 50_000,
    "nested deep, closed": b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
    "one long line": b"a" * 3_000_000,
    "many lines": b"a\n" * 100_000,
    "commas": b",,,\n,,\n",
    "quotes": b'"a\nb"c"\n"',
    "escapes": f'{{"{ESCAPES}": "{TURNED}"}}'.encode(),
    "HTML": b"<html>404 Not Found</html>\n",
    "an alias bomb": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n".encode() for a, b in pairwise("abcdefghi")),
    "a loop": b"&a {a: *a}",
    "two documents": b"a: 1\n---\nb: 2\n",
    "keys twice": b"model: {path: a}\nmodel: {path: b}\n",
    "a tab": b"model:\n\tpath: starter\n",
    "a huge number": b"1" * 10_000,
    "a huge key": b'{"' + b"k" * 100_000 + b'": 1}',
}  # fmt: skip

JUNK = (
    "\0",
    "\t",
    "\x1b[2J",
    "{",
    "}",
    "[",
    "]",
    ":",
    ": ",
    ",",
    '"',
    "'",
    "\n",
    "\n  ",
    "#",
    "&a ",
    "*a ",
    "-",
    "null",
    "é",
    "\u202e",
    "9" * 30,
)


def changed(text: str, random: Random) -> str:
    """A text with one to three mutations: cut, a line gone, twice or moved, junk put in, something replaced."""
    for _ in range(random.randint(1, 3)):
        text = random.choice(CHANGES)(text, random)
    return text


def _cut(text: str, random: Random) -> str:
    return text[: random.randint(0, len(text))]


def _line(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at = random.randrange(len(lines))
    line = lines.pop(at)
    for _ in range(random.choice((0, 1, 2))):
        lines.insert(random.randrange(len(lines) + 1), line)
    return "".join(lines)


def _junk(text: str, random: Random) -> str:
    at = random.randint(0, len(text))
    return text[:at] + random.choice(JUNK) + text[at + random.choice((0, 0, 1, 5)) :]


def _value(text: str, random: Random) -> str:
    """What follows a colon on a line of its own, replaced."""
    lines = text.splitlines(keepends=True)
    places = [n for n, line in enumerate(lines) if ":" in line]
    if places:
        at = random.choice(places)
        lines[at] = f"{lines[at].partition(':')[0]}: {random.choice(VALUES)}\n"
    return "".join(lines)


CHANGES: tuple[Callable[[str, Random], str], ...] = (_cut, _line, _junk, _value, _value, _value)


def changed_value(value: Any, random: Random) -> Any:
    """A JSON value in which one part, at any depth, is an odd thing, absent, doubled, or beside an unknown key."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        name = random.choice(sorted(value))
        kind = random.random()
        if kind < 0.15:
            return {key: inner for key, inner in value.items() if key != name}
        if kind < 0.2:
            return {**value, random.choice(("unknown", "", ESCAPES, "__class__")): value[name]}
        return {**value, name: changed_value(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return [
            *value[:at],
            *random.choice(([], [changed_value(value[at], random)], [value[at]] * 2)),
            *value[at + 1 :],
        ]
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.4:
        return random.choice((value + 1, value - 1, -value, value * 10**6, value * 10**15))
    return random.choice(THINGS)


def as_json(value: Any) -> bytes:
    """As Python writes it: with NaN, and with halves of surrogate pairs, which JSON can say and UTF-8 cannot."""
    return json.dumps(value).encode()


def writing(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)
