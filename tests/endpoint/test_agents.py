"""Agents that call a URL: what they sampled is what is trained, and a bad one fails its episode alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
import torch

from tests import running
from tests.endpoint.conftest import call_of, episode_of, listening_to
from tests.tasks.test_answers import CHAT, marked_tokenizer, rendered_by_the_library, spaced_tokenizer
from tests.tiny_models import TinyModels
from tests.training.experiences import experience_of
from tinyrl.config.sections import EnvironmentConfig, RewardConfig, TaskConfig
from tinyrl.endpoint import agent_episode
from tinyrl.endpoint.agent_episode import AgentEpisode, Call, ClientInput, SideConversations
from tinyrl.endpoint.endpoint import NO_LIMIT
from tinyrl.endpoint.live_answer import LiveAnswer
from tinyrl.endpoint.server import Listening
from tinyrl.environments.environment import Dialogue, Episode
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.generation.sample import (
    FinishReason,
    Logprobs,
    Sample,
    apply_length_rules,
    conversations,
    environment_metrics,
    kl_per_response,
    length_metrics,
    loss_mask,
    num_episodes,
    sampled_logprobs,
    token_rewards_of,
)
from tinyrl.generation.scoring import logprobs_of_text
from tinyrl.rollout.collect import prepare_rows
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.answers import render_answer
from tinyrl.training.policy_loss import Counts
from tinyrl.training.ppo import adapted_kl_coef

USER: Any = {"role": "user", "content": "hello"}
NOTHING = ClientInput()
MORE: Any = {"role": "user", "content": "and?"}


def sampled(sequence: DecodedSequence, tokens: list[int], finish: FinishReason) -> DecodedSequence:
    """Let a sequence end with these tokens."""
    sequence.end(tokens, [-1.0] * len(tokens), finish)
    return sequence


class Running:
    """An endpoint with one episode under way, and a client that has its key."""

    def __init__(self, listening: Listening) -> None:
        self.listening, self.endpoint, self.tokenizer = listening, listening.endpoint, listening.endpoint.tokenizer
        self.episode = self.open()

    def open(self, *, left: int = 64, call_tokens: int = 400, calls: int = 8, positions: int = 512) -> AgentEpisode:
        self.episode = episode_of(self.tokenizer, left=left, call_tokens=call_tokens, calls=calls, positions=positions)
        self.endpoint.episodes = {"key": self.episode}
        return self.episode

    def say(self, *messages: Any, key: str = "key", **options: Any) -> Any:
        client = openai.OpenAI(base_url=self.listening.url, api_key=key, max_retries=0, timeout=60)
        asked: dict[str, Any] = {"max_tokens": 6, **options}
        answer = client.chat.completions.create(model="policy", messages=list(messages), **asked)
        return {"role": "assistant", "content": answer.choices[0].message.content}

    @property
    def answers(self) -> list[int]:
        """How many answers each conversation has: stretches of tokens that the policy chose."""
        return [sum(chosen for chosen, _ in groupby(each.mask)) for each in self.episode.samples()]


@pytest.fixture(scope="module")
def endpoint(live: LiveScheduler) -> Iterator[Running]:
    with listening_to(live, positions=512, episodes={}) as listening:
        yield Running(listening)


@pytest.fixture
def server(endpoint: Running) -> Running:
    endpoint.open()
    return endpoint


# ---- what is recorded ----


def test_a_conversation_that_continues_is_one_row_of_what_was_sampled(server: Running, live: LiveScheduler) -> None:
    first = server.say(USER)
    second = server.say(USER, first, MORE)
    server.say(USER, first, MORE, second, USER)
    [row] = server.episode.samples()
    assert server.answers == [3]
    chosen = [token for token, kept in zip(row.response, row.mask, strict=True) if kept]
    read = [token for token, kept in zip(row.response, row.mask, strict=True) if not kept]
    assert str(live.tokenizer.decode(chosen[:6], skip_special_tokens=True)).startswith(first["content"][:3])
    assert "<user>and?" in live.tokenizer.decode(read)
    whole = logprobs_of_text(live.engine.policy, [*row.prompt, *row.response], role="policy", temperature=1.0)[0]
    scored = whole[len(row.prompt) :]
    ours, theirs = ([p for p, kept in zip(each, row.mask, strict=True) if kept] for each in (row.logprobs, scored))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_text_that_continues_is_one_row(server: Running, *, as_tokens: bool) -> None:
    client = openai.OpenAI(base_url=server.listening.url, api_key="key", max_retries=0)
    prompt: Any = server.tokenizer("hello", add_special_tokens=False)["input_ids"] if as_tokens else "hello"
    ask: Any = {"model": "policy", "max_tokens": 6, "extra_body": {"return_token_ids": True}}
    for _ in range(2):
        [choice] = client.completions.create(prompt=prompt, **ask).choices
        prompt = prompt + ((choice.model_extra or {})["token_ids"] if as_tokens else choice.text)
        prompt = prompt + ([70, 71] if as_tokens else " and")
    assert server.answers == [2]
    [row] = server.episode.samples()
    read = [token for token, chosen in zip(row.response, row.mask, strict=True) if not chosen]
    assert read == ([70, 71] if as_tokens else server.tokenizer(" and", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("make", "end"), [(spaced_tokenizer, "</s>"), (marked_tokenizer, "<|observation|>"), (marked_tokenizer, "<eos>")]
)
def test_a_turn_that_continues_is_closed_once(make: Any, end: str) -> None:
    """By the space and the end that a template writes, or by the next role's marker where the policy has not."""
    tokenizer = make()
    prompt, target = render_answer(tokenizer, CHAT[:1], CHAT[1:2], chat="auto", system_prompt=None, variables={})
    answer = [*target[:-1], tokenizer.convert_tokens_to_ids(end)]
    episode = episode_of(tokenizer, left=64, calls=8, positions=512)
    last = sampled(DecodedSequence(Request(prompt, np.uint64(0), 64)), answer, "eos")
    added = episode._added(last, ClientInput(CHAT[:2]), ClientInput(CHAT))
    whole = rendered_by_the_library(tokenizer, CHAT)
    extra = answer[-1:] if end == "<eos>" else []  # which this template does not write
    border = len(prompt) + len(answer) - len(extra)
    assert prompt + answer == whole[:border] + extra
    assert added == whole[border:]


def continued(
    tokenizer: Any, given: ClientInput, answer: str, said: Any, later: ClientInput, *, finish: FinishReason = "stop"
) -> Sample | None:
    """The row of an episode in which the policy wrote `answer`, of which the agent got `said`, and then `later` was
    asked; None if that begins another row.
    """
    episode = episode_of(tokenizer)
    first = episode.call(call_of([5, 6], stop=["END", "\n"]), given)
    assert first is not None
    sampled(first.sequence, ids(tokenizer, answer), finish)
    first.answered({"content": said})
    second = episode.call(call_of([7, 8]), later)
    assert second is not None
    sampled(second.sequence, [40], "eos")
    second.answered({"content": "x"})
    rows = episode.samples()
    return rows[0] if len(rows) == 1 else None


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "repeated",
    ["I look:\n  x =  1", "I look: x = 1 END", "I look: x = 1\nEND\n", "  I look: x = 1"],
)
def test_an_answer_that_comes_back_with_other_space_or_its_stop_string_is_continued(
    server: Running, repeated: str
) -> None:
    """By the tokens that were sampled, and then by what the template writes behind an answer."""
    answer: Any = {"role": "assistant", "content": repeated}
    row = continued(
        server.tokenizer, ClientInput([USER]), "I look: x = 1 END", "I look: x = 1 ", ClientInput([USER, answer, MORE])
    )
    assert row is not None
    assert row.response == ids(server.tokenizer, "I look: x = 1 END") + ids(server.tokenizer, "</s><user>and?<a>") + [
        40
    ]


@pytest.mark.parametrize("repeated", ["I look: x = 2", "I look: x = 1 AND", "I look: x=1", "x = 1 END"])
def test_an_answer_that_comes_back_with_other_words_is_another_row(server: Running, repeated: str) -> None:
    answer: Any = {"role": "assistant", "content": repeated}
    later = ClientInput([USER, answer, MORE])
    assert continued(server.tokenizer, ClientInput([USER]), "I look: x = 1 END", "I look: x = 1 ", later) is None


@pytest.mark.parametrize(
    ("repeated", "read"),
    [
        ("hello x END and", " and"), ("hello x and", "and"), ("hello x  END and", " and"),
        ("hello x\nEND and", " and"), ("hello x  and", " and"),
    ],
)  # fmt: skip
def test_a_text_that_comes_back_with_its_stop_string_reads_it_once(server: Running, repeated: str, read: str) -> None:
    row = continued(server.tokenizer, ClientInput(text="hello"), " x END", " x ", ClientInput(text=repeated))
    assert row is not None
    assert row.response == [*ids(server.tokenizer, " x END"), *ids(server.tokenizer, read), 40]


@pytest.mark.parametrize("repeated", ["hello xs END and", "hello y END and"])
def test_a_text_that_comes_back_otherwise_is_another_row(server: Running, repeated: str) -> None:
    assert continued(server.tokenizer, ClientInput(text="hello"), " x END", " x ", ClientInput(text=repeated)) is None


def test_a_beginning_behind_a_conversation_is_continued_as_in_a_fresh_call(server: Running) -> None:
    beginning: Any = {"role": "assistant", "content": "It is "}
    first = server.say(USER)
    server.say(USER, first, MORE, beginning)
    [row] = server.episode.samples()
    read = [token for token, chosen in zip(row.response, row.mask, strict=True) if not chosen]
    assert str(server.tokenizer.decode(read)).endswith("<user>and?<assistant>It is ")
    server.open()
    server.say(USER, first, MORE, beginning)
    [fresh] = server.episode.samples()
    assert str(server.tokenizer.decode(fresh.prompt)).endswith("<user>and?<assistant>It is ")


def test_another_history_is_a_row_of_its_own(server: Running) -> None:
    """Or other variables of the template, such as tools: the policy would not have read them at its first answer."""
    first = server.say(USER)
    edited = {**first, "content": f"{first['content']} edited"}
    server.say({"role": "system", "content": "another"}, USER, first, USER)
    server.say(USER, edited, USER)
    server.say(USER)
    server.say(USER, first, USER, extra_body={"chat_template_kwargs": {"mood": "x"}})
    assert server.answers == [1, 1, 1, 1, 1]


SYSTEM: Any = {"role": "system", "content": "You are a title generator. Be brief."}


@pytest.mark.parametrize(
    ("side", "trained"),
    [
        (SideConversations(prompts=["title generator"]), [False, True, True]),
        (SideConversations(prompts=["hello"]), [True, True, True]),  # which the user says
        (SideConversations(min_tools=1), [False, False, True]),
        (SideConversations(min_tools=2), [False, False, False]),
        (SideConversations(), [True, True, True]),
    ],
)
def test_side_conversations_are_answered_and_are_no_rows(
    side: SideConversations, trained: list[bool], server: Running
) -> None:
    """Nor records. They use the episode's turns."""
    episode = episode_of(server.tokenizer, side=side)
    inputs = [ClientInput([SYSTEM, USER]), ClientInput([USER]), ClientInput([USER], {"tools": TOOLS})]
    for given in inputs:
        call = begun(episode, [5, 6], given)
        sampled(call.sequence, [40], "eos")
        call.answered({"content": "x"})
    rows = [given for given, is_row in zip(inputs, trained, strict=True) if is_row]
    assert [dialogue.messages[:-1] for dialogue in episode.dialogues()] == [given.messages for given in rows]
    assert len(episode.samples(cut_by="turns")) == len(rows)
    assert episode.calls == 3


@pytest.mark.parametrize(
    ("side", "rows"),
    [
        (SideConversations(prompts=["title"]), ["a story", "a story"]),
        (SideConversations(prompts=["titles"]), ["a title", "a story", "a title", "a story"]),
        (SideConversations(min_tools=1), []),  # a text declares none
        (SideConversations(), ["a title", "a story", "a title", "a story"]),
    ],
)
def test_a_text_is_a_side_conversation_by_what_stands_in_it(
    side: SideConversations, rows: list[str], server: Running
) -> None:
    """Also one that is sent as tokens."""
    episode = episode_of(server.tokenizer, side=side)
    for is_tokens in (False, True):
        for text in ("a title", "a story"):
            tokens = [int(token) for token in server.tokenizer(text, add_special_tokens=False)["input_ids"]]  # pyright: ignore
            call = begun(episode, tokens, ClientInput() if is_tokens else ClientInput(text=text))
            sampled(call.sequence, [40], "eos")
            call.answered({"content": "x"})
    assert [str(server.tokenizer.decode(each.prompt)) for each in episode.samples()] == rows


def test_tokens_are_drawn_as_the_run_says_by_the_episodes_numbers(server: Running) -> None:
    """The same call twice draws twice, and the same episode again the same."""
    said = [server.say(USER)["content"] for _ in range(2)]
    assert said[0] != said[1]
    server.open()
    assert [server.say(USER, temperature=0.0, top_p=0.1)["content"] for _ in range(2)] == said


# ---- what was said ----

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


def test_what_a_conversation_said_is_kept_with_its_system_prompt_in_order(server: Running) -> None:
    system: Any = {"role": "system", "content": "be brief"}
    first = server.say(system, USER)
    second = server.say(system, USER, first, MORE)
    [said] = server.episode.dialogues()
    assert said == Dialogue([system, USER, first, MORE, second], [])


def test_calls_of_tools_and_their_results_are_kept_with_the_tools(server: Running) -> None:
    """And nothing of a call under way, or of one that was given up."""
    called = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"title": "Emma"}'}}
    result = {"role": "tool", "content": "Austen", "tool_call_id": "a"}
    asked = {"role": "assistant", "content": "", "tool_calls": [called]}
    variables = {"tools": TOOLS, "mood": "x"}
    given = ClientInput([USER, asked, result], variables)
    calls = [begun(server.episode, [5, n], given, limit=4) for n in (6, 7, 8)]
    sampled(calls[0].sequence, [40], "stop")
    calls[0].answered({"content": None, "tool_calls": [called]})
    calls[1].give_up()
    again = {**called, "function": {"name": "find", "arguments": {"title": "Emma"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [again]}
    assert server.episode.dialogues() == [Dialogue([USER, asked, result, answer], TOOLS)]


@pytest.mark.parametrize("as_tokens", [False, True])
def test_text_that_is_no_chat_is_kept_piece_by_piece(server: Running, *, as_tokens: bool) -> None:
    client = openai.OpenAI(base_url=server.listening.url, api_key="key", max_retries=0)
    tokens = {text: server.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello", " and")}
    prompt: Any = tokens["hello"] if as_tokens else "hello"
    said = []
    for _ in range(2):
        ask: Any = {"model": "policy", "max_tokens": 6, "extra_body": {"return_token_ids": True}}
        [choice] = client.completions.create(prompt=prompt, **ask).choices
        said.append(choice.text)
        own = (choice.model_extra or {})["token_ids"] if as_tokens else choice.text
        prompt = prompt + own + (tokens[" and"] if as_tokens else " and")
    messages = server.episode.dialogues()[0].messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in messages] == ["hello", said[0], " and", said[1]]


def test_another_history_is_a_conversation_of_its_own_in_the_record_too(server: Running) -> None:
    first = server.say(USER)
    edited = {**first, "content": f"{first['content']} edited"}
    second = server.say(USER, edited, MORE)
    kept = [dialogue.messages for dialogue in server.episode.dialogues()]
    assert kept == [[USER, first], [USER, edited, MORE, second]]


@pytest.mark.parametrize(("agent", "expected"), [("a.py:f", None), (None, "be brief")])
def test_a_recorded_prompt_has_no_system_text_that_nobody_sends(
    agent: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may have task.system_prompt for other ways to play it."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("tinyrl.rollout.collect.prepare_prompts", lambda task, rows, **how: given.update(how) or [])
    policy = mock.MagicMock()
    policy.config.task = TaskConfig(system_prompt="be brief")
    policy.config.environment = EnvironmentConfig(agent=agent)
    prepare_rows([], policy=policy, task=mock.MagicMock(), runner=None)
    assert given["system_prompt"] == expected


# ---- limits ----


def begun(episode: AgentEpisode, prompt: list[int], given: ClientInput = NOTHING, *, limit: int = NO_LIMIT) -> Call:
    """A call that has a turn and tokens."""
    call = episode.call(call_of(prompt, limit=limit), given)
    assert call is not None
    return call


def test_a_call_has_its_own_limit_whichever_of_several_ends_first(server: Running) -> None:
    """A shorter one that it asks for holds; a longer one does not."""
    episode = server.open(left=16, call_tokens=5)
    calls = [begun(episode, [5, 6], limit=limit) for limit in (NO_LIMIT, 4, 9)]
    sampled(calls[2].sequence, [40, 41, 42], "stop")
    calls[2].answered({"content": "x"})
    calls.append(begun(episode, [5, 6]))
    assert [one.sequence.request.limit for one in calls] == [5, 4, 5, 5]


def test_what_calls_sampled_is_counted_when_they_end(server: Running) -> None:
    """A limit above an equal share leaves the last calls with less."""
    episode = server.open(left=16, call_tokens=12)
    calls = [begun(episode, [5, 6]) for _ in range(2)]
    for one in calls:
        sampled(one.sequence, [40, 41, 42], "stop")
        one.answered({"content": "x"})
    assert (episode.left, len(episode.samples())) == (16 - 2 * 3, 2)
    assert begun(episode, [5, 6]).sequence.request.limit == 16 - 2 * 3


def test_an_image_behind_an_answer_begins_another_row_and_a_text_does_not(server: Running) -> None:
    """The images of a row are all in its prompt."""
    entry = {"path": "/a.png", "sha256": "a" * 64, "size": [4, 2]}
    shown: Any = {**MORE, "content": "\ufffcand?", "images": [entry]}
    first = begun(server.episode, [5, 6], ClientInput(messages=[USER]))
    sampled(first.sequence, [40], "eos")
    first.answered({"content": "x"})
    said: Any = {"role": "assistant", "content": "x"}
    calls = [begun(server.episode, [5], ClientInput(messages=[USER, said, behind])) for behind in (shown, MORE)]
    assert [call.conversation is first.conversation for call in calls] == [False, True]


def test_a_call_is_rendered_and_encoded_in_a_thread_of_its_own(server: Running) -> None:
    names = set[str]()

    def noted(function: Any, *given: Any, **named: Any) -> Any:
        names.add(threading.current_thread().name)
        return function(*given, **named)

    first = server.say(USER)
    with (
        mock.patch.object(agent_episode, "template_text", partial(noted, agent_episode.template_text)),
        mock.patch.object(agent_episode, "tokens_behind", partial(noted, agent_episode.tokens_behind)),
    ):
        server.say(USER, first, MORE)
    assert server.answers == [2]
    assert names
    assert "endpoint" not in names  # that of the event loop


def test_of_two_calls_that_continue_one_answer_at_once_the_second_begins_a_row(server: Running) -> None:
    """Both have found the conversation before either has begun."""
    episode = server.episode
    call = begun(episode, [5, 6], ClientInput(text="one"))
    sampled(call.sequence, [40], "eos")
    call.answered({"content": " x"})
    found = threading.Barrier(2)
    tokens_behind = agent_episode.tokens_behind

    def together(*given: Any) -> list[int]:
        with suppress(threading.BrokenBarrierError):
            found.wait(timeout=1.0)
        return tokens_behind(*given)

    with mock.patch.object(agent_episode, "tokens_behind", together), ThreadPoolExecutor(2) as pool:
        calls = list(pool.map(lambda _: begun(episode, [9], ClientInput(text="one x and")), range(2)))
    continued = [call.conversation.last is not None for call in calls]
    assert sorted(continued) == [False, True]


def until(there: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


def settled(episode: AgentEpisode) -> None:
    """Wait until no call is under way."""
    until(lambda: not any(conversation.pending for conversation in episode.conversations))


def give_up(server: Running, *messages: Any) -> None:
    """Call, and hang up before the scheduler has seen it; then let it sample whatever it still would."""
    waiting: list[Any] = []
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 6})
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
    address = urlsplit(server.listening.url)
    connection = HTTPConnection(str(address.hostname), address.port)
    with mock.patch.object(server.endpoint.scheduler, "submit", waiting.extend):
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        until(lambda: waiting)
    connection.close()
    settled(server.episode)
    [sequence] = waiting
    if not sequence.cancelled:
        sampled(sequence, [40, 41, 42], "stop").request.on_end(None)
    settled(server.episode)


def test_a_call_that_is_given_up_leaves_nothing(server: Running) -> None:
    """Neither a row nor a turn less, nor tokens less, as often as it is tried."""
    server.open(left=12, calls=2)
    for _ in range(3):
        give_up(server, USER)
    assert (server.episode.left, server.episode.calls_left, server.episode.calls) == (12, 2, 0)
    assert server.episode.conversations == []


def test_a_retry_continues_where_the_first_try_did_and_draws_what_that_would_have(server: Running) -> None:
    said = []
    for given_up in (False, True):
        server.open()
        first = server.say(USER, max_tokens=4)
        if given_up:
            give_up(server, USER, first, MORE)
        said.append(server.say(USER, first, MORE))
        assert server.answers == [2]
    assert said[0] == said[1]


def test_a_stream_that_is_left_gives_its_turn_back(server: Running) -> None:
    """Near to it, one that is read to its end counts."""
    server.open(left=400, calls=3)
    client = openai.OpenAI(base_url=server.listening.url, api_key="key", max_retries=0)
    ask: Any = {"model": "policy", "messages": [USER], "stream": True}
    plain = LiveAnswer.put_tokens

    def then_wait(answer: LiveAnswer, index: int, tokens: list[int]) -> None:  # else all 300 might come before
        plain(answer, index, tokens)
        until(lambda: answer.choices[index].sequence.cancelled)

    with (
        mock.patch.object(LiveAnswer, "put_tokens", then_wait),
        client.chat.completions.create(**ask, max_tokens=300) as stream,
    ):
        next(iter(stream))
    settled(server.episode)
    assert (server.episode.left, server.episode.calls_left, server.episode.samples()) == (400, 3, [])
    with client.chat.completions.create(**ask, max_tokens=4) as stream:
        assert len(list(stream)) > 1
    assert (server.episode.left, server.episode.calls_left, server.answers) == (396, 2, [1])


def test_a_call_whose_sampling_fails_leaves_nothing(server: Running) -> None:
    server.open(left=12, calls=2)
    fails: Any = lambda work: [each.request.on_end(RuntimeError("planted")) for each in work]  # noqa: E731
    with (
        mock.patch.object(server.endpoint.scheduler, "submit", fails),
        pytest.raises(openai.InternalServerError),
    ):
        server.say(USER)
    settled(server.episode)
    assert (server.episode.left, server.episode.calls_left, server.episode.samples()) == (12, 2, [])


def finished(server: Running, *messages: Any, stream: bool = False) -> tuple[str, str]:
    """Text and finish reason of an answer."""
    client: Any = openai.OpenAI(base_url=server.listening.url, api_key="key", max_retries=0)
    asked = {"model": "policy", "messages": list(messages), "max_tokens": 6}
    if not stream:
        [choice] = client.chat.completions.create(**asked).choices
        return choice.message.content, choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def test_calls_made_at_once_are_those_made_one_after_another(server: Running) -> None:
    """The same rows, and as much left; two of the three have the same prompt."""
    prompts: list[Any] = [USER, MORE, USER]
    rows = []
    for at_once in (1, 3):
        episode = server.open(left=24, call_tokens=8, calls=3)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(server.say, prompts))
        rows.append((sorted((each.prompt, each.response) for each in episode.samples()), episode.left, episode.calls))
    assert rows[0] == rows[1]
    assert rows[0][2] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("out_of", ["calls", "left"])
def test_a_call_for_which_nothing_is_left_is_cut_off_at_once_and_leaves_no_row(
    server: Running, out_of: str, *, stream: bool
) -> None:
    server.open(**({"calls": 2} if out_of == "calls" else {"left": 8}))
    first = server.say(USER, max_tokens=4)
    server.say(MORE, max_tokens=4)
    assert server.episode.denied is None
    for _ in range(2):
        assert finished(server, USER, first, MORE, stream=stream) == ("", "length")
    assert server.episode.denied == ("turns" if out_of == "calls" else "length")
    assert server.answers == [1, 1]


@pytest.mark.parametrize(("text", "cut"), [("two x and", 1), ("another", 0)])
@pytest.mark.parametrize(("limits", "finish"), [({"calls": 2}, "turns"), ({"left": 2}, "length")])
def test_a_denied_call_ends_the_conversation_it_would_continue_or_the_first(
    server: Running, text: str, cut: int, limits: dict[str, int], finish: str
) -> None:
    episode = server.open(**limits)
    for prompt, first in (([5, 6], "one"), ([7, 8], "two")):
        call = begun(episode, prompt, ClientInput(text=first))
        sampled(call.sequence, [40], "eos")
        call.answered({"content": " x"})
    assert episode.call(call_of([9]), ClientInput(text=text)) is None
    assert [each.finish for each in episode.samples()] == ["eos", "eos"]
    ended = [each.finish for each in episode.samples(cut_by=episode.denied)]
    assert ended == [finish if number == cut else "eos" for number in range(2)]


def test_a_conversation_whose_last_answer_was_cut_off_stays_truncated_when_turns_run_out(server: Running) -> None:
    episode = server.open(calls=1)
    call = begun(episode, [5, 6], ClientInput(text="one"))
    sampled(call.sequence, [40], "length")
    call.answered({"content": " x"})
    assert episode.call(call_of([9]), ClientInput(text="one x and")) is None
    assert [each.finish for each in episode.samples(cut_by=episode.denied)] == ["length"]


@pytest.mark.parametrize("words", [600, 300_000])
def test_what_does_not_fit_is_refused_as_clients_know_it(server: Running, words: int) -> None:
    """By its tokens, or by its characters before it is tokenised. An agent may shorten it: nothing is truncated yet."""
    server.say(USER)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        server.say({"role": "user", "content": "hello " * words})
    assert caught.value.code == "context_length_exceeded"
    assert (server.episode.has_overflowed, server.episode.denied) == (True, None)
    server.say(USER)
    assert server.answers == [1, 1]


def test_an_episode_has_its_key_until_it_is_over(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.say(USER, key="ke")
    server.say(USER)
    call = begun(server.episode, [5, 6], limit=4)
    server.episode.end()
    sampled(call.sequence, [40], "stop")
    call.answered({"content": "x"})
    assert call.sequence.cancelled
    with pytest.raises(openai.AuthenticationError):
        server.say(USER)
    assert server.answers == [1]


# ---- rows ----

AGENTS = """
import json, socket, urllib.parse, urllib.request


def choice(base_url, api_key, prompt, **fields):
    body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 4, **fields}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]


def ask(base_url, api_key, prompt, **fields):
    return choice(base_url, api_key, prompt, **fields)["text"]


async def play(row, base_url, api_key):
    said = ask(base_url, api_key, row["prompt"])
    ask(base_url, api_key, "another conversation")
    return said


def hang_up(base_url, api_key):
    url = urllib.parse.urlsplit(base_url)
    body = json.dumps({"model": "policy", "prompt": "hello"})
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {url.netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {api_key}", f"Content-Length: {len(body)}", "", body]
    with socket.create_connection((url.hostname, url.port)) as connection:  # what waits is sent with its end
        connection.send("\\r\\n".join(lines).encode(), getattr(socket, "MSG_MORE", 0))


def impatient(row, base_url, api_key):
    for _ in range(5):
        hang_up(base_url, api_key)
    return ask(base_url, api_key, row["prompt"])


def greedy(row, base_url, api_key):
    for _ in range(3):
        said = ask(base_url, api_key, row["prompt"])
        if not said:
            raise RuntimeError("no answer")
    return said


def wishful(row, base_url, api_key):
    return ask(base_url, api_key, row["prompt"], response_format={"type": "json_object"})


def strict(row, base_url, api_key):
    answer = choice(base_url, api_key, row["prompt"], max_tokens=5)  # of which it may have 4
    if answer["finish_reason"] == "length":
        raise RuntimeError("incomplete")
    return answer["text"]


def careless(row, base_url, api_key):
    ask(base_url, api_key, row["prompt"])
    raise RuntimeError("planted")


def verbose(row, base_url, api_key):
    ask(base_url, api_key, row["prompt"])
    ask(base_url, api_key, row["prompt"] * 1000)
"""


def two_episodes(*, cut_by: FinishReason = "length", **reward: Any) -> list[Sample]:
    """An episode of a conversation that ended, and one of three: cut off, ended, ended; of 2, 1, 3 and 2 tokens, of
    which 2, 1, 2 and 2 are the policy's.
    """

    def sample(prompt: list[int], tokens: list[int], **fields: Any) -> Sample:
        fields = {"mask": [True] * len(tokens), "logprobs": [0.0] * len(tokens), "row": 3, **fields}
        return Sample(prompt, tokens, **fields)

    further = [sample([9, 9], [8, 8, 8], mask=[True, False, True]), sample([9], [4, 4])]
    played = [Episode(turn_ends=[0], turn_rewards=[0.0]), Episode(turn_ends=[0] * 4, turn_rewards=[0.0] * 4)]
    ended = sample([1], [5, 6], score=1.0, played=played[0])
    cut_off = sample([2], [7], score=0.5, finish=cut_by, played=played[1], further=further)
    ruled = apply_length_rules([ended, cut_off], RewardConfig(**reward), max_new_tokens=6)
    return conversations(ruled, mask_truncated=reward.get("truncated") == "mask")


def test_an_episode_counts_once_and_its_conversations_share_its_reward() -> None:
    """What was cut off is left out, and nothing else; penalties are for the episode, whose tokens are one budget."""
    assert [one.in_loss for one in two_episodes(truncated="mask")] == [True, False, True, True]
    assert [one.reward for one in two_episodes(truncated="penalize")] == [1.0, -0.5, -0.5, -0.5]
    assert [one.reward for one in two_episodes(overlong_tokens=2)] == [1.0, 0.0, 0.0, 0.0]  # 5 tokens of 6, from 4 on
    samples = two_episodes()
    assert num_episodes(samples) == 2
    assert [one.in_loss for one in samples] == [True] * 4
    assert [one.episode for one in samples] == [0, 1, 1, 1]
    assert [one.reward for one in samples] == [1.0, 0.5, 0.5, 0.5]
    assert loss_mask(samples)[2].tolist() == [True, False, True]
    in_ppo = token_rewards_of(samples, torch.zeros(4, 3), kl_coef=0.0)  # on the last token of each
    assert in_ppo.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.5, 0.0]]
    metrics = environment_metrics(samples)
    assert metrics["environment/turns"] == 2.5  # 1 and 4
    assert metrics["environment/observation_tokens"] == 0.5
    lengths = {"completion/mean_length": 3.5, "completion/truncated": 0.5, "completion/tokens": 7.0}
    assert length_metrics(samples) == lengths  # 2 and 1 + 2 + 2
    sampled = sampled_logprobs(samples)
    logprobs = Logprobs(sampled, reference=sampled - loss_mask(samples, "all").float())
    assert kl_per_response(samples, logprobs) == (3.5, 2)  # a nat a token
    counts = Counts.of(experience_of(samples))
    assert (counts.sequences, counts.episodes) == (4, 2)
    masked = Counts.of(experience_of(two_episodes(truncated="mask")[:2]))
    assert (masked.sequences, masked.episodes) == (1, 1)
    assert adapted_kl_coef(samples, logprobs, 1.0, kl_coef=1.0) == 1 + 0.2 * 2 / 10_000


@pytest.mark.parametrize(("cut_by", "out_of_turns", "truncated"), [("turns", 0.5, 0.0), ("length", 0.0, 0.5)])
def test_an_episode_out_of_turns_is_not_truncated(cut_by: FinishReason, out_of_turns: float, truncated: float) -> None:
    samples = two_episodes(cut_by=cut_by)
    assert environment_metrics(samples)["environment/out_of_turns"] == out_of_turns
    assert length_metrics(samples)["completion/truncated"] == truncated
    penalised = two_episodes(cut_by=cut_by, truncated="penalize")
    assert [one.reward for one in penalised[:2]] == [1.0, 0.5 - 2 * truncated]
    assert [one.in_loss for one in two_episodes(cut_by=cut_by, truncated="mask")[:2]] == [True, not truncated]


def test_a_further_conversation_counts_its_episode_among_those_out_of_turns() -> None:
    samples = two_episodes(cut_by="eos")
    samples[3] = replace(samples[3], finish="turns")
    assert environment_metrics(samples)["environment/out_of_turns"] == 0.5


def assert_conversations_are_recorded(run: RunDir) -> None:
    """In training and evaluation: both calls of each episode, of which the agent returned the first answer."""
    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"train", "eval", "eval-greedy"}
    for line in lines:
        first, second = (one["messages"] for one in line["conversations"])
        assert [first[0]["content"], second[0]["content"]] == [line["prompt"], "another conversation"]
        assert first[1] == {"role": "assistant", "content": line["completion"]} == line["episode"][0]


def test_a_run_learns_from_every_conversation_and_is_resumed(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    environment = {"agent": f"{tmp_path / 'agents.py'}:play", "max_concurrency": 2}
    few = {"num_steps": 2, "eval_prompts": 2}
    settings = running.config("ppo", tiny("llama"), environment=environment, ppo={"num_prompts": 4}, run=few)
    code, run, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    last = running.metrics(run)[-1]
    assert last["environment/turns"] == 2
    assert last["policy/sampling_gap"] < 1e-5
    assert_conversations_are_recorded(run)
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    ours, theirs = ([line.get("reward/mean") for line in running.metrics(one)] for one in (stopped, run))
    assert ours == pytest.approx(theirs)


def test_calls_that_agents_gave_up_are_not_learnt_and_use_nothing_up(tiny: TinyModels, tmp_path: Path) -> None:
    """Five of six, each of which may take all 64 tokens of its episode; the one that is answered asks for 4."""
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    settings = running.config(
        "grpo",
        tiny("llama"),
        environment={
            "agent": f"{tmp_path / 'agents.py'}:impatient",
            "max_concurrency": 2,
            "max_turns": 6,
            "max_call_tokens": 64,
        },
        generation={"max_new_tokens": 64},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    [_, line] = running.metrics(run)
    assert line["reward/dropped"] == 0
    assert line["environment/turns"] == 1
    assert line["completion/tokens"] <= 16 * 4


@pytest.mark.parametrize(("agent", "dropped"), [("verbose", 0), ("greedy", 0), ("strict", 0), ("careless", 4)])
@pytest.mark.wide
def test_an_agent_that_fails_once_nothing_is_left_is_truncated_and_not_dropped(
    agent: str, dropped: int, tiny: TinyModels, tmp_path: Path
) -> None:
    """Of calls, of positions, or of the last call's tokens; near to it one that fails with calls and tokens left."""
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    settings = running.config(
        "grpo",
        tiny("llama"),
        environment={"agent": f"{tmp_path / 'agents.py'}:{agent}", "max_concurrency": 2, "max_turns": 2},
        generation={"max_new_tokens": 8},
        grpo={"num_prompts": 2, "group_size": 2},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
    )
    _, run, _ = running.train(settings, tmp_path)
    line = running.metrics(run)[-1]
    assert line["reward/dropped"] == dropped
    if dropped:  # what was written counts, and no score of it
        assert line["completion/mean_length"] > 3
        assert line["environment/observation_tokens"] == 0.0
        assert not {"reward/mean", "reward/variety"} & set(line)
    else:
        assert line["completion/truncated"] > 0.5


def test_a_wish_of_an_agent_is_noted_once(tiny: TinyModels, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    for agent, count, steps in (("wishful", 1, 2), ("greedy", 0, 1)):
        settings = running.config(
            "grpo",
            tiny("llama"),
            environment={"agent": f"{tmp_path / 'agents.py'}:{agent}", "max_concurrency": 2},
            grpo={"num_prompts": 2, "group_size": 2},
            run={"num_steps": steps, "eval_every": 0, "eval_prompts": 0},
        )
        assert running.train(settings, tmp_path, name=agent)[0] == 0
        assert capfd.readouterr().err.count("response_format") == count
