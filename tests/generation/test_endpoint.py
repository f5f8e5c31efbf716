"""The policy behind OpenAI's protocol: the real client, what is refused, who may ask, calls and stop strings."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
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


class Running(Listening):
    """An endpoint that listens, and clients of it."""

    def client(self, key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)


def endpoint(scheduler: Any, *, positions: int = 128, **options: Any) -> Endpoint:
    defaults = {"defaults": SamplingParams(), "max_new_tokens": 12, "variables": {}}
    return Endpoint(scheduler, {"policy": "policy", "base": "base"}, positions=positions, **{**defaults, **options})


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    models = TinyModels(tmp_path_factory.mktemp("models"))
    engine = make_engine(models("llama"), "fused", lora=True)
    engine.tokenizer.chat_template = TEMPLATE
    live = LiveScheduler(engine, max_rows=4)
    yield live
    live.close()


@pytest.fixture(scope="module")
def running(scheduler: LiveScheduler) -> Iterator[Running]:
    server = Running(endpoint(scheduler, hosts=LOCAL))
    yield server
    server.stop()


# ---- the client of the package index ----


def test_models_chat_and_completions(running: Running) -> None:
    client = running.client()
    assert [model.id for model in client.models.list()] == ["policy", "base"]
    chat = client.chat.completions.create(model="policy", messages=HELLO, n=3, seed=5, max_tokens=9, logprobs=True)
    texts = [choice.message.content for choice in chat.choices]
    assert len({*texts}) == 3
    assert all(len(c.logprobs.content or []) <= 9 for c in chat.choices if c.logprobs)
    again = client.chat.completions.create(model="policy", messages=HELLO, n=3, seed=5, max_tokens=9)
    assert [choice.message.content for choice in again.choices] == texts
    other = client.chat.completions.create(model="policy", messages=HELLO, n=3, seed=6, max_tokens=9)
    assert [choice.message.content for choice in other.choices] != texts
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    two = client.completions.create(model="policy", prompt=["ab", "cd"], max_tokens=4, seed=1)
    one = client.completions.create(model="policy", prompt="cd", max_tokens=4, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[1].text == one.choices[0].text


def test_token_ids_and_logprobs_are_those_of_a_reading(running: Running) -> None:
    client = running.client()
    told: dict[str, Any] = {"return_token_ids": True}
    first = client.completions.create(model="policy", prompt="hello", max_tokens=8, logprobs=0, extra_body=told)
    choice = first.choices[0]
    ids = choice.model_extra or {}
    assert choice.logprobs is not None
    sampled = choice.logprobs.token_logprobs
    whole = [*ids["prompt_token_ids"], *ids["token_ids"]]
    read = client.completions.create(model="policy", prompt=whole, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert read.logprobs is not None
    assert read.logprobs.token_logprobs is not None
    assert read.logprobs.token_logprobs[-len(ids["token_ids"]) :] == pytest.approx(sampled, abs=1e-5)
    assert read.logprobs.token_logprobs[0] is None


def test_a_stream_is_the_answer_in_pieces(running: Running) -> None:
    client = running.client()
    whole = client.chat.completions.create(model="policy", messages=HELLO, seed=2, max_tokens=10)
    pieces, reasons, usage = [], [], None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="policy", messages=HELLO, seed=2, max_tokens=10, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 2
    assert reasons[-1] == whole.choices[0].finish_reason
    assert usage == whole.usage
    text = client.completions.create(model="policy", prompt="hello", seed=2, max_tokens=10)
    streamed = client.completions.create(model="policy", prompt="hello", seed=2, max_tokens=10, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_the_base_answers_without_the_adapter(running: Running, scheduler: LiveScheduler) -> None:
    client = running.client()
    for layer in scheduler.engine.roles.adapted_layers(POLICY_ADAPTER):
        torch.nn.init.normal_(layer.lora_B[POLICY_ADAPTER].weight, generator=torch.Generator().manual_seed(0))  # pyright: ignore
    scheduler.release()
    ask: dict[str, Any] = {"prompt": "hello", "max_tokens": 10, "temperature": 0}
    texts = [client.completions.create(model=name, **ask).choices[0].text for name in ("policy", "base")]
    assert texts[0] != texts[1]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"model": "gpt-4"}, 404, "policy, base"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 1000}, 400, "128 positions"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "positions"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"chat_template_kwargs": {"thinking": True}}, 400, "thinking"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, 400, "Invalid JSON"),
        ({"\udc00": 1}, 400, "Invalid JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(
    running: Running, asked: dict[str, Any], status: int, said: str
) -> None:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 2, **asked}
    code, answer = post(f"{running.url}/chat/completions", json.dumps(body).encode())
    assert code == status
    assert said in answer["error"]["message"]


LIKE_CLIENTS = {
    **dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "stream_options", "user"]),
    **dict.fromkeys(["logprobs", "top_logprobs", "response_format", "logit_bias", "functions", "min_p", "max_tokens"]),
    **{"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0, "store": False},
    **{"ignore_eos": False, "stop_token_ids": [], "metadata": {"a": "b"}, "service_tier": "auto"},
    **{"parallel_tool_calls": True, "skip_special_tokens": True, "cache_prompt": True, "x-unknown": {"y": [1]}},
}


def test_what_clients_send_that_changes_nothing_is_taken(running: Running) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "hello", "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "tool", "content": "sunny", "tool_call_id": "c"},
        {"role": "user", "content": "\U0001f600 and?"},
    ]
    body = {"model": "policy", "messages": messages, "max_completion_tokens": 2, **LIKE_CLIENTS}
    code, answer = post(f"{running.url}/chat/completions", json.dumps(body).encode())
    assert code == 200, answer


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_tokens_at_each_place(temperature: float, running: Running, scheduler: LiveScheduler) -> None:
    """Beside a reading of its own: softmax(logits / temperature), at temperature 0 the plain one."""
    client, told = running.client(), {"return_token_ids": True}
    same: Any = {"model": "policy", "temperature": temperature, "seed": 3, "max_tokens": 6, "extra_body": told}
    chat = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=5, **same).choices[0]
    ids: Any = chat.model_extra
    with torch.no_grad(), scheduler.engine.roles.acting("policy") as model:
        logits: Any = model(torch.tensor([ids["prompt_token_ids"] + ids["token_ids"]])).logits[0]
    scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(ids["prompt_token_ids"]) - 1 : -1]
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert len(content) == len(ids["token_ids"]) > 0
    for token, row, its in zip(content, scores, ids["token_ids"], strict=True):
        best = row.topk(5)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in token.top_logprobs] == [scheduler.tokenizer.decode([i]) for i in best.indices]
        assert token.logprob == pytest.approx(row[its].item(), abs=1e-4)
    streamed = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=5, stream=True, **same)
    last = [chunk.choices[0].logprobs for chunk in streamed][-1]
    assert last is not None
    assert [len(token.top_logprobs) for token in last.content or []] == [5] * len(content)
    prompt = ids["prompt_token_ids"]
    text = client.completions.create(prompt=prompt, logprobs=20, echo=True, **same).choices[0].logprobs
    assert text is not None
    tops: Any = text.top_logprobs
    assert tops[0] is None
    for place, row in enumerate(scores, len(prompt)):
        assert max(tops[place].values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert text.tokens[place] in tops[place]  # pyright: ignore[reportOptionalSubscript]
        assert 5 < len(tops[place]) <= 21
    assert all(len(top) > 5 for top in tops[1 : len(prompt)])


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),  # what a page of another site may send without being asked
        (b"{}", {"Host": "evil.example"}, 400),
        (b" " * (1 << 25) + b"{}", {}, 413),
        (json.dumps({"model": "policy", "prompt": [1, -1], "max_tokens": 1}).encode(), {}, 400),
    ],
)
def test_what_is_no_request_is_refused(running: Running, content: bytes, headers: dict[str, str], status: int) -> None:
    code, _ = post(f"{running.url}/completions", content, headers)
    assert code == status
    assert running.client().completions.create(model="policy", prompt="hello", max_tokens=1).choices


def post(url: str, content: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read()
        return error.code, json.loads(said) if said.startswith(b"{") else {}
    except urllib.error.URLError:  # refused before all of it was sent
        return 413, {}


def test_a_key_is_asked_for(scheduler: LiveScheduler) -> None:
    server = Running(endpoint(scheduler, key="secret"))
    try:
        for wrong in ("", "secre", "secret2", "śecret"):
            code, answer = post(
                f"{server.url}/completions", b"{}", {"Authorization": f"Bearer {wrong}".encode().decode("latin-1")}
            )
            assert code == 401
            assert "secret" not in answer["error"]["message"]
        with pytest.raises(openai.AuthenticationError):
            server.client("other").models.list()
        assert server.client("secret").models.list().data
    finally:
        server.stop()


def test_a_client_that_leaves_ends_its_completion(scheduler: LiveScheduler) -> None:
    server = Running(endpoint(scheduler, positions=100_000, max_new_tokens=90_000))
    try:
        stream = server.client().completions.create(model="policy", prompt="hello", max_tokens=90_000, stream=True)
        next(iter(stream))
        stream.close()
        patient = server.client().with_options(timeout=60)  # 90,000 tokens take minutes
        answer = patient.completions.create(model="policy", prompt="a", max_tokens=2, temperature=0.5)
        assert answer.choices[0].text is not None
    finally:
        server.stop()


# ---- scripted completions ----


class Scripted:
    """A sampler that says what it is told to."""

    vocabulary = 1024

    def __init__(self, text: str) -> None:
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.tokens = [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]  # pyright: ignore

    def submit(self, work: Iterable[Any]) -> bool:
        for each in work:
            for token in self.tokens:
                each.on_tokens([token])
            each.on_end(Completion(self.tokens, [0.0] * len(self.tokens), "eos"))
        return True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me look. {CALL}", "Let me look.", 1),
        ("no call", "no call", 0),
        ("<tool_call>{broken", "<tool_call>{broken", 0),
    ],
)
def test_calls_of_tools_are_read(text: str, content: str | None, calls: int, *, stream: bool) -> None:
    server = Running(endpoint(Scripted(text), positions=4096))
    try:
        ask: dict[str, Any] = {"model": "policy", "messages": HELLO, "tools": TOOLS}
        if not stream:
            message = server.client().chat.completions.create(**ask).choices[0].message
            assert message.content == content
            assert [c.function.arguments for c in message.tool_calls or []] == ['{"city": "Oslo"}'] * calls  # pyright: ignore
            return
        said, called, reason = "", [], None
        for chunk in server.client().chat.completions.create(**ask, stream=True):
            said += chunk.choices[0].delta.content or ""
            called += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
        assert said.strip() == (content or "")
        assert [call.index for call in called] == [*range(calls)]
        assert reason == ("tool_calls" if calls else "stop")
    finally:
        server.stop()


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


def test_an_answer_that_fails_is_an_error_and_not_silence() -> None:
    class Failing(Scripted):
        def submit(self, work: Iterable[Any]) -> bool:
            next(iter(work)).on_end(RuntimeError("planted"))
            return True

    class Full(Scripted):
        def submit(self, work: Iterable[Any]) -> bool:
            return False

    for scheduler, status in ((Failing("x"), 500), (Full("x"), 429)):
        server = Running(endpoint(scheduler))
        try:
            with pytest.raises(openai.APIStatusError) as caught:
                server.client().chat.completions.create(model="policy", messages=HELLO)
            assert caught.value.status_code == status
        finally:
            server.stop()
