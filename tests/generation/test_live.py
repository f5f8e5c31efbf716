"""Requests that come one by one: each gets the completion it would have got alone, whoever shares its batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.generation.sampling import PROMPTS, make_engine
from tests.tiny_models import TinyModels
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import Completion, Request
from tinyrl.generation.live import LIVE_STEP, Draw, LiveSampler, Scored, Wanted, settings_of

DRAWS = [Draw(), Draw(temperature=0.0), Draw(temperature=0.6, top_k=5), Draw(top_p=0.5)]


@pytest.fixture(params=["llama-fused", "gpt2-hf"])
def sampler(request: pytest.FixtureRequest, tiny: TinyModels) -> Iterator[LiveSampler]:
    kind, engine = request.param.split("-", 1)
    live = LiveSampler(make_engine(tiny(kind), engine, lora=True), max_rows=3)
    yield live
    live.close()


class Client:
    """Asks, and gathers what it is told."""

    def __init__(self, prompt: list[int], draw: Draw, *, row: int, limit: int, stop: list[str] | None = None) -> None:
        self.pieces: list[int] = []
        self.said: queue.Queue[Any] = queue.Queue()
        request = Request(prompt, prompt_row=row, max_new_tokens=limit)
        self.wanted = Wanted(request, draw, stop or [], self.said.put, self.pieces.extend)

    def answer(self) -> Completion:
        said = self.said.get(timeout=60)
        if isinstance(said, Exception):
            raise said
        return said


def alone(sampler: LiveSampler, client: Client) -> Completion:
    """What the engine itself gives for the request."""
    wanted, engine = client.wanted, sampler.engine
    before, engine.settings = engine.settings, settings_of(wanted.draw, wanted.limit, wanted.stop)
    greedy = wanted.draw.temperature == 0
    [[completion]] = engine.sample([wanted.request], 1, seed=0, step=LIVE_STEP, role=wanted.draw.role, greedy=greedy)
    engine.settings = before
    return completion


def test_many_at_once_get_what_each_would_get_alone(sampler: LiveSampler) -> None:
    clients = [Client(PROMPTS[i % 4], DRAWS[i // 2 % 4], row=i % 5, limit=3 + 4 * (i % 6)) for i in range(16)]
    threads = [threading.Thread(target=sampler.ask, args=([client.wanted],)) for client in clients]
    for thread in threads:
        thread.start()
    answers = [client.answer() for client in clients]
    for client, answer in zip(clients, answers, strict=True):
        expected = alone(sampler, client)
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert client.pieces == answer.tokens


def test_recorded_logprobs_are_those_of_a_full_pass(sampler: LiveSampler) -> None:
    client, scored = Client(PROMPTS[2], Draw(), row=1, limit=12), queue.Queue[Any]()
    assert sampler.ask([client.wanted])
    answer = client.answer()
    assert sampler.score(PROMPTS[2] + answer.tokens, Draw(), scored.put)
    read = scored.get(timeout=60)
    assert isinstance(read, Scored)
    assert read.logprobs[len(PROMPTS[2]) :] == pytest.approx(answer.logprobs, abs=1e-5)
    assert read.logprobs[0] is None
    assert all(
        likeliest[0][1] >= logprob  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
        for likeliest, logprob in zip(read.likeliest[1:], read.logprobs[1:], strict=True)
    )


def test_one_that_is_given_up_ends_and_makes_room(tiny: TinyModels) -> None:
    live = LiveSampler(make_engine(tiny("llama"), "fused"), max_rows=1)
    started = threading.Event()
    first, second = Client(PROMPTS[0], Draw(), row=0, limit=4000), Client(PROMPTS[1], Draw(), row=1, limit=3)
    first.wanted.on_tokens = lambda tokens: started.set()
    assert live.ask([first.wanted, second.wanted])
    assert started.wait(60)
    first.wanted.given_up = True
    assert len(second.answer().tokens) == 3
    assert len(first.wanted.tokens) < 4000
    assert first.said.empty()
    live.close()


@pytest.mark.parametrize(("engine", "bad"), [("fused", 0), ("fused", 2), ("hf", 3)])
def test_a_request_that_fails_fails_alone(engine: str, bad: int, tiny: TinyModels) -> None:
    """A token that the model has not, first, in the middle and behind others; who is heard hears each token once."""
    live = LiveSampler(make_engine(tiny("llama"), engine), max_rows=3)
    clients = [Client(PROMPTS[i], Draw(), row=i, limit=8) for i in range(4)]
    clients[bad] = Client([20, 10**6], Draw(), row=bad, limit=8)
    assert live.ask([client.wanted for client in clients])
    answers = [client.said.get(timeout=60) for client in clients]
    live.close()
    assert isinstance(answers.pop(bad), IndexError)
    del clients[bad]
    assert [answer.tokens for answer in answers] == [alone(live, client).tokens for client in clients]
    assert [client.pieces for client in clients] == [answer.tokens for answer in answers]


@pytest.mark.parametrize("end", ["close", "release"])
def test_nothing_is_read_once_it_has_ended(end: str, tiny: TinyModels) -> None:
    """When a server closes, and when the rollout of agents ends: behind it the weights change."""
    live = LiveSampler(make_engine(tiny("llama"), "fused"), max_rows=1)
    going, read = Client(PROMPTS[0], Draw(), row=0, limit=4000), queue.Queue[Any]()
    started = threading.Event()
    going.wanted.on_tokens = lambda tokens: started.set()
    assert live.ask([going.wanted])
    assert started.wait(60)
    assert live.score(PROMPTS[2], Draw(), read.put)
    ending = threading.Thread(target=getattr(live, end))
    ending.start()
    going.wanted.given_up = True
    ending.join(60)
    said = read.get_nowait()
    assert isinstance(said, RuntimeError if end == "close" else RuntimeError | Scored)
    live.close()


def test_too_many_are_turned_away_and_a_closed_one_tells_who_waits(tiny: TinyModels) -> None:
    live = LiveSampler(make_engine(tiny("llama"), "fused"), max_rows=1, most_waiting=2)
    three = [Client(PROMPTS[0], Draw(), row=i, limit=3) for i in range(3)]
    assert not live.ask([client.wanted for client in three])
    live.close()
    assert not live.ask([three[0].wanted])


# ---- what an ended row has read ----


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The lengths of texts as they are read: whole, or behind what a row has in the cache."""
    seen: list[tuple[str, list[int]]] = []
    for name in ("prefill", "extend"):

        def read(self: Decoder, ids: Any, lengths: Any, *rest: Any, name: str = name, **named: Any) -> Any:
            seen.append((name, lengths.tolist()))
            return methods[name](self, ids, lengths, *rest, **named)

        methods[name] = getattr(Decoder, name)
        monkeypatch.setattr(Decoder, name, read)
    return seen


methods: dict[str, Any] = {}


def said(sampler: LiveSampler, prompt: list[int], row: int = 0, *, limit: int = 6) -> list[int]:
    """What follows a prompt, looked at beside the engine's own."""
    client = Client(prompt, Draw(), row=row, limit=limit)
    assert sampler.ask([client.wanted])
    answer = client.answer()
    scored = queue.Queue[Any]()
    assert sampler.score(prompt + answer.tokens, Draw(), scored.put)
    assert scored.get(timeout=60).logprobs[len(prompt) :] == pytest.approx(answer.logprobs, abs=1e-5)
    return answer.tokens


LONG = list(range(20, 50))


def test_a_conversation_that_goes_on_is_read_from_where_it_was(
    tiny: TinyModels, reads: list[tuple[str, list[int]]]
) -> None:
    """An answer's last token is not in the cache. Other conversations and rounds in between do not matter."""
    live = LiveSampler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    first, other = said(live, LONG), said(live, list(range(60, 90)), 1)
    reads.clear()
    second = said(live, [*LONG, *first, 51, 52])
    said(live, [*LONG, *first, 51, 52, *second, 53])
    said(live, [*range(60, 90), *other, 51], 1)
    live.close()
    assert reads == [("extend", [3]), ("extend", [2]), ("extend", [2])]


def test_a_history_that_was_edited_is_read_from_the_edit(tiny: TinyModels, reads: list[tuple[str, list[int]]]) -> None:
    """At half of what the row has read, or later; the same prompt again reads its last token."""
    live = LiveSampler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    said(live, LONG, limit=2)
    reads.clear()
    said(live, [*LONG[:20], 3, 4])
    said(live, [*LONG[:20], 3, 4])
    said(live, [*LONG[:8], 3, 4])
    live.close()
    assert reads == [("extend", [2]), ("extend", [1]), ("prefill", [10])]


def test_new_weights_read_everything_anew(tiny: TinyModels, reads: list[tuple[str, list[int]]]) -> None:
    live = LiveSampler(make_engine(tiny("llama"), "fused", lora=True), max_rows=4)
    first = said(live, LONG)
    reads.clear()
    with torch.no_grad():
        for parameter in live.engine.roles.parameters["policy"].values():
            parameter.add_(0.05)
    live.renew()
    second = said(live, [*LONG, *first, 51])
    live.release()
    said(live, [*LONG, *first, 51, *second, 52])
    live.close()
    assert reads == [("prefill", [len(LONG) + len(first) + 1]), ("prefill", [len(LONG) + len(first) + len(second) + 2])]


def test_rows_that_have_ended_give_way_the_oldest_first(tiny: TinyModels, reads: list[tuple[str, list[int]]]) -> None:
    live = LiveSampler(make_engine(tiny("llama"), "fused", lora=True), max_rows=2)
    texts = [[start, *LONG] for start in (60, 61, 62)]
    answers = [said(live, text, i) for i, text in enumerate(texts)]
    reads.clear()
    for i in (1, 2, 0):
        said(live, [*texts[i], *answers[i], 51], i)
    live.close()
    assert [name for name, _ in reads] == ["extend", "extend", "prefill"]
