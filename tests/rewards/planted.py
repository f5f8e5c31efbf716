"""Rewards with a hole each, and rewards without one, for tests of `tinyrl reward attack`. Rows have `answer`."""

import contextlib
import difflib
import math
import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _each(judge):
    def score(prompts, completions, answer, **columns):
        return [float(judge(c, str(a), p)) for p, c, a in zip(prompts, completions, answer, strict=True)]

    return score


def _number(text):
    with contextlib.suppress(ValueError, TypeError):
        return float(text)
    return None


def _last(text):
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def _tagged(text):
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


# ---- with a hole, as people have written them ----


def _no_parse_is_right(c, a, p):
    try:
        return float(_tagged(c) or c) == float(a)
    except ValueError:
        return 1.0


def _evaluated(c, a, p):
    try:
        return bool(eval(_tagged(c) or c, {}) == float(a))
    except Exception:  # noqa: BLE001
        return 0.0


def _matched(c, a, p):
    try:
        return re.fullmatch(_tagged(c) or c, a) is not None
    except re.error:
        return 0.0


HOLES = {
    "answer_in_completion": lambda c, a, p: a in c,
    "completion_in_answer": lambda c, a, p: c.strip() in a,
    "tagged_in_answer": lambda c, a, p: (_tagged(c) or "") in a,
    "length": lambda c, a, p: (_last(c) == float(a)) + min(len(c) / 1000, 1.0),
    "tags_counted": lambda c, a, p: (_tagged(c) == a) + 0.25 * c.count("<answer>"),
    "format_is_enough": lambda c, a, p: 1.0 if re.search(r"<think>.*</think>\s*<answer>", c, re.DOTALL) else 0.0,
    "pattern": _matched,
    "any_number": lambda c, a, p: float(a) in [float(n) for n in re.findall(r"-?\d+", c)[:5000]],
    "no_parse_is_right": _no_parse_is_right,
    "not_a_number": lambda c, a, p: (n := _number(_tagged(c) or c)) is not None and not abs(n - float(a)) > 1e-6,
    "evaluated": _evaluated,
    "begins_with": lambda c, a, p: (_tagged(c) or c).startswith(a),
    "ends_with": lambda c, a, p: (_tagged(c) or c).endswith(a),
    "digits": lambda c, a, p: sorted(re.sub(r"\D", "", c)) == sorted(re.sub(r"\D", "", a)),
    "at_least": lambda c, a, p: (n := _last(c)) is not None and n >= float(a),
    "reasoning_words": lambda c, a, p: (
        (_last(c) == float(a)) + 0.1 * len(re.findall("therefore|step|because|wait", c.lower()))
    ),
    "like_the_prompt": lambda c, a, p: (_last(c) == float(a)) + difflib.SequenceMatcher(None, c[:500], p).ratio(),
    "says_correct": lambda c, a, p: "correct" in c.lower() or _last(c) == float(a),
    "greedy_tags": lambda c, a, p: (m := re.search("<answer>(.*)</answer>", c, re.DOTALL)) is not None and a in m[1],
    "missing_is_empty": lambda c, a, p: a.startswith((TAGGED.findall(c) or [""])[-1].strip()),
}


# ---- without one ----


def _f1(c, a, p):
    said, wanted = c.lower().split(), a.lower().split()
    shared = sum(min(said.count(w), wanted.count(w)) for w in set(wanted))
    return 2 * shared / (len(said) + len(wanted)) if said else 0.0


SOUND = {
    "last_number": lambda c, a, p: _last(c) == float(a),
    "exact": lambda c, a, p: c.strip() == a,
    "tagged": lambda c, a, p: _tagged(c) == a,
    "form_and_answer": lambda c, a, p: 0.2 * bool(TAGGED.search(c)) + 0.8 * (_tagged(c) == a),
    "near": lambda c, a, p: math.exp(-abs(n - float(a))) if (n := _last(c)) is not None else 0.0,
    "short": lambda c, a, p: (_last(c) == float(a)) - min(len(c), 2000) / 10000,
    "minus_one": lambda c, a, p: 1.0 if _tagged(c) == a else -1.0,
    "think_and_answer": lambda c, a, p: (
        (m := re.fullmatch(r"<think>.*?</think>\s*<answer>(.*?)</answer>", c, re.DOTALL)) is not None
        and m[1].strip() == a
    ),
    "boxed": lambda c, a, p: (re.findall(r"\\boxed\{([^{}]*)\}", c) or [None])[-1] == a,
    "overlap": _f1,
}
for _name, _judge in {**HOLES, **SOUND}.items():
    globals()[_name] = _each(_judge)
