"""The charts of a run as plain data: every panel with at least one finite number, in reading order."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from tinyrl.report.curves import Curve, curve_of, picked
from tinyrl.report.outcome import held_out_key, phase_seconds, reward_is_pass, show
from tinyrl.runs.metrics import meaning_of
from tinyrl.runs.records import Points, Run
from tinyrl.text import one_line

COLUMNS = 3
MOST_FUNCTIONS = 5


@dataclass(frozen=True)
class Line:
    """One series. `role` names its colour: train, held, greedy, or 1, 2, ... where the series are of equal rank."""

    label: str
    role: str
    points: Points
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    measured: bool = False

    @property
    def marked(self) -> bool:
        """Whether points are drawn one by one: held-out ones are few and have intervals."""
        return self.measured or self.role in ("held", "greedy")

    @cached_property
    def curve(self) -> Curve:
        """What is drawn; marked points are never smoothed."""
        return curve_of(self.points, smooth=not self.marked)


@dataclass(frozen=True)
class Panel:
    """One small chart. `stacked`: the lines are parts of a whole and add up."""

    key: str
    title: str
    unit: str
    lines: list[Line]
    share: bool = False
    from_zero: bool = False
    floor: float = -math.inf
    any_scale: bool = False  # a logarithmic axis is fine where values differ a hundredfold
    stacked: bool = False
    span: tuple[int, int] = (0, 1)  # first and last step, the same in every panel

    @property
    def meaning(self) -> str:
        """One line: what the chart means and what is healthy; empty for a metric of unknown meaning."""
        return meaning_of(self.key)

    def alt(self) -> str:
        """What the chart shows, in words, for people who cannot see it."""
        said = []
        for line in self.lines:
            values = [(step, value) for step, value in line.points if math.isfinite(value)]
            (first, start), (last, end) = values[0], values[-1]
            start_text, end_text = show(start, share=self.share), show(end, share=self.share)
            said.append(
                f"{line.label} {end_text} at step {last}"
                if first == last
                else f"{line.label} from {start_text} at step {first} to {end_text} at step {last}"
            )
        return f"{self.title}: " + "; ".join(said) + "."


@dataclass(frozen=True)
class Cell:
    """Where a panel sits in a grid of COLUMNS columns."""

    row: int
    column: int
    height: int = 1
    width: int = 1


def cells(count: int) -> list[Cell]:
    """The places of `count` panels: the first is 2 x 2, and the last takes what its row has left."""
    if count == 1:
        return [Cell(0, 0, 2, COLUMNS)]
    if count == 2:
        return [Cell(0, 0, 2, 2), Cell(0, 2, 2, 1)]
    below = [Cell(2 + i // COLUMNS, i % COLUMNS) for i in range(count - 3)]
    places = [Cell(0, 0, 2, 2), Cell(0, 2), Cell(1, 2), *below][:count]  # none for none
    if below:
        places[-1] = Cell(below[-1].row, below[-1].column, 1, COLUMNS - below[-1].column)
    return places


@dataclass(frozen=True)
class Kind:
    """A metric that tinyrl is known to write, in training, held out, or both."""

    title: str
    unit: str
    train: str = ""
    held: str = ""
    share: bool = False
    from_zero: bool = False
    floor: float = -math.inf
    any_scale: bool = False
    greedy: bool = False  # greedy held-out values are drawn too
    skip_zero: bool = False  # a panel that is zero throughout says nothing


KINDS = (
    Kind("Reward", "higher is better", "reward/mean", "eval/reward_mean", greedy=True),
    Kind("KL from the reference", "nats per response", "objective/kl", "eval/kl", from_zero=True),
    Kind("Entropy", "nats per token", "policy/entropy", "eval/entropy", from_zero=True),
    Kind("Completion length", "tokens", "completion/mean_length", "eval/mean_length", from_zero=True),
    Kind("Cut at the length limit", "share of completions", "completion/truncated", "eval/truncated",
          share=True, from_zero=True, skip_zero=True),
    Kind("Turns", "the policy's in an episode", "environment/turns", "eval/environment/turns",
          from_zero=True, greedy=True),
    Kind("Invalid calls", "turns an episode", "environment/invalid_calls", "eval/environment/invalid_calls",
          from_zero=True, skip_zero=True),
    Kind("Tokens read", "the environment's, an episode", "environment/observation_tokens",
          "eval/environment/observation_tokens", from_zero=True),
    Kind("Out of turns", "share of episodes", "environment/out_of_turns", "eval/environment/out_of_turns",
          share=True, from_zero=True, skip_zero=True),
    Kind("pass@1", "held-out, full marks", "", "eval/pass@1", share=True, from_zero=True, greedy=True),
    Kind("Likelihood loss", "ORPO's, nats per token", "preference/nll", from_zero=True),
    Kind("KL estimate", "KTO's, nats an answer", "preference/kl", from_zero=True, skip_zero=True),
    Kind("Value loss", "lower is better", "value/loss", from_zero=True, any_scale=True),
    Kind("Explained variance", "1 is best", "value/explained_variance", floor=-1),
    Kind("Spread of rewards", "standard deviation", "reward/std", "eval/reward_std", from_zero=True),
    Kind("Groups without spread", "they teach nothing", "reward/zero_spread_groups",
          share=True, from_zero=True, skip_zero=True),
    Kind("Rewards dropped", "completions without a valid one", "reward/dropped", from_zero=True, skip_zero=True),
    Kind("Clip fraction", "share of tokens", "policy/clipfrac", share=True, from_zero=True, skip_zero=True),
    Kind("Gradient norm", "policy, before clipping", "optim/grad_norm", from_zero=True, any_scale=True),
    Kind("Critic's gradient norm", "before clipping", "value/grad_norm", from_zero=True, any_scale=True),
    Kind("Learning rate", "policy", "optim/learning_rate", from_zero=True),
)  # fmt: skip
_BOTH_SIDES = {"rewards/chosen", "rewards/rejected"}  # in a panel of their own
_REWARD_NAMES = {"reward/mean", "reward/std", "reward/zero_spread_groups", "reward/dropped"}


def panels_of(run: Run) -> list[Panel]:
    """The panels of a run; the first is its headline, the last the time by phase."""
    panels = [panel for kind in KINDS if (panel := _panel(run, kind))]
    panels = [panel for panel in panels if not (panel.title == "pass@1" and reward_is_pass(run))]
    panels += _reward_functions(run)
    extra = [panel for kind in other_kinds(run) if (panel := _panel(run, kind))] + _sides(run)
    if run.finite("reward/mean") or run.finite("eval/reward_mean"):
        panels += extra
    else:  # sft, reward, dpo: their loss and accuracy are the headline
        panels = sorted(extra, key=lambda panel: panel.key != "rewards/accuracy") + panels
    span = (min(0, *run.steps), max(1, run.last_step))
    return [replace(panel, span=span) for panel in panels + _time(run)]


def other_kinds(run: Run) -> list[Kind]:
    """Losses and other figures of the methods that learn from examples, under whatever names the run has them."""
    known = {name for kind in KINDS for name in (kind.train, kind.held)} | _BOTH_SIDES
    keys = [key for key in run.metric_names() if key.startswith(("loss", "rewards/", "preference/"))]
    return [_other_kind(run, key) for key in keys if key not in known]


def _other_kind(run: Run, key: str) -> Kind:
    group, _, name = key.partition("/")
    title = one_line(name or key, 24).replace("_", " ").capitalize()
    title = title if group in ("rewards", "preference") or not name else f"Loss: {title.lower()}"
    is_loss = group == "loss" or key == "preference/loss"
    better = "higher is better" if key == "rewards/accuracy" else "lower is better" if is_loss else ""
    return Kind(title, better, key, held_out_key(run, key), share=key == "rewards/accuracy", any_scale=is_loss)


def _sides(run: Run) -> list[Panel]:
    """Both sides of the pairs in one panel: the difference is what is learnt, and both may fall while it grows."""
    panels = []
    for key, title, unit in (
        ("rewards/{}", "Rewards of both sides", "training"),
        ("policy/{}_logprobs", "Log-probabilities", "training, nats an answer"),
    ):
        points = {side: run.points(key.format(side)) for side in ("chosen", "rejected")}
        lines = [Line(side, str(i + 1), found) for i, (side, found) in enumerate(points.items())]
        if all(run.finite(key.format(side)) for side in points):
            panels.append(Panel(key.format("sides"), title, unit, lines))
    return panels


def _panel(run: Run, kind: Kind) -> Panel | None:
    train, held = run.points(kind.train), picked(run.points(kind.held))
    greedy = picked(run.points(kind.held.replace("eval/", "eval/greedy/", 1))) if kind.greedy else []
    lines = [
        Line("training", "train", train),
        Line("held-out", "held", held, intervals_of(run, kind.held, held)),
        Line("greedy", "greedy", greedy, intervals_of(run, kind.held.replace("eval/", "eval/greedy/", 1), greedy)),
    ]
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values or (kind.skip_zero and not any(values)):
        return None
    share = kind.share and min(values) >= 0 and max(values) <= 1
    unit = kind.unit if share == kind.share else kind.unit.replace("share of ", "")
    if min(values) < kind.floor:
        unit += f" (cut at {show(kind.floor)})"
    return Panel(kind.train or kind.held, kind.title, unit, lines, share, kind.from_zero, kind.floor, kind.any_scale)


def intervals_of(run: Run, held: str, points: Points) -> dict[int, tuple[float, float]]:
    """The intervals of a held-out mean reward, by step; none of other metrics."""
    if not held.endswith("reward_mean"):
        return {}
    key = held.removesuffix("reward_mean") + "reward_ci"
    return {step: pair for step, _ in points if (pair := run.interval(key, step))}


def _reward_functions(run: Run) -> list[Panel]:
    """Each reward function in training and held out, in the same colours; held out beside the task's verifier, where
    the reward is something else.
    """
    train = {key.removeprefix("reward/"): key for key in run.metric_names() if key.startswith("reward/")}
    train = {name: key for name, key in train.items() if key not in _REWARD_NAMES}
    held = {key.removeprefix("eval/reward/"): key for key in run.metric_names() if key.startswith("eval/reward/")}
    names = sorted(train.keys() | held.keys())[:MOST_FUNCTIONS]
    roles = {name: str(i + 1) for i, name in enumerate(names)}
    of = f", the first {MOST_FUNCTIONS}" if len(train.keys() | held.keys()) > MOST_FUNCTIONS else ""
    lines = {name: Line(one_line(name, 16), roles[name], run.points(train[name])) for name in names if name in train}
    measured = [
        Line(one_line(name, 16), roles[name], picked(run.points(held[name])), measured=True)
        for name in names
        if name in held
    ]
    if run.points("eval/verifier_mean") != run.points("eval/reward_mean") and measured:
        measured.append(Line("verifier", "other", picked(run.points("eval/verifier_mean")), measured=True))
    measured = [line for line in measured if line.points]
    panels = [Panel("eval/functions", "Held-out reward by function", f"before weights{of}", measured)]
    panels.append(Panel("reward/functions", "Reward by function", f"training, before weights{of}", [*lines.values()]))
    return [panel for panel in panels if len(panel.lines) > 1]


def _time(run: Run) -> list[Panel]:
    """Evaluation is left to the table of totals: as a bar at every 25th step it would dwarf the other phases."""
    roles = {name: "other" if name == "other" else str(i + 1) for i, name in enumerate(phase_seconds(run))}
    seconds = {name: phase for name, phase in phase_seconds(run).items() if name != "evaluation"}
    steps = sorted({step for phase in seconds.values() for step in phase})
    lines = [
        Line(name, roles[name], [(step, phase.get(step, 0.0)) for step in steps]) for name, phase in seconds.items()
    ]
    unit = "seconds a step" if len(seconds) == len(roles) else "seconds a step, evaluation aside"
    return [Panel("time", "Time by phase", unit, lines, from_zero=True, stacked=True)] if lines else []
