"""Fields of requests with values that cannot be taken: each is refused by the name that its protocol has for it."""

from __future__ import annotations

from typing import Any

import pytest

from tinyrl.endpoint.completions import ChatCompletions, TextCompletions
from tinyrl.endpoint.dialect import JSON, Dialect, Refused
from tinyrl.endpoint.messages_api import Messages
from tinyrl.endpoint.request_body import Body
from tinyrl.endpoint.responses import Responses

HELLO = [{"role": "user", "content": "hello"}]
REQUESTS: dict[type[Dialect], JSON] = {
    ChatCompletions: {"model": "m", "messages": HELLO},
    TextCompletions: {"model": "m", "prompt": "hello"},
    Responses: {"model": "m", "input": "hello"},
    Messages: {"model": "m", "messages": HELLO, "max_tokens": 4},
}
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
SHARED: dict[str, list[Any]] = {  # by all protocols
    "model": [None, 5, ["m"]],
    "temperature": [-0.1, 100.5, "1", True, [1]],
    "top_p": [0, 1.1, "1", True],
    "top_k": [-2, 1 << 63, 1.5, True],
    "seed": [-1, 1 << 62, "x", True],
    "stream": [1, "true"],
    "tools": [{}, "look", [5], [[]]],
    "tool_choice": [5, True],
    "stream_options": [5, [1], "x"],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "n": [0, 129, 1.5, True, "2"],
    "stop": ["", [""], 5, [5], ["x"] * 17, "x" * 1001],
    "max_tokens": [0, -1, 1.5, True, "4"],
    "max_completion_tokens": [0, -1, 1.5, True, "4"],
    "chat_template_kwargs": [5, []],
    "return_token_ids": [1, "yes"],
    "include_stop_str_in_output": [1, "yes"],
    "logit_bias": [{"5": 1}],
    "presence_penalty": [0.5],
    "response_format": [{"type": "json_object"}],
    "system": ["be brief"],
    "instructions": ["be brief"],
    "input": ["hello"],
    "stop_sequences": [["x"]],
    "functions": [[FUNCTION]],
    "function_call": [{"name": "look"}],
    "max_output_tokens": [4],
}
BAD: dict[type[Dialect], dict[str, list[Any]]] = {
    ChatCompletions: {
        **SHARED,
        **OF_COMPLETIONS,
        "messages": ["hello", {"role": "user"}],
        "tools": [*SHARED["tools"], [{"type": "function"}], [{"type": "function", "function": {"name": 5}}]],
        "logprobs": [5, "yes"],
        "top_logprobs": [21, -1, True, 2],
        "prompt": ["hello"],
        "echo": [True],
    },
    TextCompletions: {
        **{name: values for name, values in SHARED.items() if name != "tools"},
        **{name: values for name, values in OF_COMPLETIONS.items() if name != "chat_template_kwargs"},
        "prompt": [5, [1.5], [["a"]], {"a": 1}],
        "logprobs": [True, 21, -1, "yes"],
        "tools": [[{"type": "function", "function": FUNCTION}]],
        "messages": [HELLO],
        "echo": [1, "yes"],
        "best_of": [2],
        "suffix": ["x"],
    },
    Responses: {
        **SHARED,
        "input": [None, 5, {}, [5], [{"type": "computer_call"}]],
        "instructions": [5, ["be brief"], {}],
        "max_output_tokens": [0, -1, 1.5, True, "4"],
        "text": ["x", []],
        "text.format": [{"type": "json_object"}],
        "text.bogus": [1],
        "include": [5, "x", [5], {}],
        "reasoning": ["high", 0],
        "top_logprobs": [21, True, 2],
        "tools": [*SHARED["tools"], [{"type": "function"}], [{"type": "namespace", "name": "of"}]],
        "prompt": [{"id": "x"}],
        "conversation": ["x"],
        "background": [True],
        "truncation": ["auto"],
        "n": [2],
        "max_tokens": [4],
        "max_completion_tokens": [4],
        "response_format": [{"type": "json_object"}],
        "logprobs": [True],
        "messages": [HELLO],
    },
    Messages: {
        **SHARED,
        "messages": [None, "hello", [], [5], [{"role": "tool", "content": "x"}]],
        "system": [5, {}, [5], [{"type": "image"}], [{"type": "text", "text": 5}]],
        "max_tokens": [0, -1, 1.5, True, "4"],
        "stop_sequences": [[""], 5, "", [5], ["x"] * 17],
        "tools": [*SHARED["tools"], [{"name": ""}], [{"name": "look", "input_schema": 5}]],
        "output_config": [5],
        "output_config.format": [{"type": "json_schema"}],
        "thinking": [{"type": "enabled"}],
        "container": ["x"],
        "n": [2],
        "stop": [["x"]],
        "max_completion_tokens": [4],
        "logprobs": [True],
        "prompt": ["hello"],
    },
}


def named(kind: type[Dialect], asked: JSON) -> str | None:
    """The field that a request is refused for, which the sentence begins with: Messages' errors have no other place."""
    try:
        wishes = Body.of(asked, kind).wishes(asked, kind)
    except Refused as refused:
        return refused.param if str(refused).startswith(f"{refused.param}:") else str(refused)
    return next((name for name, shown in wishes.items() if shown.startswith(f"{name}=")), None)


def with_field(asked: JSON, field: str, value: Any) -> JSON:
    outer, _, inner = field.partition(".")
    return {**asked, outer: {inner: value} if inner else value}


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_request_with_a_bad_value_is_refused_by_the_field_that_has_it(kind: type[Dialect]) -> None:
    assert named(kind, REQUESTS[kind]) is None
    for field, values in BAD[kind].items():
        for value in values:
            assert named(kind, with_field(REQUESTS[kind], field, value)) == field, value


@pytest.mark.parametrize("kind", [ChatCompletions, TextCompletions])
def test_two_names_of_one_limit_with_two_values_contradict_each_other(kind: type[Dialect]) -> None:
    asked = {**REQUESTS[kind], "max_tokens": 4, "max_completion_tokens": 5}
    assert named(kind, asked) == "max_tokens"
    assert named(kind, {**asked, "max_completion_tokens": 4}) is None
    assert named(kind, {**asked, "max_completion_tokens": None}) is None
