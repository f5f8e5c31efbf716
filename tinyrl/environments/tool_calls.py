"""Calls of tools in a policy's turn: found, checked, carried out, and what each is answered with, as text.

A turn holds any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or its message has
been read already (tasks/call_forms.py) and brings a list `tool_calls`, with text for a call that could not be read. As
serving engines do, a call ends at the first closing tag, and what stands before `</think>` calls nothing. Whatever is
not such a call is answered with CALL_FAILED and why.
"""

import contextlib
import copy
import functools
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyrl.environments import Message, Reply

CALL_FAILED = "This call failed:"
MAX_REASON_CHARS = 200  # of what an exception says, of which the policy reads the first line
MAX_REPLY_CHARS = 100_000  # it is cut to a number of tokens later; this keeps a tool's megabytes from travelling
MAX_AT_ONCE = 64  # coroutines awaited together, of different episodes
OPEN, CLOSE, END_OF_THINKING = "<tool_call>", "</tool_call>", "</think>"

Tools = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it. `problem` is why it cannot be carried out, and empty where it can."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """What a call is answered with. `failed`: it was not a valid call, or the tool raised."""

    text: str
    failed: bool = False


class InvalidCall(ValueError):
    """A call that no tool can carry out."""


def calls_of(message: Message) -> list[Call]:
    """The calls of a policy's turn, in order. Time is linear in the length of the text."""
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
            calls.append(call_in(_parsed(text[start:end])))
        except ValueError as error:
            calls.append(Call(problem=f"not JSON: {error}"))
        at = end + len(CLOSE)
    return calls


def _parsed(text: str) -> Any:
    """A value of JSON. ValueError where it is none: also for NaN and Infinity, which Python's reader takes."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None


def refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a value of JSON")


def call_in(entry: Any) -> Call:
    """A call from {"name", "arguments"} (or "parameters"), or from {"function": ...} with these, as messages have it.
    Arguments that are absent, null or empty are none.
    """
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        return Call(problem="a call is an object with 'name' and 'arguments'")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        return Call(problem="the call has no 'name'")
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments.strip() or "null")
        except ValueError as error:
            return Call(name, problem=f"{name}: 'arguments' are not JSON: {error}")
    if not isinstance(arguments, dict | None):
        return Call(name, problem=f"{name}: 'arguments' must be an object")
    return Call(name, arguments or {})


def carry_out(episodes: Sequence[tuple[Tools, Sequence[Call]]]) -> list[list[Result]]:
    """The results of each episode's calls, which are made in order: (tools, calls) of each -> results, one a call.

    First calls of all episodes come first, then second ones, and so on, so that coroutines of different episodes wait
    together. What a tool raises is answered, not raised.
    """
    results: list[list[Result]] = [[] for _ in episodes]
    for turn in range(max((len(calls) for _, calls in episodes), default=0)):
        who = [index for index, (_, calls) in enumerate(episodes) if turn < len(calls)]
        returned = awaited([_begin(episodes[index][0], episodes[index][1][turn]) for index in who])
        for index, value in zip(who, returned, strict=True):
            results[index].append(_result(episodes[index][1][turn].name, value))
    return results


def _begin(tools: Tools, call: Call) -> Any:
    """What a call returned (a coroutine, perhaps), or the exception it came to."""
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 people's code may raise anything, and the policy is told
        return error


def reply(results: Sequence[Result]) -> Reply:
    """One reply to all calls of a turn: their results, one below the other."""
    text = "\n".join(result.text for result in results)
    return Reply(text[:MAX_REPLY_CHARS], invalid=any(result.failed for result in results))


def rows_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """What each episode started from: the columns of its row, and its prompt."""
    names = [*columns, "prompt"]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), prompts, strict=True)]


def awaited(values: list[Any]) -> list[Any]:
    """The values, coroutines among them finished; an exception in the place of one that raised."""
    waiting = [index for index, value in enumerate(values) if inspect.isawaitable(value)]
    for start in range(0, len(waiting), MAX_AT_ONCE):
        some = waiting[start : start + MAX_AT_ONCE]
        finished = _loop().run_until_complete(_together([values[index] for index in some]))
        for index, value in zip(some, finished, strict=True):
            values[index] = value
    return values


async def _together(awaitables: list[Any]) -> list[Any]:
    import asyncio  # most tools are not coroutines, and it is slower to import than all the rest here

    return await asyncio.gather(*awaitables, return_exceptions=True)


@functools.cache
def _loop() -> Any:
    """One event loop for the process: connections that a tool keeps belong to the loop they were opened in."""
    import asyncio

    return asyncio.new_event_loop()


def _result(name: str, value: Any) -> Result:
    if not isinstance(value, BaseException):
        try:
            return Result(text_of(value))
        except Exception as error:  # noqa: BLE001 a value's own __str__ may raise anything
            value = error
    if isinstance(value, InvalidCall):
        return Result(_sentence(str(value)), failed=True)
    _show_once(name, value)
    said = _said(value)
    return Result(_sentence(f"{type(value).__name__}: {said}" if said else type(value).__name__), failed=True)


def _sentence(reason: str) -> str:
    return encodable(f"{CALL_FAILED} {reason.splitlines()[0][:MAX_REASON_CHARS]}")


def _said(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # noqa: BLE001 an exception's own __str__ may raise anything
        return ""


_SHOWN: set[tuple[str, type]] = set()


def _show_once(name: str, error: BaseException) -> None:
    """Print where a tool raised, once for each kind of error: its author sees no other sign of a bug."""
    if (name, type(error)) not in _SHOWN:
        _SHOWN.add((name, type(error)))
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the tool may have closed or replaced it
            traceback.print_exception(error, file=sys.stderr)


def text_of(value: Any) -> str:
    """A result as the policy reads it: text as it is, JSON where it can be, else what str() makes of it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict | list | tuple | int | float | None):
        try:
            value = json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError):  # keys that are no text; a list that holds itself
            value = str(value)
    return encodable(str(value)[:MAX_REPLY_CHARS])


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def encodable(text: str) -> str:
    """Text that can be written as UTF-8: halves of a surrogate pair are joined, or replaced where one is alone."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
