"""Chat messages in the forms that files hold: roles, parts, tool calls, ShareGPT; and what is none."""

import json
from typing import Any

import pytest

from tinyrl.data.messages import as_messages, conversation, messages_of, roles_of

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


def test_arguments_in_json_become_an_object():
    """As OpenAI writes them; templates that write an object as JSON would quote the text once more."""
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
        {"name": "say", "arguments": "hello"},
        {"name": "add", "arguments": "[2]"},
    ]
    (message,) = messages_of([{"role": "assistant", "content": None, "tool_calls": calls}], "messages")
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}, *calls[1:]
    ]  # fmt: skip
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 2}'}  # the row is not changed


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "'messages' must be a list of messages, not []"),
        ("hi", "'messages' is text that is not JSON: 'hi'"),
        ('{"role": "user"}', "'messages' must be a list of messages, not {'role': 'user'}"),
        (["hi"], "'messages' holds 'hi' where a message (role, content) belongs"),
        ([{"content": "hi"}], "'messages' has a message without a `role`: {'content': 'hi'}"),
        ([{"role": "user"}], "'messages' has a message without `content`: {'role': 'user'}"),
        ([{"role": "assistant", "content": None}], "'messages' has a message without `content`"),
        ([{"role": "user", "content": 3}], "'messages' has a message whose `content` is not text: 3"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "'messages' has a message with a part that is not text: 'image'",
        ),
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
