"""The answer that a text states, in the forms in which chat models write one.

A text states what it marks (<answer>, "####", \\boxed{}), else what follows "the answer is" or "Answer:" to the end of
the sentence, else it is the answer as a whole. Markup, a unit behind a number and a final mark are not part of it. What
says more, or less, states something else: lists, "A or B", "not Paris". Every function returns at once for a megabyte.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from tinyrl.tasks.grading import (
    FRACTION,
    NUMBER,
    first_number,
    folded,
    marked_answer,
    numbers_in,
    parse_number,
    plain_numbers,
    without_latex_text,
)

MAX_NESTED = 4  # an <answer> with \\boxed{} in it, and so on
MAX_ANSWER_CHARS = 500  # of an answer whose markup is looked for
MAX_STATEMENTS = 8  # the last ones, that are read
MAX_SENTENCE_CHARS = 400
TAIL_CHARS = 80  # beside a number or a statement, where it may be denied
MAX_UNIT_CHARS = 40
MAX_UNIT_WORDS = 3

# ---- "the answer is" ----

_STATEMENT = re.compile(
    r"\b(?:the|my|our)\s{1,9}(?:(?:final|correct|right|best)\s{1,9}){0,2}(?:answer|option|choice)\s{1,9}is\b\s{0,9}[:=]?"
    r"|(?:^[ \t*_#>-]{0,8}(?:the\s{1,9})?(?:(?:final|correct|right)\s{1,9}){0,2}|\bfinal\s{1,9})"
    r"answer[*_]{0,3}[ \t]?[:=][*_]{0,3}",
    re.IGNORECASE | re.MULTILINE,
)
_CLOSING = "*`\"'”’)]$"
_ABBREVIATIONS = "".join(rf"(?<!\b{name})" for name in ("Dr", "Mr", "Mrs", "Ms", "St", "Mt", "Ft", "Prof", "Jr", "Sr"))
_SENTENCE_END = re.compile(rf"{_ABBREVIATIONS}[.!?](?=[{re.escape(_CLOSING)}]{{0,9}}(?:\s|\Z))|[。？]|\n")
_FILLERS = (
    "that|be|been|equal|equals|to|exactly|the|a|an|think|believe|say|sure|certain|mean|suppose|answer|option|choice|"
    "final|correct|right|best|is|are|it|was|necessarily|simply|really|true"
)
_DENIED = re.compile(  # at the end of what stands before an answer
    r"(?:\b(?:not|never|cannot|nor|neither|doubt|doubtful|false|untrue|unlikely|wrong|incorrect|whether|if|unless)"
    rf"|n['’]t)(?:\s+(?:{_FILLERS}))*\s+[$*\"'(\[]*\Z|(?:!=|≠|\\neq?)\s*[$*]*\Z",
    re.IGNORECASE,
)
_DISMISSED = re.compile(  # at the beginning of what stands behind a number
    r"[$*\"')\]]*\s+(?:is|was)(?:(?:\s+not|n['’]t)\s+(?:the|right|correct|it|true)|\s+(?:wrong|incorrect|false))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StatedAnswer:
    """An answer without its markup; is_marked: it stands in a mark, so that nothing around it is the answer."""

    text: str
    is_marked: bool


def stated_answer(text: str) -> StatedAnswer:
    """Return the answer that a text marks, else the sentence behind the last "the answer is", else all of the text. A
    mark may stand in a sentence and a sentence in a mark.
    """
    is_marked = False
    for _ in range(MAX_NESTED):
        marked = marked_answer(text)
        inside = _behind_statement(text) if marked is None else marked
        if inside is None:
            break
        text = inside
        is_marked = is_marked or marked is not None
    return StatedAnswer(undressed(text), is_marked)


def _behind_statement(text: str) -> str | None:
    """Return the sentence behind the last "the answer is" or "Answer:" that is neither denied nor a question."""
    for statement in reversed(deque(_STATEMENT.finditer(text), maxlen=MAX_STATEMENTS)):
        behind = text[statement.end() : statement.end() + MAX_SENTENCE_CHARS].lstrip()
        end = _SENTENCE_END.search(behind)
        mark = end.group() if end else ""
        is_stated = not _is_denied(text, statement.start()) and mark not in ("?", "？")
        if not end:
            sentence = behind.strip()
        else:
            closing = behind[end.end() :]
            closing = closing[: len(closing) - len(closing.lstrip(_CLOSING))]
            sentence = f"{behind[: end.end()]}{closing}".strip()
        if is_stated and undressed(sentence).strip(_CLOSING):
            return sentence
    return None


def _is_denied(text: str, start: int) -> bool:
    """Return whether the words before a place, in its line, deny what stands there."""
    return _DENIED.search(text[max(0, start - TAIL_CHARS) : start].rpartition("\n")[2]) is not None


# ---- markup ----

_LATEX_SPACE = re.compile(r"\\[;: ]|\\q?quad\b|(?<=[0-9])~")
_PAIRS = (("**", "**"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("$$", "$$"),
          ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))  # fmt: skip
_IN_PARENTHESES = re.compile(r"\(\s*([^(),;]{1,100}?)\s*\)|([^\W_])\)")  # (B), B), not (1, 2)
_EXCLAIMED = re.compile(r"[^\W\d_]{2}!\Z")  # not 5! and n!


def undressed(text: str) -> str:
    """Return an answer without the markup around it and its final mark: of "**Paris**", "\\text{Paris}", "Paris."."""
    text = folded(text).strip()
    if len(text) > MAX_ANSWER_CHARS:
        return text
    for _ in range(MAX_NESTED):
        text = without_latex_text(text).strip() or text
    text = _LATEX_SPACE.sub(" ", text).strip() or text
    while (inside := _less_dressed(text)) and inside != text:
        text = inside
    return text


def _less_dressed(text: str) -> str:
    for opening, closing in _PAIRS:
        inside = text[len(opening) : -len(closing)]
        if text == f"{opening}{inside}{closing}" and inside.strip() and opening not in inside:
            return inside.strip()
    if found := _IN_PARENTHESES.fullmatch(text):
        return str(found[1] or found[2])
    if text.endswith((".", "。")) or _EXCLAIMED.search(text):
        return text[:-1].rstrip()
    return text.removeprefix("**").removesuffix("**").strip()


# ---- numbers ----

_CURRENCY = re.compile(r"[€£¥₹]\s*")
_AMOUNT = re.compile(rf"{NUMBER.pattern}(?:\s*/\s*[0-9]{{1,50}})?")
_UNIT = re.compile(
    r"(?:[^\W\d_]|[\s°·*/%€£¥₹.]|\^\{?-?[0-9]\}?|[²³]|(?<=[a-z])[23](?![0-9])|\^?\{?\\circ\}?)*"  # also cm^2, cm2
)
_ONE_LETTER_UNIT = re.compile("[msghlLJWVKCFNA\u03a9]")
_NO_UNIT = re.compile(  # a word that says something about a number, or makes another one of it
    "and|or|nor|not|no|but|to|is|are|was|than|if|maybe|perhaps|probably|wrong|false|incorrect|right|correct|so|as|of|"
    "minus|plus|times|over|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|pi|squared|cubed|factorial|half|"
    "halves|thirds?|quarters?|tenths|hundredths|less|more|each|mod|modulo|choose|least|most",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"[,;](?![0-9])|\b(?:and|or|not)\b", re.IGNORECASE)
_OR = re.compile(r"[\s,;*\"'`)\]$]*\bor\b[\s*\"'`(\[$]*", re.IGNORECASE)
_BETWEEN_LISTED = re.compile(r"(?:[\s,;|&/$%.]++|\b(?:and|or)\b)*+", re.IGNORECASE)


def number_of(answer: StatedAnswer, text: str) -> Fraction | None:
    """Return the number that a text states, whose answer was found; None if that is not a number, or not one number.

    Without a mark it is the last number of the sentence that states the answer, or of the text.
    """
    number = parse_number(answer.text)
    for written in (answer.text, _right_side(answer.text)):
        number = number_with_unit(written) if number is None else number
    if number is not None or answer.is_marked:
        return number
    return stated_number(text if first_number(answer.text) is None else answer.text)


def _right_side(text: str) -> str:
    """Return the right side of an equation: of "x = 42"; "" for other texts and for several equations."""
    left, _, right = text.rpartition("=")
    is_one = left.rstrip() and left[-1] not in "!<>~" and not _SEVERAL.search(left)
    return right.strip() if is_one else ""


def number_with_unit(text: str) -> Fraction | None:
    """Parse an answer that is a number with a unit: "42 apples", "42 km/h", "€42". Return None for any other text, as
    for "42 or 43", "42 million" and "42x".
    """
    text = FRACTION.sub(r"\1\2/\3", _CURRENCY.sub("", plain_numbers(text).strip(), count=1))
    amount = _AMOUNT.match(text)
    unit = text[amount.end() :] if amount else ""
    if amount is None or len(unit) > MAX_UNIT_CHARS or not _UNIT.fullmatch(unit):
        return None
    is_apart = unit[:1].isspace() or "°" in unit or "circ" in unit
    words = re.findall(r"[^\W\d_]+", unit.replace("\\circ", "°"))
    for word in words:
        is_variable = len(word) == 1 and not (is_apart and _ONE_LETTER_UNIT.fullmatch(word))
        if is_variable or _NO_UNIT.fullmatch(word):
            return None
    return parse_number(amount.group()) if len(words) <= MAX_UNIT_WORDS else None


def stated_number(text: str) -> Fraction | None:
    """Return the number with which a text ends. Return None where that is denied ("it is not 42"), one of two ("41 or
    42"), or in a text that only lists different numbers.
    """
    text = plain_numbers(text)
    found = deque(numbers_in(text), maxlen=2)
    if not found:
        return None
    last = found[-1]
    behind = text[last.end() : last.end() + TAIL_CHARS]
    is_denied = _is_denied(text, last.start()) or _DISMISSED.match(behind) is not None
    is_alternative = len(found) > 1 and _OR.fullmatch(text, found[0].end(), last.start()) is not None
    if is_denied or is_alternative or _is_list(text):
        return None
    return parse_number(last.group())


def begun_number(text: str) -> Fraction | None:
    """Return the first number of a line that gives an answer ("42 apples in 3 boxes"). Return None where it is denied,
    and where another one is offered beside it ("41 or 42").
    """
    text = plain_numbers(text)
    found = list(islice(numbers_in(text), 2))
    if not found or _is_denied(text, found[0].start()):
        return None
    is_alternative = len(found) > 1 and _OR.fullmatch(text, found[0].end(), found[1].start()) is not None
    return None if is_alternative else parse_number(found[0].group())


def _is_list(text: str) -> bool:
    """Return whether a text is nothing but numbers, and not always the same one."""
    if not _BETWEEN_LISTED.fullmatch(NUMBER.sub(" ", text)):
        return False
    written = dict.fromkeys(match.group() for match in numbers_in(text))
    first = parse_number(next(iter(written), None))
    return any(parse_number(other) != first for other in written)
