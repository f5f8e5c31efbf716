"""The scheduler: requests that come one by one, prefixes that stay in the cache, and steps replayed from graphs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.generation.recording import Recording, pretend_cuda
from tests.generation.sampling import PROMPTS, assert_same, make_engine, stir
from tests.tiny_models import TinyModels
from tinyrl.generation.drawing import sample_keys
from tinyrl.generation.live import LIVE_STEP, LiveScheduler
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.generation.sample import Sample
from tinyrl.generation.scheduler import Scheduler, StepGraphs
from tinyrl.generation.scoring import logprobs_of_text

DRAWN: list[dict[str, Any]] = [{}, {"greedy": True}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.5}]
LONG = list(range(20, 50))


def make_live(tiny: TinyModels, kind: str = "llama", engine: str = "fused", *, rows: int = 4) -> LiveScheduler:
    return LiveScheduler(make_engine(tiny(kind), engine, lora=True), max_rows=rows)


class Client(DecodedSequence):
    """A request, and what its client has got; heard: called, too, with new tokens."""

    def __init__(
        self,
        prompt: list[int],
        drawn: dict[str, Any] = DRAWN[0],
        *,
        row: int = 0,
        limit: int = 6,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        [key] = sample_keys(0, LIVE_STEP, prompts=np.array([row]), samples=np.array([0]))
        self.pieces, self.results, self.heard = list[int](), queue.Queue[Any](), heard
        listening: dict[str, Any] = {"on_tokens": self.hear, "on_end": self.results.put}
        super().__init__(Request(prompt, key, limit, row, after="cached", **drawn, **listening))

    def hear(self, tokens: list[int]) -> None:
        self.pieces += tokens
        self.heard()

    def answer(self) -> Sample:
        if (error := self.results.get(timeout=60)) is not None:
            raise error
        return self.sample()


def alone(live: LiveScheduler, client: Client) -> Sample:
    """What the engine itself gives for the request, on the thread that may still be freeing rows of those before."""
    request = replace(client.request, after="free", on_tokens=None)
    return live.run(lambda: live.engine.sample([request])[0])


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "engine"), [("llama", "fused"), ("gpt2", "hf"), ("gpt2", "plain"), ("qwen3.5", "hf")])
def test_many_at_once_get_what_each_would_get_alone(
    tiny: TinyModels, kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
):
    """Also where rows that are drawn otherwise share the batch."""
    live, together, decode = make_live(tiny, kind, engine, rows=3), set[int](), Scheduler._decode

    def noted(self: Scheduler) -> None:
        together.add(len({(s.request.temperature, s.request.top_p, s.request.greedy) for s in self.live}))
        decode(self)

    monkeypatch.setattr(Scheduler, "_decode", noted)
    clients = [Client(PROMPTS[i % 4], DRAWN[i % 4], row=i % 5, limit=3 + 4 * (i % 5)) for i in range(16)]
    for client in clients:
        threading.Thread(target=live.submit, args=([client],)).start()
    answers = [client.answer() for client in clients]
    assert_same([answers], [[alone(live, client) for client in clients]], tolerance=1e-4)
    assert [client.pieces for client in clients] == [answer.response for answer in answers]
    assert engine == "plain" or max(together) > 1
    live.close()


def test_a_round_that_fails_ends_and_the_next_begins(tiny: TinyModels):
    """A token that the model has not."""
    live = make_live(tiny, rows=3)
    bad, good = Client([20, 10**6]), Client(PROMPTS[0])
    live.submit([bad])
    assert isinstance(bad.results.get(timeout=60), IndexError)
    live.submit([good])
    assert good.answer().response == alone(live, good).response
    live.close()


def test_one_that_fails_fails_alone(tiny: TinyModels):
    """It joins two that are being sampled, with another: they go on, and hear of each token once."""
    live, started = make_live(tiny, rows=4), threading.Event()
    bad, *good = [Client([20, 10**6]), *(Client(PROMPTS[i], row=i, limit=60, heard=started.set) for i in range(3))]
    live.submit([*good[:2]])
    assert started.wait(60)
    live.submit([bad, good[2]])
    assert isinstance(bad.results.get(timeout=60), IndexError)
    answers = [client.answer() for client in good]
    assert_same([answers], [[alone(live, client) for client in good]])
    assert [client.pieces for client in good] == [answer.response for answer in answers]
    live.close()


@pytest.mark.parametrize("end", ["close", "release"])
def test_nothing_runs_once_it_has_ended(end: str, tiny: TinyModels):
    """When a server closes, and when the rollout of agents ends: behind it the weights change. One that is cancelled
    ends soon, and nobody hears of it; a server that closes waits for none.
    """
    live, started = make_live(tiny, rows=1), threading.Event()
    going, waiting = Client(PROMPTS[0], limit=4000, heard=started.set), Client(PROMPTS[1], limit=4000)
    live.submit([going, waiting])
    assert started.wait(60)
    ending = threading.Thread(target=getattr(live, end))
    ending.start()
    while not (live._jobs or live._closed):
        time.sleep(0.01)
    if end == "release":
        going.cancel()
    ending.join(60)
    assert isinstance(waiting.results.get_nowait(), RuntimeError)
    live.close()
    assert not waiting.tokens
    if end == "close":
        assert isinstance(going.results.get_nowait(), RuntimeError)
    assert going.results.empty()
    assert len(going.tokens) < 4000
    live.submit([late := Client(PROMPTS[0])])
    assert isinstance(late.results.get_nowait(), RuntimeError)
    with pytest.raises(RuntimeError):
        live.run(lambda: None)


def test_a_job_raises_where_it_was_handed_in(tiny: TinyModels):
    live = make_live(tiny)
    assert live.run(threading.current_thread).name == "scheduler"
    with pytest.raises(ZeroDivisionError):
        live.run(lambda: 1 // 0)
    live.close()


# ---- prefixes that ended rows have in the cache ----


def answer_to(live: LiveScheduler, prompt: list[int], row: int = 0, *, limit: int = 6) -> list[int]:
    """What follows a prompt, compared with a pass over all of it."""
    client = Client(prompt, row=row, limit=limit)
    live.submit([client])
    answer = client.answer()
    scored, _ = logprobs_of_text(live.engine.policy, prompt + answer.response, role="policy", temperature=1.0)
    assert scored[len(prompt) :] == pytest.approx(answer.logprobs, abs=1e-4)
    return answer.response


def test_a_conversation_is_prefilled_from_where_it_was(tiny: TinyModels, prefills: list[tuple[str, list[int]]]):
    """An answer's last token is not in the cache. Other conversations do not matter; new weights do."""
    live = make_live(tiny)
    first, other = answer_to(live, LONG), answer_to(live, list(range(60, 90)), 1)
    prefills.clear()
    second = answer_to(live, [*LONG, *first, 51, 52])
    answer_to(live, [*LONG, *first, 51, 52, *second, 53])
    answer_to(live, [*range(60, 90), *other, 51], 1)
    assert prefills == [("extend", [3]), ("extend", [2]), ("extend", [2])]
    stir(live.engine)  # pyright: ignore
    live.release()
    answer_to(live, [*LONG, *first, 51])
    live.close()
    assert prefills[3:] == [("prefill", [len(LONG) + len(first) + 1])]


def test_a_row_with_states_is_continued_whole_or_not_at_all(tiny: TinyModels, prefills: list[tuple[str, list[int]]]):
    live = make_live(tiny, "qwen3.5", "hf")
    first = answer_to(live, LONG)
    prefills.clear()
    answer_to(live, [*LONG, *first, 51, 52])
    answer_to(live, [*LONG[:25], 3, 4], 1)
    live.close()
    assert prefills == [("extend", [3]), ("prefill", [27])]


def test_an_edited_history_is_prefilled_from_the_edit_and_the_oldest_rows_give_way(
    tiny: TinyModels, prefills: list[tuple[str, list[int]]]
):
    """An edit at half of what the row holds, or later; the same prompt again prefills its last token."""
    live = make_live(tiny, rows=2)
    answer_to(live, LONG, limit=2)
    prefills.clear()
    for prompt in ([*LONG[:20], 3, 4], [*LONG[:20], 3, 4], [*LONG[:8], 3, 4]):
        answer_to(live, prompt)
    assert prefills == [("extend", [2]), ("extend", [1]), ("prefill", [10])]
    texts = [[start, *LONG] for start in (60, 61, 62)]
    answers = [answer_to(live, text, i) for i, text in enumerate(texts)]
    prefills.clear()
    for i in (1, 2, 0):
        answer_to(live, [*texts[i], *answers[i], 51], i)
    live.close()
    assert [name for name, _ in prefills] == ["extend", "extend", "prefill"]


# ---- CUDA graphs as far as a CPU can follow them: replayed from a recording (samples: tests/gpu) ----


def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """Warned of once; a lack of memory is an error all the same."""
    pretend_cuda(monkeypatch)
    state, errors = torch.zeros(2), [torch.OutOfMemoryError(), RuntimeError("not permitted when stream is capturing")]

    def step(rows: int) -> None:
        if Recording.capturing is not None:
            Recording.capturing = None
            raise errors.pop(0)
        state[:rows] += 1

    graphs = StepGraphs(step, state=(state,), side=torch.cuda.Stream())
    with pytest.raises(torch.OutOfMemoryError):
        graphs(1)
    with pytest.warns(UserWarning, match="graph"):
        graphs(1)
    graphs(2)  # without a second try
    assert state.tolist() == [2.0, 1.0]
    assert not graphs.graphs
