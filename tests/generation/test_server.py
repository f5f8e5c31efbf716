"""The server engine against a stand-in of vLLM's endpoints: the hf engine's completions, versions, faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.generation.sampling import PROMPTS, assert_same, make_engine, sample, stir, tokens_of
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels
from tinyrl.data import http_client
from tinyrl.errors import GuardStop, Interrupted
from tinyrl.generation.engine import Request
from tinyrl.generation.engines import HfEngine
from tinyrl.generation.server import ServerClient, ServerEngine
from tinyrl.runs.signals import StopFlag


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)


@pytest.fixture
def served(tiny: TinyModels) -> Iterator[StandIn]:
    with StandIn(tiny("llama")) as server:
        yield server


def engines(server: StandIn, *, sleeps: bool = False, **options: Any) -> tuple[ServerEngine, HfEngine]:
    """(through the server, hf) over the same perturbed adapter."""
    plain = make_engine(server.folder, lora=True, reference=True, **{"max_new_tokens": 6, **options})
    stir(plain)
    client = ServerClient(server.url)
    ours = ServerEngine(plain.policy, plain.tokenizer, plain.settings, server=client, longest=40, sleeps=sleeps)
    return ours, plain


# ---- the same completions ----


@pytest.mark.parametrize(("role", "greedy"), [("policy", False), ("base", True)])
def test_completions_are_those_of_the_hf_engine(served: StandIn, role: Any, greedy: bool) -> None:
    ours, plain = engines(served)
    before = {n: p.detach().clone() for n, p in plain.policy.parameters["policy"].items()}
    assert_same(sample(ours, role=role, greedy=greedy), sample(plain, role=role, greedy=greedy))
    assert all(torch.equal(p, before[n]) for n, p in plain.policy.parameters["policy"].items())
    assert ours.first_gap < 1e-6


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "max_new_tokens": 3}, {"stop": ["a", "%"], "max_new_tokens": 20}]
)
def test_settings_reach_the_server(served: StandIn, options: dict[str, Any]) -> None:
    ours, plain = engines(served, **options)
    drawn = sample(ours, 4)
    assert_same(drawn, sample(plain, 4))
    assert ("stop" in options) == ("stop" in {c.finish_reason for group in drawn for c in group})


def test_truncated_sampling_draws_the_same_tokens(served: StandIn) -> None:
    ours, plain = engines(served, top_p=0.5, top_k=30)
    assert tokens_of(sample(ours)) == tokens_of(sample(plain))


def test_a_later_turn_continues_with_the_numbers_of_its_first_token(served: StandIn) -> None:
    ours, plain = engines(served)
    later = [Request([20, 21, 22], 3, first_sample=5, first_token=7, max_new_tokens=4), Request([30], 1)]
    key: dict[str, Any] = {"seed": 2, "step": 3}
    assert_same(ours.sample(later, 2, **key), plain.sample(later, 2, **key))


def test_each_version_has_a_name_of_its_own_and_the_one_before_is_unloaded(served: StandIn) -> None:
    ours, plain = engines(served)
    names = []
    for by in (0.0, 0.0, 0.01):  # without other weights no other version
        stir(plain, by=by)
        sample(ours, 1)
        names += served.loaded
    assert served.log == ["load", "load", "unload", "load", "unload"]  # the test adapter, and two versions
    assert names[0] == names[1] != names[2]
    folder = ours.folder
    assert [path.name for path in folder.iterdir()] == names[2:]
    ours.close()
    assert not served.loaded
    assert not folder.exists()


# ---- what is refused before the first step ----


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"faults": Faults(loads_applied=0)}, "does not sample with the adapter"),
        ({"faults": Faults(shift_after=0)}, "another base"),
        ({"faults": Faults(raw=True)}, "--logprobs-mode processed_logprobs"),
        ({"faults": Faults(token=77)}, "tokenizer"),
        ({"faults": Faults(updates_adapters=False)}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"max_lora_rank": 1}, "--max-lora-rank 8"),
        ({"max_model_len": 39}, "--max-model-len 40"),
    ],
)
@pytest.mark.wide
def test_a_server_that_is_not_ours(
    tiny: TinyModels, wrong: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test adapter moves log-probabilities less than they vary from token to token, as in a large model."""
    monkeypatch.setattr("tinyrl.generation.server.PERTURBED", 0.004)
    with StandIn(tiny("llama"), **wrong) as server:
        ours, _ = engines(server, temperature=0.9)
        with pytest.raises(ValueError, match=named):
            ours.start(PROMPTS)


# ---- what happens later ----


def test_log_probabilities_that_are_another_models_stop_the_run(served: StandIn) -> None:
    ours, plain = engines(served)
    sample(ours, 1)
    served.faults.shift_after = 0
    stir(plain, by=0.003)
    with pytest.raises(GuardStop, match=r"0.5 nats per token"):
        sample(ours, 1)


@pytest.mark.parametrize("fault", ["busy", "restarted"])
def test_a_request_is_sent_again(served: StandIn, fault: str) -> None:
    ours, plain = engines(served)
    sample(ours, 1)
    if fault == "busy":
        served.faults.busy = 2
    else:
        served.loaded.clear()
    assert_same(sample(ours), sample(plain))


def test_a_server_that_dies_or_answers_too_much_or_too_late_interrupts(
    served: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = engines(served)
    sample(ours, 1)
    monkeypatch.setattr(http_client, "MAX_BYTES", 50)
    with pytest.raises(Interrupted, match="more than"):
        sample(ours, 1)
    monkeypatch.setattr(http_client, "MAX_BYTES", 1 << 26)
    served.faults.dead_after = served.completions + 2
    with pytest.raises(Interrupted, match=r"did not answer(?s:.*)VLLM_ALLOW_RUNTIME"):
        sample(ours)
    ours.server.http.timeout_s, served.faults.slow_s = 0.2, 1.0
    with pytest.raises(Interrupted, match=r"within 0.2 s"):
        sample(ours, 1)


def test_a_signal_gives_up_what_is_under_way(served: StandIn) -> None:
    """Completions that would take a minute are not waited for."""
    held = threading.Event()
    ours, _ = engines(served)
    sample(ours, 1)

    def interrupt() -> None:
        served.before = lambda: None
        os.kill(os.getpid(), signal.SIGTERM)
        held.wait(60)

    served.before = interrupt
    with StopFlag(), pytest.raises(Interrupted, match="SIGTERM"):
        sample(ours, 2)
    held.set()


def drawn_as(last: Any = -1.0, **wrong: Any) -> dict[str, Any]:
    """The answer to a request for six tokens, with another last log-probability or other fields."""
    right = {"token_ids": [5] * 6, "logprobs": {"token_logprobs": [-1.0] * 5 + [last]}, "finish_reason": "length"}
    return {"choices": [{**right, **wrong}]}


FALSE_MODELS = (
    None, "text", {"data": [None]}, {"data": []}, {"data": [{"id": 3}]}, {"data": [{"id": "base", "root": 3}]},
    {"data": [{"id": "base", "max_model_len": "512"}]},
)  # fmt: skip
FALSE_COMPLETIONS = (
    None,
    {"choices": []},
    {"choices": drawn_as()["choices"] * 2},
    *(drawn_as(wrong) for wrong in (None, float("nan"), 0.5)),
    *(drawn_as(token_ids=wrong) for wrong in (None, [5] * 5, [5] * 5 + [5.0], [5] * 5 + [-1], [5] * 5 + [10**7])),
    drawn_as(token_ids=[5] * 48, logprobs={"token_logprobs": [-1.0] * 48}),
    *(drawn_as(logprobs=wrong) for wrong in (None, {"token_logprobs": {}})),
    *(drawn_as(finish_reason=wrong) for wrong in ("abort", "stop")),  # no text stops it here
    drawn_as(token_ids=[5], logprobs={"token_logprobs": [-1.0]}),  # cut off where there was room
)


def test_a_false_answer_is_named_and_never_trained_on(served: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = engines(served)
    for answer in FALSE_MODELS:
        monkeypatch.setattr(StandIn, "models", lambda self, answer=answer: (200, answer))
        with pytest.raises(ValueError, match="/v1/models"):
            ours.start(PROMPTS)

    def sampled(answer: Any) -> list[Any]:
        ours._notes, ours.served[None], ours.checked[None] = ["started"], "base", {}
        monkeypatch.setattr(StandIn, "complete", lambda self, asked: (200, answer))
        return sample(ours, 1, role="base")

    for answer in FALSE_COMPLETIONS:
        with pytest.raises(Interrupted, match="/v1/completions"):
            sampled(answer)
    assert {c.finish_reason for [c] in sampled(drawn_as())} == {"length"}
    ours.eos = [5]  # and nothing may follow a token that ends a completion
    with pytest.raises(Interrupted, match="/v1/completions"):
        sampled(drawn_as())


# ---- a server that sleeps ----


def test_it_is_awake_only_while_it_samples(tiny: TinyModels) -> None:
    """Adapters are loaded under a new name each time it wakes, although the weights have not changed."""
    with StandIn(tiny("llama"), faults=Faults(sleeps=True)) as sleeper:
        ours, plain = engines(sleeper, sleeps=True)
        ours.start(PROMPTS)
        assert sleeper.asleep
        for role in ("policy", "policy", "base"):
            assert_same(sample(ours, role=role), sample(plain, role=role))
            assert sleeper.asleep
        loads = ["wake", "load", "sleep"], ["wake", "load", "unload", "sleep"], ["wake", "load", "unload", "sleep"]
        assert sleeper.log == [*(what for load in loads for what in load), "wake", "sleep"]
        sleeper.faults.dead_after = sleeper.completions + 2
        with pytest.raises(Interrupted, match=r"did not answer"):
            sample(ours)
        assert sleeper.asleep
        sleeper.faults.dead_after = None
        assert_same(sample(ours), sample(plain))
        awake, _ = engines(sleeper)
        with pytest.raises(ValueError, match=r"generation\.server_sleep"):
            awake.start(PROMPTS)
