"""The policy behind OpenAI's protocol: the real client, what is refused, who may ask, calls and stop strings."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
import uvicorn

from tests.endpoint.conftest import episode_of, listening_to
from tests.generation.sampling import TEMPLATE, stir
from tests.images import png
from tests.tiny_models import tiny_tokenizer
from tinyrl.endpoint import endpoint as endpoint_file
from tinyrl.endpoint import request_body, server
from tinyrl.endpoint.live_answer import Choice
from tinyrl.endpoint.server import LOCAL, Connection, Listening
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.tasks.prompts import render_prompt
from tinyrl.tasks.turn_text import TurnDetokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def client_of(listening: Listening, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=listening.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def listening(live: LiveScheduler) -> Iterator[Listening]:
    with listening_to(live, hosts=LOCAL) as made:
        yield made


@pytest.fixture
def client(listening: Listening) -> openai.OpenAI:
    return client_of(listening)


# ---- the client of the package index ----


def test_models_chat_and_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["policy", "base"]
    ask: Callable[..., Any] = client.chat.completions.create
    same = {"model": "policy", "messages": HELLO, "n": 3, "max_tokens": 9}
    chats = [ask(**same, seed=seed) for seed in (5, 5, 6)]
    texts = [[choice.message.content for choice in chat.choices] for chat in chats]
    assert len({*texts[0]}) == 3
    assert texts[0] == texts[1] != texts[2]
    assert chats[0].usage.total_tokens == chats[0].usage.prompt_tokens + chats[0].usage.completion_tokens
    two = client.completions.create(model="policy", prompt=["ab", "cd"], max_tokens=4, seed=1)
    one = client.completions.create(model="policy", prompt="cd", max_tokens=4, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[1].text == one.choices[0].text


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    ask: Callable[..., Any] = client.chat.completions.create
    same: dict[str, Any] = {"model": "policy", "seed": 2, "max_tokens": 10}
    whole = ask(messages=HELLO, **same)
    *chunks, last = ask(messages=HELLO, **same, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 2
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


IMAGE = {"path": "/etc/passwd", "sha256": "0" * 64, "size": [4, 2]}
WITH_IMAGE = {"role": "user", "content": "\ufffc", "images": [IMAGE]}  # as rows that were read have it
IMAGE_PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(png()).decode()}"}}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_tokens_at_each_place(temperature: float, client: openai.OpenAI, live: LiveScheduler) -> None:
    """Beside a forward pass of the base: softmax(logits / temperature), at temperature 0 the plain one."""
    stir(live.engine)
    live.release()
    ask: Callable[..., Any] = client.chat.completions.create
    same: Any = {"model": "base", "temperature": temperature, "seed": 3, "max_tokens": 6}
    same["extra_body"] = {"return_token_ids": True}
    [chat] = ask(messages=HELLO, logprobs=True, top_logprobs=5, **same).choices
    prompt, tokens = chat.model_extra["prompt_token_ids"], chat.model_extra["token_ids"]
    with torch.no_grad(), live.engine.policy.acting("base") as model:
        logits: Any = model(torch.tensor([prompt + tokens])).logits[0]
    scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(prompt) - 1 : -1]
    for entry, row, token in zip(chat.logprobs.content, scores, tokens, strict=True):
        best = row.topk(5)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in entry.top_logprobs] == [live.tokenizer.decode([i]) for i in best.indices]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
    listed = [
        chunk.choices[0].logprobs for chunk in ask(messages=HELLO, logprobs=True, top_logprobs=5, stream=True, **same)
    ]
    streamed = [entry for one in listed if one for entry in one.content]
    assert [len(entry.top_logprobs) for entry in streamed] == [5] * len(tokens)
    # As lm-eval asks: the prompt as tokens, and one more.
    echo: Any = {"model": "base", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    text: Any = client.completions.create(prompt=prompt + tokens, **echo).choices[0].logprobs
    assert text.token_logprobs[0] is text.top_logprobs[0] is None
    assert len(text.tokens) == len(prompt + tokens) + 1
    plain = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for place, (row, token) in enumerate(zip(plain, tokens, strict=True), len(prompt)):
        assert text.token_logprobs[place] == pytest.approx(row[token].item(), abs=1e-4)
        assert max(text.top_logprobs[place].values()) == pytest.approx(row.max().item(), abs=1e-4)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("asked", "headers", "status", "named"),
    [
        ({"model": "gpt-4"}, {}, 404, "policy, base"),
        ({"response_format": {"type": "json_object"}}, {}, 400, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, {}, 400, "context_length_exceeded"),
        ({"messages": [WITH_IMAGE]}, {}, 400, "data URL"),
        ({"messages": [{"role": "user", "content": [IMAGE_PART]}]}, {}, 400, "no images"),
        ({"chat_template_kwargs": {"thinking": True}}, {}, 400, "thinking"),
        ({"top_logprobs": 21, "logprobs": True}, {}, 400, "top_logprobs"),
        ({"chat_template_kwargs": {"": 1}}, {}, 400, "chat_template_kwargs"),
        ({"top_k": 1 << 63}, {}, 400, "top_k"),
        ({"tools": [{"type": "fuction", "function": {"name": "look"}}]}, {}, 400, "fuction"),
        ({"chat_template_kwargs": {"mod": "x"}}, {}, 400, '"param": "chat_template_kwargs"'),
        (b"{", {}, 400, "JSON"),
        (b'{"model": "policy", "seed": 1, "seed": 2}', {}, 400, "'seed' is given twice"),
        (b'{"model": "policy", "metadata": {"a": 1, "a": 2}}', {}, 400, "'a' is given twice"),
        (b'{"model": "policy", "metadata": 1e999}', {}, 400, "1e999"),  # which no answer could repeat
        (b'{"model": "policy", "user": "\\ud800"}', {}, 400, "JSON"),
        (b'{"model": "policy", "user": ' + b"[" * 999 + b"]" * 999 + b"}", {}, 400, "JSON"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "JSON"),  # a page of another site may send it without being asked
        (b"{}", {"Host": "evil.example"}, 400, "evil.example"),
        (b"{}", {"Host": "localhost.evil.example:80"}, 400, "evil.example"),
        (b"{}", {"Host": "[::1"}, 400, "127.0.0.1"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(
    listening: Listening, client: openai.OpenAI, asked: Any, headers: dict[str, str], status: int, named: str
) -> None:
    whole = {"model": "policy", "messages": HELLO, "max_tokens": 2}
    content = asked if isinstance(asked, bytes) else json.dumps(whole | asked).encode()
    code, answer = post(f"{listening.url}/chat/completions", content, headers)
    assert code == status
    assert named in json.dumps(answer)
    assert client.completions.create(model="policy", prompt="hello", max_tokens=1).choices


def test_what_clients_send_that_changes_nothing_is_accepted(client: openai.OpenAI) -> None:
    own = {"presence_penalty": 0.0, "min_tokens": 0, "stop_token_ids": [], "user": "me", "metadata": {"y": "1"}}
    own |= {"store": True, "parallel_tool_calls": True, "do_sample": True, "response_format": {"type": "text"}}
    own |= dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "logprobs", "min_p"])
    assert client.chat.completions.create(model="policy", messages=HELLO, max_tokens=2, extra_body=own).choices


WISHES = {  # that are not honoured; near to some of them, what is
    "add_generation_prompt": False, "continue_final_message": True, "do_sample": False, "stop_sequences": ["x"],
    "json_schema": {}, "no_repeat_ngram_size": 2, "enable_thinking": False, "presence_penalty": False,
    "ignore_eos": 0, "best_of": True, "maximum_tokens": 2, "thinking": {"type": "enabled"},
}  # fmt: skip


@pytest.mark.parametrize("name", WISHES)
def test_a_wish_that_is_not_honoured_is_refused_by_name(name: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(model="policy", prompt="hello", max_tokens=1, extra_body={name: WISHES[name]})


PREFILLED: list[Any] = [*HELLO, {"role": "assistant", "content": "It is "}]
OF_THE_CHAT = {"model": "policy", "messages": HELLO}
REQUESTS: dict[str, Any] = {
    "chat/completions": {**OF_THE_CHAT, "max_tokens": 1},
    "completions": {"model": "policy", "prompt": "hello", "max_tokens": 1},
    "messages": {**OF_THE_CHAT, "max_tokens": 1},
    "responses": {"model": "policy", "input": "hello", "max_output_tokens": 1},
}


def status_of(listening: Listening, path: str, more: dict[str, Any], key: str = "any") -> tuple[int, str]:
    """Whether a request with more fields is answered, and how."""
    headers = {"Authorization": f"Bearer {key}"}
    code, answer = post(f"{listening.url}/{path}", json.dumps({**REQUESTS[path], **more}).encode(), headers)
    return code, json.dumps(answer)


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"prompt": "x"}, "prompt"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("completions", {"tools": TOOLS}, "tools"),
        ("completions", {"messages": HELLO}, "messages"),
        ("completions", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("completions", {"top_logprobs": 2, "logprobs": 1}, "top_logprobs"),
        ("messages", {"stop": ["x"]}, "stop"),
        ("messages", {"logprobs": True}, "logprobs"),
        ("messages", {"echo": True}, "echo"),
        ("messages", {"return_token_ids": True}, "return_token_ids"),
        ("messages", {"prompt": "x"}, "prompt"),
        ("messages", {"max_completion_tokens": 2}, "max_completion_tokens"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("messages", {"output_config": 5}, "output_config"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("responses", {"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("responses", {"response_format": {"type": "json_object"}}, "response_format"),
        ("responses", {"logprobs": True}, "logprobs"),
        ("responses", {"top_logprobs": 2}, "top_logprobs"),
        ("responses", {"max_completion_tokens": 2}, "max_completion_tokens"),
        ("responses", {"max_tokens": 2}, "max_tokens"),
        ("responses", {"messages": HELLO}, "messages"),
        ("responses", {"return_token_ids": True}, "return_token_ids"),
        ("responses", {"text": {"bogus": 1}}, "text.bogus"),
        ("responses", {"include": 5}, "include"),
        ("responses", {"include": True}, "include"),
        ("responses", {"include": [{}]}, "include"),
        ("responses", {"include": "message.output_text.logprobs"}, "include"),
        ("chat/completions", {"messages": PREFILLED, "continue_final_message": False}, "continue_final_message"),
        ("chat/completions", {"messages": PREFILLED, "add_generation_prompt": True}, "add_generation_prompt"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_a_field_that_changes_nothing_here_is_refused_by_name(
    path: str, more: dict[str, Any], named: str, listening: Listening
) -> None:
    code, answer = status_of(listening, path, more)
    assert code == 400
    assert named in answer


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"echo": False, "prompt": None, "top_logprobs": 0}),
        ("chat/completions", {"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": False}),
        ("chat/completions", {"continue_final_message": False, "add_generation_prompt": True}),
        ("completions", {"tools": [], "messages": None, "chat_template_kwargs": {}, "top_logprobs": 0}),
        ("messages", {"stop": [], "logprobs": False, "echo": False, "return_token_ids": False}),
        ("responses", {"response_format": {"type": "text"}, "logprobs": False, "max_tokens": None}),
        ("responses", {"text": {"bogus": None}, "include": []}),
        ("responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
def test_a_field_that_asks_for_what_is_done_anyway_is_accepted(
    path: str, more: dict[str, Any], listening: Listening
) -> None:
    assert status_of(listening, path, more)[0] == 200


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"reasoning_effort": "low"}),
        ("messages", {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}),
        ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}),
        ("responses", {"reasoning": {"effort": "high", "summary": "detailed"}, "store": False}),
        ("responses", {"client_metadata": {"session_id": "x"}, "prompt_cache_key": "x"}),
        ("responses", {"include": ["web_search_call.action.sources"]}),
    ],
)
def test_a_field_that_only_describes_a_request_is_no_wish(path: str, more: dict[str, Any], live: LiveScheduler) -> None:
    """As Codex and Claude Code send them; in an episode no note says that they are ignored."""
    with listening_to(live, positions=512, episodes={}) as server:
        server.endpoint.episodes = {"key": episode_of(live.tokenizer)}
        assert status_of(server, path, more, "key")[0] == 200
        assert server.endpoint.wishes == {}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat/completions", "max_tokens"), ("chat/completions", "max_completion_tokens"),
        ("completions", "max_tokens"), ("messages", "max_tokens"), ("responses", "max_output_tokens"),
    ],
)  # fmt: skip
def test_more_new_tokens_than_fit_behind_a_prompt_are_the_fields_fault(
    path: str, field: str, listening: Listening
) -> None:
    """Clients shorten their prompts where they read that these are too long. Positions are 128."""
    del (asked := {**REQUESTS[path]})[next(name for name in REQUESTS[path] if name.startswith("max_"))]
    code, answer = post(f"{listening.url}/{path}", json.dumps({**asked, field: 32000}).encode())
    assert code == 400
    error = answer["error"]
    assert f"`{field}` exceed" in error["message"]
    most = int(error["message"].rpartition(" ")[2])
    assert (error.get("param"), error.get("code")) == ((None, None) if path == "messages" else (field, "invalid_value"))
    assert post(f"{listening.url}/{path}", json.dumps({**asked, field: most}).encode())[0] == 200


def test_fields_of_other_protocols_are_wishes_in_an_episode(live: LiveScheduler) -> None:
    with listening_to(live, positions=512, episodes={}) as server:
        server.endpoint.episodes = {"key": episode_of(live.tokenizer)}
        assert status_of(server, "chat/completions", {"echo": True, "top_logprobs": 2}, "key")[0] == 200
        assert status_of(server, "messages", {"max_completion_tokens": 2}, "key")[0] == 200
        assert status_of(server, "responses", {"text": {"bogus": 1}}, "key")[0] == 200
        assert {*server.endpoint.wishes} == {"echo", "top_logprobs", "max_completion_tokens", "text.bogus"}
        assert status_of(server, "responses", {"include": 5}, "key")[0] == 400


@pytest.mark.parametrize("echo", [False, True])
def test_no_logprobs_of_a_completion_are_none_and_0_are_those_of_its_tokens(
    listening: Listening, *, echo: bool
) -> None:
    asked = {"prompt": "hello", "temperature": 0, "echo": echo}
    found = list[Any]()
    for logprobs in (False, None, 0):
        _, answer = status_of(listening, "completions", {**asked, "logprobs": logprobs})
        found.append(json.loads(answer)["choices"][0]["logprobs"])
    assert found[:2] == [None, None]
    for text, logprob, place in zip(*(found[2][n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert place == (None if logprob is None else {text: logprob})


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "temperature", "top_logprobs"])
def test_a_truth_value_is_no_number(field: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.chat.completions.create(model="policy", messages=HELLO, extra_body={"max_tokens": 1, field: True})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_variables_of_a_template_that_are_its_own_are_not_a_clients(name: str, client: openai.OpenAI) -> None:
    own = {"chat_template_kwargs": {name: []}}
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(model="policy", messages=HELLO, max_tokens=1, extra_body=own)


def test_the_largest_top_k_is_sampled_with(listening: Listening) -> None:
    assert status_of(listening, "completions", {"top_k": (1 << 63) - 1})[0] == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"])
def test_a_server_of_this_machine_answers_by_each_of_its_names(host: str, listening: Listening) -> None:
    code, _ = post(f"{listening.url}/completions", json.dumps(REQUESTS["completions"]).encode(), {"Host": host})
    assert code == 200


@pytest.mark.parametrize("more", [0, 1])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    more: int, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing one would keep everybody waiting."""
    body = json.dumps({**REQUESTS["completions"], "metadata": [[], [], {}]}).encode()
    monkeypatch.setattr(request_body, "MOST_VALUES", sum(body.count(mark) for mark in b",[{") - more)
    code, answer = post(f"{listening.url}/completions", body)
    assert (code, "values" in json.dumps(answer)) == ((413, True) if more else (200, False))


@pytest.mark.parametrize(("path", "is_anthropics"), [("messages", True), ("responses", False)])
def test_a_failure_of_the_server_is_an_error_in_the_clients_words(
    path: str, is_anthropics: bool, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(endpoint_file, "render_prompt", fail)
    code, answer = status_of(listening, path, {})
    assert code == 500
    assert ('"api_error"' in answer) == is_anthropics
    assert "KeyError" in answer
    assert "secret" not in answer


@pytest.mark.parametrize(
    ("path", "is_anthropics"),
    [("messages/count_tokens", True), ("messages/batches", True), ("messagesx", False), ("responses/x", False)],
)
def test_a_path_below_a_protocols_own_is_refused_in_its_words(
    path: str, is_anthropics: bool, listening: Listening
) -> None:
    code, answer = post(f"{listening.url}/{path}", b"{}")
    assert code == 404
    assert (answer.get("type") == "error") == is_anthropics


HEADERS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 90\r\n"
)


@pytest.mark.parametrize(
    ("sent", "answer"), [(b"", b""), (HEADERS[:20], b""), (HEADERS, b""), (HEADERS + b"\r\n{", b"HTTP/1.1 408 ")]
)
def test_a_client_that_does_not_send_its_request_is_let_go(
    sent: bytes, answer: bytes, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SLOW_S", 0.2)
    monkeypatch.setattr(request_body, "SLOW_S", 0.2)
    port = int(listening.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(sent)
        found = connection.makefile("rb").read()  # until the server closes
    assert found[:13] == answer


@pytest.mark.parametrize("is_long", [True, False])
def test_headers_that_do_not_end_end_the_connection(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, *, is_long: bool
) -> None:
    """They are kept in memory, before a key is read."""
    monkeypatch.setattr(server, "MOST_HEADERS", 10_000)
    body = json.dumps(REQUESTS["completions"]).encode()
    whole = HEADERS.replace(b"90", b"%d" % len(body)) + b"\r\n" + body
    port = int(listening.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(HEADERS + b"X-Long: " + b"x" * 20_000 if is_long else whole)
        found = connection.makefile("rb").read()
    assert found[:13] == (b"" if is_long else b"HTTP/1.1 200 ")


def test_a_body_that_nobody_reads_is_no_header(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer comes before its end, and the connection can be used again."""
    monkeypatch.setattr(server, "MOST_HEADERS", 10_000)
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(listening.url).netloc, timeout=30)
    for content_type, status in (("text/plain", 415), ("application/json", 200)):
        body = json.dumps({**REQUESTS["completions"], "user": "x" * 1_000_000})
        connection.request("POST", "/v1/completions", body, {"Content-Type": content_type})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


@contextlib.contextmanager
def streaming(listening: Listening) -> Iterator[socket.socket]:
    """A client that has asked for a stream of some 100 kB, far more than sockets this small hold."""
    listening._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    asked = {"model": "policy", "prompt": "c", "max_tokens": 100, "n": 16, "stream": True}
    body = json.dumps(asked).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", int(listening.url.rpartition(":")[2].partition("/")[0])))
        connection.sendall(HEADERS.replace(b"90", b"%d" % len(body)) + b"\r\n" + body)
        yield connection


def test_a_client_that_does_not_read_its_stream_is_let_go(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SLOW_S", 0.3)
    with streaming(listening) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        until = time.monotonic() + 60
        while listening.endpoint.num_sequences and time.monotonic() < until:
            time.sleep(0.01)
        assert listening.endpoint.num_sequences == 0
        assert b"[DONE]" not in connection.makefile("rb").read()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The server's side of each connection that is made."""
    found = list[Connection]()
    made = Connection.connection_made

    def noted(connection: Connection, transport: Any) -> None:
        found.append(connection)
        made(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    return found


def test_a_client_is_kept_while_it_takes_enough_of_its_stream(
    listening: Listening, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As looked at twice: one byte of what waited has been taken, and none."""
    one: Any
    monkeypatch.setattr(server, "LEAST_TAKEN", 1)

    async def look(*, taken: int) -> bool:
        waiting: int = one.transport.get_write_buffer_size()
        one._end_unread(waiting + taken)
        return one.transport.is_closing()

    with streaming(listening) as client:
        assert client.recv(100)
        [one] = connections
        while one._looks is None:  # until writing is paused
            time.sleep(0.01)
        assert [asyncio.run_coroutine_threadsafe(look(taken=n), one.loop).result(60) for n in (1, 0)] == [False, True]


def test_a_request_that_is_being_answered_has_no_timer(
    listening: Listening, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its answer may take longer than a request. Before its headers it has one, and after its answer again."""
    timers = list[Any]()

    def noted(*given: Any, **named: Any) -> Any:
        timers.extend(one._ends for one in connections)
        return render_prompt(*given, **named)

    monkeypatch.setattr(endpoint_file, "render_prompt", noted)
    assert status_of(listening, "completions", {})[0] == 200
    assert timers == [None]


def test_an_answer_that_is_cut_off_at_the_end_logs_no_traceback(
    live: LiveScheduler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    over = threading.Event()

    def for_ever(*given: Any, **named: Any) -> Any:
        begun.set()
        over.wait(30)
        raise ValueError("over")

    monkeypatch.setattr(endpoint_file, "render_prompt", for_ever)
    with listening_to(live) as listening:
        logging.getLogger("uvicorn.error").propagate = True
        logging.getLogger("uvicorn").propagate = True
        client = threading.Thread(target=suppressed(status_of), args=[listening, "completions", {}])
        client.start()
        begun.wait(30)
    over.set()
    client.join()
    assert [record for record in caplog.records if record.exc_info] == []


def suppressed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> None:
        with contextlib.suppress(Exception):
            function(*given)

    return call


WISHED = {"response_format": {"type": "json_object"}, "tool_choice": "required", "frequency_penalty": 1}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
NO_WISHES = {
    "parallel_tool_calls": False, "store": True, "verbosity": "low", "metadata": {"a": "b"}, "user": "me",
    "tool_choice": "none", "response_format": {"type": "text"},
}  # fmt: skip


def test_in_an_episode_wishes_are_the_policys_to_learn_and_are_listed(live: LiveScheduler) -> None:
    with listening_to(live, positions=4096, episodes={}) as server:
        server.endpoint.episodes = {"key": episode_of(live.tokenizer)}
        ask = client_of(server, "key").chat.completions.create
        asked: Any = {"model": "policy", "messages": HELLO, "tools": TOOLS, "max_tokens": 1}
        assert ask(**asked, extra_body=NO_WISHES).choices
        assert server.endpoint.wishes == {}
        assert ask(**asked, extra_body=WISHED).choices
        assert ask(**asked, extra_body={"tool_choice": NAMED}).choices
        assert {*server.endpoint.wishes} == {*WISHED}
        assert server.endpoint.wishes["tool_choice"] == 'tool_choice="required"'


@pytest.mark.parametrize("wish", [*WISHED.items(), ("tool_choice", NAMED)])
def test_what_no_episode_learns_is_refused(wish: tuple[str, Any], client: openai.OpenAI) -> None:
    name, value = wish
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(model="policy", messages=HELLO, max_tokens=1, extra_body={name: value})
    asked: Any = {"model": "policy", "messages": HELLO, "max_tokens": 1}
    assert client.chat.completions.create(**asked, extra_body=NO_WISHES).choices


# ---- too much ----


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("completions", {"prompt": ["hello"] * 5000, "n": 10}, 429),
        ("completions", {"prompt": ["hello"] * 33, "n": 128}, 429),
        ("completions", {"prompt": ["hello", "x" * 5_000_000]}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5_000_000}]}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"text": "x " * 900_000}]}]}, 400),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "x" * 5_000_000}]}, 400),
    ],
)  # fmt: skip
def test_too_much_is_refused_before_anything_is_tokenised(
    path: str, asked: dict[str, Any], status: int, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Any] = []
    monkeypatch.setattr("tinyrl.endpoint.endpoint.render_prompt", lambda *args, **_: rendered.append(args))
    code, _ = post(f"{listening.url}/{path}", json.dumps({"model": "policy", "max_tokens": 1, **asked}).encode())
    assert code == status
    assert not rendered


def test_sequences_of_all_requests_are_counted_until_they_have_ended(
    live: LiveScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyrl.endpoint.endpoint.MOST_SEQUENCES", 4)
    with listening_to(live) as server:
        ask: Callable[..., Any] = client_of(server).completions.create
        two: Any = {"model": "policy", "prompt": ["a", "b"], "max_tokens": 90}
        with ask(**two, stream=True) as first, ask(**two, stream=True) as second:
            next(iter(first))
            next(iter(second))
            with pytest.raises(openai.RateLimitError):
                ask(model="policy", prompt="c", max_tokens=1)
        until = time.monotonic() + 30
        while server.endpoint.num_sequences and time.monotonic() < until:
            time.sleep(0.01)
        assert ask(model="policy", prompt="c", max_tokens=1).choices


def test_a_long_text_keeps_nobody_waiting(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return render_prompt(*args, **options)

    monkeypatch.setattr("tinyrl.endpoint.endpoint.render_prompt", slow)
    answers: list[tuple[int, Any]] = []
    body = json.dumps({"model": "policy", "prompt": "hello", "max_tokens": 1}).encode()
    asking = threading.Thread(target=lambda: answers.append(post(f"{listening.url}/completions", body)))
    asking.start()
    assert begun.wait(60)
    with urllib.request.urlopen(listening.url.removesuffix("/v1") + "/health", timeout=30) as answer:
        assert json.loads(answer.read()) == {"status": "ok"}
    assert not answers
    go_on.set()
    asking.join(60)
    assert [code for code, _ in answers] == [200]


def post(url: str, content: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raw = error.read()
        return error.code, json.loads(raw) if raw.startswith(b"{") else {}


def test_a_key_is_asked_for(live: LiveScheduler) -> None:
    with listening_to(live, key="secret") as server:
        for wrong in ("", "secre", "secret2", "śecret"):
            key = f"Bearer {wrong}".encode().decode("latin-1")
            code, answer = post(f"{server.url}/completions", b"{}", {"Authorization": key})
            assert code == 401
            assert "secret" not in answer["error"]["message"]
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "other").models.list()
        assert client_of(server, "secret").models.list().data


# ---- scripted completions ----


class Scripted:
    """A scheduler whose completions are this text, or end as `result`."""

    vocabulary = 1024

    def __init__(self, text: str, result: Any = None) -> None:
        self.tokenizer, self.result = tiny_tokenizer(), result
        self.tokenizer.chat_template = TEMPLATE
        self.tokens = [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]  # pyright: ignore

    def submit(self, work: list[Any]) -> None:
        for each in work:
            each.end(self.tokens, [0.0] * len(self.tokens), "eos")
            for token in self.tokens:
                each.request.on_tokens([token])
            each.request.on_end(self.result)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_completion(*, streams: bool) -> None:
    """Also while tokens come, of which one that waits for the whole sees none."""

    class Endless(Scripted):
        ended = threading.Event()

        def submit(self, work: list[Any]) -> None:
            [sequence] = work
            threading.Thread(target=self.decode, args=(sequence,), daemon=True).start()

        def decode(self, sequence: DecodedSequence) -> None:
            while not sequence.cancelled and sequence.request.on_tokens is not None:
                sequence.request.on_tokens([40])
                time.sleep(0.01)
            self.ended.set()

    with listening_to(Endless("")) as server:
        ask = client_of(server).completions.create
        if streams:
            stream = ask(model="policy", prompt="hello", stream=True)
            next(iter(stream))
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(model="policy", prompt="hello", timeout=0.5)
        assert Endless.ended.wait(20)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me look. {CALL}", "Let me look.", 1),
        ("no call", "no call", 0),
        ("<tool_call>{broken", "<tool_call>{broken", 0),
        (f"<think>or {CALL}", f"<think>or {CALL}", 0),
    ],
)
def test_calls_of_tools_are_read(text: str, content: str, calls: int) -> None:
    with listening_to(Scripted(text), positions=4096) as server:
        ask: Callable[..., Any] = client_of(server).chat.completions.create
        asked = {"model": "policy", "messages": HELLO, "tools": TOOLS}
        message = ask(**asked).choices[0].message
        assert message.content == content
        assert [call.function.arguments for call in message.tool_calls or []] == ['{"city": "Oslo"}'] * calls
        streamed, called, reason = "", [], None
        for chunk in ask(**asked, stream=True):
            [choice] = chunk.choices
            streamed += choice.delta.content or ""
            called += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
        assert streamed.strip() == content
        assert [call.index for call in called] == [*range(calls)]
        assert reason == ("tool_calls" if calls else "stop")


def test_a_call_that_the_client_begins_is_read_and_its_beginning_is_not_sent_back() -> None:
    begun = [*HELLO, {"role": "assistant", "content": f"Let me look. {CALL[:20]}"}]
    for text, content, calls in ((CALL[20:], None, 1), ("at this", "at this", 0)):
        with listening_to(Scripted(text), positions=4096) as server:
            ask: Callable[..., Any] = client_of(server).chat.completions.create
            message = ask(model="policy", messages=begun, tools=TOOLS).choices[0].message
            assert message.content == content
            assert [call.function.arguments for call in message.tool_calls or []] == ['{"city": "Oslo"}'] * calls


@pytest.mark.parametrize(
    ("stop", "expected"), [(["cd"], "ab"), (["zz"], "abcdefg"), (["g", "ef"], "abcd"), (["abcdefg"], "")]
)
def test_nothing_of_a_stop_string_is_shown(stop: list[str], expected: str) -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(0, DecodedSequence(Request([1], np.uint64(0), 9)), TurnDetokenizer(tokenizer), stop)
    shown = ""
    for token in tokenizer("abcdefg", add_special_tokens=False)["input_ids"]:  # pyright: ignore
        shown += choice.add([token])  # pyright: ignore
        assert expected.startswith(shown)
    choice.ended = True
    assert shown + choice.add([]) == expected


@pytest.mark.parametrize(("shows_stop", "expected"), [(False, "<think>\nab"), (True, "<think>\nab\ncd")])
def test_a_stop_string_in_what_the_template_wrote_stops_nothing(*, shows_stop: bool, expected: str) -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(
        index=0,
        sequence=DecodedSequence(Request([1], np.uint64(0), 9)),
        detokenizer=TurnDetokenizer(tokenizer),
        stop=["\n"],
        shows_stop=shows_stop,
        text="<think>\n",
    )
    shown = ""
    for token in tokenizer("ab\ncd", add_special_tokens=False)["input_ids"]:  # pyright: ignore
        shown += choice.add([token])  # pyright: ignore
    choice.ended = True
    assert shown + choice.add([]) == expected
    assert choice.stopped_by == "\n"


class CutOff(Scripted):
    """Its completions end for length."""

    def submit(self, work: list[Any]) -> None:
        for each in work:
            each.end(self.tokens, [0.0] * len(self.tokens), "length")
            each.request.on_tokens(self.tokens)
            each.request.on_end(None)


@pytest.mark.parametrize(
    ("stop", "reasons"), [("cd", ("stop", "stop_sequence", "cd")), ("zz", ("length", "max_tokens", None))]
)
def test_chats_and_messages_agree_on_what_ended_an_answer(stop: str, reasons: tuple[str, str, str | None]) -> None:
    """Where a stop string is in the text, and sampling went on over a token that has none."""
    asked = {"model": "policy", "messages": HELLO, "max_tokens": 9}
    with listening_to(CutOff("abcd")) as server:
        _, chat = post(f"{server.url}/chat/completions", json.dumps({**asked, "stop": stop}).encode())
        _, message = post(f"{server.url}/messages", json.dumps({**asked, "stop_sequences": [stop]}).encode())
    found = (chat["choices"][0]["finish_reason"], message["stop_reason"], message["stop_sequence"])
    assert found == reasons


def test_an_answer_that_fails_is_an_error_and_not_silence() -> None:
    failing = Scripted("x", RuntimeError("planted"))
    with listening_to(failing) as server, pytest.raises(openai.APIStatusError) as caught:
        client_of(server).chat.completions.create(model="policy", messages=HELLO)
    assert caught.value.status_code == 500


def test_a_server_that_ends_before_it_listens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    with pytest.raises(RuntimeError), listening_to(Scripted("x")):
        pass
