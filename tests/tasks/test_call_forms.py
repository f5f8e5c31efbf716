"""Forms of tool calls: recognised from what a chat template renders, and read from what a policy sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AddedToken

from tests.tiny_models import EOS, tiny_tokenizer
from tinyrl.environments.tool_calls import ToolCall, calls_of
from tinyrl.models.tokens import token_ids
from tinyrl.tasks.call_forms import call_form
from tinyrl.tasks.turn_text import turn_text

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}CALLS<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen 2.5 and 3, Llama 3.1, Mistral 7B v0.3, Qwen3-Coder, Granite 3 write them.
HERMES = "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
LLAMA = (
    "{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)
MISTRAL = (
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
)
CODER = (
    "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
GRANITE = "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
SPECIAL = {MISTRAL: "[TOOL_CALLS]", LLAMA: "<|python_tag|>"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "nullable": True}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "show", "parameters": {"properties": {"text": {"type": "string"}}}}},
]
ADDED, SHOW = ToolCall("add", {"a": 1, "b": 2}), ToolCall("show", {"text": "12"})


def tokenizer_of(calls: str | None, *, special: str | None = None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("CALLS", calls or "")
    if marker := special or SPECIAL.get(calls or ""):
        tokenizer.add_tokens(AddedToken(marker, special=True), special_tokens=True)
    return tokenizer


def turn_of(tokenizer: Any, written: str) -> str:
    return turn_text(tokenizer, token_ids(tokenizer, written + EOS))


def read(tokenizer: Any, written: str) -> tuple[str, list[ToolCall]]:
    return call_form(tokenizer, {}).read(turn_of(tokenizer, written), tools=TOOLS)


ONE, OTHER = '{"name": "add", "KEY": {"a": 1, "b": 2}}', '{"name": "show", "KEY": {"text": "12"}}'
IN_XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
OTHER_IN_XML = "<function=show>\n<parameter=text>\n12\n</parameter>\n</function>"


def written(form: str, key: str = "arguments") -> str:
    return form.replace("ONE", ONE).replace("OTHER", OTHER).replace("KEY", key)


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (HERMES, written("So: <tool_call>\nONE\n</tool_call>\n<tool_call>OTHER</tool_call>"), "So: ", [ADDED, SHOW]),
        (HERMES, written("<tool_call>?</think>\n<tool_call>ONE</tool_call>"), "<tool_call>?</think>\n", [ADDED]),
        (LLAMA, written("ONE", "parameters"), "", [ADDED]),
        (LLAMA, written("<|python_tag|>ONE; OTHER", "parameters"), "", [ADDED, SHOW]),
        (LLAMA, '{"answer": 3}', None, []),
        (LLAMA, written("It is ONE."), None, []),
        (MISTRAL, written("[TOOL_CALLS] [ONE, OTHER]"), "", [ADDED, SHOW]),
        (MISTRAL, written("see [1] [TOOL_CALLS][ONE]"), "see [1] ", [ADDED]),
        (GRANITE, written("<|tool_call|>[ONE,OTHER]"), "", [ADDED, SHOW]),
        (CODER, f"Well.\n<tool_call>\n{IN_XML}\n</tool_call>\n<tool_call>\n{OTHER_IN_XML}\n</tool_call>", "Well.\n",
         [ADDED, SHOW]),
        (CODER, IN_XML, "", [ADDED]),  # as it often forgets to open
        (CODER, "<function=add>\n<parameter=a>\n1\n</parameter><parameter=b>None</parameter></function>", "",
         [ToolCall("add", {"a": 1, "b": None})]),
        (None, written("<tool_call>ONE</tool_call>"), "", [ADDED]),
        # text behind a call, and between two
        (HERMES, written("So: <tool_call>ONE</tool_call>\nbye"), "So: \nbye", [ADDED]),
        (HERMES, written("<tool_call>ONE</tool_call> and <tool_call>OTHER</tool_call>"), " and ", [ADDED, SHOW]),
        (HERMES, written("<think>a</think>So: <tool_call>ONE</tool_call>!"), "<think>a</think>So: !", [ADDED]),
        (LLAMA, written("ONE\nbye", "parameters"), "\nbye", [ADDED]),
        (MISTRAL, written("see [TOOL_CALLS][ONE] bye"), "see  bye", [ADDED]),
        (GRANITE, written("<|tool_call|>[ONE,OTHER] bye"), " bye", [ADDED, SHOW]),
        (CODER, f"Well.\n<tool_call>\n{IN_XML}\n</tool_call>\nbye", "Well.\n\nbye", [ADDED]),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_form_of_the_template(
    template: str | None, text: str, content: str | None, calls: list[ToolCall]
) -> None:
    tokenizer = tokenizer_of(template)
    form = call_form(tokenizer, {})
    said = read(tokenizer, text)
    assert said == (said[0] if content is None else content, calls)
    message = form.message(turn_of(tokenizer, text), tools=TOOLS)  # for an environment
    assert ("tool_calls" in message) == (bool(calls) and not form.in_text)
    assert calls_of(message) == calls
    assert form.in_text == (template in (HERMES, None))


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES, written("<tool_call>ONE</tool_call>")),
        (LLAMA, written("ONE", "parameters")),
        (MISTRAL, written("[TOOL_CALLS][ONE]")),
        (CODER, IN_XML),
    ],
)
def test_a_thought_that_the_prompt_or_a_token_opened_calls_nothing_in_any_form(template: str, call: str) -> None:
    tokenizer = tokenizer_of(template)
    for marker in ("<think>", "</think>"):  # which decoding without special tokens drops
        tokenizer.add_tokens(AddedToken(marker, special=True), special_tokens=True)
    form = call_form(tokenizer, {})
    for opened, turn, calls in (
        ("<think>\n", call, []),
        ("<think>\n", f"</think>{call}", [ADDED]),
        ("", f"<think>{call}", []),
        ("", f"<think>{call}</think>{call}", [ADDED]),
        ("", call, [ADDED]),
    ):
        text = opened + turn_of(tokenizer, turn)
        assert form.read(text, tools=TOOLS)[1] == calls
        message = form.message(text, tools=TOOLS)
        assert calls_of(message) == calls


def test_a_broken_call_is_one_that_fails() -> None:
    for template, text in (
        (LLAMA, '{"name": "add", "parameters": {'),
        (MISTRAL, '[TOOL_CALLS][{"name": "add"'),
        (MISTRAL, '[TOOL_CALLS][{"arguments": {}}]'),
        (CODER, "<tool_call>\n<function=>\n</function>"),
    ):
        tokenizer = tokenizer_of(template)
        (call,) = read(tokenizer, text)[1]
        assert call.problem
        message = call_form(tokenizer, {}).message(turn_of(tokenizer, text), tools=TOOLS)
        assert json.loads(json.dumps(message)) == message
        assert [each.problem for each in calls_of(message)] == [call.problem]


# ---- XML: where arguments end, and their types ----

TEXT = "<tool_call>\n<function=show>\n<parameter=text>\nTEXT\n</parameter>\n</function>\n</tool_call>"


def xml_calls(written: str, tools: list[Any] = TOOLS) -> list[ToolCall]:
    return call_form(tokenizer_of(CODER), {}).read(written, tools=tools)[1]


@pytest.mark.parametrize(
    "text",
    [
        "A block ends with </parameter> here.",
        "A block ends with\n</parameter>\nand so on.",
        "<parameter=x> begins one",
        "Write\n<parameter=x>\n1\n</parameter>\nand close.",
        "def f():\n    return '</function>'",
        "a </tool_call> b <tool_call> c",
        "a\n<function=g>\n</function>\n</tool_call>\nb",
        "",
    ],
)
def test_a_text_argument_in_xml_may_hold_its_tags(text: str) -> None:
    assert xml_calls(TEXT.replace("TEXT", text)) == [ToolCall("show", {"text": text})]
    both = xml_calls(TEXT.replace("TEXT", text) + "\n<tool_call>\n" + IN_XML + "\n</tool_call>")
    assert both == [ToolCall("show", {"text": text}), ADDED]


@pytest.mark.parametrize(
    "written",
    [
        # as a whole call, whose end may be this one's
        TEXT.replace("TEXT", f"see\n<tool_call>\n{IN_XML}\n</tool_call>\nthere"),
        TEXT.replace("TEXT", "see\n</parameter>\n</function>\n</tool_call>\nthere"),
        # an end was forgotten
        "<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=show>\n<parameter=text>\n1\n</function>",
        # text between arguments, and two values of one
        "<function=add>\n<parameter=a>\n1\n</parameter>\nand\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=add>\n{}\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
    ],
)
def test_a_call_in_xml_that_may_be_read_otherwise_fails(written: str) -> None:
    calls = xml_calls(written)
    assert calls
    assert all(call.problem for call in calls)


INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [INTEGER, {"type": "null"}]}, "3", 3),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "None", None),
        ({"anyOf": [INTEGER, STRING]}, "3", "3"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "3", 3),
        ({"oneOf": [{"const": "a"}, {"const": 3}]}, "3", 3),
        ({"allOf": [INTEGER, {"minimum": 1}]}, "3", 3),
        ({"allOf": [STRING, {"minLength": 1}]}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": ["string", "integer"], "enum": ["auto", 2]}, "2", 2),
        ({"type": ["string", "integer"], "enum": ["auto", 2]}, "auto", "auto"),
        ({"const": 2}, "2", 2),
        ({"$ref": "#/$defs/Place"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Name"}, '{"a": 1}', '{"a": 1}'),
        ({"$ref": "#/$defs/Loop"}, "x", "x"),
        ({"$ref": "#/$defs/Loop"}, "null", "null"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "\nNone ", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
        ({"anyOf": [STRING, {"$ref": "#/$defs/Nothing"}]}, "null", None),
        ({"enum": ["null", None]}, "null", None),
        (STRING, "null", "null"),
        ({"type": "string", "nullable": False}, "None", "None"),
        ({}, "null", "null"),
        (STRING, " 3 ", " 3 "),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": "boolean"}, "True", True),
        (INTEGER, "three", "three"),
    ],
)
def test_an_argument_in_xml_is_text_where_its_schema_allows_this_text(schema: Any, written: str, value: Any) -> None:
    defs = {
        "Place": {"type": "object"},
        "Name": STRING,
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 2},
        "Nothing": {"type": "null"},
    }
    parameters = {"type": "object", "properties": {"text": schema}, "$defs": defs}
    [call] = xml_calls(TEXT.replace("TEXT", written), [{"function": {"name": "show", "parameters": parameters}}])
    assert call == ToolCall("show", {"text": value})
    assert type(call.arguments["text"]) is type(value)


def test_many_calls_in_xml_are_read_in_linear_time() -> None:
    assert len(xml_calls(IN_XML * 5000)) == 5000
    assert [bool(call.problem) for call in xml_calls("<function=a>" * 100_000)] == [True]


def test_a_marker_of_hermes_may_be_a_special_token_and_unknown_forms_are_refused() -> None:
    tokenizer = tokenizer_of(HERMES, special="<tool_call>")
    form = call_form(tokenizer, {})
    assert form.in_text
    assert read(tokenizer, written("<tool_call>ONE</tool_call>"))[1] == [ADDED]
    message = form.message(turn_of(tokenizer, written("<tool_call>ONE</tool_call>")), tools=TOOLS)
    assert calls_of(message) == [ADDED]
    for calls in ("{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}",
                  "{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"):  # fmt: skip
        with pytest.raises(ValueError, match="chat template"):
            call_form(tokenizer_of(calls), {})
