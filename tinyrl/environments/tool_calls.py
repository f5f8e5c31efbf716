"""Tool calls in a policy's turn: parse, check and execute them, and format the results.

A turn holds any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or its message was
parsed before (tasks/call_forms.py) and has a list `tool_calls`, with text for a call that could not be parsed. As in
serving engines, a call ends at the first closing tag, and text before `</think>` calls nothing. Any other call is
answered with CALL_FAILED and the reason.
"""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyrl.environments import Message, Reply
from tinyrl.workers.worker import Exited, awaited

CALL_FAILED = "This call failed:"
MAX_REASON_CHARS = 200  # of an exception's first line
OPEN, CLOSE, END_OF_THINKING = "<tool_call>", "</tool_call>", "</think>"
DECODER = json.JSONDecoder()

Tools = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; `problem`: why it cannot be executed, or empty."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse_json(decode: Callable[..., Any], *given: Any) -> Any:
    """Call a method of DECODER; JSON that is nested too deep is a ValueError too."""
    try:
        return decode(*given)
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None


def calls_of(message: Message) -> list[Call]:
    """Parse the calls of a policy's turn, in order and in linear time."""
    if message.get("tool_calls") is not None:
        given = copy.deepcopy(message["tool_calls"])
        return [Call(problem=entry) if isinstance(entry, str) else call_in(entry) for entry in given]
    text, calls = message["content"], []
    at = max(0, text.find(END_OF_THINKING))
    while (opened := text.find(OPEN, at)) >= 0:
        start = opened + len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            return [*calls, Call(problem=f"{OPEN} without {CLOSE}")]
        try:
            calls.append(call_in(parse_json(DECODER.decode, text[start:end])))
        except ValueError as error:
            calls.append(Call(problem=f"not JSON: {error}"))
        at = end + len(CLOSE)
    return calls


def call_in(entry: Any) -> Call:
    """Parse {"name", "arguments" or "parameters"}, or {"function": ...} with these. Absent, null or empty arguments are
    {}; arguments in text are JSON.
    """
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        return Call(problem="a call is an object with 'name' and 'arguments'")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        return Call(problem="the call has no 'name'")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(DECODER.decode, arguments.strip() or "null")
        except ValueError as error:
            return Call(name, problem=f"{name}: 'arguments' are not JSON: {error}")
    if not isinstance(arguments, dict | None):
        return Call(name, problem=f"{name}: 'arguments' must be an object")
    return Call(name, arguments or {})


def carry_out(episodes: Sequence[tuple[Tools, Sequence[Call]]]) -> list[list[Reply]]:
    """Execute the calls of each episode, in order; return a reply for each call.

    The first calls of all episodes come first, then the second ones, so that coroutines of different episodes wait
    together. An exception of a tool becomes a reply.
    """
    replies: list[list[Reply]] = [[] for _ in episodes]
    for turn in range(max((len(calls) for _, calls in episodes), default=0)):
        who = [index for index, (_, calls) in enumerate(episodes) if turn < len(calls)]
        begun = [_begin(episodes[index][0], episodes[index][1][turn]) for index in who]
        for index, value in zip(who, awaited(begun, return_exceptions=True), strict=True):
            if isinstance(value, BaseException):
                value = _failed(": ".join(filter(None, [type(value).__name__, str(value).strip()])))
            replies[index].append(value if isinstance(value, Reply) else Reply(text_of(value)))
    return replies


def _begin(tools: Tools, call: Call) -> Any:
    """Return a call's result (perhaps a coroutine), its exception, or the reply to one that cannot be executed."""
    if call.problem:
        return _failed(call.problem)
    if call.name not in tools:
        return _failed(f"there is no tool {call.name[: MAX_REASON_CHARS // 2]!r}; there are: {', '.join(tools)}")
    try:
        inspect.signature(tools[call.name]).bind(**call.arguments)
    except TypeError as error:
        return _failed(f"{call.name}: {error}")
    try:
        return tools[call.name](**call.arguments)
    except SystemExit as exit_:  # of a tool that would end the process of all episodes
        return Exited(f"sys.exit({exit_.code!r})")
    except Exception as error:  # noqa: BLE001 people's code may raise anything, and the policy reads it
        return error


def _failed(reason: str) -> Reply:
    return Reply(encodable(f"{CALL_FAILED} {reason.splitlines()[0][:MAX_REASON_CHARS]}"), invalid=True)


def joined(replies: Sequence[Reply]) -> Reply:
    """Join the replies to the calls of a turn, one below the other."""
    return Reply("\n".join(reply.text for reply in replies), invalid=any(reply.invalid for reply in replies))


def rows_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the row of each episode: its columns, and its prompt."""
    names = [*columns, "prompt"]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), prompts, strict=True)]


def text_of(value: Any) -> str:
    """Format a result: text as it is, JSON if possible, else str()."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict | list | tuple | int | float | None):
        plain = lambda inner: inner.tolist() if hasattr(inner, "tolist") else str(inner)  # noqa: E731
        try:
            value = json.dumps(value, ensure_ascii=False, default=plain)
        except (TypeError, ValueError):  # keys that are no text; a list that holds itself
            value = str(value)
    return encodable(str(value))


def encodable(text: str) -> str:
    """Return text that is valid UTF-8: surrogate pairs are joined, lone surrogates replaced."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
