"""The server engine against a stand-in of vLLM's endpoints: the hf engine's completions, versions, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.generation.sampling import PROMPTS, assert_same, make_engine, sample, stir, tokens_of
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels
from tinyrl.data import http_client
from tinyrl.generation.plain import PlainEngine
from tinyrl.generation.server import ServerEngine
from tinyrl.process.errors import GuardStop, Interrupted


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)


@pytest.fixture
def served(tiny: TinyModels) -> Iterator[StandIn]:
    with StandIn(tiny("llama")) as server:
        yield server


def engines(server: StandIn, **options: Any) -> tuple[ServerEngine, PlainEngine]:
    """(through the server, in plain batches) over the same perturbed adapter."""
    options = {"max_new_tokens": 6, "url": server.url, **options}
    plain = make_engine(server.folder, lora=True, reference=True, **options)
    stir(plain)
    return ServerEngine(plain.policy, plain.tokenizer, plain.settings, longest=40), plain


# ---- the same completions ----


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"role": "base", "greedy": True}),
        ({"temperature": 0.7, "max_new_tokens": 3}, {}),
        ({"stop": ["a", "%"], "max_new_tokens": 20}, {}),
    ],
)
@pytest.mark.wide
def test_completions_are_those_of_plain_batches(served: StandIn, options: dict[str, Any], how: Any) -> None:
    ours, plain = engines(served, **options)
    drawn = sample(ours, 4, **how)
    assert_same(drawn, sample(plain, 4, **how))
    assert ("stop" in options) == ("stop" in {c.finish for group in drawn for c in group})
    assert ours.first_gap is not None
    assert ours.first_gap < 1e-6
    later = ours.requests_for([20, 21, 22], 2, row=3, first=5, limit=4, seed=2, step=3)
    later += ours.requests_for([30], 2, row=1, seed=2, step=3)
    assert_same([ours.sample(later)], [plain.sample(later)])
    ours, plain = engines(served, **options, top_p=0.5, top_k=30)
    assert tokens_of(sample(ours)) == tokens_of(sample(plain))


def test_each_version_has_a_name_of_its_own_and_the_one_before_is_unloaded(served: StandIn) -> None:
    ours, plain = engines(served)
    names = []
    for by in (0.0, 0.0, 0.01):  # without other weights no other version
        stir(plain, by=by)
        sample(ours, 1)
        names += served.loaded
    assert served.log == ["load", "load", "unload"]
    assert names[0] == names[1] != names[2]
    folder = ours.folder
    assert [path.name for path in folder.iterdir()] == names[2:]
    ours.close()
    assert not served.loaded
    assert not folder.exists()


# ---- what is refused before the first step, and what happens later ----


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"faults": Faults(loads_applied=0)}, "the adapter"),
        ({"faults": Faults(shift_after=0, shift=-1.0)}, "another base"),
        ({"faults": Faults(token=77)}, "tokenizer"),
        ({"max_lora_rank": 1}, "docs/scale.md"),
        ({"max_model_len": 39}, "39 tokens"),
    ],
)
@pytest.mark.wide
def test_a_server_that_is_not_ours(tiny: TinyModels, wrong: dict[str, Any], named: str) -> None:
    with StandIn(tiny("llama"), **wrong) as server:
        ours, _ = engines(server, temperature=0.7)
        with pytest.raises(ValueError, match=named):
            ours.start(PROMPTS)


def test_log_probabilities_that_are_another_models_stop_the_run(served: StandIn) -> None:
    ours, plain = engines(served)
    sample(ours, 1)
    served.faults.shift_after = 0
    stir(plain, by=0.003)
    with pytest.raises(GuardStop, match=r"0.5 nats per token"):
        sample(ours, 1)


def test_a_busy_server_is_asked_again_and_a_dead_one_interrupts(served: StandIn) -> None:
    ours, plain = engines(served)
    served.faults.busy = 2
    assert_same(sample(ours), sample(plain))
    served.faults.dead_after = served.completions + 2
    with pytest.raises(Interrupted, match="did not answer"):
        sample(ours)
    served.faults.dead_after = None
    served.loaded.clear()  # it was started again
    assert_same(sample(ours), sample(plain))


def choice(tokens: int = 6, last: Any = -1.0) -> dict[str, Any]:
    """The answer to a request for six tokens."""
    logprobs = {"token_logprobs": [-1.0] * 5 + [last]}
    return {"choices": [{"token_ids": [5] * tokens, "logprobs": logprobs, "finish_reason": "length"}]}


@pytest.mark.parametrize("answer", [None, choice(last=float("nan")), choice(last=0.5), choice(tokens=5)])
def test_a_false_answer_is_named_and_never_trained_on(
    served: StandIn, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    ours, _ = engines(served)
    ours.start(PROMPTS)
    monkeypatch.setattr(StandIn, "complete", lambda self, asked: (200, answer))
    with pytest.raises(Interrupted, match="/v1/completions"):
        sample(ours, 1)


# ---- a server that sleeps ----


def test_it_is_awake_only_while_it_samples(tiny: TinyModels) -> None:
    """Adapters are loaded under a new name each time it wakes, although the weights have not changed."""
    with StandIn(tiny("llama"), faults=Faults(sleeps=True)) as sleeper:
        ours, plain = engines(sleeper, server_sleep=True)
        ours.start(PROMPTS)
        assert sleeper.asleep
        for role in ("policy", "policy", "base"):
            assert_same(sample(ours, role=role), sample(plain, role=role))
            assert sleeper.asleep
        loads = ["wake", "load", "sleep"], ["wake", "load", "unload", "sleep"], ["wake", "load", "unload", "sleep"]
        assert sleeper.log == [*(what for load in loads for what in load), "wake", "sleep"]


@pytest.mark.slow  # Fast: a dead server interrupts (above), and test_distill.py resumes a run whose server was gone.
def test_a_run_through_a_server_that_dies_is_resumed(tiny: TinyModels, tmp_path: Path) -> None:
    """With the numbers of a run that samples here."""
    options: dict[str, Any] = {"max_prompt_tokens": 64, "server_sleep": True}
    with StandIn(tiny("llama"), faults=Faults(sleeps=True)) as server:
        options |= {"engine": "server", "url": server.url}
        settings = running.config("grpo", tiny("llama"), generation=options)
        server.faults.dead_after = 60
        code, run, _ = running.train(settings, tmp_path)
        assert code == 75
        assert server.asleep
        server.faults.dead_after = None
        assert running.go_on(run) == 0
    settings = running.config("grpo", tiny("llama"), generation={"engine": "hf", "max_prompt_tokens": 64})
    _, plain, _ = running.train(settings, tmp_path, name="plain")
    assert 0 < len(running.metrics(run)) == len(running.metrics(plain))
    for ours, theirs in zip(running.metrics(run)[1:], running.metrics(plain)[1:], strict=True):
        for name in ("reward/mean", "policy/loss", "policy/entropy", "optim/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5)
