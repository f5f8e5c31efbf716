"""Requests that come one by one: each gets the completion it would have got alone, whoever shares its batch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.generation.sampling import PROMPTS, make_engine
from tests.tiny_models import TinyModels
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import Completion, Request, SamplingParams, Sequence, sample_keys
from tinyrl.generation.scheduler import LIVE_STEP, LiveScheduler, Scheduler, score

PARAMS = [SamplingParams(), SamplingParams(greedy=True), SamplingParams(0.6, top_k=5), SamplingParams(top_p=0.5)]
LONG = list(range(20, 50))


@pytest.fixture(params=["llama-fused", "gpt2-hf"])
def live(request: pytest.FixtureRequest, tiny: TinyModels) -> Iterator[LiveScheduler]:
    kind, engine = request.param.split("-", 1)
    scheduler = LiveScheduler(make_engine(tiny(kind), engine, lora=True), max_rows=3)
    yield scheduler
    scheduler.close()


class Client(Sequence):
    """A request, and what its client has got."""

    def __init__(self, prompt: list[int], params: SamplingParams = PARAMS[0], *, row: int = 0, limit: int = 6) -> None:
        [key] = sample_keys(0, LIVE_STEP, prompts=np.array([row]), samples=np.array([0]))
        super().__init__(prompt, params, key, limit, after="cached")
        self.number, self.pieces, self.results = row, list[int](), queue.Queue[Any]()
        self.on_tokens, self.on_end = self.pieces.extend, self.results.put

    def answer(self) -> Completion:
        if isinstance(result := self.results.get(timeout=60), Exception):
            raise result
        return result


def alone(live: LiveScheduler, client: Client) -> Completion:
    """What the engine itself gives for the request."""
    params, engine = client.params, live.engine
    before = engine.settings
    engine.settings = replace(before, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)
    request = Request(client.prompt, prompt_row=client.number, max_new_tokens=client.limit)
    [[completion]] = engine.sample([request], 1, seed=0, step=LIVE_STEP, greedy=params.greedy)
    engine.settings = before
    return completion


def test_many_at_once_get_what_each_would_get_alone(live: LiveScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows that are drawn otherwise share the batch."""
    together = set[int]()
    decode = Scheduler._decode

    def noted(self: Scheduler) -> None:
        together.add(len({sequence.params for sequence in self.live}))
        decode(self)

    monkeypatch.setattr(Scheduler, "_decode", noted)
    clients = [Client(PROMPTS[i % 4], PARAMS[i % 4], row=i % 5, limit=3 + 4 * (i % 5)) for i in range(16)]
    threads = [threading.Thread(target=live.submit, args=([client],)) for client in clients]
    for thread in threads:
        thread.start()
    answers = [client.answer() for client in clients]
    for client, answer in zip(clients, answers, strict=True):
        expected = alone(live, client)
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert client.pieces == answer.tokens
    assert live.engine.name == "hf" or max(together) > 1


def test_one_that_is_cancelled_ends_and_makes_room(tiny: TinyModels) -> None:
    live = LiveScheduler(make_engine(tiny("llama"), "fused"), max_rows=1)
    started = threading.Event()
    first, second = Client(PROMPTS[0], limit=4000), Client(PROMPTS[1], row=1, limit=3)
    first.on_tokens = lambda tokens: started.set()
    assert live.submit([first, second])
    assert started.wait(60)
    first.cancelled = True
    assert len(second.answer().tokens) == 3
    assert len(first.tokens) < 4000
    assert first.results.empty()
    live.close()


@pytest.mark.parametrize(("engine", "bad"), [("fused", 0), ("fused", 2), ("hf", 3)])
def test_a_request_that_fails_fails_alone(engine: str, bad: int, tiny: TinyModels) -> None:
    """A token that the model has not, first, in the middle and behind others; who is heard hears each token once."""
    live = LiveScheduler(make_engine(tiny("llama"), engine), max_rows=3)
    clients = [Client(PROMPTS[i], row=i) for i in range(4)]
    clients[bad] = Client([20, 10**6], row=bad)
    assert live.submit(clients)
    answers = [client.results.get(timeout=60) for client in clients]
    live.close()
    assert isinstance(answers.pop(bad), IndexError)
    del clients[bad]
    assert [answer.tokens for answer in answers] == [alone(live, client).tokens for client in clients]
    assert [client.pieces for client in clients] == [answer.tokens for answer in answers]


@pytest.mark.parametrize("end", ["close", "release"])
def test_nothing_runs_once_it_has_ended(end: str, tiny: TinyModels) -> None:
    """When a server closes, and when the rollout of agents ends: behind it the weights change."""
    live = LiveScheduler(make_engine(tiny("llama"), "fused"), max_rows=1)
    started, going, waiting = threading.Event(), Client(PROMPTS[0], limit=4000), Client(PROMPTS[1], limit=4000)
    going.on_tokens = lambda tokens: started.set()
    assert live.submit([going, waiting])
    assert started.wait(60)
    ending = threading.Thread(target=getattr(live, end))
    ending.start()
    while not (live._runs or live._closed):
        time.sleep(0.01)
    going.cancelled = True
    ending.join(60)
    assert isinstance(waiting.results.get_nowait(), RuntimeError)
    live.close()
    assert not waiting.tokens
    assert not live.submit([Client(PROMPTS[0])])


def test_too_many_are_turned_away(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.scheduler.MOST_WAITING", 2)
    live = LiveScheduler(make_engine(tiny("llama"), "fused"), max_rows=1)
    assert not live.submit([Client(PROMPTS[0], row=i) for i in range(3)])
    live.close()


# ---- prefixes that ended rows have in the cache ----


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The lengths of texts as they are prefilled: whole, or behind what a row has in the cache."""
    seen: list[tuple[str, list[int]]] = []
    for name in ("prefill", "extend"):
        method: Any = getattr(Decoder, name)

        def noted(
            self: Decoder, ids: Any, lengths: Any, *rest: Any, name: str = name, method: Any = method, **named: Any
        ) -> Any:
            seen.append((name, lengths.tolist()))
            return method(self, ids, lengths, *rest, **named)

        monkeypatch.setattr(Decoder, name, noted)
    return seen


def answer_to(live: LiveScheduler, prompt: list[int], row: int = 0, *, limit: int = 6) -> list[int]:
    """What follows a prompt, compared with a pass over all of it."""
    client = Client(prompt, row=row, limit=limit)
    assert live.submit([client])
    answer = client.answer()
    scored = score(live.engine, prompt + answer.tokens, role="policy", temperature=1.0)
    assert scored.logprobs[len(prompt) :] == pytest.approx(answer.logprobs, abs=1e-5)
    return answer.tokens


def test_a_conversation_that_goes_on_is_prefilled_from_where_it_was(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]]
) -> None:
    """An answer's last token is not in the cache. Other conversations and rounds in between do not matter."""
    live = LiveScheduler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    first, other = answer_to(live, LONG), answer_to(live, list(range(60, 90)), 1)
    prefills.clear()
    second = answer_to(live, [*LONG, *first, 51, 52])
    answer_to(live, [*LONG, *first, 51, 52, *second, 53])
    answer_to(live, [*range(60, 90), *other, 51], 1)
    live.close()
    assert prefills == [("extend", [3]), ("extend", [2]), ("extend", [2])]


def test_a_history_that_was_edited_is_prefilled_from_the_edit(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]]
) -> None:
    """At half of what the row holds, or later; the same prompt again prefills its last token."""
    live = LiveScheduler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    answer_to(live, LONG, limit=2)
    prefills.clear()
    answer_to(live, [*LONG[:20], 3, 4])
    answer_to(live, [*LONG[:20], 3, 4])
    answer_to(live, [*LONG[:8], 3, 4])
    live.close()
    assert prefills == [("extend", [2]), ("extend", [1]), ("prefill", [10])]


def test_new_weights_prefill_everything_anew(tiny: TinyModels, prefills: list[tuple[str, list[int]]]) -> None:
    live = LiveScheduler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    first = answer_to(live, LONG)
    prefills.clear()
    with torch.no_grad():
        for parameter in live.engine.roles.parameters["policy"].values():
            parameter.add_(0.05)
    live.release()
    answer_to(live, [*LONG, *first, 51])
    live.close()
    assert prefills == [("prefill", [len(LONG) + len(first) + 1])]


def test_rows_that_have_ended_give_way_the_oldest_first(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]]
) -> None:
    live = LiveScheduler(make_engine(tiny("llama"), "fused", lora=True), max_rows=2)
    texts = [[start, *LONG] for start in (60, 61, 62)]
    answers = [answer_to(live, text, i) for i, text in enumerate(texts)]
    prefills.clear()
    for i in (1, 2, 0):
        answer_to(live, [*texts[i], *answers[i], 51], i)
    live.close()
    assert [name for name, _ in prefills] == ["extend", "extend", "prefill"]
