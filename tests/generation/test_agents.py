"""Agents that call a URL: what they sampled is what is trained, and a bad one fails its episode alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
import torch

from tests import running
from tests.generation.sampling import make_engine
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig, RewardConfig
from tinyrl.environments.agent import Agents, Job
from tinyrl.environments.environment import Episode
from tinyrl.generation.agents import AgentEpisode, Given, closing_of
from tinyrl.generation.endpoint import Endpoint, Listening
from tinyrl.generation.engine import Completion, SamplingParams, Sequence
from tinyrl.generation.scheduler import LiveScheduler, score
from tinyrl.rollout.sample import (
    Sample,
    apply_length_rules,
    conversations,
    environment_metrics,
    fill,
    kl_per_response,
    length_metrics,
    loss_mask,
    num_episodes,
    padded,
    token_rewards_of,
)
from tinyrl.tasks.call_forms import call_form
from tinyrl.training.ppo import adapted_kl_coef

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
USER: Any = {"role": "user", "content": "hello"}
MORE: Any = {"role": "user", "content": "and?"}


class Running:
    """An endpoint with one episode under way, and a client that has its key."""

    def __init__(self, scheduler: LiveScheduler) -> None:
        endpoint: Any = {"defaults": SamplingParams(), "max_new_tokens": 64, "positions": 512, "variables": {}}
        self.endpoint = Endpoint(scheduler, {"policy": "policy"}, **endpoint, episodes={})
        self.listening, self.tokenizer = Listening(self.endpoint), scheduler.tokenizer
        self.episode = self.open()

    def open(self, *, left: int = 64, calls: int = 8) -> AgentEpisode:
        read: Any = self.tokenizer, closing_of(self.tokenizer, {}), 512
        self.episode = AgentEpisode(np.uint64(5), SamplingParams(), "policy", left, calls, *read)
        self.endpoint.episodes = {"key": self.episode}
        return self.episode

    def say(self, *messages: Any, key: str = "key", timeout: float = 60, **options: Any) -> Any:
        client = openai.OpenAI(base_url=self.listening.url, api_key=key, max_retries=0, timeout=timeout)
        asked: dict[str, Any] = {"max_tokens": 6, **options}
        answer = client.chat.completions.create(model="policy", messages=list(messages), **asked)
        return {"role": "assistant", "content": answer.choices[0].message.content}

    @property
    def answers(self) -> list[int]:
        """How many answers each conversation has: stretches of tokens that the policy chose."""
        return [sum(chosen for chosen, _ in groupby(c.action_mask or [])) for _, c in self.episode.rows()]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    engine = make_engine(TinyModels(tmp_path_factory.mktemp("models"))("llama"), "fused", lora=True)
    engine.tokenizer.chat_template = TEMPLATE
    live = LiveScheduler(engine, max_rows=4)
    yield live
    live.close()


@pytest.fixture(scope="module")
def endpoint(sampler: LiveScheduler) -> Iterator[Running]:
    server = Running(sampler)
    yield server
    server.listening.stop()


@pytest.fixture
def server(endpoint: Running) -> Running:
    endpoint.open()
    return endpoint


# ---- what is recorded ----


def test_a_conversation_that_continues_is_one_row_of_what_was_sampled(server: Running, sampler: LiveScheduler) -> None:
    first = server.say(USER)
    second = server.say(USER, first, MORE)
    server.say(USER, first, MORE, second, USER)
    [(prompt, row)] = server.episode.rows()
    assert server.answers == [3]
    mask = row.action_mask or []
    chosen, read = ([t for t, kept in zip(row.tokens, mask, strict=True) if kept is wanted] for wanted in (True, False))
    assert str(sampler.tokenizer.decode(chosen[:6], skip_special_tokens=True)).startswith(first["content"][:3])
    assert "<user>and?" in sampler.tokenizer.decode(read)
    whole = score(sampler.engine, [*prompt, *row.tokens], role="policy", temperature=1.0).logprobs[len(prompt) :]
    ours, theirs = ([p for p, kept in zip(each, mask, strict=True) if kept] for each in (row.logprobs, whole))
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


@pytest.mark.parametrize("other", ["system", "edited", "again"])
def test_another_history_is_a_row_of_its_own(other: str, server: Running) -> None:
    first = server.say(USER)
    edited = {**first, "content": f"{first['content']} edited"}
    system: Any = {"role": "system", "content": "another"}
    server.say(*{"system": [system, USER, first, USER], "edited": [USER, edited, USER], "again": [USER]}[other])
    assert server.answers == [1, 1]


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tools": [tool("alpha")]}, {"tools": [tool("bravo")]}),
        ({"extra_body": {"chat_template_kwargs": {"mood": "x"}}}, {}),
    ],
)
def test_other_tools_or_variables_are_a_row_of_its_own(
    first: Any, then: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy read before its first answer would not be what the second call shows it."""
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ tools | tojson if tools }}{{ mood }}" + TEMPLATE)
    monkeypatch.setattr(server.endpoint, "form", call_form(server.tokenizer, {}))
    said = server.say(USER, **first)
    again = server.say(USER, said, USER, **first)
    server.say(USER, said, USER, again, USER, **then)
    assert server.answers == [2, 1]
    read = [str(server.tokenizer.decode(prompt)) for prompt, _ in server.episode.rows()]
    assert ["bravo" in text for text in read] == [False, "tools" in then]


def test_tokens_are_drawn_as_the_run_says_by_the_episodes_numbers(server: Running) -> None:
    """The same call twice draws twice, and the same episode again the same."""
    said = [server.say(USER)["content"] for _ in range(2)]
    assert said[0] != said[1]
    server.open()
    assert [server.say(USER, temperature=0.0, top_p=0.1)["content"] for _ in range(2)] == said


# ---- limits ----


def test_calls_side_by_side_have_what_the_episode_has_left(server: Running) -> None:
    """Also without `max_tokens`, and whichever comes first; what they sampled is counted when they end."""
    session, waiting = server.open(left=16), list[Sequence]()

    def submit(work: Iterable[Sequence]) -> bool:
        waiting.extend(work)
        for one in waiting if len(waiting) == 2 else ():
            one.on_end(Completion([40, 41, 42], [-1.0] * 3, "stop"))
        return True

    with ThreadPoolExecutor(2) as pool, mock.patch.object(server.endpoint.scheduler, "submit", side_effect=submit):
        asked = [pool.submit(server.say, USER, max_tokens=None) for _ in range(2)]
        assert len([each.result(timeout=60) for each in asked]) == len(session.rows()) == 2
    assert [one.limit for one in waiting] == [16, 16]
    assert session.left == 16 - 2 * 3


def test_a_call_that_is_given_up_leaves_its_tokens_and_its_conversation(server: Running) -> None:
    """A client's retry continues where the first try did."""
    first = server.say(USER, max_tokens=4)
    left = server.episode.left
    with (
        mock.patch.object(server.endpoint.scheduler, "submit", return_value=True),
        pytest.raises(openai.APITimeoutError),
    ):
        server.say(USER, first, MORE, timeout=0.3)
    [conversation], until = server.episode.conversations, time.monotonic() + 30
    assert conversation.pending is not None
    while not conversation.pending.cancelled and time.monotonic() < until:
        time.sleep(0.05)
    assert server.episode.left == left
    server.say(USER, first, MORE, max_tokens=None)
    assert server.answers == [2]


def test_an_episode_has_so_many_tokens_and_calls(server: Running) -> None:
    session = server.open(left=8, calls=3)
    for _ in range(2):
        server.say(USER, max_tokens=100)
        if not session.left:
            break
    assert sum(sum(row.action_mask or []) for _, row in session.rows()) <= 8
    server.open(left=0)
    with pytest.raises(openai.BadRequestError, match="max_new_tokens"):
        server.say(USER)
    server.open(calls=1)
    server.say(USER)
    with pytest.raises(openai.BadRequestError, match="max_turns"):
        server.say(USER)


def test_another_key_and_an_episode_that_is_over_get_nothing(server: Running) -> None:
    server.say(USER)
    for key in ("x", "ke"):
        with pytest.raises(openai.AuthenticationError):
            server.say(USER, key=key)
    sequence, _ = server.episode.call([5, 6], Given(), limit=4, stop=[])
    server.episode.end()
    sequence.on_end(Completion([40], [-1.0], "stop"))
    assert sequence.cancelled
    with pytest.raises(openai.AuthenticationError):
        server.say(USER)
    assert server.answers == [1]


# ---- the processes of agents ----

AGENTS = """
import json, os, sys, time, urllib.request


def good(row, base_url, api_key):
    return row["prompt"] + base_url[-1:] + api_key


def other(row):
    return {"prompt": row["prompt"]}


async def later(row):
    return row["prompt"]


def nothing(row):
    return None


def bad(row):
    kind = row["prompt"]
    if kind == "raises":
        raise RuntimeError("planted")
    if kind == "dies":
        os._exit(3)
    if kind == "hangs":
        time.sleep(60)
    if kind == "exits":
        sys.exit(2)
    if kind == "huge":
        return "x" * 50_000_000
    return "fine"


def ask(base_url, api_key, prompt, **fields):
    body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 4, **fields}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["text"]


def play(row, base_url, api_key):
    said = ask(base_url, api_key, row["prompt"])
    ask(base_url, api_key, "another conversation")
    return said

"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    return tmp_path / "agents.py"


def played(use: Any, *prompts: str, **fields: Any) -> list[Any]:
    agents, ended = (
        Agents(EnvironmentConfig.model_validate({"agent": use, "max_concurrency": 2, **fields})),
        list[int](),
    )
    jobs = [Job({"prompt": prompt}, "http://127.0.0.1:1/v1", "key", "policy") for prompt in prompts]
    found = agents.play(jobs, ended=ended.append)
    agents.close()
    assert sorted(ended) == [*range(len(jobs))]
    return found


@pytest.mark.parametrize(
    ("name", "expected"), [("good", "p1key"), ("other", '{"prompt": "p"}'), ("later", "p"), ("nothing", "")]
)
def test_a_function_gets_the_arguments_it_takes(name: str, expected: str, file: Path) -> None:
    [one] = played(f"{file}:{name}", "p")
    assert (one.text, one.failure) == (expected, None)


def test_a_bad_agent_fails_its_episode_alone(file: Path) -> None:
    prompts = ("fine", "raises", "fine", "dies", "fine", "hangs", "fine", "exits", "huge", "fine")
    episodes = played(f"{file}:bad", *prompts, timeout_s=2.0)
    for prompt, one in zip(prompts, episodes, strict=True):
        assert (one.failure is None) == (prompt in ("fine", "huge")), (prompt, one.failure)
    assert "planted" in episodes[1].failure
    assert len(episodes[8].text) <= 1 << 20


# ---- rows ----


def two_episodes(**reward: Any) -> list[Sample]:
    """An episode of a conversation that ended, and one of three: cut off, ended, ended; of 2, 1, 3 and 2 tokens, of
    which 2, 1, 2 and 2 are the policy's.
    """

    def sample(prompt: list[int], tokens: list[int], **fields: Any) -> Sample:
        fields = {"mask": [True] * len(tokens), "logprobs": [0.0] * len(tokens), "row": 3, **fields}
        return Sample(prompt, tokens, **fields)

    further = [sample([9, 9], [8, 8, 8], mask=[True, False, True]), sample([9], [4, 4])]
    played = [Episode(turn_ends=[0], turn_rewards=[0.0]), Episode(turn_ends=[0] * 4, turn_rewards=[0.0] * 4)]
    ended = sample([1], [5, 6], reward=1.0, played=played[0])
    cut_off = sample([2], [7], reward=0.5, finish="length", played=played[1], further=further)
    apply_length_rules([ended, cut_off], RewardConfig(**reward), max_new_tokens=6)
    return conversations([ended, cut_off], mask_truncated=reward.get("truncated") == "mask")


def test_length_rules_look_at_every_conversation_of_an_episode() -> None:
    """What was cut off is left out, and nothing else; penalties are for the episode, whose tokens are one budget."""
    assert [one.in_loss for one in two_episodes(truncated="mask")] == [True, False, True, True]
    assert [one.in_loss for one in two_episodes()] == [True] * 4
    assert [one.reward for one in two_episodes(truncated="penalize")] == [1.0, -0.5, -0.5, -0.5]
    assert [one.reward for one in two_episodes(overlong_tokens=2)] == [1.0, 0.0, 0.0, 0.0]  # 5 tokens of 6, from 4 on


def test_an_episode_counts_once_and_its_conversations_share_its_reward() -> None:
    samples = two_episodes()
    assert num_episodes(samples) == 2
    assert [one.episode for one in samples] == [0, 1, 1, 1]
    assert [one.reward for one in samples] == [1.0, 0.5, 0.5, 0.5]
    assert loss_mask(samples)[2].tolist() == [True, False, True]
    in_ppo = token_rewards_of(samples, torch.zeros(4, 3), kl_coef=0.0)  # on the last token of each
    assert in_ppo.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.5, 0.0]]
    metrics = environment_metrics(samples)
    assert metrics["environment/turns"] == 2.5  # 1 and 4
    assert metrics["environment/observation_tokens"] == 0.5
    assert metrics["environment/out_of_turns"] == 0.0
    assert length_metrics(samples) == {
        "completion/mean_length": 3.5,  # 2 and 1 + 2 + 2
        "completion/truncated": 0.5,
        "completion/tokens": 7.0,
    }
    fill(samples, "ref", padded(samples, "logprobs") - loss_mask(samples, "all").float())
    assert kl_per_response(samples) == (3.5, 2)  # a nat a token
    assert adapted_kl_coef(samples, 1.0, kl_coef=1.0) == 1 + 0.2 * 2 / 10_000


def test_a_run_learns_from_every_conversation_and_is_resumed(file: Path, tiny: TinyModels, tmp_path: Path) -> None:
    environment = {"agent": f"{file}:play", "max_concurrency": 2}
    settings = running.config("ppo", tiny("llama"), environment=environment, run={"num_steps": 2})
    code, run, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    last = running.metrics(run)[-1]
    assert last["environment/turns"] == 2
    assert last["policy/sampling_gap"] < 1e-5
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    ours, theirs = ([line.get("reward/mean") for line in running.metrics(one)] for one in (stopped, run))
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"method": "distill", "teacher": {"path": "/teacher"}}, "grpo or ppo"),
        ({"grpo": {"dynamic_sampling_rounds": 1}}, "dynamic_sampling_rounds"),
        ({"generation": {"engine": "server", "url": "http://127.0.0.1:8000"}}, "engine=server"),
        ({"grpo": {"advantage": "reinforce++"}}, "advantage"),
    ],
)
def test_what_does_not_go_with_an_agent_is_refused(sections: dict[str, Any], named: str) -> None:
    values = {"method": "grpo", "task": {"name": "sort"}, "environment": {"agent": "a.py:f"}, **sections}
    with pytest.raises(ValueError, match=named):
        Config.model_validate(values)
