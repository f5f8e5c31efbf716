"""Completions token by token: each coloured by one of its numbers, which radio buttons choose, all of them on hovering.

Colours are steps of a scale, LEVELS to either side of 0, whose end is the 95th percentile of the sizes on the page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from tinyrl.report.markup import text_html
from tinyrl.report.outcome import show
from tinyrl.runs.lines import Token, TokenSample

LEVELS = 5
_KINDS = {"train": "training, ", "eval": "held-out, ", "eval-greedy": "held-out, greedy, "}


@dataclass(frozen=True)
class Quantity:
    """A number that tokens are coloured by. `key`: its class in the page."""

    key: str
    name: str
    meaning: str
    of: Callable[[dict[str, float]], float]


QUANTITIES = (
    Quantity(
        "a",
        "Advantage",
        "How much better than expected: what is above 0 was made more likely",
        lambda n: n["advantage"],
    ),
    Quantity(
        "d", "Change by the update", "Log-probability after the update less before", lambda n: n["new"] - n["old"]
    ),
    Quantity(
        "k",
        "KL from the reference",
        "Log-probability when sampled less that of the reference",
        lambda n: n["old"] - n["ref"],
    ),
    Quantity(
        "s",
        "Log-probability",
        "How likely the token was when sampled: the stronger, the more surprising",
        lambda n: n["old"],
    ),
    Quantity("v", "Value", "What the critic expected from here on", lambda n: n["value"]),
    Quantity(
        "w", "Reward", "Where it landed, with the KL penalty of each token where there is one", lambda n: n["reward"]
    ),
)


def tokens_html(samples: list[TokenSample]) -> str:
    """The section; empty where no token was recorded."""
    chosen = [token for sample in samples for token in sample.tokens if token.chosen]
    scales = {quantity.key: scale_of([quantity.of(token.numbers) for token in chosen]) for quantity in QUANTITIES}
    quantities = [quantity for quantity in QUANTITIES if scales[quantity.key] > 0]
    if not chosen:
        return ""
    shown = "".join(_completion(sample, quantities, scales) for sample in samples)
    return f"""<h2>Token by token</h2>
<p class="muted">{len(samples)} completion{"s" * (len(samples) != 1)} of step {samples[0].step}; grey: read, not written
by the policy. Point at a token for its numbers.</p>
<div class="browser">
{_choice(quantities, scales)}<div class="tokens">
{shown}</div>
</div>
"""


def scale_of(values: list[float]) -> float:
    """The 95th percentile of the sizes of the finite ones that are not 0; 0 where there are none."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value != 0)
    return sizes[math.ceil(0.95 * len(sizes)) - 1] if sizes else 0.0


def level_of(value: float, scale: float) -> int:
    """-LEVELS to LEVELS; 0 for what has no number."""
    if not math.isfinite(value) or scale <= 0:
        return 0
    return round(max(-1.0, min(1.0, value / scale)) * LEVELS)


def _choice(quantities: list[Quantity], scales: dict[str, float]) -> str:
    """Radio buttons, the rules by which they colour, and what the colours of the chosen one mean."""
    buttons = "".join(
        f'<input type="radio" name="by" id="by-{quantity.key}"{" checked" * (i == 0)}>'
        f'<label for="by-{quantity.key}">{quantity.name}</label>\n'
        for i, quantity in enumerate(quantities)
    )
    meanings = "".join(
        f'<p class="at muted said-{quantity.key}">{quantity.meaning}; green above 0, orange below, strongest from '
        f"{show(scales[quantity.key])} on.</p>\n"
        for quantity in quantities
    )
    rules = "".join(_rules(quantity.key) for quantity in quantities)
    coloured = f'<style>\n{rules}</style>\n<span class="muted">Coloured by</span>\n{buttons}{meanings}'
    return coloured if quantities else ""


def _rules(key: str) -> str:
    """The backgrounds of one quantity's levels: the page's green above 0 and its orange below, ever stronger."""
    lines = [f"#by-{key}:checked ~ .said-{key} {{ display: revert; }}\n"]
    for level in range(1, LEVELS + 1):
        for sign, colour in (("", "greedy"), ("m", "held")):
            mixed = f"color-mix(in srgb, var(--{colour}) {level * 11}%, transparent)"
            lines.append(f"#by-{key}:checked ~ .tokens .{key}{sign}{level} {{ background: {mixed}; }}\n")
    return "".join(lines)


def _completion(sample: TokenSample, quantities: list[Quantity], scales: dict[str, float]) -> str:
    most = max((abs(r) for token in sample.tokens if math.isfinite(r := token.numbers["reward"])), default=0.0)
    shown = [_token(token, quantities, scales, most) for token in sample.tokens]
    if sample.omitted:
        shown.insert(len(shown) // 2, f'\n<span class="cut">… {sample.omitted:,} tokens left out …</span>\n')
    score = f" · reward {show(sample.reward)}" if math.isfinite(sample.reward) else ""
    which = f"{_KINDS.get(sample.kind, '')}prompt {sample.prompt_index}, sample {sample.sample}{score}"
    return f"""<div class="token-sample"><span class="who">{which}</span>
<div class="text read" dir="auto">{text_html(sample.prompt)}</div>
<div class="text" dir="auto">{"".join(shown)}</div></div>
"""


def _token(token: Token, quantities: list[Quantity], scales: dict[str, float], most: float) -> str:
    """One <span>; a reward of at least half the completion's largest is written behind it."""
    classes = [] if token.chosen else ["unchosen"]
    for quantity in quantities if token.chosen else ():
        level = level_of(quantity.of(token.numbers), scales[quantity.key])
        classes += [f"{quantity.key}{'m' * (level < 0)}{abs(level)}"] if level else []
    known = [f"{name} {show(value)}" for name, value in token.numbers.items() if math.isfinite(value)]
    told = f' title="{escape(" · ".join(known))}"' if known else ""
    named = f' class="{" ".join(classes)}"' if classes else ""
    reward = token.numbers["reward"]
    got = f'<sup class="got">{show(reward)}</sup>' if reward != 0 and abs(reward) >= most / 2 else ""
    return f"<span{named}{told}>{text_html(token.piece)}</span>{got}"
