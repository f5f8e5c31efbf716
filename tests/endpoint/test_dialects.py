"""Three dialects of one endpoint, each by its own client: what is translated and answered, and the same samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.endpoint.conftest import episode_of, listening_to
from tests.endpoint.test_endpoint import CALL, TOOLS, CutOff, Scripted, post
from tinyrl.endpoint.completions import ChatCompletions
from tinyrl.endpoint.dialect import EndedChoice, ListedToken, Refused, Usage
from tinyrl.endpoint.messages_api import Messages
from tinyrl.endpoint.responses import Responses
from tinyrl.endpoint.server import Listening
from tinyrl.generation.live import LiveScheduler

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ROME = CALL.replace("Oslo", "Rome")


# ---- requests ----


def test_items_of_responses_become_messages() -> None:
    """Consecutive calls are one message of the assistant's, with its text before them."""
    asked = {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "as ever"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "reasoning", "id": "rs_2", "summary": []},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "wet"},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 9,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}, "verbosity": "low"},
        "reasoning": {"effort": "low"},  # and what else only describes a request
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_p": 0.5,
    }

    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}}

    chat = {name: value for name, value in Responses.chat_request(asked).items() if value is not None}
    assert chat == {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "system", "content": "as ever"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look."}],
                "tool_calls": [call("a"), call("b")],
            },
            {"role": "tool", "tool_call_id": "b", "content": "wet"},
            {"role": "assistant", "content": None, "tool_calls": [call("c")]},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": None, "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_completion_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "verbosity": "low",
        "logprobs": True,
        "top_p": 0.5,
    }


def test_blocks_of_messages_become_messages() -> None:
    """Results of tools are messages of their own, where they stand."""
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
    asked = {
        "model": "policy",
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "wet"}]},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": "now?"},
                ],
            },
        ],
        "tools": [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "max_tokens": 9,
        "thinking": {"type": "disabled"},
    }
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert Messages.chat_request(asked) == {
        "model": "policy",
        "messages": [
            {"role": "system", "content": asked["system"]},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "I look."}],
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "wet"}]},
            {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
            }
        ],
        "tool_choice": "required",
        "stop": ["END"],
        "max_tokens": 9,
        "thinking": {"type": "disabled"},
    }


def test_a_chat_goes_to_the_template_in_its_own_words() -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    asked = {
        "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {**function, "strict": True}}],
        "seed": 1,
    }
    assert ChatCompletions.chat_request(asked) == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("kind", "asked", "named"),
    [
        (Responses, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (Responses, {"input": "x", "conversation": {"id": "conv_1"}}, "conversation"),
        (Responses, {"input": "x", "background": True}, "background"),
        (Responses, {"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        (Responses, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (Responses, {"input": "x", "tools": [{"name": "weather"}]}, "tools"),
        (Responses, {"input": "x", "tools": [{"type": "namespace", "name": "of"}]}, "namespace"),
        (
            Responses,
            {"input": "x", "tools": [{"type": "namespace", "name": "of", "description": 5, "tools": []}]},
            "description",
        ),
        (
            Responses,
            {
                "input": "x",
                "tools": [
                    {"type": "namespace", "name": "of", "tools": [{"type": "namespace", "name": "x", "tools": []}]}
                ],
            },
            "within",
        ),
        (Responses, {"input": "x", "reasoning": "high"}, "reasoning"),
        (Responses, {"input": 3}, "input"),
        (Responses, {"input": "x", "n": 2}, "^n:"),
        (Messages, {"messages": [{"role": "user", "content": "x"}], "container": "x"}, "container"),
        (
            Messages,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image",
        ),
        (Messages, {"messages": [{"role": "tool", "content": "x"}]}, "tool"),
        (Messages, {"messages": [{"role": "user", "content": "x"}], "n": 2}, "^n:"),
        (Messages, {"messages": [{"role": "user", "content": "x"}], "tools": ["bash"]}, "tools"),
        (ChatCompletions, {"messages": [{"role": "user", "content": "x"}], "tools": ["bash"]}, "tools"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(kind: Any, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        kind.chat_request({"model": "policy", **asked})


def test_state_that_is_not_asked_for_is_no_state() -> None:
    asked = {"model": "policy", "input": "x", "previous_response_id": None, "background": False, "n": 1}
    assert Responses.chat_request(asked)["messages"] == [{"role": "user", "content": "x"}]


# ---- answers, by the types of the clients ----

TWO_CALLS = EndedChoice(
    content="I look.",
    calls=[
        {
            "id": f"call_{city}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for city in ("Oslo", "Rome")
    ],
    reason="tool_calls",
    logprobs=[ListedToken("I look.", -0.5, b"I look.", [ListedToken("I", -0.25, b"I")])],
)
ENDINGS = {
    "text": EndedChoice("dry", [], "stop"),
    "nothing": EndedChoice("", [], "stop"),
    "cut off": EndedChoice("dr", [], "length"),
    "stopped": EndedChoice("dry", [], "stop", stop="END"),
    "calls alone": EndedChoice(None, TWO_CALLS.calls, "tool_calls"),
    "calls": TWO_CALLS,
}


def streamed(dialect: Any, ended: EndedChoice) -> list[Any]:
    """The events of an answer whose text comes in two pieces."""
    events = [*dialect.begin(1, Usage(3, 0))]
    text = ended.content or ""
    for piece in (text[:2], text[2:]):
        events += dialect.piece(0, piece, None) if piece else []
    return [*events, *dialect.end(0, ended), *dialect.finish(Usage(3, 4))]


def test_an_error_within_a_stream_of_a_response_is_the_clients_own_event() -> None:
    [event] = Responses({"model": "policy", "input": "x"}).failed(Refused(429, "too many", code="busy"))
    found: Any = TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert isinstance(found, ResponseErrorEvent)
    assert (found.code, found.message) == ("busy", "too many")


@pytest.mark.parametrize(("name", "status"), [("text", "completed"), ("cut off", "incomplete"), ("calls", "completed")])
def test_a_response_and_its_message_are_incomplete_where_they_were_cut_off(name: str, status: str) -> None:
    found = Responses({"model": "policy", "input": "x"}).whole([ENDINGS[name]], Usage(3, 4))
    assert (found["status"], found["output"][0]["status"]) == (status, status)


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.wide
def test_a_response_is_one_of_the_clients_own_streamed_and_not(name: str) -> None:
    asked = {"model": "policy", "input": "x", "tools": [{"type": "function", **TOOLS[0]["function"], "strict": None}]}
    whole = Response.model_validate(Responses(asked).whole([ENDINGS[name]], Usage(3, 4)), strict=True)
    events = [TypeAdapter(ResponseStreamEvent).validate_python(e) for e in streamed(Responses(asked), ENDINGS[name])]
    last: Any = events[-1]
    assert whole.output_text == last.response.output_text == (ENDINGS[name].content or "")
    kinds = [("message",), ("function_call", "function_call"), ("message", "function_call", "function_call")]
    assert tuple(item.type for item in whole.output) == kinds[0 if not ENDINGS[name].calls else 1 + (name == "calls")]
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (3, 4, 7)
    assert last.type == f"response.{whole.status}"
    status = "incomplete" if name == "cut off" else "completed"
    assert {whole.status, *(item.status for item in whole.output if item.type == "message")} == {status}
    assert [event.sequence_number for event in events] == [*range(len(events))]
    done = [event.item.model_dump() for event in events if event.type == "response.output_item.done"]
    assert done == [item.model_dump() for item in last.response.output]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == [
        piece for piece in ((whole.output_text[:2]), whole.output_text[2:]) if piece
    ]
    calls = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert calls == [call["function"]["arguments"] for call in ENDINGS[name].calls]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "end_turn"), ("nothing", "end_turn"), ("cut off", "max_tokens"), ("stopped", "stop_sequence"),
        ("calls alone", "tool_use"), ("calls", "tool_use"),
    ],
)  # fmt: skip
@pytest.mark.wide
def test_a_message_is_one_of_the_clients_own_streamed_and_not(name: str, reason: str) -> None:
    from anthropic.types import Message, RawMessageStreamEvent  # a second of CPU time, so only where it is needed

    asked = {"model": "policy", "messages": []}
    ended = ENDINGS[name]
    whole = Message.model_validate(Messages(asked).whole([ended], Usage(3, 4)), strict=True)
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (3, 4)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, ended.stop)
    inputs = [block.input for block in whole.content if block.type == "tool_use"]
    assert inputs == [json.loads(call["function"]["arguments"]) for call in ended.calls]
    events = streamed(Messages(asked), ended)
    for event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == (ended.content or "")
    assert [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta] == inputs


# ---- the same samples ----


class Chat:
    """A harness that speaks to an endpoint by a client, and repeats what the client gave it."""

    tools: ClassVar[list[Any]] = TOOLS

    def __init__(self, listening: Listening, *, streams: bool, **options: Any) -> None:
        self.client: Any = openai.OpenAI(base_url=listening.url, api_key="key", max_retries=0)
        self.streams = streams
        self.history: list[Any] = []
        self.options = options
        self.calls: list[tuple[str, Any]] = []  # id and arguments of those in the last answer

    def say(self, text: str) -> str:
        self.history.append({"role": "user", "content": text})
        return self.ask()

    def ask(self) -> str:
        asked = {"model": "policy", "messages": self.history, "max_tokens": 6, **self.options}
        answer = self.client.chat.completions.create(**asked, stream=self.streams)
        if self.streams:
            deltas = [chunk.choices[0].delta for chunk in answer]
            content = "".join(delta.content or "" for delta in deltas)
            called = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            message = answer.choices[0].message
            content = message.content
            called = message.tool_calls or []
        self.calls = [(call.id, json.loads(call.function.arguments)) for call in called]
        repeated = {"role": "assistant", "content": content}
        calls = [call.to_dict() for call in called]
        self.history.append({**repeated, "tool_calls": calls} if calls else repeated)
        return content or ""

    def results(self, results: dict[str, str]) -> str:
        self.history += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results.items()]
        return self.ask()


class OverResponses(Chat):
    tools: ClassVar[list[Any]] = [{"type": "function", **TOOLS[0]["function"], "strict": True}]

    def ask(self) -> str:
        asked = {"model": "policy", "input": self.history, "max_output_tokens": 6, **self.options}
        answer = self.client.responses.create(**asked, stream=self.streams)
        response = [*answer][-1].response if self.streams else answer
        self.history += response.output
        called = [item for item in response.output if item.type == "function_call"]
        self.calls = [(item.call_id, json.loads(item.arguments)) for item in called]
        return response.output_text

    def results(self, results: dict[str, str]) -> str:
        self.history += [
            {"type": "function_call_output", "call_id": call, "output": text} for call, text in results.items()
        ]
        return self.ask()


class OverMessages(Chat):
    tools: ClassVar[list[Any]] = [{"name": "weather", "input_schema": {"type": "object"}}]

    def __init__(self, listening: Listening, *, streams: bool, **options: Any) -> None:
        import anthropic

        super().__init__(listening, streams=streams, **options)
        url = listening.url.removesuffix("/v1")
        self.client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)

    def ask(self) -> str:
        asked = {"model": "policy", "messages": self.history, "max_tokens": 6, **self.options}
        if self.streams:
            with self.client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = self.client.messages.create(**asked)
        self.history.append({"role": "assistant", "content": message.content})
        self.calls = [(block.id, block.input) for block in message.content if block.type == "tool_use"]
        return "".join(block.text for block in message.content if block.type == "text")

    def results(self, results: dict[str, str]) -> str:
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in results.items()]
        self.history.append({"role": "user", "content": blocks})
        return self.ask()


EACH = pytest.mark.parametrize(
    ("kind", "streams"), [(k, s) for k in (Chat, OverResponses, OverMessages) for s in (0, 1)]
)


def rows_of(listening: Listening) -> list[Any]:
    episode = (listening.endpoint.episodes or {})["key"]
    return [(each.prompt, each.response, each.mask, each.finish) for each in episode.samples()]


def open_episode(listening: Listening) -> None:
    tokenizer = listening.endpoint.tokenizer
    episode = episode_of(tokenizer, left=4096, calls=8, positions=4096)
    listening.endpoint.episodes = {"key": episode}


@pytest.fixture(scope="module")
def sampled(live: LiveScheduler) -> Iterator[Listening]:
    with listening_to(live, positions=512, episodes={}) as listening:
        yield listening


def talk(harness: Chat) -> list[str]:
    return [harness.say("hello"), harness.say("and?")]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (408, "invalid_request_error"), (413, "request_too_large"),
     (429, "rate_limit_error"), (499, "invalid_request_error"), (500, "api_error"), (503, "api_error")],
)  # fmt: skip
def test_an_error_of_messages_is_the_clients_below_500(status: int, kind: str) -> None:
    assert Messages.error(Refused(status, "no")) == {"type": "error", "error": {"type": kind, "message": "no"}}


@EACH
@pytest.mark.wide
def test_an_episode_through_each_dialect_gives_the_same_samples(sampled: Listening, kind: Any, streams: int) -> None:
    open_episode(sampled)
    said = talk(Chat(sampled, streams=False))
    [expected] = rows_of(sampled)
    open_episode(sampled)
    assert talk(kind(sampled, streams=bool(streams))) == said
    assert rows_of(sampled) == [expected]


class Script(Scripted):
    """Calls two tools, and then answers."""

    def __init__(self) -> None:
        super().__init__(f"I look. {CALL}{ROME}")
        self.later = Scripted("It is dry in one.").tokens

    def submit(self, work: list[Any]) -> None:
        super().submit(work)
        self.tokens = self.later


def use_tools(kind: Any, *, streams: bool) -> list[Any]:
    with listening_to(Script(), positions=4096, episodes={}) as listening:
        open_episode(listening)
        harness = kind(listening, streams=streams, tools=kind.tools)
        assert harness.say("weather in Oslo and Rome?") == "I look."
        (first, oslo), (second, rome) = harness.calls
        assert (oslo, rome) == ({"city": "Oslo"}, {"city": "Rome"})
        assert harness.results({second: "wet", first: "dry"}) == "It is dry in one."
        return rows_of(listening)


@EACH
@pytest.mark.wide
def test_parallel_calls_and_results_in_another_order_are_one_row(kind: Any, streams: int) -> None:
    [(prompt, tokens, mask, _)] = use_tools(kind, streams=bool(streams))
    tokenizer = Script().tokenizer
    read = tokenizer.decode([token for token, chosen in zip(tokens, mask, strict=True) if not chosen])
    assert "<tool>dry<tool>wet" in str(read).replace(" ", "")
    [expected] = use_tools(Chat, streams=False)
    assert (prompt, tokens, mask) == expected[:3]


def call_ids(question: str) -> list[str]:
    with listening_to(Script(), positions=4096, episodes={}) as listening:
        open_episode(listening)
        harness = Chat(listening, streams=False, tools=Chat.tools)
        harness.say(question)
        return [call for call, _ in harness.calls]


def test_ids_of_calls_are_those_of_the_same_episode_and_no_others() -> None:
    """A harness may write them into its next prompt, of which the random numbers are."""
    ids = call_ids("weather in Oslo and Rome?")
    assert ids == call_ids("weather in Oslo and Rome?")
    assert len({*ids, *call_ids("weather in Bern?")}) == 4


# ---- tools that clients declare ----

WEATHER = {"name": "weather", "parameters": SCHEMA}
FOREIGN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # path, messages, a tool of no client's, its name
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "hello"}]},
        {"type": "custom", "custom": {"name": "apply_patch"}},
        "apply_patch",
    ),
    ("responses", {"input": "hello"}, {"type": "web_search", "external_web_access": False}, "web_search"),
    ("responses", {"input": "hello"}, {"type": "local_shell"}, "local_shell"),
    (
        "messages",
        {"messages": [{"role": "user", "content": "hello"}]},
        {"type": "bash_20250124", "name": "bash"},
        "bash",
    ),
]
FUNCTIONS: dict[str, dict[str, Any]] = {
    "chat/completions": {"type": "function", "function": WEATHER},
    "responses": {"type": "function", **WEATHER},
    "messages": {"name": "weather", "input_schema": SCHEMA},
}


class Recording(Scripted):
    """Keeps the prompts that it is asked to complete."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.prompts = list[str]()

    def submit(self, work: list[Any]) -> None:
        self.prompts += [str(self.tokenizer.decode(each.request.prompt)) for each in work]
        super().submit(work)


@pytest.mark.parametrize(("path", "asked", "tool", "name"), FOREIGN)
def test_a_tool_that_no_client_runs_is_left_out_noted_once_and_cannot_be_called(
    path: str, asked: dict[str, Any], tool: dict[str, Any], name: str
) -> None:
    notes = list[str]()
    called = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    script = Recording(called)
    body = {"model": "policy", "max_tokens": 99, **asked, "tools": [FUNCTIONS[path], tool]}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    with listening_to(script, positions=4096, note=notes.append) as listening:
        answers = [post(f"{listening.url}/{path}", json.dumps(body).encode()) for _ in range(2)]
    for code, answer in answers:
        assert code == 200
        assert json.dumps(called)[1:-1] in json.dumps(answer)  # as text
    assert all("weather" in prompt and name not in prompt for prompt in script.prompts)
    [note] = notes
    assert name in note


@pytest.mark.parametrize("name", ["web_search", "weather"])
def test_a_function_of_the_clients_is_called_whatever_else_has_its_name(name: str) -> None:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA}, {"type": "web_search"}]
    body = {"model": "policy", "input": "hello", "tools": tools}
    with listening_to(Scripted(CALL.replace("weather", name)), positions=4096) as listening:
        _, answer = post(f"{listening.url}/responses", json.dumps(body).encode())
    assert [item["type"] for item in answer["output"]] == ["function_call"]


def recorded_of_codex() -> dict[str, Any]:
    """A request of Codex CLI 0.171.0 behind two calls, with texts cut short and some tools left out."""
    return json.loads((Path(__file__).parent / "codex_request.json").read_text(encoding="utf-8"))


def test_a_recorded_request_of_codex_is_answered_with_a_call_within_its_namespace() -> None:
    script = Recording('<tool_call>{"name": "multi_agent_v1.close_agent", "arguments": {"target": "a"}}</tool_call>')
    with listening_to(script, positions=4096) as listening:
        client = openai.OpenAI(base_url=listening.url, api_key="key", max_retries=0)
        asked = recorded_of_codex()
        metadata = {"client_metadata": asked.pop("client_metadata")}
        [*_, last] = client.responses.create(**asked, extra_body=metadata)
    [call] = last.response.output
    assert (call.type, call.namespace, call.name) == ("function_call", "multi_agent_v1", "close_agent")
    [prompt] = script.prompts
    assert "multi_agent_v1.close_agent" in prompt
    assert "web_search" not in prompt


def test_what_a_namespace_is_for_stands_before_what_its_functions_do() -> None:
    tools = [
        {"type": "namespace", "name": "sky", "description": "About the sky.", "tools": [
            {"type": "function", "name": "look", "description": "Look up."},
            {"type": "function", "name": "wait"},
            {"type": "web_search"},
        ]},
        {"type": "namespace", "name": "sea", "tools": [{"type": "function", "name": "look"}]},
        {"type": "function", "name": "stop", "description": "End it."},
    ]  # fmt: skip
    chat = Responses.chat_request({"model": "policy", "input": "x", "tools": tools})
    functions = [tool["function"] for tool in chat["tools"] if tool["type"] == "function"]
    assert [(each["name"], each["description"]) for each in functions] == [
        ("sky.look", "About the sky.\n\nLook up."),
        ("sky.wait", "About the sky."),
        ("sea.look", None),
        ("stop", "End it."),
    ]


class InNamespace(OverResponses):
    tools: ClassVar[list[Any]] = [
        {"type": "namespace", "name": "of", "description": "the sky", "tools": [FUNCTIONS["responses"]]}
    ]


class ScriptInNamespace(Script):
    """Calls a function within a namespace, and then answers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Scripted(CALL.replace("weather", "of.weather")).tokens


def test_a_call_within_a_namespace_is_continued_as_it_was_sampled() -> None:
    with listening_to(ScriptInNamespace(), positions=4096, episodes={}) as listening:
        open_episode(listening)
        harness = InNamespace(listening, streams=False, tools=InNamespace.tools)
        harness.say("weather in Oslo?")
        [(call, _)] = harness.calls
        harness.results({call: "dry"})
        assert len(rows_of(listening)) == 1


# ---- around them ----


@pytest.fixture(scope="module")
def served(live: LiveScheduler) -> Iterator[Listening]:
    with listening_to(live, key="secret") as listening:
        yield listening


@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
def test_a_key_is_a_bearer_or_an_api_key(served: Listening, name: str) -> None:
    body = json.dumps({"model": "policy", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}).encode()
    for key, expected in (("secret", 200), ("secre", 401)):
        given = f"Bearer {key}" if name == "Authorization" else key
        status, answer = post(f"{served.url}/messages", body, {name: given})
        assert status == expected
    assert answer["error"]["type"] == "authentication_error"


def test_a_model_has_a_page_of_its_own_and_another_has_none(served: Listening) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0)
    assert client.models.retrieve("base").id == "base"
    with pytest.raises(openai.NotFoundError, match="policy, base"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("path", ["/embeddings", "/v1/messages", "/chat/completions/x"])
def test_a_path_that_is_not_there_is_answered_with_those_that_are(served: Listening, path: str) -> None:
    """Near to it, a client of Anthropic's that was given an address with /v1."""
    status, answer = post(f"{served.url}{path}", b"{}")
    assert status == 404
    assert "/v1/responses" in answer["error"]["message"]


def test_log_probabilities_are_streamed_with_their_tokens(served: Listening) -> None:
    client: Any = openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0)
    asked = {"model": "policy", "seed": 3, "logprobs": True}
    chat = {**asked, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    [whole] = client.chat.completions.create(**chat).choices
    for more in ({}, {"top_logprobs": 2}):
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, **more, stream=True)]
        pieces = [one for one in chunks if one.delta.content]
        assert len(pieces) > 1
        for one in pieces:
            assert one.delta.content in "".join(entry.token for entry in one.logprobs.content)
        entries = [entry for one in chunks if one.logprobs for entry in one.logprobs.content]
        assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]
        assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in whole.logprobs.content])
        assert {len(entry.top_logprobs) for entry in entries} == {more.get("top_logprobs", 0)}
    text = {**asked, "prompt": "hello", "logprobs": 0, "max_tokens": 8}
    [one] = client.completions.create(**text).choices
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**text, stream=True)]
    assert [place for each in chunks if each for place in each.text_offset] == one.logprobs.text_offset


def listed_of(text: str, path: str, **more: Any) -> Any:
    """The log-probabilities of an answer of this text."""
    asked = {"model": "policy", "max_tokens": 9, **more}
    with listening_to(CutOff(text), positions=4096) as listening:
        _, answer = post(f"{listening.url}/{path}", json.dumps(asked).encode())
    return answer["choices"][0]["logprobs"]


def test_bytes_of_a_token_are_its_own_where_it_is_part_of_a_character() -> None:
    """Of U+00E9 and U+2028; a space, which byte-level BPE writes as another character; and a letter."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}
    listed = listed_of("é \u2028b", "chat/completions", **chat)
    assert [entry["bytes"] for entry in listed["content"]] == [[0xC3], [0xA9], [0x20], [0xE2], [0x80], [0xA8], [0x62]]


def test_offsets_of_tokens_count_characters_of_the_text() -> None:
    listed = listed_of("é b", "completions", prompt="x", logprobs=0)
    assert listed["text_offset"] == [0, 0, 1, 2]


def test_offsets_of_tokens_behind_an_echoed_prompt_count_on(live: LiveScheduler) -> None:
    asked = {"model": "base", "prompt": "é b", "max_tokens": 1, "echo": True, "logprobs": 0}
    with listening_to(live) as listening:
        _, answer = post(f"{listening.url}/completions", json.dumps(asked).encode())
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(("prompts", "n", "read"), [(["ab", "ab"], 1, 4), (["ab"], 2, 2), (["ab", "abc"], 2, 5)])
def test_each_prompt_of_a_request_is_counted_once(prompts: list[str], n: int, read: int) -> None:
    asked = {"model": "policy", "prompt": prompts, "n": n}
    with listening_to(Scripted("x"), positions=4096) as listening:
        _, answer = post(f"{listening.url}/completions", json.dumps(asked).encode())
    assert answer["usage"]["prompt_tokens"] == read


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_line_of_a_stream_is_one_wherever_its_reader_splits(end: str) -> None:
    [line, *rest] = ChatCompletions({}).line({"text": f"a{end}b"}).splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": f"a{end}b"}


def test_a_failure_within_a_stream_is_the_clients_error() -> None:
    import anthropic

    with listening_to(Scripted("x", RuntimeError("planted")), positions=4096) as listening:
        url = listening.url
        ask: Any = openai.OpenAI(base_url=url, api_key="any", max_retries=0).responses.create
        with pytest.raises(openai.APIError, match="planted"):
            list(ask(model="policy", input="hello", stream=True))
        claude = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0)
        asked: Any = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(anthropic.APIError, match="planted"):
            list(claude.messages.create(**asked, stream=True))
        with pytest.raises(anthropic.InternalServerError, match="planted"):
            claude.messages.create(**asked)
