"""Tool calls in a policy's turn: parse, check and execute them, and format the results.

A turn holds any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or its message was
parsed before (tasks/call_forms.py) and has a list `tool_calls`, with text for a call that could not be parsed. As in
serving engines, a call ends at the first closing tag, and thoughts call nothing (text.without_thoughts). Any other call
is answered with CALL_FAILED and the reason.

A call that fails is the policy's fault (`Reply.invalid`: it cannot be executed, or the tool refused it by a ValueError)
or the tool's (`Reply.tool_error`: any other exception, such as that of a server that is down).
"""

import copy
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tinyrl.data.thoughts import without_thoughts
from tinyrl.environments import DropEpisode, Message, Reply
from tinyrl.workers.values import message_of
from tinyrl.workers.worker import Exited, awaited, is_ours

CALL_FAILED = "This call failed:"
MAX_REASON_CHARS = 200  # of an exception's first line
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
DECODER = json.JSONDecoder()

# ValueErrors that a tool does not raise on purpose: what its server answered could not be read.
UNREADABLE = (json.JSONDecodeError, UnicodeError)

ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-fA-F]{4,}(?=[ >])")  # in a default repr: <game.Thing object at 0x7f...>

Tools = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class ToolCall:
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


def calls_of(message: Message) -> list[ToolCall]:
    """Parse the calls of a policy's turn, in order and in linear time."""
    if message.get("tool_calls") is not None:
        given = copy.deepcopy(message["tool_calls"])
        return [ToolCall(problem=entry) if isinstance(entry, str) else call_in(entry) for entry in given]
    return [call for _, call in placed_calls(without_thoughts(message["content"]))]


def placed_calls(text: str) -> list[tuple[slice, ToolCall]]:
    """Parse the calls of a text without thoughts, each with its place."""
    calls = list[tuple[slice, ToolCall]]()
    at = 0
    while (opened := text.find(OPEN, at)) >= 0:
        start = opened + len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            return [*calls, (slice(opened, len(text)), ToolCall(problem=f"{OPEN} without {CLOSE}"))]
        try:
            call = call_in(parse_json(DECODER.decode, text[start:end]))
        except ValueError as error:
            call = ToolCall(problem=f"not JSON: {error}")
        at = end + len(CLOSE)
        calls.append((slice(opened, at), call))
    return calls


def call_in(entry: Any) -> ToolCall:
    """Parse {"name", "arguments" or "parameters"}, or {"function": ...} with these. Absent, null or empty arguments are
    {}; arguments in text are JSON.
    """
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        return ToolCall(problem="a call is an object with 'name' and 'arguments'")
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        return ToolCall(problem="the call has no 'name'")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(DECODER.decode, arguments.strip() or "null")
        except ValueError as error:
            return ToolCall(name, problem=f"{name}: 'arguments' are not JSON: {error}")
    if not isinstance(arguments, dict | None):
        return ToolCall(name, problem=f"{name}: 'arguments' must be an object")
    return ToolCall(name, arguments or {})


def carry_out(episodes: Sequence[tuple[Tools, Sequence[ToolCall]]]) -> list[list[Reply] | DropEpisode]:
    """Execute the calls of each episode, in order; return a reply for each call, or the DropEpisode that one raised.

    The first calls of all episodes come first, then the second ones, so that coroutines of different episodes wait
    together. Any other exception of a tool becomes a reply.
    """
    replies: list[list[Reply]] = [[] for _ in episodes]
    dropped: dict[int, DropEpisode] = {}
    for turn in range(max((len(calls) for _, calls in episodes), default=0)):
        who = [index for index, (_, calls) in enumerate(episodes) if turn < len(calls) and index not in dropped]
        begun = [_begin(episodes[index][0], episodes[index][1][turn]) for index in who]
        for index, value in zip(who, awaited(begun, return_exceptions=True), strict=True):
            if isinstance(value, DropEpisode):
                dropped[index] = value
            elif isinstance(value, BaseException):
                replies[index].append(_raised(value))
            else:
                replies[index].append(_reply_of(value))
    return [dropped.get(index, of_calls) for index, of_calls in enumerate(replies)]


def _begin(tools: Tools, call: ToolCall) -> Any:
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
        arguments = typed_arguments(tools[call.name], call.arguments)
    except ValueError as error:
        return _failed(f"{call.name}: {error}")
    try:
        return tools[call.name](**arguments)
    except Exception as error:  # noqa: BLE001 user code may raise anything, and the policy reads it
        return error
    except BaseException as error:  # of a tool that would end the process of all episodes
        if is_ours(error):
            raise
        return Exited.by(error)


def _reply_of(value: Any) -> Reply:
    """Return the reply to a call that gave this value; that it failed, where the value cannot be turned into text, or
    is a Reply that rewards or ends what only a respond function can.
    """
    if isinstance(value, Reply):
        if value.reward is None and not value.done:
            return value
        reason = "a tool returned a Reply with a reward or done=True, which only environment.name=FILE.py:RESPOND has"
        return replace(_failed(reason), invalid=False, tool_error=True)
    try:
        return Reply(text_of(value))
    except Exception as error:  # noqa: BLE001 user code may raise anything, in __str__ and in tolist too
        return _raised(error)


def typed_arguments(tool: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments, as JSON has them, to the types that a tool's hints name: an Enum from its value, 2 for "2"
    where a whole number is asked for. Raises ValueError, naming the parameter, for one that is of no such type.
    """
    types = _hinted_types(inspect.unwrap(getattr(tool, "__func__", tool)))
    converted = dict(arguments)
    for name, value in arguments.items():
        if name in types:
            try:
                converted[name] = types[name].validate_python(value)
            except ValueError as error:
                reasons: Any = getattr(error, "errors", list)()
                raise ValueError(f"{name}: {reasons[0]['msg'] if reasons else error}") from None
    return converted


@functools.lru_cache(maxsize=1024)
def _hinted_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what validates a function's parameters by their type hints, but for types that pydantic does not know."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a name that is known to type checkers alone
        hints = {}
    hints.pop("return", None)
    if not hints:
        return {}
    from pydantic import (
        PydanticSchemaGenerationError,
        PydanticUserError,
        TypeAdapter,
    )  # takes longer than all else here

    types = {}
    for name, hint in hints.items():
        with suppress(PydanticSchemaGenerationError, PydanticUserError):
            types[name] = TypeAdapter(hint)
    return types


def _raised(error: BaseException) -> Reply:
    """Return the reply to a call whose tool raised an exception."""
    refused = isinstance(error, ValueError) and not isinstance(error, UNREADABLE)
    reply = _failed(": ".join(filter(None, [type(error).__name__, without_addresses(message_of(error)).strip()])))
    return replace(reply, invalid=refused, tool_error=not refused)


def _failed(reason: str) -> Reply:
    return Reply(encodable(f"{CALL_FAILED} {reason.splitlines()[0][:MAX_REASON_CHARS]}"), invalid=True)


def joined(replies: list[Reply] | DropEpisode) -> Reply | DropEpisode | None:
    """Join the replies to the calls of a turn: the results of several, and their texts one below the other. None: it
    called nothing.
    """
    if isinstance(replies, DropEpisode):
        return replies
    if not replies:
        return None
    texts = [reply.text for reply in replies]
    return Reply(
        "\n".join(texts),
        invalid=any(reply.invalid for reply in replies),
        results=tuple(texts) if len(texts) > 1 else (),
        tool_error=any(reply.tool_error for reply in replies),
    )


def rows_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the row of each episode: its columns, and its prompt."""
    names = [*columns, "prompt"]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), prompts, strict=True)]


def text_of(value: Any) -> str:
    """Format a result: text as it is, JSON if possible, else str() without addresses. Raises ValueError for an image,
    what a value's own methods raise, and RecursionError for one that is nested too deep.
    """
    if hasattr(value, "getexif"):  # PIL's
        raise ValueError(f"the result is an image ({type(value).__name__}), and a tool's result is text")
    if isinstance(value, str):
        return encodable(str(value))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict | list | tuple | int | float | None):
        try:
            value = json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError):  # keys that are not text; a list that holds itself
            value = without_addresses(str(value))
    else:
        value = without_addresses(str(value))
    return encodable(value)


def _plain(value: Any) -> Any:
    """Return a value that JSON does not have as one that it has."""
    return value.tolist() if hasattr(value, "tolist") else without_addresses(str(value))


def without_addresses(text: str) -> str:
    """Return the text of an object without the addresses of default reprs: another process has others."""
    return ADDRESS.sub("", text)


def encodable(text: str) -> str:
    """Return text that is valid UTF-8: surrogate pairs are joined, lone surrogates replaced."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
