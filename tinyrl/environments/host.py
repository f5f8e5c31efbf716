"""The host of a person's environment in its worker process: a function, tools, or a class; replies are checked.

Run by workers/worker.py, which is quick to start: nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyrl.environments import MAX_REWARD
from tinyrl.environments.calls import awaited, text_of
from tinyrl.environments.tool_use import Adapted, adapted
from tinyrl.workers.worker import parameters_of

MAX_TEXT_CHARS = 1 << 20  # of a reply, which is cut to a number of tokens later: this keeps megabytes from travelling

Checked = tuple[list[Any], list[tuple[int, str]]]


@dataclass
class Service:
    """What a worker serves: functions of the arguments by name, and facts about them for the run."""

    calls: dict[str, Callable[..., Checked]]
    facts: dict[str, Any]


def environment(objects: list[Any]) -> Service:
    """The service of `environment.use`: a respond function, or a class as TRL's trainers take it."""
    return _service(adapted(objects, as_tools=False), objects[0])


def tools(objects: list[Any]) -> Service:
    """The service of `environment.tools`."""
    return _service(adapted(objects, as_tools=True), None)


def agent(objects: list[Any]) -> Service:
    """The service of `environment.agent`: a function that plays an episode against an endpoint."""
    function = objects[0]
    if not callable(function):
        raise TypeError(f"is a {type(function).__name__}, not a function")
    known = parameters_of(function)
    missing = [name for name in known["required"] if name not in ("row", "base_url", "api_key", "model")]
    if missing:
        raise TypeError(f"takes {', '.join(missing)}; an agent is given row, base_url, api_key and model")

    def run(**arguments: list[Any]) -> Checked:
        given = {name: values[0] for name, values in arguments.items()}
        if known["parameters"] is not None:
            given = {name: value for name, value in given.items() if name in known["parameters"]}
        value = awaited([function(**given)])[0]
        if isinstance(value, BaseException):
            raise value
        return [_cut("" if value is None else text_of(value))], []

    return Service({"run": run}, {"whole_batch": True})


def _service(made: Adapted, function: Any) -> Service:
    opening, final_rewards = made.opening, made.final_rewards
    calls: dict[str, Callable[..., Checked]] = {
        "respond": lambda **arguments: checked(made.respond(**arguments), len(next(iter(arguments.values())))),
    }
    if opening is not None:
        calls["opening"] = lambda **arguments: ([_cut(text) for text in opening(**arguments)], [])
    if final_rewards is not None:
        calls["final_rewards"] = lambda **arguments: (final_rewards(**arguments), [])
    own = made.respond is function  # a person's respond function, called with what it takes
    facts = {
        "schemas": made.schemas() if made.tools else None,
        "opening": opening is not None,
        "final_rewards": final_rewards is not None,
        "rewards": own or final_rewards is not None,
        **(parameters_of(function) if own else {}),
    }
    return Service(calls, facts)


def checked(returned: Any, num_rows: int) -> Checked:
    """The replies of a call as JSON has them, [text, done, reward, invalid] or null a row, and (row, reason) of those
    that are none; an exception in the place of a reply is the reason. Raises TypeError or ValueError where there is not
    one for each row.
    """
    if not isinstance(returned, list | tuple):
        raise TypeError(f"returned {type(returned).__name__}, not a list with one reply for each episode")
    if len(returned) != num_rows:
        raise ValueError(f"returned a list of {len(returned)} for a batch of {num_rows}")
    pairs = [_reply(value) for value in returned]
    return [reply for reply, _ in pairs], [(row, problem) for row, (_, problem) in enumerate(pairs) if problem]


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:MAX_TEXT_CHARS]


def _reply(value: Any) -> tuple[list[Any] | None, str]:
    if value is None or isinstance(value, str):
        return (None if value is None else [_cut(value), False, 0.0, False]), ""
    if isinstance(value, Exception):
        return None, f"gave no answer: {value}"
    text, done, reward = (getattr(value, name, None) for name in ("text", "done", "reward"))
    if not isinstance(text, str) or not isinstance(done, bool):
        return None, f"answered with {type(value).__name__}, not with text, Reply(text, done, reward) or None"
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        shown = reward if isinstance(reward, float) and not math.isfinite(reward) else type(reward).__name__
        return None, f"gave the reward {shown}, not a number up to {MAX_REWARD:g}"
    return [_cut(text), done, float(reward), bool(getattr(value, "invalid", False))], ""
