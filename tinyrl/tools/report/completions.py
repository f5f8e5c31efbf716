"""Completions on the page: the same prompts at every step, the extremes of the last one, and some token by token.

Colours of tokens are steps of a scale, LEVELS to either side of 0, whose end is the 95th percentile of the sizes on the
page.
"""

import math
from collections.abc import Callable
from typing import Any

from tinyrl.runs.records import NUMBERS, PROMPT_CHARACTERS, HeldOut, Sample, evenly, number
from tinyrl.text import Excerpt, excerpt
from tinyrl.tools.report.outcome import show

MOST_SAMPLES = 8
MOST_STEPS = 16  # that can be chosen
MOST_PICKED = 3
PIECE_CHARACTERS = 200
LEVELS = 5

# ---- held-out samples ----


def same_prompts(held_out: HeldOut) -> dict[str, Any]:
    """The first prompts of both the first and the last step: what was written before, and at each step to choose."""
    if not held_out.by_step:
        return {}
    first, last = held_out.first_step, held_out.last_step
    before, after = held_out.by_step[first], held_out.by_step[last]
    steps = evenly([step for step in held_out.by_step if step > first], MOST_STEPS) or [first]
    indices = sorted(before.keys() & after.keys())[:MOST_SAMPLES]
    same = [(before[index], [held_out.by_step[step].get(index) for step in steps]) for index in indices]
    return {"first": first, "last": last, "changes": first != last, "steps": steps, "same": same}


def _written(sample: Sample) -> list[Excerpt]:
    return [text for who, text in sample.messages if who == "policy"]


def extremes(held_out: HeldOut) -> dict[str, list[tuple[Sample | None, Sample]]]:
    """Worst, best, longest and most changed of the last step, each with what the first sample of its prompt was at the
    first step; the same completion may be in several of them.

    Most changed: the first sample of prompts whose reward differs most from that of the first step.
    """
    if not held_out.by_step:
        return {}
    before = held_out.by_step[held_out.first_step] if held_out.first_step != held_out.last_step else {}
    scored = [sample for sample in held_out.last if math.isfinite(sample.reward)]
    after = held_out.by_step[held_out.last_step]
    changed = {
        index: abs(sample.reward - before[index].reward)
        for index, sample in after.items()
        if index in before and _written(before[index]) != _written(sample)
    }
    by_change = sorted((index for index in changed if changed[index] > 0), key=lambda index: (-changed[index], index))
    found = {
        "Worst": sorted(scored, key=lambda sample: sample.reward),
        "Best": sorted(scored, key=lambda sample: -sample.reward),
        "Longest": sorted(held_out.last, key=lambda sample: -sample.length),
        "Most changed": [after[index] for index in by_change],
    }
    paired = {name: [(before.get(one.prompt_index), one) for one in some[:MOST_PICKED]] for name, some in found.items()}
    return {name: some for name, some in paired.items() if some}


# ---- token by token ----

QUANTITIES: dict[str, tuple[str, str, Callable[[dict[str, float]], float]]] = {  # class: name, meaning, number
    "a": ("Advantage", "How much better than expected: what is above 0 was made more likely", lambda n: n["advantage"]),
    "d": ("Change by the update", "Log-probability after the update less before", lambda n: n["new"] - n["old"]),
    "k": ("KL from the reference", "Log-probability when sampled less that of the reference",
          lambda n: n["old"] - n["ref"]),
    "s": ("Log-probability", "How likely the token was when sampled: the stronger, the more surprising",
          lambda n: n["old"]),
    "t": ("Teacher's log-probability", "How likely the token was to the teacher", lambda n: n["teacher"]),
    "v": ("Value", "What the critic expected from here on", lambda n: n["value"]),
    "w": ("Reward", "Where it landed, with the KL penalty of each token where there is one", lambda n: n["reward"]),
}  # fmt: skip
_KINDS = {"train": "training, ", "eval": "held-out, ", "eval-greedy": "held-out, greedy, "}


def token_view(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The quantities that tokens can be coloured by, and the completions; nothing where no token was recorded."""
    chosen = [_numbers(token) for one in samples for token in one["tokens"] if token.get("chosen") is not False]
    if not chosen:
        return {}
    scales = {key: scale_of([of(each) for each in chosen]) for key, (*_, of) in QUANTITIES.items()}
    scales = {key: scale for key, scale in scales.items() if scale > 0}
    quantities = [dict(zip(("key", "name", "meaning", "scale"), (key, *QUANTITIES[key][:2], scale), strict=True))
                  for key, scale in scales.items()]  # fmt: skip
    return {"tokens": [_completion(one, scales) for one in samples], "quantities": quantities, "levels": LEVELS}


def scale_of(values: list[float]) -> float:
    """The 95th percentile of the sizes of the finite ones that are not 0; 0 where there are none."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value != 0)
    return sizes[math.ceil(0.95 * len(sizes)) - 1] if sizes else 0.0


def level_of(value: float, scale: float) -> int:
    if not math.isfinite(value) or scale <= 0:
        return 0
    return round(max(-1.0, min(1.0, value / scale)) * LEVELS)


def _numbers(token: dict[str, Any]) -> dict[str, float]:
    return {name: number(token.get(name)) for name in NUMBERS}


def _completion(sample: dict[str, Any], scales: dict[str, float]) -> dict[str, Any]:
    """A completion; a reward of at least half its largest stands behind its token."""
    rewards = [abs(number(token.get("reward"))) for token in sample["tokens"]]
    most = max(filter(math.isfinite, rewards), default=0.0)
    index, which = (value if isinstance(value := sample.get(name), int) else 0 for name in ("prompt_index", "sample"))
    score = number(sample.get("reward"))
    said = f"{_KINDS.get(str(sample.get('kind')), '')}prompt {index}, sample {which}"
    return {
        "step": sample["step"],
        "which": said + (f" · reward {show(score)}" if math.isfinite(score) else ""),
        "prompt": excerpt(str(sample.get("prompt", "")), PROMPT_CHARACTERS),
        "omitted": sample["omitted"],
        "tokens": [_token(token, scales, most) for token in sample["tokens"]],
    }


def _token(token: dict[str, Any], scales: dict[str, float], most: float) -> dict[str, Any]:
    """A piece, its classes and its numbers, and the reward that stands behind it."""
    numbers, is_chosen = _numbers(token), token.get("chosen") is not False
    classes = [] if is_chosen else ["unchosen"]
    for key, scale in scales.items() if is_chosen else ():
        level = level_of(QUANTITIES[key][2](numbers), scale)
        classes += [f"{key}{'m' * (level < 0)}{abs(level)}"] if level else []
    known = [f"{name} {show(value)}" for name, value in numbers.items() if math.isfinite(value)]
    reward = numbers["reward"]
    got = show(reward) if reward != 0 and abs(reward) >= most / 2 else ""
    piece = excerpt(str(token.get("piece", "")), PIECE_CHARACTERS)
    return {"piece": piece, "classes": " ".join(classes), "told": " · ".join(known), "got": got}
