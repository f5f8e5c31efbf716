"""Read run folders: records and metrics of a run that is going on, was killed, or lacks files.

A record has a JSON object a line. A last line without its line break is being written, so it is left out when it does
not parse; other lines that do not parse are counted and reported. Numbers that are null, NaN or infinite become NaN: a
gap in a chart, never a zero.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tinyrl.text import Excerpt, did_you_mean, excerpt, first_line, join_truncated, one_line

Points = list[tuple[int, float]]  # (step, value), by step
T = TypeVar("T")

LARGEST = 1e100
PROMPT_CHARACTERS = 500  # of samples and tokens, what a page shows
POLICY_CHARACTERS = 900
OTHER_CHARACTERS = 500
MOST_MESSAGES = 16  # of an episode
MOST_COMPLETIONS = 8  # token by token
MOST_TOKENS = 400  # of a completion
SEED = re.compile(r"seed-[0-9]{1,17}")  # the folder of one of several seeds
NUMBERS = ("advantage", "old", "new", "ref", "teacher", "value", "reward")  # of a token


# ---- lines ----


def to_float(value: Any) -> float:
    """Return a JSON value as a float; NaN for what is not a finite number, or too large for an axis."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else math.nan


def float_or(value: Any, otherwise: float) -> float:
    """Return a JSON value as a float; `otherwise` where it is none."""
    return otherwise if math.isnan(found := to_float(value)) else found


def json_safe(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(inner) for key, inner in value.items()}
    return [json_safe(inner) for inner in value] if isinstance(value, list | tuple) else value


def json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises ValueError, naming it, for anything else, and OSError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON that can be read: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {found!r:.40} instead of an object")
    return found


REWARD_CHANGED = "reward_changed"  # in env.json: steps after which a resume or a fork went on with another reward


def reward_changes(env: dict[str, Any]) -> list[int]:
    """Return the steps of env.json after which the reward was another one."""
    found = env.get(REWARD_CHANGED)
    return [step for step in found if isinstance(step, int)] if isinstance(found, list) else []


def reward_change_note(env: dict[str, Any]) -> str:
    """Return a sentence for a run whose reward changed on the way; "" for others."""
    steps = reward_changes(env)
    if not steps:
        return ""
    after = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
    return f"The reward changed after {after}: numbers before and after do not compare."


class Origin(NamedTuple):
    """The checkpoint that a fork began with: its run, and its step."""

    run: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def origin_of(env: dict[str, Any]) -> Origin | None:
    """Return the checkpoint that a fork began with, by its env.json; None for any other run."""
    run, _, step = str(env.get("forked_from") or "").rpartition("@")
    return Origin(run, int(step)) if re.fullmatch("[0-9]{1,9}", step) else None


def since_start(steps: Sequence[int], env: dict[str, Any]) -> list[int]:
    """Return the steps of records that are a run's own, with the one before: of a fork those after its origin, and the
    last of the other run's, where it began.
    """
    origin = origin_of(env)
    earlier = 0 if origin is None else sum(step <= origin.step for step in steps)
    return [*steps[max(0, earlier - 1) :]]


def json_lines(path: Path, notes: list[str], *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the objects with a step in a record; none where there is no such file. Lines that cannot be read, but for a
    cut-off last one, are counted in `notes` at the end. containing: skip lines without it, unparsed.
    """
    if not path.is_file():
        return
    broken = 0
    with path.open("rb") as file:
        for line in file:
            if containing not in line or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is int and 0 <= step < 2**53:
                yield row
            else:
                broken += 1
    if broken:
        lines = "1 line" if broken == 1 else f"{broken} lines"
        notes.append(f"{path.name}: {lines} could not be read and are left out.")


def read_steps(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """Read metrics.jsonl: step to metrics, by step."""
    steps: dict[int, dict[str, Any]] = {}
    for row in json_lines(path, notes):
        steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def samples_of(
    path: Path, notes: list[str], *, kind: str | None = None, step: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield lines of samples.jsonl of a step and a kind (None: any): "train", "eval" (held out), "eval-greedy"."""
    rows = json_lines(path, notes, containing=f'"{kind}"'.encode() if kind else b"")
    return (row for row in rows if kind in (None, row.get("kind")) and step in (None, row["step"]))


class Turn(NamedTuple):
    """A message of a sample as it is shown. speaker: "policy", "environment"; with an agent also the role of a message
    that it sent, "tools" that it offered, and "agent returned". conversation: the number of an agent's, if there are
    several; reward, advantage: of a turn of the policy that has its own (grpo.credit=turn).
    """

    speaker: str
    text: str
    conversation: int = 0
    reward: float | None = None
    advantage: float | None = None


def turns_of(row: dict[str, Any]) -> list[Turn]:
    """Return the turns after the prompt in a line of samples.jsonl; with an agent, those of its conversations and what
    it returned.
    """
    completion = str(row.get("completion", ""))
    if isinstance(conversations := row.get("conversations"), list):
        turns = list[Turn]()
        for number, one in enumerate(conversations, start=1):
            if isinstance(one, dict):
                turns += _conversation_turns(one, number=number if len(conversations) > 1 else 0)
        return [*turns, Turn("agent returned", completion)]
    if not isinstance(episode := row.get("episode"), list):
        return [Turn("policy", completion)]
    credits = iter(_credits(row))
    turns = list[Turn]()
    for message in episode:
        if not isinstance(message, dict):
            continue
        text = str(message.get("content", ""))
        if message.get("role") == "assistant":
            reward, advantage = next(credits, (None, None))
            turns.append(Turn("policy", text, reward=reward, advantage=advantage))
        else:
            turns.append(Turn("environment", text))
    return turns


def _credits(row: dict[str, Any]) -> list[tuple[float | None, float | None]]:
    """Return the reward and the advantage of each turn of the policy, None where it has none; [] without credit by
    turn.
    """
    turns = row.get("turns")
    records = [turn if isinstance(turn, dict) else {} for turn in turns] if isinstance(turns, list) else []
    return [(_finite(turn.get("reward")), _finite(turn.get("advantage"))) for turn in records]


def _finite(value: Any) -> float | None:
    number = to_float(value)
    return number if math.isfinite(number) else None


def _conversation_turns(conversation: dict[str, Any], *, number: int) -> list[Turn]:
    """Return the turns of a conversation as rollout/records.py writes it."""
    turns = list[Turn]()
    tools = conversation.get("tools")
    if isinstance(tools, list):
        turns.append(Turn("tools", "\n".join(map(_tool_line, tools)) or "none", number))
    same_as = conversation.get("same_as")
    if isinstance(same_as, dict):
        count = same_as.get("messages")
        first = "the first message" if count == 1 else f"the first {count} messages"
        turns.append(Turn("as before", f"{first} of conversation {same_as.get('conversation')}", number))
    messages = conversation.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            role = str(message.get("role", ""))
            turns.append(Turn("policy" if role == "assistant" else role, _message_text(message), number))
    return turns


def _message_text(message: dict[str, Any]) -> str:
    """Return a message's content with its calls of tools, a line each."""
    parts = [str(content)] if (content := message.get("content")) else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = _function_of(call)
        parts.append(f"{function.get('name')}({json.dumps(function.get('arguments'), ensure_ascii=False)})")
    return "\n".join(parts)


def _tool_line(tool: Any) -> str:
    """Return the definition of a tool in a line: name, parameters, description."""
    function = _function_of(tool)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    names = ", ".join(properties) if isinstance(properties, dict) else ""
    described = " ".join(str(function.get("description") or "").split())
    return f"{function.get('name')}({names})" + (f": {described}" if described else "")


def _function_of(value: Any) -> dict[str, Any]:
    """Return the function of a tool's definition or call, which OpenAI's form has inside."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def subsample(items: list[T], most: int) -> list[T]:
    """Subsample to at most `most` items, the first and the last among them; [] where two are too many."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else []


def without_middle(items: list[T], most: int) -> tuple[list[T], int]:
    """Return at most so many items (an even number) from both ends, and the number left out."""
    omitted = max(0, len(items) - most)
    return ([*items[: most // 2], *items[-most // 2 :]] if omitted else items), omitted


# ---- held-out samples, and single tokens ----


class ShownTurn(NamedTuple):
    """A turn, cut for a page."""

    speaker: str
    text: Excerpt
    conversation: int
    reward: float | None


def _shown(turn: Turn) -> ShownTurn:
    limit = POLICY_CHARACTERS if turn.speaker == "policy" else OTHER_CHARACTERS
    return ShownTurn(turn.speaker, excerpt(turn.text, limit), turn.conversation, turn.reward)


@dataclass(frozen=True)
class HeldOutSample:
    """A held-out completion, cut for a page: `omitted` messages are left out in the middle.

    length: characters that the policy wrote; images: of the prompt, as they are recorded.
    """

    prompt_index: int
    sample: int
    prompt: Excerpt
    messages: tuple[ShownTurn, ...]
    omitted: int
    reward: float
    finish_reason: str
    length: int
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class HeldOut:
    """by_step: step to prompt_index to its first sample, by step. last: every sample of the last step, as recorded."""

    by_step: dict[int, dict[int, HeldOutSample]] = field(default_factory=dict)
    last: tuple[HeldOutSample, ...] = ()


def read_held_out(path: Path, notes: list[str]) -> HeldOut:
    """Read the samples of kind "eval" of a samples.jsonl."""
    by_step: dict[int, dict[int, HeldOutSample]] = {}
    newest = -1
    last = list[HeldOutSample]()
    for row in samples_of(path, notes, kind="eval"):
        if not isinstance(index := row.get("prompt_index"), int):
            continue
        turns = turns_of(row)
        messages, omitted = without_middle(turns, MOST_MESSAGES)
        sample = HeldOutSample(
            prompt_index=index,
            sample=which if isinstance(which := row.get("sample"), int) else 0,
            prompt=excerpt(str(row.get("prompt", "")), PROMPT_CHARACTERS),
            messages=tuple(map(_shown, messages)),
            omitted=omitted,
            reward=to_float(row.get("reward")),
            finish_reason=str(row.get("finish_reason", "")),
            length=sum(len(turn.text) for turn in turns if turn.speaker == "policy"),
            images=tuple(images) if isinstance(images := row.get("images"), list) else (),
        )
        if row["step"] > newest:
            newest = row["step"]
            last = []
        if row["step"] == newest:
            last.append(sample)
        firsts = by_step.setdefault(row["step"], {})
        if index not in firsts or sample.sample < firsts[index].sample:
            firsts[index] = sample
    return HeldOut(dict(sorted(by_step.items())), tuple(last))


def read_last_tokens(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read the completions of the last step in tokens.jsonl, at most MOST_COMPLETIONS. A token has `piece`, `chosen`
    (by the policy) and some of NUMBERS; `omitted` tokens are left out in the middle.
    """
    step = -1
    kept = list[dict[str, Any]]()
    for row in json_lines(path, notes):
        tokens = row.get("tokens")
        if not isinstance(tokens, list) or row["step"] < step:
            continue
        if row["step"] > step:
            step = row["step"]
            kept = []
        if len(kept) < MOST_COMPLETIONS:
            tokens, omitted = without_middle([one for one in tokens if isinstance(one, dict)], MOST_TOKENS)
            kept.append({**row, "tokens": tokens, "omitted": omitted})
    return kept


# ---- a run ----


@dataclass(frozen=True)
class RunRecords:
    """A run folder as data. steps: step to metrics; nonfinite: the step of each batch that was not finite."""

    path: Path
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    held_out: HeldOut = field(default_factory=HeldOut)
    checkpoints: tuple[str, ...] = ()
    nonfinite: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return one_line(run_name(self.path), 80)

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def metric_names(self) -> list[str]:
        """Return every metric that has at least one finite number, sorted."""
        return sorted(filter(self.points, set[str]().union(*self.steps.values())))

    def points(self, key: str) -> Points:
        """Return the metric by step, NaN where its line has null; [] when it never has a finite number."""
        found = [(step, to_float(line[key])) for step, line in self.steps.items() if key in line]
        return found if any(math.isfinite(value) for _, value in found) else []

    def finite(self, key: str) -> Points:
        """Return the metric by step, finite values only."""
        return [point for point in self.points(key) if math.isfinite(point[1])]

    def since_start(self, key: str) -> Points:
        """Return the metric by step since the run's start, finite values only: of a fork since its origin."""
        points = self.finite(key)
        return points[len(points) - len(since_start([step for step, _ in points], self.env)) :]

    def interval(self, key: str, step: int) -> tuple[float, float] | None:
        """Return a metric that is [low, high], at one step."""
        pair = self.steps.get(step, {}).get(key)
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        low = to_float(pair[0])
        high = to_float(pair[1])
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def setting(self, dotted: str) -> Any:
        """Return the value of config.yaml at `section.key`; None where there is none."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "config.yaml")


def run_name(folder: Path) -> str:
    """Return how tables call a run: by the name of its folder, of one of several seeds with the folder of those."""
    place = folder.resolve()
    return f"{place.parent.name}/{place.name}" if SEED.fullmatch(place.name) else place.name


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, by name."""
    return sorted(file.parent for file in folder.glob("*/config.yaml") if not file.parent.name.startswith("."))


def seed_runs(folder: Path) -> list[Path]:
    """Return the runs in the folder of a command with --seeds, by their seed; [] for a run, and for other folders."""
    if is_run(folder):
        return []
    seeds = {int(run.name[5:]): run for run in runs_in(folder) if SEED.fullmatch(run.name)}
    return [seeds[seed] for seed in sorted(seeds)]


def nearest_run(path: str | Path) -> str:
    """Return " Did you mean ...?" with a run beside `path`, or in runs/, of nearly that name; "" where none is near."""
    there = [*Path(path).parent.glob("*/config.yaml"), *Path("runs").glob("*/config.yaml")]
    others = [str(found.parent) for found in there if found.parent.resolve() != Path(path).resolve()]
    return did_you_mean(str(path), others)


def holds_runs(path: str | Path) -> bool:
    """Return whether a path that is not a run is a folder with runs in it, or PATH@STEP of one."""
    return bool(runs_in(_before_at(path)))


def _before_at(path: str | Path) -> Path:
    """Return the path that stands before the @ of PATH@STEP, or the path itself."""
    before, at, _ = os.fspath(path).rpartition("@")
    return Path(before) if at and not os.path.lexists(path) else Path(path)


def not_a_run(path: str | Path) -> str:
    """Return a sentence on a path that is not a run, with the runs that may be meant: those in it, the one that it is
    in, or one of nearly that name.
    """
    folder = _before_at(path)
    if there := runs_in(folder):
        seeds = seed_runs(folder)
        what = "the runs of several seeds" if seeds else "runs"
        names = join_truncated(run.name for run in there)
        return f"{folder} is not a run; it holds {what}: {names}. Name one of them, such as {[*seeds, *there][0]}."
    if not os.path.lexists(folder):
        return f"{folder} is not a run: it does not exist.{nearest_run(folder)}"
    for above in folder.parents:
        if is_run(above) and (above / "env.json").is_file():
            return f"{folder} is not a run; it is inside one: {above}."
    return f"{folder} is not a run: it has no config.yaml.{nearest_run(folder)}"


def read_run(run_dir: Path) -> RunRecords:
    """Read a run folder. Raises ValueError when it is not one or has no metrics yet."""
    from tinyrl.config.yaml_reader import parse_plain  # with yaml, which not every reader of records needs

    metrics = run_dir / "metrics.jsonl"
    notes = list[str]()
    if not (steps := read_steps(metrics, notes)):
        if not metrics.is_file() and not is_run(run_dir):
            raise ValueError(not_a_run(run_dir))
        raise ValueError(" ".join([f"{run_dir} has no finished step yet: see {metrics}.", *notes]))
    found: dict[str, dict[str, Any]] = {"config.yaml": {}, "env.json": {}}
    for name, parse in (("config.yaml", lambda text: parse_plain(text, "config.yaml")), ("env.json", json.loads)):
        try:
            if (run_dir / name).exists():
                found[name] = dict(parse((run_dir / name).read_bytes().decode("utf-8", "replace")))
        except (ValueError, TypeError, RecursionError):
            notes.append(f"{name} could not be read and is left out.")
    skipped = [path.stem.split("-")[1] for path in (run_dir / "nonfinite").glob("step-*-*.json")]
    return RunRecords(
        run_dir,
        steps,
        config=found["config.yaml"],
        env=found["env.json"],
        held_out=read_held_out(run_dir / "samples.jsonl", notes),
        checkpoints=tuple(sorted(path.name for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())),
        nonfinite=tuple(sorted(int(step) for step in skipped if step.isdecimal())),
        notes=tuple(notes),
    )
