"""Agents over the library's modules: windows, states, experts. What they sampled is what is trained, and a turn is
prefilled only behind the one before, where the cache can.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests import running
from tests.endpoint.conftest import episode_of, listening_to
from tests.generation.sampling import TEMPLATE, make_engine, stir
from tests.tiny_models import TinyModels
from tinyrl.endpoint.agent_episode import AgentEpisode
from tinyrl.endpoint.server import Listening
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.sample import Sample
from tinyrl.models.checks import as_exact
from tinyrl.models.policy import Policy

AGENTS = 4
ANSWER = 12  # tokens of an answer at most
QUESTION = "Tell agent {} which of the two boxes holds the key."  # longer than a window
FOLLOW_UP: Any = {"role": "user", "content": "and the other?"}
HALF = [("gemma3", torch.bfloat16), ("qwen3.5", torch.bfloat16), ("gpt-oss", torch.bfloat16)]
FAMILIES = [("gemma3", torch.float32), ("qwen3.5", torch.float32), ("gpt-oss", torch.float32), *HALF]
ONE_FAST = [case if case == FAMILIES[1] else pytest.param(*case, marks=pytest.mark.wide) for case in FAMILIES]


@dataclass(frozen=True)
class Agent:
    """A client of an endpoint with the key of its episode, as an OpenAI client is."""

    number: int
    episode: AgentEpisode
    url: str

    def ask(self, *messages: Any) -> Any:
        """Return the answer to a history as a message."""
        client = openai.OpenAI(base_url=self.url, api_key=str(self.number), max_retries=0, timeout=60)
        answer = client.chat.completions.create(model="policy", messages=list(messages), max_tokens=ANSWER)
        return {"role": "assistant", "content": answer.choices[0].message.content}

    @property
    def question(self) -> Any:
        return {"role": "user", "content": QUESTION.format(self.number)}

    def two_turns(self) -> Sample:
        """Ask, ask again behind the answer, and return the one row that is trained on."""
        self.ask(self.question, self.ask(self.question), FOLLOW_UP)
        [row] = self.episode.samples()
        return row


@contextmanager
def agents_over(folder: Path, dtype: torch.dtype = torch.float32) -> Iterator[tuple[LiveScheduler, list[Agent]]]:
    engine = make_engine(folder, "hf", lora=True, dtype=dtype)
    stir(engine)
    engine.eos = set()
    engine.tokenizer.chat_template = TEMPLATE
    live = LiveScheduler(engine, max_rows=AGENTS)
    try:
        with listening_to(live, positions=512, episodes={}) as listening:
            yield live, agents_of(listening)
    finally:
        live.close()


def agents_of(listening: Listening) -> list[Agent]:
    endpoint = listening.endpoint
    assert endpoint.episodes is not None
    agents: list[Agent] = []
    for number in range(AGENTS):
        episode = episode_of(endpoint.tokenizer)
        endpoint.episodes[str(number)] = episode
        agents.append(Agent(number, episode, listening.url))
    return agents


def turns_of(row: Sample) -> list[int]:
    """Count the tokens of each stretch of a response: sampled, read, sampled."""
    return [len([*stretch]) for _, stretch in groupby(row.mask)]


def scored(policy: Policy, row: Sample, dtype: torch.dtype) -> torch.Tensor:
    """Score the sampled tokens of a row by the library's pass over all of it."""
    half = dtype != torch.float32
    ids = torch.tensor([[*row.prompt, *row.response]])
    with torch.inference_mode(), policy.acting("policy") as model, torch.autocast("cpu", dtype=dtype, enabled=half):
        log_p = model(input_ids=ids).logits[0, len(row.prompt) - 1 : -1].float().log_softmax(-1)
    return log_p.gather(1, torch.tensor(row.response).unsqueeze(1)).squeeze(1)[torch.tensor(row.mask)]


@pytest.mark.parametrize(("kind", "dtype"), ONE_FAST)
def test_what_agents_sampled_at_once_is_scored_as_one_text(tiny: TinyModels, kind: str, dtype: torch.dtype) -> None:
    """In half precision, it is as near to float32 as the library's pass is."""
    with agents_over(tiny(kind), dtype) as (live, agents), ThreadPoolExecutor(AGENTS) as pool:
        rows = list(pool.map(Agent.two_turns, agents))
    policy = live.engine.policy
    sampled = torch.cat([torch.tensor(row.logprobs)[torch.tensor(row.mask)] for row in rows])
    library = torch.cat([scored(policy, row, dtype) for row in rows])
    assert len(sampled) == AGENTS * 2 * ANSWER
    if dtype == torch.float32:
        assert float((sampled - library).abs().max()) < 1e-4
        return
    policy.causal.float()
    exact = torch.cat([scored(policy, row, torch.float32) for row in rows])
    assert as_exact(float((sampled - exact).abs().mean()), float((library - exact).abs().mean()))


@pytest.mark.parametrize(("kind", "dtype"), FAMILIES)
@pytest.mark.wide
def test_a_second_turn_is_prefilled_behind_the_first(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]], kind: str, dtype: torch.dtype
) -> None:
    """What the agent adds, and the answer's last token, which is not in the cache."""
    with agents_over(tiny(kind), dtype) as (_, agents):
        row = agents[0].two_turns()
    first, read, second = turns_of(row)
    assert (first, second) == (ANSWER, ANSWER)
    assert prefills == [("prefill", [len(row.prompt)]), ("extend", [read + 1])]


@pytest.mark.parametrize(("kind", "continued"), [("gemma3", True), ("gpt-oss", True), ("qwen3.5", False)])
@pytest.mark.wide
def test_an_edited_answer_is_prefilled_from_the_edit_or_with_states_anew(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]], kind: str, *, continued: bool
) -> None:
    with agents_over(tiny(kind)) as (live, agents):
        agent = agents[0]
        answer = agent.ask(agent.question)
        agent.ask(agent.question, {**answer, "content": "no"}, FOLLOW_UP)
    known, edited = agent.episode.samples()
    pairs = zip([*known.prompt, *known.response], edited.prompt, strict=False)
    same = next(i for i, (before, now) in enumerate(pairs) if before != now)
    whole = len(edited.prompt)
    assert prefills[1:] == ([("extend", [whole - same])] if continued else [("prefill", [whole])])
    assert torch.tensor(edited.logprobs).sub(scored(live.engine.policy, edited, torch.float32)).abs().max() < 1e-4


PLAY = """
import json, urllib.request


def play(row, base_url, api_key):
    text = row["prompt"]
    for added in ("", " and then"):
        body = json.dumps({"model": "policy", "prompt": text + added, "max_tokens": 6}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        with urllib.request.urlopen(urllib.request.Request(base_url + "/completions", body, headers)) as answer:
            said = json.load(answer)["choices"][0]["text"]
        text += added + said
    return said
"""


@pytest.mark.parametrize(("kind", "dtype"), FAMILIES)
@pytest.mark.wide
def test_a_run_with_agents_trains_the_tokens_that_were_sampled(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    (tmp_path / "agents.py").write_text(PLAY, encoding="utf-8")
    settings = running.config(
        "grpo",
        tiny(kind),
        model={"dtype": str(dtype).removeprefix("torch.")},
        environment={"agent": f"{tmp_path / 'agents.py'}:play", "max_concurrency": 4},
        generation={"engine": "hf", "max_new_tokens": 16},
        run={"num_steps": 2, "eval_every": 0, "eval_prompts": 0},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    line = running.metrics(run)[-1]
    assert line["environment/turns"] == 2
    behind = len(" and then") + 1
    assert any(behind in lengths for name, lengths in prefills if name == "extend")
    assert line["policy/sampling_gap"] < (1e-4 if dtype == torch.float32 else 0.1)
