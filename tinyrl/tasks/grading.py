"""Grading that several tasks share: numbers, arithmetic, and the place of the answer in a text.

Texts come from a model, so nothing here trusts them: no eval, no regular expression that backtracks, limits on the size
of numbers, and every function returns at once for a megabyte of nonsense. Only ASCII digits, and their full-width
forms, are digits.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from tinyrl.data.thoughts import answer_in

MAX_NUMBER_CHARS = 100  # more digits than any answer has
MAX_EXPONENT = 300  # 1e999999999 as an exact number would fill the memory
MAX_EXPRESSION_CHARS = 500
MAX_COMPOSED_CHARS = 2_000  # composing a run of accents takes the square of its length
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_EXPONENT = r"[-+]?[0-9]{1,9}"
NUMBER = re.compile(rf"[-+]?\$?[-+]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]{_EXPONENT})?%?")
_DECIMAL = re.compile(rf"(?P<sign>[-+]?)\$?(?P<digits>{_DIGITS}?(?:\.[0-9]*)?)(?:[eE](?P<exponent>{_EXPONENT}))?%?")
_IN_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([0-9]{1,50})\}\{([0-9]{1,50})\}")
_LATEX_SPELLINGS = (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ""), ("\\!", ""))
_PLAIN = {0xFEE0 + code: code for code in range(0x21, 0x7F)} | str.maketrans("−⁄∕\u3000", "-// ")


def folded(text: str) -> str:
    """Replace full-width characters (１２, ％), and signs that look alike, by the ASCII ones."""
    return text.translate(_PLAIN)


def completion_text(completion: Any) -> str:
    """Return the text of a completion: text as it is, or the contents of its assistant messages."""
    return "\n".join(text for text in _turns(completion) if text)


def answer_text(completion: Any) -> str:
    """Return the text of a completion without its thoughts, turn by turn: nothing in them is an answer."""
    return "\n".join(answer_in(text) for text in _turns(completion) if text)


def _turns(completion: Any) -> list[str | None]:
    if isinstance(completion, str):
        return [completion]
    contents = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    return ["".join(part.get("text") or "" for part in c) if isinstance(c, list) else c for c in contents]


def by_row(
    score: Callable[[str, dict[str, Any]], float | None], *, with_thoughts: bool = False
) -> Callable[..., list[float | None]]:
    """Return verify(prompts, completions, **columns) from the score of one completion's text and its row.

    with_thoughts: score a text with its thoughts, as a rule about their form does.
    """
    text_of = completion_text if with_thoughts else answer_text

    def verify(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        pairs = zip(completions, rows or [{}] * len(completions), strict=True)
        return [score(text_of(completion), row) for completion, row in pairs]

    return verify


# ---- numbers ----


def parse_number(value: Any) -> Fraction | None:
    """Parse a text (or number) as an exact number, else None: "1,000", "$1000.00", "50%", "-3.", "1e3", "1/2"."""
    if isinstance(value, float):
        return Fraction(repr(value)) if math.isfinite(value) else None
    if isinstance(value, int | Fraction):
        return None if isinstance(value, bool) else Fraction(value)
    if not isinstance(value, str) or len(value) > MAX_NUMBER_CHARS:
        return None
    text = plain_numbers(value).strip().strip("$").strip()
    if fraction := FRACTION.fullmatch(text):
        text = fraction.expand(r"\1\2/\3")
    above, slash, below = text.partition("/")
    if not slash:
        return _decimal(text.removesuffix("."))
    number = _decimal(above.strip())
    divisor = _decimal(below.strip().removesuffix("."))
    return number / divisor if number is not None and divisor else None


def _decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if not match or not re.search("[0-9]", match["digits"]) or abs(int(match["exponent"] or 0)) > MAX_EXPONENT:
        return None
    digits = match["digits"].replace(",", "").removesuffix(".")
    return Fraction(f"{match['sign']}{digits}") * Fraction(10) ** int(match["exponent"] or 0)


def numbers_equal(a: Any, b: Any) -> bool:
    """Return whether both are the same number: 1,000 == 1000.00 == "$1000."; a percent sign is decoration."""
    first = parse_number(a)
    second = parse_number(b)
    return first is not None and first == second


def first_number(text: str) -> str | None:
    """Return the first number in a text, as it is written; None if there is none."""
    return next((match.group() for match in numbers_in(plain_numbers(text))), None)


def last_number(text: str) -> str | None:
    """Return the last number in a text, as it is written, or None. "5-3" ends in 3, "= -3" in -3."""
    last = deque(numbers_in(plain_numbers(text)), maxlen=1)
    return last[0].group() if last else None


def numbers_in(text: str) -> Iterator[re.Match[str]]:
    """Yield the numbers in a text with plain ones (`plain_numbers`)."""
    for match in NUMBER.finditer(text):
        before = text[match.start() - 1] if match.start() else " "
        # the minus of "5-3" and "x-3" subtracts; the one of "= -3" and "(-3)" belongs to the number
        if match.group()[0] in "-+" and (before.isalnum() or before in ")]}"):
            yield NUMBER.match(text, match.start() + 1) or match
        else:
            yield match


def plain_numbers(text: str) -> str:
    """Replace the spellings of numbers in LaTeX and in full-width characters by plain ones."""
    text = folded(text)
    for latex, plain in _LATEX_SPELLINGS:
        text = text.replace(latex, plain)
    return text


def safe_arithmetic(text: str) -> Fraction:
    """Compute whole numbers, + - * / and parentheses exactly. Raises ValueError for anything else, and for 1/0.

    Python parses the text and runs nothing of it. The length is limited, and there is no power, so no text takes long
    or makes a huge number.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
        raise ValueError("an expression has whole numbers, + - * / and parentheses")

    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"an expression may have {MAX_EXPRESSION_CHARS} characters, not {len(text)}")
    text = folded(text).translate({ord("×"): "*", ord("·"): "*", ord("÷"): "/"})
    if other := re.search(r"[^-+*/()0-9\s]", text):
        raise ValueError(f"unexpected '{other[0]}' in an expression")
    text = re.sub(r"\b0+(?=[0-9])", "", " ".join(text.split()))
    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None


# ---- the answer in a text ----


def boxed(text: str) -> str | None:
    """Return the inside of the last \\boxed{...}, braces balanced; None if there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + match.start()].strip()
    return None


def tagged(text: str, tag: str) -> str | None:
    """Return the inside of the last <tag>...</tag>."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def after_last(text: str, marker: str) -> str | None:
    """Return the first line after the last `marker`."""
    _, found, rest = text.rpartition(marker)
    return rest.strip().partition("\n")[0].rstrip() if found else None


def marked_answer(text: str) -> str | None:
    """Return the answer that a text marks: the last <answer>...</answer>, else after "####", else in \\boxed{...}."""
    return tagged(text, "answer") or after_last(text, "####") or boxed(text) or None


def without_latex_text(text: str) -> str:
    """Return a formula with the words of its \\text{...}, \\mathrm{...} and their like without these."""
    return _IN_LATEX_TEXT.sub(r"\1", text)


def think_answer_format(text: str) -> bool:
    """Return whether a text is <think>...</think>...<answer>...</answer>: each tag once, in this order (Logic-RL)."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    places = [text.find(tag) for tag in tags]
    return all(text.count(tag) == 1 for tag in tags) and places == sorted(places)


def normalised_text(text: str) -> str:
    """Normalise case, spacing, full-width forms and accents (e with U+0301 is U+00E9) of a text, without a trailing
    full stop.
    """
    plain = " ".join(folded(text).casefold().split())
    if len(plain) <= MAX_COMPOSED_CHARS:
        plain = unicodedata.normalize("NFC", plain)
    return plain.removesuffix(".").rstrip() or plain
