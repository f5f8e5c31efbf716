"""The server engine against a stand-in of vLLM's endpoints: the hf engine's completions, versions, faults."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
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
def served(tiny: TinyModels):
    with StandIn(tiny("llama")) as server:
        yield server


def engines(server: StandIn, folder: Path, *, sleeps: bool = False, **options: Any) -> tuple[ServerEngine, HfEngine]:
    """(through the server, hf) over the same perturbed adapter."""
    settings: dict[str, Any] = {"max_new_tokens": 6, **options}
    plain = make_engine(folder, lora=True, reference=True, **settings)
    stir(plain)
    client = ServerClient(server.url)
    ours = ServerEngine(plain.roles, plain.tokenizer, plain.settings, server=client, longest=40, sleeps=sleeps)
    return ours, plain


@pytest.mark.parametrize(("role", "greedy"), [("policy", False), ("base", True)])
def test_completions_are_those_of_the_hf_engine(tiny: TinyModels, served: StandIn, role: Any, greedy: bool):
    ours, plain = engines(served, tiny("llama"))
    assert_same(sample(ours, role=role, greedy=greedy), sample(plain, role=role, greedy=greedy))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "max_new_tokens": 3}, {"stop": ["a", "%"], "max_new_tokens": 20}]
)
def test_settings_reach_the_server(tiny: TinyModels, served: StandIn, options: dict[str, Any]):
    ours, plain = engines(served, tiny("llama"), **options)
    drawn = sample(ours, 4)
    assert_same(drawn, sample(plain, 4))
    if "stop" in options:
        assert "stop" in {c.finish_reason for group in drawn for c in group}


def test_truncated_sampling_draws_the_same_tokens(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"), top_p=0.5, top_k=30)
    assert tokens_of(sample(ours)) == tokens_of(sample(plain))


def test_a_later_turn_goes_on_with_the_numbers_of_its_first_token(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"))
    later = [Request([20, 21, 22], 3, first_sample=5, first_token=7, max_new_tokens=4), Request([30], 1)]
    key: dict[str, Any] = {"seed": 2, "step": 3}
    assert_same(ours.sample(later, 2, **key), plain.sample(later, 2, **key))


def test_each_version_has_a_name_of_its_own_and_the_one_before_is_unloaded(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"))
    sample(ours, 1)
    sample(ours, 1)  # no other weights, no other version
    stir(plain, by=0.01)
    sample(ours, 1)
    loads = [name for what, name in served.log if what == "load"]
    assert [what for what, _ in served.log] == ["load", "load", "unload", "load", "unload"]
    assert len({*loads}) == 3  # the test adapter, and two versions
    assert [*served.loaded] == [loads[2]]
    folder = ours.folder
    assert [path.name for path in folder.iterdir()] == [loads[2]]
    ours.close()
    assert not served.loaded
    assert not folder.exists()


def test_checks_leave_the_adapter_as_it_was(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"))
    before = {n: p.detach().clone() for n, p in plain.roles.parameters["policy"].items()}
    [line, asked] = ours.start(PROMPTS)
    assert all(torch.equal(p, before[n]) for n, p in plain.roles.parameters["policy"].items())
    assert float(re.findall(r"differs from ours by (\S+) nats", line)[0]) < 1e-6
    assert "rank 4" in asked
    assert str(ours.folder) in asked


# ---- what is refused before the first step ----


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_lora_rank": 1}, "max_lora_rank 1"),
        ({"max_model_len": 39}, "--max-model-len 40"),
        ({"faults": Faults(updates_adapters=False)}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"faults": Faults(token=77)}, "another tokenizer"),
        ({"faults": Faults(loads_applied=0)}, "does not sample with the adapter"),
        ({"faults": Faults(shift_after=0)}, "has another base"),
    ],
)
@pytest.mark.wide
def test_a_server_that_is_not_ours(tiny: TinyModels, wrong: dict[str, Any], said: str):
    with StandIn(tiny("llama"), **wrong) as server:
        ours, _ = engines(server, tiny("llama"))
        with pytest.raises(ValueError, match=said):
            ours.start(PROMPTS)


# ---- what happens later ----


def test_log_probabilities_that_are_another_models(tiny: TinyModels):
    with StandIn(tiny("llama")) as server:
        ours, plain = engines(server, tiny("llama"))
        sample(ours, 1)
        server.faults.shift_after = 0
        stir(plain, by=0.003)
        with pytest.raises(GuardStop, match=r"are 0.5 nats per token from ours"):
            sample(ours, 1)


@pytest.mark.slow
def test_a_busy_server_is_asked_again(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"))
    sample(ours, 1)
    served.faults.busy = 2
    assert_same(sample(ours), sample(plain))


def test_a_server_that_dies_interrupts(tiny: TinyModels):
    with StandIn(tiny("llama"), faults=Faults(dead_after=14)) as server:
        ours, _ = engines(server, tiny("llama"))
        with pytest.raises(Interrupted, match=r"did not answer .*Start it with\n  VLLM_ALLOW_RUNTIME"):
            sample(ours)


def test_a_server_that_was_started_anew_is_given_the_adapter_again(tiny: TinyModels, served: StandIn):
    ours, plain = engines(served, tiny("llama"))
    sample(ours, 1)
    served.loaded.clear()
    assert_same(sample(ours), sample(plain))


def test_a_server_that_takes_too_long(tiny: TinyModels):
    with StandIn(tiny("llama")) as server:
        ours, _ = engines(server, tiny("llama"))
        sample(ours, 1)
        ours.server.http.timeout_s, server.faults.slow_s = 0.2, 1.0
        with pytest.raises(Interrupted, match=r"did not answer within 0.2 s"):
            sample(ours, 1)


def test_a_signal_gives_up_what_is_under_way(tiny: TinyModels):
    """Completions that would take a minute are not waited for."""
    held = threading.Event()
    with StandIn(tiny("llama")) as server:
        ours, _ = engines(server, tiny("llama"))
        sample(ours, 1)

        def interrupt() -> None:
            server.before = lambda: None
            os.kill(os.getpid(), signal.SIGTERM)
            held.wait(60)

        server.before = interrupt
        with StopFlag(), pytest.raises(Interrupted, match="SIGTERM"):
            sample(ours, 2)
        held.set()


def drawn_as(last: Any = -1.0, **wrong: Any) -> dict[str, Any]:
    """The answer to a request for six tokens, with another last log-probability or other fields."""
    right = {"token_ids": [5] * 6, "logprobs": {"token_logprobs": [-1.0] * 5 + [last]}, "finish_reason": "length"}
    return {"choices": [{**right, **wrong}]}


FALSE_MODELS = (
    None,
    "text",
    {"data": [None]},
    {"data": []},
    {"data": [{"id": 3}]},
    {"data": [{"id": "base", "root": 3}]},
    {"data": [{"id": "base", "max_model_len": "512"}]},
)
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


@pytest.mark.slow
def test_a_false_list_of_models_is_a_sentence(tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch):
    ours, _ = engines(served, tiny("llama"))
    for answer in FALSE_MODELS:
        monkeypatch.setattr(StandIn, "models", lambda self, answer=answer: (200, answer))
        with pytest.raises(ValueError, match="/v1/models"):
            ours.start(PROMPTS)


def test_a_false_completion_is_never_trained_on(tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch):
    ours, _ = engines(served, tiny("llama"))
    ours._base, ours.served[None] = "base", ("base", {})  # as after a start that found nothing wrong
    for answer in FALSE_COMPLETIONS:
        monkeypatch.setattr(StandIn, "complete", lambda self, asked, answer=answer: (200, answer))
        with pytest.raises(Interrupted, match="/v1/completions"):
            sample(ours, 1, role="base")


def test_a_completion_goes_on_after_no_token_that_ends_it(
    tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch
):
    ours, _ = engines(served, tiny("llama"))
    ours._base, ours.served[None] = "base", ("base", {})
    monkeypatch.setattr(StandIn, "complete", lambda self, asked: (200, drawn_as()))
    assert {c.finish_reason for [c] in sample(ours, 1, role="base")} == {"length"}
    ours.eos = [5]
    with pytest.raises(Interrupted, match="/v1/completions"):
        sample(ours, 1, role="base")


# ---- a server that sleeps ----


@pytest.fixture
def sleeper(tiny: TinyModels):
    with StandIn(tiny("llama"), faults=Faults(sleeps=True)) as server:
        yield server


def test_it_is_awake_only_while_it_samples(tiny: TinyModels, sleeper: StandIn):
    """What it has is loaded under a new name each time it wakes, although the weights have not changed."""
    ours, plain = engines(sleeper, tiny("llama"), sleeps=True)
    lines = ours.start(PROMPTS)
    assert lines[-1] == "it sleeps between samplings"
    assert sleeper.asleep
    for _ in range(2):
        assert_same(sample(ours), sample(plain))
        assert sleeper.asleep
    once = ["wake", "load", "unload", "sleep"]
    assert [what for what, _ in sleeper.log] == once * 3
    assert len({name for what, name in sleeper.log if what == "load"}) == 3
    assert_same(sample(ours, role="base"), sample(plain, role="base"))


def test_what_fails_while_it_is_awake_is_told_and_it_sleeps(tiny: TinyModels, sleeper: StandIn):
    ours, plain = engines(sleeper, tiny("llama"), sleeps=True)
    ours.start(PROMPTS)
    sleeper.faults.dead_after = sleeper.completions + 2
    with pytest.raises(Interrupted, match=r"did not answer"):
        sample(ours)
    assert sleeper.asleep
    sleeper.faults.dead_after = None
    assert_same(sample(ours), sample(plain))
