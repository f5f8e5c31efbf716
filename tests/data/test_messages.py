"""Chat messages in the forms that files hold: roles, parts, tool calls, ShareGPT; and what is none."""

import json
from typing import Any

import pytest

from tinyrl.data.messages import as_messages, conversation, messages_of, prompt_of, roles_of, tools_of

USER = {"role": "user", "content": "hi"}


def test_messages_stay_as_they_are_and_null_keys_go():
    table = {"role": "user", "content": "hi", "name": None, "tool_calls": None}  # a row of a .parquet file
    assert messages_of([table, {**USER, "name": "Ann"}], "messages") == [USER, {**USER, "name": "Ann"}]


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
    assert conversation(row, "conversations") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    own = [{"from": "system", "value": "be long"}, *row["conversations"]]
    assert conversation({**row, "conversations": own}, "conversations")[0]["content"] == "be long"


def test_a_conversation_may_be_json_in_a_text():
    assert conversation({"messages": json.dumps([USER])}, "messages") == [USER]


def test_text_in_parts_is_put_together():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert messages_of([{"role": "user", "content": parts}], "messages") == [{"role": "user", "content": "a b"}]


def called(call: dict[str, Any], **more: Any) -> Any:
    """What becomes of a call inside a message."""
    (message,) = messages_of([{"role": "assistant", "content": None, "tool_calls": [call], **more}], "messages")
    assert message["content"] == ""
    (found,) = message["tool_calls"]
    return found


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"arguments": '{"a": 2}'}, {"a": 2}),  # as OpenAI writes them; templates would quote the text once more
        ({"arguments": {"a": 2}}, {"a": 2}),
        ({"arguments": "null"}, {}),
        ({"arguments": ""}, {}),
        ({"arguments": " "}, {}),
        ({"arguments": None}, {}),
        ({"arguments": {}}, {}),
        ({}, {}),
        ({"arguments": {"a": 2, "b": None, "c": {"d": None}, "e": [{"f": None, "g": 1}, None]}},
         {"a": 2, "c": {}, "e": [{"g": 1}, None]}),
        ({"arguments": '{"a": 2, "b": null}'}, {"a": 2}),
        ({"arguments": "hello"}, "hello"),
        ({"arguments": "[2]"}, "[2]"),
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_an_object(given: dict[str, Any], arguments: Any):
    assert called({"name": "add", **given}) == {"name": "add", "arguments": arguments}
    function = {"name": "add", **given}
    assert called({"type": "function", "id": None, "function": function}) == {
        "type": "function",
        "function": {"name": "add", "arguments": arguments},
    }
    assert function == {"name": "add", **given}  # the row is not changed


@pytest.mark.parametrize("none", [None, [], "[]", "null", ""])
def test_no_calls_are_no_call(none: Any):
    answer = {"role": "assistant", "content": "4"}
    assert messages_of([{**answer, "tool_calls": none}], "messages") == [answer]


@pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": None}], [{"type": "text", "text": ""}]])
def test_null_and_no_parts_are_empty(content: Any):
    for role in ("user", "assistant", "tool"):
        assert messages_of([{"role": role, "content": content}], "messages") == [{"role": role, "content": ""}]


def test_keys_of_tools_that_are_null_are_absent():
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "description": None, "parameters": schema}, "id": None}
    wanted = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert tools_of([tool]) == [{"type": "function", "function": {"name": "add", "parameters": wanted}}]
    assert tools_of(json.dumps([tool])) == tools_of([tool])
    assert [tools_of(none) for none in (None, [], "", "[]")] == [None] * 4
    with pytest.raises(ValueError, match="tools"):
        tools_of({"name": "add"})


def test_prompts_are_read_as_all_messages_are():
    """One rule for training on completions, preference pairs and prompts alike."""
    parts = [{"type": "text", "text": "h", "image_url": None}, {"type": "text", "text": "i"}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": "null"}}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]
    read = [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {}}}]}]  # fmt: skip
    assert prompt_of(talk) == read
    assert prompt_of(read) == read
    assert prompt_of([{"from": "human", "value": "hi"}]) == [USER]
    assert prompt_of("hi") == "hi"
    with pytest.raises(ValueError, match="image_url"):
        prompt_of([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "a.png"}}]}])
    for empty in ("", [{"role": "user", "content": []}], [{"role": "system", "content": ""}]):
        with pytest.raises(ValueError, match="empty"):
            prompt_of(empty)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "'messages' must be a list of messages, not []"),
        ("hi", "'messages' is text that is not JSON: 'hi'"),
        ('{"role": "user"}', "'messages' must be a list of messages, not {'role': 'user'}"),
        (["hi"], "'messages' holds 'hi' where a message (role, content) belongs"),
        ([{"content": "hi"}], "'messages' has a message without a `role`: {'content': 'hi'}"),
        ([{"role": "user"}], "'messages' has a message without `content`: {'role': 'user'}"),
        ([{"role": "assistant", "tool_calls": None}], "'messages' has a message without `content`"),
        (
            [{"role": "assistant", "tool_calls": {"name": "a"}}],
            "'messages' has a message whose `tool_calls` are",
        ),
        ([{"role": "user", "content": 3}], "'messages' has a message whose `content` is not text: 3"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "'messages' has a message with a part that is not text: 'image'",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "text": None}]}],
            "'messages' has a message with a part that is not text: 'image'",
        ),
        ([{"role": "user", "content": ["hi"]}], "'messages' has a message with a part that is not text: 'hi'"),
        ([{"from": "judge", "value": "hi"}], "'messages' has a message from 'judge'; known are system, human"),
        ([{"from": ["gpt"], "value": "hi"}], "'messages' has a message from ['gpt']; known"),
        ([{"from": "function_call", "value": "[1]"}], "'messages' has a function_call without a `name`: '[1]'"),
        ([{"from": "gpt"}], "'messages' has a message without `content`: {'from': 'gpt'}"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, sentence: str):
    with pytest.raises(ValueError, match=r"\S") as caught:
        conversation({"messages": value}, "messages")
    assert str(caught.value).startswith(sentence)


def test_a_prompt_in_text_is_the_users():
    assert as_messages("hi") == [USER]
    assert as_messages([USER, USER]) == [USER, USER]
    assert as_messages(None) == []
    assert roles_of([USER, {"role": "assistant", "content": ""}]) == "user, assistant"
