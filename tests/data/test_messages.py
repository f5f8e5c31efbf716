"""Chat messages in the forms that files hold: roles, parts, tool calls, ShareGPT; and what is refused."""

import json
from typing import Any

import pytest

from tinyrl.data.messages import asked_of, conversation, messages_of, prompt_of, tools_of

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "h", "image_url": None}, {"type": "text", "text": "i"}]


def test_sharegpt_senders_become_roles():
    row = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "four"},
        ],
    }
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    assert conversation(row, "conversations") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    own = [{"from": "system", "value": "be long"}, *row["conversations"]]
    assert conversation({**row, "conversations": own}, "conversations")[0]["content"] == "be long"
    assert conversation({"messages": json.dumps([USER])}, "messages") == [USER]


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({**USER, "name": None, "tool_calls": None}, USER),  # a row of a .parquet file
        ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
        ({**USER, "content": PARTS}, USER),
        *[({**USER, "content": none}, {**USER, "content": ""}) for none in (None, [{"type": "text", "text": None}])],
        *[({**USER, "tool_calls": none}, USER) for none in ([], "null", "")],
        ({"from": "human", "value": "hi"}, USER),
        ({"role": "developer", "content": "hi"}, {"role": "system", "content": "hi"}),
    ],
)
def test_content_becomes_text_and_null_keys_go(message: dict[str, Any], wanted: dict[str, Any]):
    assert messages_of([message], "messages") == prompt_of([USER, message])[1:] == [wanted]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"arguments": '{"a": 2, "b": null}'}, {"a": 2}),  # as OpenAI writes them; templates would quote the text
        *[({"arguments": none}, {}) for none in ("null", " ", None)],
        ({}, {}),
        ({"arguments": {"a": 2, "b": None, "c": {"d": None}, "e": [{"f": None, "g": 1}, None]}},
         {"a": 2, "c": {}, "e": [{"g": 1}, None]}),
        ({"arguments": "hello"}, "hello"),
        ({"arguments": "[2]"}, "[2]"),
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_an_object(given: dict[str, Any], arguments: Any):
    function = {"name": "add", **given}
    for call, read in (
        (function, {"name": "add", "arguments": arguments}),
        ({"id": None, "function": function}, {"function": {"name": "add", "arguments": arguments}}),
    ):
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert messages_of([message], "messages") == [{"role": "assistant", "content": "", "tool_calls": [read]}]
    assert function == {"name": "add", **given}  # the row is not changed


def calling(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": {}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, call: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if call is None else {"tool_call_id": call})}


@pytest.mark.parametrize(
    ("before", "results", "wanted"),
    [
        ([USER, calling("a", "b")], [result("B", "b"), result("A", "a")], "AB"),
        ([USER, calling("a", "b")], [result('["A", "B"]')], '["A", "B"]'),  # of both calls
        # nothing tells which result is whose
        ([USER, calling(None, None)], [result("B", "b"), result("A", "a")], "BA"),
        ([USER, calling("x", "x")], [result("B", "x"), result("A", "x")], "BA"),
        ([USER, calling("a", "b")], [result("B"), result("A")], "BA"),
        ([USER], [result("B", "b"), result("A", "a")], "BA"),
    ],
)
def test_results_are_in_the_order_of_their_calls(before: list[Any], results: list[Any], wanted: str):
    read = messages_of([*before, *results, USER], "messages")
    assert "".join(message["content"] for message in read[len(before) : -1]) == wanted
    assert read[-1] == USER


def test_each_turn_has_its_own_calls():
    given = [USER, calling("a", "b"), result("B", "b"), result("A", "a"), calling("c"), result("C", "c"), USER]
    assert [message["content"] for message in messages_of(given, "messages")][2:6] == ["A", "B", "", "C"]
    with pytest.raises(ValueError, match="tool_call_id='a'"):
        messages_of([*given, calling("d"), result("A", "a")], "messages")


@pytest.mark.parametrize("results", [[result("A", "c")], [result("A", "a"), result("B", "a")]])
def test_a_result_of_no_call_and_a_second_one_are_refused(results: list[Any]):
    with pytest.raises(ValueError, match="tool_call_id"):
        messages_of([USER, calling("a", "b"), *results], "messages")


@pytest.mark.parametrize(
    "results", [[result("B", "b")], [result("B")], [result('["B"]')], [result("["), USER, calling("c")]]
)
@pytest.mark.parametrize("ids", [("a", "b"), (None, None)])
def test_a_missing_result_of_two_calls_is_refused(ids: tuple[str | None, ...], results: list[Any]):
    with pytest.raises(ValueError, match="2 calls"):
        messages_of([USER, calling(*ids), *results], "messages")


@pytest.mark.parametrize("behind", [[], [USER]])
def test_two_calls_without_any_result_are_read(behind: list[Any]):
    """The turn is the last one to learn, or its results have another role."""
    assert len(messages_of([USER, calling("a", "b"), *behind], "messages")) == 2 + len(behind)


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}])
def test_an_image_is_refused_by_its_name(part: dict[str, Any]):
    with pytest.raises(ValueError, match=part["type"]):
        messages_of([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}], "messages")


@pytest.mark.parametrize("text", [5, 0, True, ["a"], {"value": "a"}])
def test_a_part_whose_text_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        messages_of([{"role": "user", "content": [{"type": "text", "text": text}]}], "messages")


def test_keys_of_tools_that_are_null_are_absent():
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}}
    tool = {"type": "function", "function": {"name": "add", "description": None, "parameters": schema}, "id": None}
    wanted = {"type": "object", "properties": {"a": {"type": "string"}}}
    for given in ([tool], json.dumps([tool])):
        assert tools_of(given) == [{"type": "function", "function": {"name": "add", "parameters": wanted}}]
    assert [tools_of(none) for none in (None, "", "[]")] == [None] * 3
    with pytest.raises(ValueError, match="tools"):
        tools_of({"name": "add"})


@pytest.mark.parametrize(
    "value",
    [
        [], "hi", '{"role": "user"}', ["hi"], [{"content": "hi"}], [{"role": "user", "content": 3}],
        [{"role": "assistant", "tool_calls": {"name": "a"}}], [{"from": ["gpt"], "value": "hi"}],
        [{"role": "user", "content": [{"type": "image", "text": "a"}]}], [{"role": "user", "content": ["hi"]}],
    ],
)  # fmt: skip
def test_other_conversations_are_refused(value: Any):
    with pytest.raises(ValueError, match="'messages' "):
        conversation({"messages": value}, "messages")


def test_an_empty_prompt_and_other_values_are_refused():
    assert prompt_of("hi") == "hi"
    for prompt in (" \n", None, 7, [], ["hi"], [{"role": "user", "content": None}], {"role": "user"}):
        with pytest.raises(ValueError, match="prompt"):
            prompt_of(prompt)


def test_a_question_is_a_prompt_without_the_beginning_of_its_answer():
    begun = {"role": "assistant", "content": "I"}
    cases = [("hi", "hi"), ([USER], [USER]), ([USER, begun], [USER]), ([USER, begun, USER], [USER, begun, USER])]
    for prompt, question in [*cases, ([begun], [begun])]:  # nothing is asked
        assert asked_of(prompt) == question


def test_a_key_given_twice_in_the_json_of_a_column_or_a_call_is_refused():
    call = {"name": "add", "arguments": '{"a": 1, "a": 2}'}
    with pytest.raises(ValueError, match="'a' is given twice"):
        messages_of([{"role": "assistant", "content": "", "tool_calls": [call]}], "messages")
    with pytest.raises(ValueError, match=r"'tools'.*'type' is given twice"):
        tools_of('[{"type": "function", "type": "x"}]')


@pytest.mark.parametrize("call", [5, {}, {"function": {}}, {"function": {"name": ""}}, {"name": 5}, {"function": 5}])
def test_a_call_of_no_tool_is_refused(call: Any):
    with pytest.raises(ValueError, match=r"'prompt'.*name"):
        messages_of([{"role": "assistant", "tool_calls": [call]}], "prompt")


@pytest.mark.parametrize("arguments", ['{"a": 1, "a": 2}', '{"a": ["\\ud800"]}', '{"a": ' + "9" * 5000 + "}"])
def test_arguments_that_cannot_be_read_are_refused_by_the_calls_name(arguments: str):
    call = {"function": {"name": "add", "arguments": arguments}}
    with pytest.raises(ValueError, match=r"'prompt'.*add"):
        messages_of([{"role": "assistant", "tool_calls": [call]}], "prompt")


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]])
def test_half_a_character_is_refused_as_such(prompt: Any):
    """A key of a terminal's may be none, and tokenizers raise TypeError at it."""
    with pytest.raises(ValueError, match="invalid Unicode"):
        prompt_of(prompt)
