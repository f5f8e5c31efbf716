"""Tool calls in a policy's turn: parse, check and execute them, and format the results.

A turn holds any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or its message was
parsed before (tasks/call_forms.py) and has a list `tool_calls`, with text for a call that could not be parsed. As in
serving engines, a call ends at the first closing tag, and text before `</think>` calls nothing. Any other call is
answered with CALL_FAILED and the reason.
"""

import contextlib
import copy
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyrl.environments import Message, Reply

CALL_FAILED = "This call failed:"
MAX_REASON_CHARS = 200  # of an exception's first line
MAX_REPLY_CHARS = 100_000  # it is cut to a number of tokens later; this keeps a tool's megabytes from travelling
MAX_AT_ONCE = 64  # coroutines awaited together, of different episodes
OPEN, CLOSE, END_OF_THINKING = "<tool_call>", "</tool_call>", "</think>"

Tools = Mapping[str, Callable[..., Any]]
_LOOP = list[Any]()  # one event loop for the process: a tool's open connections belong to the loop they were opened in
_SHOWN = set[tuple[str, type]]()  # kinds of errors that were printed


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; `problem`: why it cannot be executed, or empty."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class InvalidCall(ValueError):
    """A call that no tool can execute."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a value of JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)  # NaN and Infinity, which Python's parser takes, are no JSON


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
        returned = awaited([_begin(episodes[index][0], episodes[index][1][turn]) for index in who])
        for index, value in zip(who, returned, strict=True):
            replies[index].append(_reply_to(episodes[index][1][turn].name, value))
    return replies


def _begin(tools: Tools, call: Call) -> Any:
    """Return what a call returned (a coroutine, perhaps), or its exception."""
    try:
        if call.problem:
            raise InvalidCall(call.problem)
        if call.name not in tools:
            raise InvalidCall(f"there is no tool {call.name[: MAX_REASON_CHARS // 2]!r}; there are: {', '.join(tools)}")
        try:
            inspect.signature(tools[call.name]).bind(**call.arguments)
        except TypeError as error:
            raise InvalidCall(f"{call.name}: {error}") from None
        return tools[call.name](**call.arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 people's code may raise anything, and the policy reads it
        return error


def _reply_to(name: str, value: Any) -> Reply:
    if not isinstance(value, BaseException):
        try:
            return Reply(text_of(value))
        except Exception as error:  # noqa: BLE001 a value's own __str__ may raise anything
            value = error
    kind, reason = type(value), ""
    with contextlib.suppress(Exception):  # an exception's own __str__ may raise anything
        reason = str(value).strip()
    if kind is not InvalidCall:
        reason = f"{kind.__name__}: {reason}" if reason else kind.__name__
        if (name, kind) not in _SHOWN:  # once for each kind of error: its author sees no other sign of a bug
            _SHOWN.add((name, kind))
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the tool may have closed or replaced it
                traceback.print_exception(value, file=sys.stderr)
    return Reply(encodable(f"{CALL_FAILED} {reason.splitlines()[0][:MAX_REASON_CHARS]}"), invalid=True)


def joined(replies: Sequence[Reply]) -> Reply:
    """Join the replies to the calls of a turn, one below the other."""
    text = "\n".join(reply.text for reply in replies)
    return Reply(text[:MAX_REPLY_CHARS], invalid=any(reply.invalid for reply in replies))


def rows_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the row of each episode: its columns, and its prompt."""
    names = [*columns, "prompt"]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), prompts, strict=True)]


def awaited(values: list[Any]) -> list[Any]:
    """Replace coroutines by their results, or by the exceptions they raise."""
    waiting = [index for index, value in enumerate(values) if inspect.isawaitable(value)]
    for start in range(0, len(waiting), MAX_AT_ONCE):
        some = waiting[start : start + MAX_AT_ONCE]
        for index, value in zip(some, _gather([values[index] for index in some]), strict=True):
            values[index] = value
    return values


def _gather(awaitables: list[Any]) -> list[Any]:
    import asyncio  # most tools are not coroutines, and it is slower to import than all the rest here

    async def together() -> list[Any]:
        return await asyncio.gather(*awaitables, return_exceptions=True)

    if not _LOOP:
        _LOOP.append(asyncio.new_event_loop())
    return _LOOP[0].run_until_complete(together())


def text_of(value: Any) -> str:
    """Format a result: text as it is, JSON if possible, else str()."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict | list | tuple | int | float | None):
        plain = lambda inner: inner.tolist() if hasattr(inner, "tolist") else str(inner)  # noqa: E731
        try:
            value = json.dumps(value, ensure_ascii=False, default=plain)
        except (TypeError, ValueError, RecursionError):  # keys that are no text; a list that holds itself
            value = str(value)
    return encodable(str(value)[:MAX_REPLY_CHARS])


def encodable(text: str) -> str:
    """Return text that is valid UTF-8: surrogate pairs are joined, lone surrogates replaced."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
