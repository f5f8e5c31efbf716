"""The rubric of a judge: its text, and whether the scale that it speaks of is the one that scores are read on."""

from __future__ import annotations

import re
from pathlib import Path

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardFunctionConfig

OF_A_SCALE = re.compile(r"\b(?:scor|rat(?:e|ing)|scale|grad(?:e|ing)|points?\b|marks?\b)", re.I)
RANGE = re.compile(r"(?<![\w.-])(-?\d+(?:\.\d+)?)\s*(?:to|through|and|-|\u2013|\u2014)\s*(\d+(?:\.\d+)?)(?![\w-])")
BEST = re.compile(r"\bout of (\d+)|\b(\d+)[- ]points? scale", re.I)
SENTENCE = re.compile(r"[^\n.!?;]*(?:\.\d[^\n.!?;]*)*")
LARGEST_LOW = 1.0  # scales begin at 0, 1 or below; "8 to 10 if it is right" is a part of one


def read_rubric(judge: RewardFunctionConfig) -> str:
    """Return the text of a rubric. Raises ValueError for a file that cannot be read, and for a rubric that speaks of
    another scale than the default one, where none is given.
    """
    assert judge.rubric is not None
    try:
        rubric = Path(judge.rubric).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reward.functions: rubric {judge.rubric}: {error}") from None
    is_default = "scale" not in judge.model_fields_set
    low, high = judge.scale
    named = named_scale(rubric)
    if judge.mode == "score" and is_default and named is not None:
        least, best = named
        if best != high or least not in (None, low):
            words = f"up to {best:g}" if least is None else f"from {least:g} to {best:g}"
            own = f"[{low if least is None else least:g}, {best:g}]"
            raise ValueError(
                f"reward.functions: the rubric {judge.rubric} speaks of a scale {words}, and scores are read from "
                f"{low:g} to {high:g} by default. Give scale: {own}, or scale: [{low:g}, {high:g}] if that is meant"
            )
    return rubric


def named_scale(rubric: str) -> tuple[float | None, float] | None:
    """Return the (worst, best) score that a rubric speaks of: over all ranges in sentences about scores, one of which
    must begin at 1 or below. The worst is None where only the best is named ("out of 5"); None: there is no scale.
    """
    sentences = [found for found in SENTENCE.findall(rubric) if OF_A_SCALE.search(found)]
    ends = list[tuple[float, float]]()
    best = list[float]()
    for sentence in sentences:
        ends += [(float(low), float(high)) for low, high in RANGE.findall(sentence)]
        best += [float(one or other) for one, other in BEST.findall(sentence)]
    least = min((low for low, high in ends if low < high), default=None)
    if least is not None and least <= LARGEST_LOW:
        return least, max(high for _, high in ends)
    return (None, max(best)) if best else None


def check_rubrics(config: Config) -> None:
    """Raise Refusal for a rubric that cannot be read, or that speaks of another scale."""
    for at, function in enumerate(config.reward.functions):
        if not function.is_judge:
            continue
        try:
            read_rubric(function)
        except ValueError as error:
            raise Refusal((f"reward.functions[{at}].rubric",), str(error)) from error
