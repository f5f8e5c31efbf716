"""Agents that know only an address: what they sampled is what is trained, and a bad one fails its episode alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import psutil
import pytest
import torch

from tests import running
from tests.generation import test_endpoint
from tests.generation.sampling import make_engine
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig, RewardConfig
from tinyrl.environments.agent import Agents, Job
from tinyrl.environments.environment import Episode
from tinyrl.generation.agents import AgentEpisode, Conversation, closing_of
from tinyrl.generation.endpoint import Endpoint
from tinyrl.generation.engine import Completion, SamplingParams, Sequence
from tinyrl.generation.scheduler import LiveScheduler, score
from tinyrl.rollout.collector import apply_length_rules, token_rewards_of
from tinyrl.rollout.sample import (
    Sample,
    conversations,
    environment_metrics,
    fill,
    kl_per_response,
    length_metrics,
    loss_mask,
    num_episodes,
    padded,
)
from tinyrl.tasks.call_forms import call_form
from tinyrl.trainers.ppo import adapted_kl_coef

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
USER: Any = {"role": "user", "content": "hello"}


class Running(test_endpoint.Running):
    """An endpoint with one episode under way, and a client that has its key."""

    def __init__(self, scheduler: Any) -> None:
        endpoint: Any = {"defaults": SamplingParams(), "max_new_tokens": 64, "positions": 512, "variables": {}}
        self.endpoint = Endpoint(scheduler, {"policy": "policy"}, **endpoint, episodes={})
        super().__init__(self.endpoint)

    def open(self, key: str = "key", *, left: int = 64, calls: int = 8) -> AgentEpisode:
        tokenizer = self.endpoint.tokenizer
        assert self.endpoint.episodes is not None
        closing = closing_of(tokenizer, {})
        self.endpoint.episodes[key] = AgentEpisode(
            np.uint64(5), SamplingParams(), "policy", left, calls, tokenizer, closing, positions=512
        )
        return self.endpoint.episodes[key]

    def say(self, *messages: Any, key: str = "key", **options: Any) -> Any:
        asked: dict[str, Any] = {"max_tokens": 6, **options}
        answer = self.client(key).chat.completions.create(model="policy", messages=list(messages), **asked)
        return {"role": "assistant", "content": answer.choices[0].message.content}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    engine = make_engine(TinyModels(tmp_path_factory.mktemp("models"))("llama"), "fused", lora=True)
    engine.tokenizer.chat_template = TEMPLATE
    live = LiveScheduler(engine, max_rows=4)
    yield live
    live.close()


@pytest.fixture(scope="module")
def running_endpoint(sampler: LiveScheduler) -> Iterator[Running]:
    server = Running(sampler)
    yield server
    server.stop()


@pytest.fixture
def episode(running_endpoint: Running) -> AgentEpisode:
    return running_endpoint.open()


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


# ---- what is recorded ----


def calls_of(row: Conversation) -> int:
    """How many answers a conversation has: stretches of tokens that the policy chose."""
    return sum(chosen for chosen, _ in groupby(row.action_mask))


def test_a_conversation_that_goes_on_is_one_row_of_what_was_sampled(
    running_endpoint: Running, episode: AgentEpisode, sampler: LiveScheduler
) -> None:
    first = running_endpoint.say(USER)
    second = running_endpoint.say(USER, first, {"role": "user", "content": "and?"})
    running_endpoint.say(USER, first, {"role": "user", "content": "and?"}, second, {"role": "user", "content": "so?"})
    [row] = episode.rows()
    assert calls_of(row) == 3
    assert sum(row.action_mask) == len([x for x in row.logprobs if x != 0.0])
    chosen = [token for token, kept in zip(row.tokens, row.action_mask, strict=True) if kept]
    assert str(sampler.tokenizer.decode(chosen[:6], skip_special_tokens=True)).startswith(first["content"][:3])
    read = [token for token, kept in zip(row.tokens, row.action_mask, strict=True) if not kept]
    assert "<user>and?" in sampler.tokenizer.decode(read)
    scored = score(sampler.engine, [*row.prompt, *row.tokens], role="policy", temperature=1.0)
    whole = scored.logprobs[len(row.prompt) :]
    ours = [p for p, kept in zip(row.logprobs, row.action_mask, strict=True) if kept]
    theirs = [p for p, kept in zip(whole, row.action_mask, strict=True) if kept]
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    "messages",
    [
        lambda first: [{"role": "system", "content": "another"}, USER, first, USER],
        lambda first: [USER, {**first, "content": f"{first['content']} edited"}, USER],
        lambda first: [USER],
    ],
)
def test_another_history_is_a_row_of_its_own(
    messages: Callable[[Any], list[Any]], running_endpoint: Running, episode: AgentEpisode
) -> None:
    first = running_endpoint.say(USER)
    running_endpoint.say(*messages(first))
    assert [calls_of(row) for row in episode.rows()] == [1, 1]


def test_the_same_call_twice_draws_twice_and_the_same_episode_again_the_same(running_endpoint: Running) -> None:
    said = []
    for key in ("one", "two"):
        running_endpoint.open(key)
        said.append([running_endpoint.say(USER, key=key)["content"] for _ in range(2)])
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]


def test_how_tokens_are_drawn_is_the_runs(running_endpoint: Running) -> None:
    running_endpoint.open("a")
    running_endpoint.open("b")
    greedy = running_endpoint.say(USER, key="a", temperature=0.0, top_p=0.1)
    assert running_endpoint.say(USER, key="b") == greedy


# ---- limits ----


def test_calls_side_by_side_have_what_the_episode_has_left(running_endpoint: Running) -> None:
    """Also without `max_tokens`, and whichever comes first; what they sampled is counted when they end."""
    session = running_endpoint.open("side", left=16)
    limits = []
    with (
        ThreadPoolExecutor(2) as pool,
        mock.patch.object(running_endpoint.endpoint.scheduler, "submit", side_effect=later(limits)),
    ):
        asked = [pool.submit(running_endpoint.say, USER, key="side", max_tokens=None) for _ in range(2)]
        answers = [each.result(timeout=60) for each in asked]
    assert limits == [16, 16]
    assert len(answers) == len(session.rows()) == 2
    assert session.left == 16 - 2 * 3


def later(limits: list[int]) -> Callable[[Iterable[Sequence]], bool]:
    """A scheduler's `submit` that answers two calls together."""
    waiting: list[Sequence] = []

    def submit(work: Iterable[Sequence]) -> bool:
        added = list(work)
        waiting.extend(added)
        limits.extend(one.limit for one in added)
        if len(waiting) == 2:
            for one in waiting:
                one.on_end(Completion([40, 41, 42], [-1.0] * 3, "stop"))
        return True

    return submit


def test_a_call_that_is_given_up_leaves_its_tokens_and_its_conversation(running_endpoint: Running) -> None:
    """A client's retry goes on where the first try did."""
    session = running_endpoint.open("retry", left=40)
    first = running_endpoint.say(USER, key="retry", max_tokens=4)
    left = session.left
    more: Any = [USER, first, {"role": "user", "content": "and?"}]
    with mock.patch.object(running_endpoint.endpoint.scheduler, "submit", return_value=True):
        hurried = running_endpoint.client("retry").with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            hurried.chat.completions.create(model="policy", messages=more)
    until = time.monotonic() + 30
    while not session.sequences[-1].cancelled and time.monotonic() < until:
        time.sleep(0.05)
    assert session.left == left
    running_endpoint.say(*more, key="retry", max_tokens=None)
    [row] = session.rows()
    assert calls_of(row) == 2


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tools": [tool("alpha")]}, {"tools": [tool("bravo")]}),
        ({"extra_body": {"chat_template_kwargs": {"mood": "x"}}}, {}),
    ],
)
def test_other_tools_or_variables_are_a_row_of_its_own(
    first: Any, then: Any, running_endpoint: Running, episode: AgentEpisode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy read before its first answer would not be what the second call shows it."""
    tokenizer = running_endpoint.endpoint.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson if tools }}{{ mood }}" + TEMPLATE)
    monkeypatch.setattr(running_endpoint.endpoint, "form", call_form(tokenizer, {}))
    said = running_endpoint.say(USER, **first)
    again = running_endpoint.say(USER, said, USER, **first)
    running_endpoint.say(USER, said, USER, again, USER, **then)
    read = [str(tokenizer.decode(row.prompt)) for row in episode.rows()]
    assert [calls_of(row) for row in episode.rows()] == [2, 1]
    assert ["bravo" in text for text in read] == [False, "tools" in then]


def test_an_episode_has_so_many_tokens_and_calls(running_endpoint: Running) -> None:
    session = running_endpoint.open("t", left=8, calls=3)
    for _ in range(2):
        running_endpoint.say(USER, key="t", max_tokens=100)
        if not session.left:
            break
    assert sum(sum(row.action_mask) for row in session.rows()) <= 8
    session = running_endpoint.open("c", calls=1)
    running_endpoint.say(USER, key="c")
    with pytest.raises(openai.BadRequestError, match="max_turns"):
        running_endpoint.say(USER, key="c")


@pytest.mark.parametrize("key", ["", "ke"])
def test_another_key_gets_nothing(key: str, running_endpoint: Running, episode: AgentEpisode) -> None:
    with pytest.raises(openai.AuthenticationError):
        running_endpoint.say(USER, key=key or "x")
    assert not episode.rows()


def test_an_episode_that_is_over_gets_nothing_and_records_nothing(running_endpoint: Running) -> None:
    session = running_endpoint.open("late")
    running_endpoint.say(USER, key="late")
    session.end()
    with pytest.raises(openai.AuthenticationError):
        running_endpoint.say(USER, key="late")
    assert [calls_of(row) for row in session.rows()] == [1]


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


def wants(row, more):
    return ""


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


def agents(use: Any, **fields: Any) -> Agents:
    return Agents(EnvironmentConfig.model_validate({"agent": use, "at_once": 2, **fields}))


def jobs(*prompts: str) -> list[Job]:
    return [Job({"prompt": prompt}, "http://127.0.0.1:1/v1", "key", "policy") for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "expected"), [("good", "p1key"), ("other", '{"prompt": "p"}'), ("later", "p"), ("nothing", "")]
)
def test_a_function_is_given_what_it_takes(name: str, expected: str, file: Path) -> None:
    with_function = agents(f"{file}:{name}")
    with_function.start()
    ended: list[int] = []
    [played] = with_function.play(jobs("p"), ended=ended.append)
    with_function.close()
    assert (played.text, played.failure) == (expected, None)
    assert ended == [0]


def test_a_bad_agent_fails_its_episode_alone(file: Path) -> None:
    several = agents(f"{file}:bad", timeout_s=2.0)
    prompts = ("fine", "raises", "fine", "dies", "fine", "hangs", "fine", "exits", "huge", "fine")
    played = several.play(jobs(*prompts), ended=lambda place: None)
    several.close()
    for prompt, one in zip(prompts, played, strict=True):
        assert (one.failure is None) == (prompt in ("fine", "huge")), (prompt, one.failure)
    assert "planted" in (played[1].failure or "")
    assert len(played[8].text or "") <= 1 << 20


def test_a_program_gets_the_row_and_the_address(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, time\nrow = json.load(sys.stdin)\n"
        "if row['prompt'] == 'fails': sys.exit('planted')\nif row['prompt'] == 'hangs': time.sleep(60)\n"
        "if row['prompt'] == 'dies': os.kill(os.getpid(), 9)\n"
        "print(row['prompt'], os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])\n",
        encoding="utf-8",
    )
    several = agents([sys.executable, str(program)], timeout_s=3.0)
    played = several.play(jobs("p", "fails", "hangs", "dies"), ended=lambda place: None)
    assert played[0].text == "p http://127.0.0.1:1/v1 key"
    assert "planted" in (played[1].failure or "")
    assert "timeout_s" in (played[2].failure or "")
    assert "SIGKILL" in (played[3].failure or "")
    [missing] = agents(["/no/such/program"]).play(jobs("p"), ended=lambda place: None)
    assert "could not be started" in (missing.failure or "")


def test_what_a_program_prints_and_starts_ends_with_its_episode(tmp_path: Path) -> None:
    """Output without end, and a process that goes on in a session of its own."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, subprocess, sys\nrow = json.load(sys.stdin)\n"
        "idle = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "if row['prompt'] == 'leaves':\n"
        "    print(subprocess.Popen(idle, start_new_session=True, stdin=-3, stdout=-3, stderr=-3).pid)\n"
        "while row['prompt'] == 'prints': sys.stdout.write('x' * 1_000_000)\n",
        encoding="utf-8",
    )
    leaves, prints = agents([sys.executable, str(program)]).play(jobs("leaves", "prints"), ended=lambda place: None)
    assert leaves.text is not None
    assert not psutil.pid_exists(int(leaves.text))
    assert prints.text is None
    assert len(prints.failure or "") < 500


# ---- rows ----


def sample(prompt: list[int], tokens: list[int], **fields: Any) -> Sample:
    fields = {"mask": [True] * len(tokens), "logprobs": [0.0] * len(tokens), "row": 3, **fields}
    return Sample(prompt, tokens, **fields)


def test_further_conversations_are_samples_with_their_episodes_reward() -> None:
    further = sample([9, 9], [8, 8, 8], mask=[True, False, True])
    first = sample([2], [7], reward=0.0, scores=[0.0], further=[further])
    whole = conversations([sample([1], [5, 6], reward=1.0, scores=[1.0]), first])
    assert num_episodes(whole) == 2
    assert [one.episode for one in whole] == [0, 1, 1]
    assert [one.reward for one in whole] == [1.0, 0.0, 0.0]
    assert whole[2] is further
    assert loss_mask(whole)[2].tolist() == [True, False, True]


def two_episodes(**reward: Any) -> list[Sample]:
    """An episode of a conversation that ended, and one of three: cut off, ended, ended; of 2, 1, 3 and 2 tokens, of
    which 2, 1, 2 and 2 are the policy's.
    """
    further = [sample([9, 9], [8, 8, 8], mask=[True, False, True]), sample([9], [4, 4])]
    played = [Episode(turn_ends=[0], turn_rewards=[0.0]), Episode(turn_ends=[0] * 4, turn_rewards=[0.0] * 4)]
    ended = sample([1], [5, 6], reward=1.0, played=played[0])
    cut_off = sample([2], [7], reward=0.0, finish="length", played=played[1], further=further)
    apply_length_rules([ended, cut_off], RewardConfig(**reward), max_new_tokens=6)
    return conversations([ended, cut_off], mask_truncated=reward.get("truncated") == "mask")


def test_length_rules_look_at_every_conversation_of_an_episode() -> None:
    """What was cut off is left out, and nothing else; penalties are for the episode, whose tokens are one budget."""

    def in_loss(samples: list[Sample]) -> list[bool]:
        return [one.in_loss for one in samples]

    def rewards(samples: list[Sample]) -> list[float]:
        return [one.reward for one in samples]

    assert in_loss(two_episodes(truncated="mask")) == [True, False, True, True]
    assert in_loss(two_episodes()) == [True] * 4
    assert rewards(two_episodes(truncated="penalize")) == [1.0, -1.0, -1.0, -1.0]
    assert rewards(two_episodes(overlong_tokens=2)) == [1.0, -0.5, -0.5, -0.5]  # 5 tokens of 6, from 4 on
    episode = [sample([1], [5], reward=0.0, further=[sample([9], [4], finish="length")])]
    apply_length_rules(episode, RewardConfig(truncated="penalize"), max_new_tokens=6)
    assert episode[0].reward == -1.0
    assert in_loss(conversations(episode, mask_truncated=True)) == [True, False]


def test_an_episode_counts_once_in_every_metric() -> None:
    samples = two_episodes()
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


def test_ppo_gives_every_conversation_the_score_on_its_last_token() -> None:
    further = sample([9, 9], [8, 8, 8], mask=[True, False, True])
    samples = conversations([sample([1], [5, 6], reward=1.0), sample([2], [7], reward=0.5, further=[further])])
    rewards = token_rewards_of(samples, torch.zeros(3, 3), kl_coef=0.0)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.5]]


def config(model: Path, use: str, *, method: str = "grpo", **sections: Any) -> Config:
    environment = {"agent": use, "at_once": 2, **sections.pop("environment", {})}
    run = {"num_steps": 2, **sections.pop("run", {})}
    return running.config(method, model, environment=environment, run=run, **sections)


@pytest.fixture
def small(tiny: TinyModels) -> Path:
    return tiny("llama")


def lines(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_run_learns_from_every_conversation_and_is_resumed(file: Path, small: Path, tmp_path: Path) -> None:
    settings = config(small, f"{file}:play", method="ppo")
    code, run, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    last = lines(run)[-1]
    assert last["environment/turns"] == 2
    assert last["policy/sampling_gap"] < 1e-5
    assert abs(last["policy/loss"]) >= 0
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    for ours, theirs in zip(lines(stopped), lines(run), strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"]) if "reward/mean" in theirs else True


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"method": "distill", "teacher": {"path": "/teacher"}}, "grpo or ppo"),
        ({"grpo": {"refill_rounds": 1}}, "refill_rounds"),
        ({"generation": {"engine": "server", "url": "http://127.0.0.1:8000"}}, "engine=server"),
        ({"grpo": {"advantage": "discounted-return"}}, "advantage"),
    ],
)
def test_what_does_not_go_with_an_agent_is_refused(sections: dict[str, Any], named: str) -> None:
    values = {"method": "grpo", "task": {"name": "sort"}, "environment": {"agent": "a.py:f"}, **sections}
    with pytest.raises(ValueError, match=named):
        Config.model_validate(values)
