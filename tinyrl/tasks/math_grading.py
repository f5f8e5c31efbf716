"""Equality of answers as mathematics, by the package math-verify (`task.grading=math`; the extra `math`).

For tasks whose rows have an `answer`. A completion's answer is the one it states (tasks/stated.py: marked, behind "the
answer is", or the whole of a short one), else what math-verify finds in its end. Two answers are equal when they are
the same text or number, or when math-verify says so: (1,2) and (1, 2), \\frac12 and 0.5, 2\\sqrt{3} and \\sqrt{12},
(x+1)^2 and x^2+2x+1.

An `answer` that cannot be read (\\text{}, $$, broken LaTeX) has no score: every completion would be wrong. Words are
compared as text only: to math-verify they are products of letters, and "listen" is "silent". The package
simplifies what a model wrote, which can take any time and memory, so this runs as a reward function does: in a process
of its own, within reward.timeout_s. A comparison that takes more than `PATIENCE_S` of processor time is a wrong
answer: by the clock, as math-verify measures it, a busy machine would score right ones 0.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]  an extra
from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]

from tinyrl.data.readers import Row
from tinyrl.tasks.grading import by_row, folded, normalised_text, parse_number, without_latex_text
from tinyrl.tasks.stated import number_with_unit, stated_answer

PATIENCE_S = 2.0  # of processor time, for each parse and each comparison
CLOCK_S = 60  # whole seconds on the clock, after which math-verify gives up
MAX_ANSWER_CHARS = 300  # of a formula
SEARCHED_CHARS = 2000  # the end of a completion, where its answer is


def score(text: str, row: Row) -> float | None:
    """Return 1.0 if a completion's answer equals the row's `answer`, 0.0 if not, None if the row has none, or one that
    cannot be read.
    """
    reference = row.get("answer")
    if reference is None or not str(reference).strip():
        return None
    wanted = _plain(stated_answer(str(reference)).text)
    if not _is_readable(wanted):
        return None
    stated = stated_answer(text)
    given = _plain(stated.text)
    number = parse_number(wanted)
    is_same_number = number is not None and number in (parse_number(given), number_with_unit(given))
    if normalised_text(given) == normalised_text(wanted) or is_same_number:
        return 1.0
    if re.fullmatch(r"[\w\s'’.,;:!?-]*", wanted) and re.search(r"[^\W\d_]{3,}", wanted):  # language, no formula
        return 0.0
    answers = _formula(given) if len(given) <= MAX_ANSWER_CHARS else []
    if not stated.is_marked:
        answers = [*answers, *_parsed(folded(text[-SEARCHED_CHARS:]))]  # found in prose
    return float(bool(answers) and _are_equal(_formula(wanted), answers))


equal_answers = by_row(score)


def _is_readable(wanted: str) -> bool:
    """Return whether an answer may be compared: not \\text{} or $$, of which nothing is left, and no broken LaTeX, in
    which math-verify finds no more than the text itself.
    """
    if "\\" not in wanted:
        return bool(wanted)
    return any(not isinstance(each, str) for each in _formula(wanted))


def _plain(text: str) -> str:
    """Return an answer without dollar signs around it, and \\text{Paris} as Paris."""
    return without_latex_text(folded(text).strip().removesuffix(".").strip("$")).strip()


@lru_cache(maxsize=4096)  # the samples of a group have one reference
def _formula(answer: str) -> list[Any]:
    return _parsed(f"${answer}$" if "$" not in answer else answer)


def _parsed(text: str) -> list[Any]:
    with _impatient():
        return parse(text, parsing_timeout=CLOCK_S)
    return []


def _are_equal(wanted: list[Any], answers: list[Any]) -> bool:
    with _impatient():
        return verify(wanted, answers, timeout_seconds=CLOCK_S)
    return False


@contextmanager
def _impatient() -> Iterator[None]:
    """End what is inside, after each PATIENCE_S of this process's time, as math-verify's own alarm does. It takes the
    exception for the end of one parse or comparison; outside of those it ends here.
    """

    def late(*_: Any) -> None:
        raise TimeoutException("more than PATIENCE_S of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S, PATIENCE_S)
    try:
        yield
    except TimeoutException:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


_formula("1")  # the first takes a second, which is not a row's
