"""Forms of tool calls: recognise how a model's chat template writes a call, and parse a policy's calls in that form.

Hermes' `<tool_call>{json}</tool_call>` is parsed by environments/tool_calls.py, other forms are parsed here; both from
the text of a turn, in which their markers stand also where they are special tokens ([TOOL_CALLS]).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.data.thoughts import without_thoughts
from tinyrl.environments import Message
from tinyrl.environments.tool_calls import CLOSE, DECODER, OPEN, ToolCall, call_in, parse_json, placed_calls
from tinyrl.models.tokens import template_text
from tinyrl.tasks.prompts import ANSWER, shared_length
from tinyrl.text import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

NAME = "look_up"
PARAMETER = "place"
VALUE = "Oslo"  # of the call that is rendered to see its form
_PLACE = {"type": "object", "properties": {PARAMETER: {"type": "string", "description": "A city."}}}
_TOOL = {"type": "function", "function": {"name": NAME, "description": "Look up.", "parameters": _PLACE}}
_FUNCTION = {"name": NAME, "arguments": {PARAMETER: VALUE}}
_CALL = {"id": "call00001", "type": "function", "function": _FUNCTION}  # Mistral's ids have nine characters
FUNCTION = "<function="
ARGUMENT = "<parameter="
HERMES = f"{OPEN}{{json}}{CLOSE}"
_BETWEEN = re.compile(r"(?:<\|python_tag\|>|[\s;])*")  # before a call, and between two
NULLS = ("null", "None")  # as JSON and chat templates write it
MAX_SCHEMA_DEPTH = 32  # of references that may lead in a circle
# Of a call in XML: one without arguments; the end of others; what follows it; the beginning and the end of an argument;
# such tags in a value.
_EMPTY_FUNCTION = re.compile(r"<function=[^<>\n]*>\s*(?P<function></function>)")
_FUNCTION_END = re.compile(r"</parameter>\s*(?P<function></function>)")
_AFTER_FUNCTION = re.compile(r"\s*(?:</tool_call>|<tool_call>|<function=|\Z)")
_CLOSING = re.compile(r"\s*</tool_call>")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^<>\n]*)>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=[^<>\n]*>|\Z)")
_TAG = re.compile(r"(?m)^[ \t]*(?P<opens><parameter=[^<>\n]*>)(?![ \t]+\S)|</parameter>")


@dataclass(frozen=True)
class CallForm:
    """The form in which a policy writes tool calls.

    name      for people
    split     (text without thoughts, tools) -> the places of calls, in order, and the calls
    """

    name: str
    split: Callable[[str, list[Any]], tuple[list[slice], list[ToolCall]]]

    @property
    def in_text(self) -> bool:
        """Return whether environments parse the calls themselves, from the text of a turn."""
        return self.name == HERMES

    def read(self, text: str, *, tools: list[Any] | None) -> tuple[str, list[ToolCall]]:
        """Split a policy's turn into its text before and behind the calls, and the calls. text: with the thought that
        the prompt has opened; without the stop string that ended it, if that is so.
        """
        places, calls = self.split(without_thoughts(text), tools or [])
        if not places:
            return text, calls
        starts = [0, *(place.stop for place in places)]
        ends = [*(place.start for place in places), len(text)]
        first, *others = (text[start:end] for start, end in zip(starts, ends, strict=True))
        return "".join([first, *(piece for piece in others if piece.strip())]), calls

    def message(self, text: str, *, tools: list[Any] | None) -> Message:
        """Return a policy's turn for an environment, with the calls that it does not parse from the text itself. A call
        that cannot be executed is its problem, as text.
        """
        calls = [] if self.in_text else self.read(text, tools=tools)[1]
        entries = [
            each.problem or {"type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
        return {"role": "assistant", "content": text, **({"tool_calls": entries} if entries else {})}


def call_form(tokenizer: Tokenizer, variables: dict[str, Any]) -> CallForm:
    """Return the form in which a model's chat template renders a call; Hermes' if it renders none. Raises ValueError
    for an unknown form.
    """
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": ANSWER}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    variables = {**variables, "tools": [_TOOL]}
    plain, text = (template_text(tokenizer, [user, last], variables=variables) for last in (answer, called))
    text = text[shared_length(plain, text) :]  # begins where the text of another answer does

    def holds_the_call(at: int) -> bool:
        with suppress(ValueError):
            value, _ = parse_json(DECODER.raw_decode, text, at)
            return call_in(value[0] if isinstance(value, list) and value else value) == ToolCall(**_FUNCTION)
        return False

    if VALUE not in text:
        return CallForm(HERMES, _hermes_calls)
    if f"{FUNCTION}{NAME}>" in text and f"{ARGUMENT}{PARAMETER}>" in text:
        return CallForm(f"{FUNCTION}NAME>{ARGUMENT}NAME>...", _xml_calls)
    start = next((at for at, sign in enumerate(text) if sign in "[{" and holds_the_call(at)), None)
    if start is None:
        raise ValueError(
            f"the model's chat template writes calls of tools in a form that is not known: {truncate(text, 200)!r}; "
            "describe the tools in the prompt and answer with environment.name=FILE.py:FUNCTION"
        )
    marker = text[:start].strip()
    if marker == OPEN and text[start] == "{":
        return CallForm(HERMES, _hermes_calls)
    name = f"{marker}{{json}}" if text[start] == "{" else f"{marker}[{{json}}]"
    return CallForm(name, lambda text, tools: _json_calls(text, marker))


# ---- the forms ----


def _hermes_calls(text: str, tools: list[Any]) -> tuple[list[slice], list[ToolCall]]:
    placed = placed_calls(text)
    return [place for place, _ in placed], [call for _, call in placed]


def _json_calls(text: str, marker: str) -> tuple[list[slice], list[ToolCall]]:
    """Parse objects, or lists of them, each behind a marker. Without a marker the whole answer is objects (Llama 3),
    and JSON without a name is an answer.
    """
    calls = list[ToolCall]()
    places = list[slice]()
    at = 0
    while True:
        begun = at
        if marker:
            begun = text.find(marker, at)
            if begun < 0:
                return places, calls
            at = begun + len(marker)
        between = _BETWEEN.match(text, at)
        assert between is not None, "it matches nothing, too"
        at = between.end()
        if not marker and text[at : at + 1] not in ("{", "["):
            return places, calls
        try:
            value, at = parse_json(DECODER.raw_decode, text, at)
        except ValueError as error:
            if marker or '"name"' in text[at:]:
                calls.append(ToolCall(problem=f"not JSON: {error}"))
                places.append(slice(begun, at))
            if not marker:
                return places, calls
            continue
        entries = value if isinstance(value, list) else [value]
        if not marker and not all(isinstance(entry, dict) and {"name", "function"} & {*entry} for entry in entries):
            return places, calls
        calls += map(call_in, entries)
        places.append(slice(begun, at))


def _xml_calls(text: str, tools: list[Any]) -> tuple[list[slice], list[ToolCall]]:
    """Parse Qwen-Coder's <function=NAME> with a <parameter=NAME> for each argument, as text of its type in `tools`.

    A text argument may hold the same tags. One that closes counts only where the next opening, or the end of the
    function or of the calls, follows it, and a parameter opens only at the function's beginning and behind such an end.
    A call that may also be read otherwise is one that fails: no argument is ever shortened.
    """
    calls = list[ToolCall]()
    places = list[slice]()
    at = 0
    while (opened := text.find(FUNCTION, at)) >= 0:
        begun = text.rfind(OPEN, at, opened)
        begun = begun if begun >= 0 and not text[begun + len(OPEN) : opened].strip() else opened
        end = _function_end(text, opened)
        if end is None:
            calls.append(ToolCall(problem=f"{FUNCTION}...> without </function>"))
            places.append(slice(begun, len(text)))
            break
        at = end.end()
        closing = _CLOSING.match(text, at)
        places.append(slice(begun, at if closing is None else closing.end()))
        following = text.find(FUNCTION, at)
        between = text[at : following if following >= 0 else len(text)]
        if "</parameter>" in between or "</function>" in between:
            calls.append(ToolCall(problem=f"it is not clear where the text of {FUNCTION}...> ends"))
        else:
            calls.append(_typed(_xml_call(text[opened + len(FUNCTION) : end.start("function")]), tools))
    return places, calls


def _function_end(text: str, opened: int) -> re.Match[str] | None:
    """Return where a function ends: at once, or at the first </function> behind a parameter's end that the end of the
    calls or another call follows; else at the only one. None if there is none, or several.
    """
    if empty := _EMPTY_FUNCTION.match(text, opened):
        return empty
    ends = list[re.Match[str]]()
    for end in _FUNCTION_END.finditer(text, opened):
        if _AFTER_FUNCTION.match(text, end.end()):
            return end
        ends.append(end)
    return ends[0] if len(ends) == 1 else None


def _xml_call(written: str) -> ToolCall:
    """Parse NAME>, and its parameters as texts, up to </function>."""
    name, _, body = written.rstrip().partition(">")
    name = name.strip()
    arguments = dict[str, Any]()
    at = 0
    while at < len(body):
        start = _PARAMETER.match(body, at)
        if start is None:
            found = truncate(body[at:].strip(), 60)
            return ToolCall(name, problem=f"{name}: there is text outside of {ARGUMENT}...>: {found!r}")
        end = _PARAMETER_END.search(body, start.end())
        key = start["name"].strip()
        value = body[start.end() : end.start() if end else len(body)]
        if end is None or _holds_an_open_parameter(value):
            return ToolCall(name, problem=f"{name}: it is not clear where the parameter '{key}' ends")
        if key in arguments:
            return ToolCall(name, problem=f"{name}: the parameter '{key}' is given twice")
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
        at = end.end()
    return call_in({"name": name, "arguments": arguments})


def _holds_an_open_parameter(value: str) -> bool:
    """Return whether a line of a value opens a parameter that the value does not close, so that the end that was found
    may be that one's.
    """
    opened = 0
    for tag in _TAG.finditer(value):
        opened = opened + 1 if tag["opens"] else max(0, opened - 1)
    return opened > 0


def _typed(call: ToolCall, tools: list[Any]) -> ToolCall:
    """Parse arguments in text as JSON where the schema of the tool's parameter does not allow this text, or names null
    and the text is that.
    """
    parsed = dict(call.arguments)
    with suppress(AttributeError, LookupError, TypeError):  # a client may send anything as tools
        functions = {each["name"]: each for each in (tool.get("function", tool) for tool in tools)}
        parameters = functions[call.name]["parameters"]
        for key, value in call.arguments.items():
            schema = parameters["properties"].get(key, True)
            text = str(value)
            bare = text.strip()
            is_null = bare in NULLS and names_null(schema, within=parameters)
            if is_null or not allows_text(schema, text, within=parameters):
                with suppress(ValueError, RecursionError):
                    parsed[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(bare, bare))
    return ToolCall(call.name, parsed, call.problem)


def allows_text(schema: Any, text: str, *, within: dict[str, Any], depth: int = 0) -> bool:
    """Return whether a JSON schema allows a text as a value, by its type, enum, const, anyOf, oneOf, allOf and $ref
    (to a place `within` another schema). What it does not restrict, it allows.
    """
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        return schema is not False
    if "$ref" in schema and not allows_text(_referred(schema, within), text, within=within, depth=depth + 1):
        return False
    kinds = schema.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    if ("enum" in schema and text not in schema["enum"]) or ("const" in schema and schema["const"] != text):
        return False
    for name, needed in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        options = schema.get(name)
        if options and not needed(allows_text(each, text, within=within, depth=depth + 1) for each in options):
            return False
    return True


def names_null(schema: Any, *, within: dict[str, Any]) -> bool:
    """Return whether a JSON schema names null: by its type, `nullable`, enum or const, or in one of its parts."""
    waiting = [schema]
    referred = set[str]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        kinds = part.get("type", [])
        by_type = "null" in ([kinds] if isinstance(kinds, str) else kinds) or part.get("nullable") is True
        by_value = None in part.get("enum", []) or part.get("const", "") is None
        if by_type or by_value:
            return True
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += part.get(name, [])
        if "$ref" in part and str(part["$ref"]) not in referred:
            referred.add(str(part["$ref"]))
            waiting.append(_referred(part, within))
    return False


def _referred(schema: dict[str, Any], within: dict[str, Any]) -> Any:
    """Return the schema that a $ref names, a place `within` another schema; {} if there is none."""
    target: Any = within
    for name in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
        target = target.get(name, {}) if isinstance(target, dict) else {}
    return target
