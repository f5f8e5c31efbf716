"""The policy behind OpenAI's protocol: the real client, what is refused, who may ask, calls and stop strings."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.generation.sampling import make_engine
from tests.tiny_models import TinyModels, tiny_tokenizer
from tinyrl.generation.endpoint import LOCAL, Choice, Endpoint, Listening
from tinyrl.generation.engine import Completion, SamplingParams, Sequence
from tinyrl.generation.scheduler import IncrementalDetokenizer, LiveScheduler
from tinyrl.models.lora import POLICY_ADAPTER

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def client_of(listening: Listening, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=listening.url, api_key=key, max_retries=0)


@contextmanager
def listening_to(scheduler: Any, *, positions: int = 128, **options: Any) -> Iterator[Listening]:
    given: dict[str, Any] = {"defaults": SamplingParams(), "max_new_tokens": 12, "variables": {}, **options}
    listening = Listening(Endpoint(scheduler, {"policy": "policy", "base": "base"}, positions=positions, **given))
    try:
        yield listening
    finally:
        listening.stop()


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    engine = make_engine(TinyModels(tmp_path_factory.mktemp("models"))("llama"), "fused", lora=True)
    engine.tokenizer.chat_template = TEMPLATE
    live = LiveScheduler(engine, max_rows=4)
    yield live
    live.close()


@pytest.fixture(scope="module")
def url(scheduler: LiveScheduler) -> Iterator[str]:
    with listening_to(scheduler, hosts=LOCAL) as listening:
        yield listening.url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0)


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


def test_token_ids_and_logprobs_are_those_of_an_echo(client: openai.OpenAI) -> None:
    """As lm-eval asks: the prompt as tokens, of which nothing or one more token is sampled."""
    ask: Callable[..., Any] = client.completions.create
    [choice] = ask(
        model="policy", prompt="hello", max_tokens=8, logprobs=0, extra_body={"return_token_ids": True}
    ).choices
    ids = choice.model_extra
    whole = [*ids["prompt_token_ids"], *ids["token_ids"]]
    for more in (0, 1):
        [read] = ask(model="policy", prompt=whole, max_tokens=more, echo=True, logprobs=1, temperature=0).choices
        found = read.logprobs.token_logprobs[: len(whole)]
        assert found[-len(ids["token_ids"]) :] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert found[0] is None
        assert len(read.logprobs.tokens) == len(read.logprobs.top_logprobs) == len(whole) + more


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    ask: Callable[..., Any] = client.chat.completions.create
    same: dict[str, Any] = {"model": "policy", "seed": 2, "max_tokens": 10}
    whole = ask(messages=HELLO, **same)
    pieces, reasons, usage = [], [], None
    for chunk in ask(messages=HELLO, **same, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 2
    assert reasons[-1] == whole.choices[0].finish_reason
    assert usage == whole.usage
    text = client.completions.create(prompt="hello", **same)
    streamed = client.completions.create(prompt="hello", **same, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_the_base_answers_without_the_adapter(client: openai.OpenAI, scheduler: LiveScheduler) -> None:
    for layer in scheduler.engine.policy.adapted_layers(POLICY_ADAPTER):
        torch.nn.init.normal_(layer.lora_B[POLICY_ADAPTER].weight, generator=torch.Generator().manual_seed(0))  # pyright: ignore
    scheduler.release()
    ask: dict[str, Any] = {"prompt": "hello", "max_tokens": 10, "temperature": 0}
    texts = [client.completions.create(model=name, **ask).choices[0].text for name in ("policy", "base")]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_tokens_at_each_place(
    temperature: float, client: openai.OpenAI, scheduler: LiveScheduler
) -> None:
    """Beside a forward pass: softmax(logits / temperature), at temperature 0 the plain one."""
    ask: Callable[..., Any] = client.chat.completions.create
    same: Any = {"model": "policy", "temperature": temperature, "seed": 3, "max_tokens": 6}
    same["extra_body"] = {"return_token_ids": True}
    [chat] = ask(messages=HELLO, logprobs=True, top_logprobs=5, **same).choices
    prompt, tokens = chat.model_extra["prompt_token_ids"], chat.model_extra["token_ids"]
    with torch.no_grad(), scheduler.engine.policy.acting("policy") as model:
        logits: Any = model(torch.tensor([prompt + tokens])).logits[0]
    scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(prompt) - 1 : -1]
    for entry, row, token in zip(chat.logprobs.content, scores, tokens, strict=True):
        best = row.topk(5)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in entry.top_logprobs] == [scheduler.tokenizer.decode([i]) for i in best.indices]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
    last = [
        chunk.choices[0].logprobs for chunk in ask(messages=HELLO, logprobs=True, top_logprobs=5, stream=True, **same)
    ]
    assert [len(entry.top_logprobs) for entry in last[-1].content] == [5] * len(tokens)
    complete: Callable[..., Any] = client.completions.create
    text = complete(prompt=prompt, logprobs=20, echo=True, **same).choices[0].logprobs
    assert text.top_logprobs[0] is None
    assert all(5 < len(top) <= 21 for top in text.top_logprobs[1:])
    for place, row in enumerate(scores, len(prompt)):
        assert max(text.top_logprobs[place].values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert text.tokens[place] in text.top_logprobs[place]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("asked", "status", "named"),
    [
        ({"model": "gpt-4"}, 404, "policy, base"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 1000}, 400, "128 positions"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "positions"),
        ({"messages": None}, 400, "messages"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"chat_template_kwargs": {"thinking": True}}, 400, "thinking"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, 400, "JSON"),
        ({"\udc00": 1}, 400, "JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(url: str, asked: dict[str, Any], status: int, named: str) -> None:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 2, **asked}
    code, answer = post(f"{url}/chat/completions", json.dumps(body).encode())
    assert code == status
    assert named in answer["error"]["message"]


LIKE_CLIENTS = {
    **dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "stream_options", "user"]),
    **dict.fromkeys(["logprobs", "top_logprobs", "response_format", "logit_bias", "functions", "min_p", "max_tokens"]),
    **{"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0, "store": False},
    **{"ignore_eos": False, "stop_token_ids": [], "metadata": {"a": "b"}, "service_tier": "auto"},
    **{"parallel_tool_calls": True, "skip_special_tokens": True, "cache_prompt": True, "x-unknown": {"y": [1]}},
}


def test_what_clients_send_that_changes_nothing_is_accepted(url: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "hello", "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "tool", "content": "sunny", "tool_call_id": "c"},
        {"role": "user", "content": "\U0001f600 and?"},
    ]
    body = {"model": "policy", "messages": messages, "max_completion_tokens": 2, **LIKE_CLIENTS}
    code, answer = post(f"{url}/chat/completions", json.dumps(body).encode())
    assert code == 200, answer


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"model": "policy"}', {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),  # what a page of another site may send without being asked
        (b"{}", {"Host": "evil.example"}, 400),
        (b" " * (1 << 25) + b"{}", {}, 413),
        (json.dumps({"model": "policy", "prompt": [1, -1], "max_tokens": 1}).encode(), {}, 400),
    ],
)
def test_what_is_no_request_is_refused(
    url: str, client: openai.OpenAI, content: bytes, headers: dict[str, str], status: int
) -> None:
    code, _ = post(f"{url}/completions", content, headers)
    assert code == status
    assert client.completions.create(model="policy", prompt="hello", max_tokens=1).choices


def post(url: str, content: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raw = error.read()
        return error.code, json.loads(raw) if raw.startswith(b"{") else {}
    except OSError:  # refused before all of it was sent
        return 413, {}


def test_a_key_is_asked_for(scheduler: LiveScheduler) -> None:
    with listening_to(scheduler, key="secret") as server:
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
    """A scheduler whose completions are this text, or end as `result`; None: it is full."""

    vocabulary = 1024

    def __init__(self, text: str, result: Any = ()) -> None:
        self.tokenizer, self.result = tiny_tokenizer(), result
        self.tokenizer.chat_template = TEMPLATE
        self.tokens = [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]  # pyright: ignore

    def submit(self, work: Iterable[Any]) -> bool:
        for each in work if self.result is not None else ():
            for token in self.tokens:
                each.on_tokens([token])
            each.on_end(self.result or Completion(self.tokens, [0.0] * len(self.tokens), "eos"))
        return self.result is not None


def test_a_client_that_leaves_ends_its_completion() -> None:
    class Endless(Scripted):
        ended = threading.Event()

        def submit(self, work: Iterable[Any]) -> bool:
            [sequence] = work
            threading.Thread(target=self.decode, args=(sequence,), daemon=True).start()
            return True

        def decode(self, sequence: Sequence) -> None:
            while not sequence.cancelled and sequence.on_tokens is not None:
                sequence.on_tokens([40])
                time.sleep(0.01)
            self.ended.set()

    with listening_to(Endless("")) as server:
        stream = client_of(server).completions.create(model="policy", prompt="hello", stream=True)
        next(iter(stream))
        stream.close()
        assert Endless.ended.wait(60)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me look. {CALL}", "Let me look.", 1),
        ("no call", "no call", 0),
        ("<tool_call>{broken", "<tool_call>{broken", 0),
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


@pytest.mark.parametrize(
    ("stop", "expected"), [(["cd"], "ab"), (["zz"], "abcdefg"), (["g", "ef"], "abcd"), (["abcdefg"], "")]
)
def test_nothing_of_a_stop_string_is_shown(stop: list[str], expected: str) -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(0, Sequence([1], SamplingParams(), np.uint64(0), 9), IncrementalDetokenizer(tokenizer), stop)
    shown = ""
    for token in tokenizer("abcdefg", add_special_tokens=False)["input_ids"]:  # pyright: ignore
        shown += choice.add([token])  # pyright: ignore
        assert expected.startswith(shown)
    assert shown + choice.add([], ended=True) == expected


@pytest.mark.parametrize(("result", "status"), [(RuntimeError("planted"), 500), (None, 429)])
def test_an_answer_that_fails_is_an_error_and_not_silence(result: Any, status: int) -> None:
    with listening_to(Scripted("x", result)) as server, pytest.raises(openai.APIStatusError) as caught:
        client_of(server).chat.completions.create(model="policy", messages=HELLO)
    assert caught.value.status_code == status
