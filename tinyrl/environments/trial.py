"""The trial of an environment before training, `tinyrl env test`: what it answers to scripted turns.

It uses the user's own rows and the worker process that a run would use; no model is loaded.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tinyrl.environments import Reply, Transcript
from tinyrl.environments.environment import Environment, kind_of_ours
from tinyrl.text import one_line, visible
from tinyrl.workers.calls import MAX_FAILED_SHARE, RowFailure

# ---- Scripted turns ----


NONSENSE = "qzx vvk 7# ~~ jjq"
UNKNOWN_TOOL = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'
NOT_JSON = '<tool_call>\n{"name": "no_such_tool", "arguments": {\n</tool_call>'
FIRST_WORDS = 8
SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "object": {}, "null": None}

Schema = dict[str, Any]


def asking_turn(built_in: str | None, schemas: list[Schema] | None, question: str) -> str | None:
    """A turn that an environment should answer: a search for the first words of the question, a cell of Python, or a
    call of the first tool. None where nothing is known of what it takes.
    """
    if built_in is not None:
        return kind_of_ours(built_in).asking_turn(first_words(question))
    return tool_call(schemas[0], question) if schemas else None


def tool_call(schema: Schema, question: str) -> str:
    """A call of a tool with an argument for each parameter that it requires; texts are the question's first words."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    known = parameters.get("properties", {})
    arguments = {name: _sample(known.get(name, {}), question) for name in parameters.get("required", [])}
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def first_words(question: str) -> str:
    """The first words of a question, as a query; of several lines those of the last that has any."""
    lines = [line for line in question.splitlines() if line.strip()]
    return " ".join((lines[-1] if lines else "").split()[:FIRST_WORDS])


def _sample(schema: Schema, question: str) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "array":
        return [_sample(schema.get("items", {}), question)]
    return SAMPLES[kind] if kind in SAMPLES else first_words(question)


# ---- What a function came to ----


CHARS_A_TOKEN = 4  # of English: no tokenizer is loaded
SHOWN_LINES, SHOWN_CHARS = 12, 200  # of what it printed, and of a failure
_YES = {True: "yes", False: "no", None: "-"}
SHOWN_REPLY = 600  # characters of the reply that is shown


@dataclass(frozen=True)
class Called:
    """One call: of what, how many rows, which failed, seconds."""

    what: str
    rows: int
    failures: list[RowFailure]
    seconds: float

    @property
    def failed(self) -> set[int]:
        return {failure.row for failure in self.failures}


Call = TypeVar("Call", bound=Called)


@dataclass(frozen=True)
class Batch(Called):
    """Which turns were answered, and what with (None: the episode is over); whether the same call gave the same again
    (None: it was not made again, since it had failed).
    """

    turns: list[str]
    replies: list[Reply | None]
    repeatable: bool | None

    @property
    def said(self) -> list[Reply]:
        return [reply for reply in self.replies if reply is not None and reply.text]

    @property
    def over(self) -> int:
        ended = {row for row, reply in enumerate(self.replies) if reply is None or reply.done}
        return len(ended - self.failed)

    @property
    def rewards(self) -> list[float]:
        return [reply.reward for reply in self.replies if reply is not None]


@dataclass
class Tried(Generic[Call]):
    """The calls of a person's function, and what it printed."""

    name: str
    batches: list[Call] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)  # lines, the last of them where there were many

    @property
    def failed_share(self) -> float:
        return sum(len(batch.failed) for batch in self.batches) / max(1, sum(batch.rows for batch in self.batches))

    @property
    def would_stop_a_run(self) -> bool:
        """More rows fail than a run tolerates (three batches like this in a row, and it stops)."""
        return self.failed_share > MAX_FAILED_SHARE

    def warnings(self) -> list[str]:
        if not self.would_stop_a_run:
            return []
        return [f"{self.failed_share:.0%} of the rows failed; a run stops after three batches like that"]

    def ending(self) -> list[str]:
        """The first failure, what was printed last, and the warnings, as lines."""
        lines = list[str]()
        if failure := next((failure for batch in self.batches for failure in batch.failures), None):
            lines += ["", f"first failure: row {failure.row + 1}: {visible(failure.reason)}"]
        if self.printed:
            last = [one_line(line, SHOWN_CHARS) for line in self.printed[-SHOWN_LINES:]]
            lines += ["", f"printed (the last {len(last)} lines):", *(f"  {line}" for line in last)]
        return lines + [f"warning: {warning}" for warning in self.warnings()]


@dataclass
class Trial(Tried[Batch]):
    """What an environment says at the end of the first prompt, and how much of a reply is read."""

    max_observation_tokens: int = 0
    opening: str | None = None

    def warnings(self) -> list[str]:
        found = [
            f"the same turns ({batch.what}) got other answers when it was asked again: a resumed run would not repeat "
            "itself. Draw random numbers from the `seed` of each episode alone"
            for batch in self.batches
            if batch.repeatable is False
        ][:1]
        if not any(batch.over for batch in self.batches):
            found.append("none of these turns ended an episode: without an end all go on to environment.max_turns")
        if not any(batch.said for batch in self.batches):
            found.append("it answered none of these turns, so no episode has a second one")
        longest = max((len(reply.text) for batch in self.batches for reply in batch.said), default=0)
        if longest > CHARS_A_TOKEN * self.max_observation_tokens:
            found.append(
                f"the longest reply has {longest:,} characters, some {longest // CHARS_A_TOKEN:,} tokens; what is over "
                f"environment.max_observation_tokens={self.max_observation_tokens} is cut off"
            )
        return found + super().warnings()


def try_environment(
    environment: Environment, prompts: list[Any], columns: dict[str, list[Any]], *, gold: list[str | None]
) -> Trial:
    """Ask a started environment about gold answers where all are known, turns that it should answer, nothing, nonsense
    and, where it has tools, bad calls. Raises ValueError where it lacks a column, or says no opening.
    """
    columns = {"seed": list(range(len(prompts))), **columns}
    trial = Trial(environment.describe(), max_observation_tokens=environment.max_observation_tokens)
    trial.opening = next(iter(environment.openings(prompts, {k: v for k, v in columns.items() if k != "seed"})), None)
    for what, turns in _scripts(environment, prompts, columns, gold).items():
        transcripts: list[Transcript] = [[{"role": "assistant", "content": turn}] for turn in turns]
        begun = time.perf_counter()
        answers = environment.respond(prompts, transcripts, columns)
        seconds = time.perf_counter() - begun
        same = None if answers.failures else environment.respond(prompts, transcripts, columns).values == answers.values
        trial.batches.append(Batch(what, len(turns), answers.failures, seconds, turns, answers.values, same))
    trial.printed = [line for worker in environment.workers for line in worker.printed.kept]
    return trial


def _scripts(
    environment: Environment, prompts: list[Any], columns: dict[str, list[Any]], gold: list[str | None]
) -> dict[str, list[str]]:
    """Turns by what they are, one a row."""
    own = columns.get("question", [None] * len(prompts))
    questions = [q if isinstance(q, str) else _text(prompt) for q, prompt in zip(own, prompts, strict=True)]
    scripts: dict[str, list[str]] = {}
    known = [answer for answer in gold if answer is not None]
    if len(known) == len(prompts):
        scripts["gold"] = known
    if environment.built_in is not None:
        scripts[environment.built_in] = [asking_turn(environment.built_in, None, q) or "" for q in questions]
    for schema in environment.schemas or []:
        scripts[f"call {schema['function']['name']}"] = [tool_call(schema, question) for question in questions]
    alike = {"nothing": "", "nonsense": NONSENSE}
    alike |= {"unknown tool": UNKNOWN_TOOL, "not JSON": NOT_JSON} if environment.schemas else {}
    return scripts | {what: [turn] * len(prompts) for what, turn in alike.items()}


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def render(trial: Trial) -> str:
    """A table of the calls, the first reply and failure, and the warnings."""
    width = max(8, *(len(one_line(batch.what, 30)) for batch in trial.batches))
    names = ("rows", "replies", "over", "invalid", "rewards", "failed", "ms a call", "repeatable")
    lines = [one_line(trial.name, SHOWN_CHARS), "", f"{'turns':{width}} " + " ".join(f"{n:>10}" for n in names)]
    for batch in trial.batches:
        invalid = sum(reply is not None and reply.invalid for reply in batch.replies)
        mean = f"{statistics.mean(batch.rewards):.4g}" if batch.rewards else "-"
        cells = (batch.rows, len(batch.said), batch.over, invalid, mean, len(batch.failed))
        shown = " ".join(f"{cell:>10}" for cell in (*cells, f"{batch.seconds * 1e3:.1f}"))
        lines.append(f"{one_line(batch.what, 30):{width}} {shown} {_YES[batch.repeatable]:>10}")
    if trial.opening:
        lines += ["", "at the end of the first prompt:", _quoted(trial.opening)]
    return "\n".join([*lines, *_first_reply(trial), *trial.ending()])


def _first_reply(trial: Trial) -> list[str]:
    """The first reply there is and what it answers: one that an episode goes on with, to a call, if possible."""
    said = [
        (reply.done, batch.what in ("gold", "nothing", "nonsense"), batch.what, turn, reply.text)
        for batch in trial.batches
        for turn, reply in zip(batch.turns, batch.replies, strict=True)
        if reply is not None and reply.text
    ]
    if not said:
        return []
    *_, what, turn, text = min(said, key=lambda each: each[:2])
    return ["", f"turn ({what}):", _quoted(turn), "reply:", _quoted(text)]


def _quoted(text: str) -> str:
    cut = f" ... [{len(text) - SHOWN_REPLY:,} more characters]" if len(text) > SHOWN_REPLY else ""
    return "\n".join(f"  {line}" for line in (visible(text[:SHOWN_REPLY]) + cut or "(nothing)").split("\n"))
