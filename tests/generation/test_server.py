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
from tinyrl.generation import server, server_client
from tinyrl.generation.engine import Request
from tinyrl.generation.hf import HfEngine
from tinyrl.generation.server import ServerEngine
from tinyrl.generation.server_client import ServerClient
from tinyrl.generation.turns import Response
from tinyrl.runs.signals import StopFlag


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "WAITS_S", (0.01, 0.01))
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
    client = ServerClient(server.url, timeout_s=30.0)
    ours = ServerEngine(plain.roles, plain.tokenizer, plain.settings, server=client, longest=40, sleeps=sleeps)
    return ours, plain


made: dict[Path, tuple[ServerEngine, HfEngine]] = {}


def shared_engine(tiny: TinyModels, server: StandIn) -> tuple[ServerEngine, HfEngine]:
    """An engine that has not begun, over a model that is loaded once."""
    folder = tiny("llama")
    _, plain = made.setdefault(folder, engines(server, folder) if folder not in made else made[folder])
    client = ServerClient(server.url, timeout_s=30.0)
    return ServerEngine(plain.roles, plain.tokenizer, plain.settings, server=client, longest=40), plain


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("role", ["policy", "reference", "base"])
@pytest.mark.wide
def test_completions_are_those_of_the_hf_engine(tiny: TinyModels, served: StandIn, role: Any, greedy: bool):
    ours, plain = engines(served, tiny("llama"))
    assert_same(sample(ours, role=role, greedy=greedy), sample(plain, role=role, greedy=greedy))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"stop": ["a", "%"], "max_new_tokens": 20}, {"max_new_tokens": 3}]
)
@pytest.mark.wide
def test_settings_reach_the_server(tiny: TinyModels, served: StandIn, options: dict[str, Any]):
    ours, plain = engines(served, tiny("llama"), **options)
    drawn = sample(ours, 4)
    assert_same(drawn, sample(plain, 4))
    if "stop" in options:
        assert "stop" in {c.finish_reason for group in drawn for c in group}


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}])
@pytest.mark.wide
def test_truncated_sampling_draws_the_same_tokens(tiny: TinyModels, served: StandIn, options: dict[str, Any]):
    ours, plain = engines(served, tiny("llama"), **options)
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
    folder = ours.adapters.folder
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
    assert str(ours.adapters.folder) in asked


def test_so_many_requests_at_a_time(tiny: TinyModels):
    with StandIn(tiny("llama"), faults=Faults(slow_s=0.05)) as server:
        ours, _ = engines(server, tiny("llama"), max_new_tokens=1, max_rows=3)
        sample(ours, 4)
        assert server.most_at_a_time == 3


@pytest.mark.slow
def test_login_and_query_of_the_address_are_sent(tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch):
    ours, plain = shared_engine(tiny, served)
    served.faults.login, served.faults.query = "Basic bWU6aHVudGVyMg==", "?api_key=a%20b"
    with pytest.raises(ValueError, match="401"):
        ours.start(PROMPTS)
    shown, whole = (served.url.replace("//", f"//{login}@") + "/v1/" for login in ("***", "me:hunter2"))
    monkeypatch.setenv("TINYRL_GENERATION_URL", f"{whole}?api_key=a%20b")
    client = ServerClient(f"{shown}?api_key=***", timeout_s=30.0)
    ours = ServerEngine(plain.roles, plain.tokenizer, plain.settings, server=client, longest=40)
    lines = ours.start(PROMPTS)
    assert_same(sample(ours), sample(plain))
    assert "hunter2" not in f"{lines} {ours.command} {client.name}"


# ---- what is refused before the first step ----


def test_nobody_there(tiny: TinyModels):
    with StandIn(tiny("llama")) as server:
        ours, _ = engines(server, tiny("llama"))
    with pytest.raises(ValueError, match="did not answer") as said:
        ours.start(PROMPTS)
    assert f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {tiny('llama')} --enable-lora --max-lora-rank 8 " in str(
        said.value
    )
    assert str(said.value).endswith(
        f"--logprobs-mode processed_logprobs --max-model-len 40 --host 127.0.0.1 --port {server.port}"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_lora_rank": 1}, r"max_lora_rank 1\. \(lora.r is 4 here\)\. Start it with"),
        ({"max_model_len": 39}, "--max-model-len 40"),
        ({"faults": Faults(updates_adapters=False)}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora allow"),
        ({"faults": Faults(reads_folders=False)}, "it cannot read the folder, which needs the same machine, user and"),
        ({"faults": Faults(token=77)}, r"another tokenizer: token 77 is '\S+' here and '\S+' there"),
        ({"faults": Faults(loads_applied=0)}, "took an adapter and does not sample with it"),
        ({"faults": Faults(shift_after=0)}, "another base"),
    ],
)
@pytest.mark.wide
def test_a_server_that_is_not_ours(tiny: TinyModels, wrong: dict[str, Any], said: str):
    with StandIn(tiny("llama"), **wrong) as server:
        ours, _ = engines(server, tiny("llama"))
        with pytest.raises(ValueError, match=said):
            ours.start(PROMPTS)


def test_another_base(tiny: TinyModels):
    with StandIn(tiny("llama", seed=1)) as server:
        ours, _ = engines(server, tiny("llama"))
        with pytest.raises(ValueError, match=r"another base: it serves .* nats per token from those of"):
            ours.start(PROMPTS)


def test_log_probabilities_before_the_temperature(tiny: TinyModels):
    with StandIn(tiny("llama"), faults=Faults(raw=True)) as server:
        ours, _ = engines(server, tiny("llama"), temperature=0.7)
        with pytest.raises(ValueError, match="start it with --logprobs-mode processed_logprobs"):
            ours.start(PROMPTS)


# ---- what happens later ----


@pytest.mark.slow
def test_a_load_that_is_ignored_is_found_at_once(tiny: TinyModels):
    """The test adapter and the first version are used, the second is taken and the first goes on being sampled."""
    with StandIn(tiny("llama"), faults=Faults(loads_applied=2)) as server:
        ours, plain = engines(server, tiny("llama"))
        sample(ours, 1)
        stir(plain, by=0.003)
        drawn = server.completions
        with pytest.raises(GuardStop, match="the server samples from another policy"):
            sample(ours, 1)
        assert server.completions == drawn + 8  # looked at twice, and nothing else was sampled


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
        with pytest.raises(Interrupted, match=r"did not answer within 0.2 s \(generation.timeout_s\)"):
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


def test_a_signal_ends_the_wait_for_an_answer_that_stopped(tiny: TinyModels, served: StandIn):
    ours, _ = shared_engine(tiny, served)
    ours.server.http.timeout_s = 3600.0
    served.before = lambda: os.kill(os.getpid(), signal.SIGTERM)
    served.faults.stops_short = True
    with StopFlag(), pytest.raises(Interrupted, match="SIGTERM"):
        ours.start(PROMPTS)


NO_ANSWERS = (None, True, 3, "text", [], [[]], {}, {"choices": None}, {"data": None}, {"error": "busy"})
FALSE_MODELS = (
    *NO_ANSWERS,
    {"data": {}},
    {"data": [None]},
    {"data": ["base"]},
    {"data": []},
    {"data": [{"parent": None}]},
    *({"data": [{"id": wrong}]} for wrong in (None, 3, "", ["base"])),
    *({"data": [{"id": "base", "root": wrong}]} for wrong in (3, ["x"])),
    *({"data": [{"id": "base", "max_model_len": wrong}]} for wrong in ("512", -1, 0, 1.5, True)),
    {"data": [{"id": "a", "parent": "base"}]},
)
FALSE_COMPLETIONS = (
    *NO_ANSWERS,
    *({"choices": wrong} for wrong in ({}, "a", [], [None], ["text"], [{}], [[]], drawn_as()["choices"] * 2)),
    *(drawn_as(wrong) for wrong in (None, "-1.0", float("nan"), float("inf"), -float("inf"), 0.5, [0.1], True)),
    *(drawn_as(token_ids=wrong) for wrong in (None, [], "5", [5] * 5, [5] * 7)),
    *(drawn_as(token_ids=[5] * 5 + [wrong]) for wrong in ("5", 5.0, True, None, -1, 10**7, 10**30)),
    drawn_as(token_ids=[5] * 48, logprobs={"token_logprobs": [-1.0] * 48}),
    *(drawn_as(logprobs=wrong) for wrong in (None, [-1.0], {}, {"token_logprobs": None}, {"token_logprobs": {}})),
    *(drawn_as(finish_reason=wrong) for wrong in (None, "abort", 1, "stop")),  # no text stops it here
    drawn_as(token_ids=[5], logprobs={"token_logprobs": [-1.0]}),  # cut off where there was room
)


@pytest.mark.parametrize("answer", FALSE_MODELS, ids=repr)
@pytest.mark.wide
def test_a_false_list_of_models_is_a_sentence(
    tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch, answer: Any
):
    ours, _ = shared_engine(tiny, served)
    monkeypatch.setattr(StandIn, "models", lambda self: (200, answer))
    with pytest.raises(ValueError, match="/v1/models") as caught:
        ours.start(PROMPTS)
    assert "Start it with" in str(caught.value)


@pytest.mark.parametrize("answer", FALSE_COMPLETIONS, ids=repr)
@pytest.mark.wide
def test_a_false_completion_is_never_trained_on(
    tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch, answer: Any
):
    ours, _ = shared_engine(tiny, served)
    monkeypatch.setattr(StandIn, "complete", lambda self, asked: (200, answer))
    with pytest.raises(ValueError, match="/v1/completions"):
        ours.start(PROMPTS)
    ours._base = "base"  # as after a start that found nothing
    with pytest.raises(Interrupted, match="/v1/completions"):
        sample(ours, 1, role="base")


def test_a_completion_goes_on_after_no_token_that_ends_it(
    tiny: TinyModels, served: StandIn, monkeypatch: pytest.MonkeyPatch
):
    ours, _ = shared_engine(tiny, served)
    ours._base = "base"
    monkeypatch.setattr(StandIn, "complete", lambda self, asked: (200, drawn_as()))
    assert {c.finish_reason for [c] in sample(ours, 1, role="base")} == {"length"}
    ours.eos = [5]
    with pytest.raises(Interrupted, match="/v1/completions"):
        sample(ours, 1, role="base")


@pytest.mark.slow
def test_a_server_that_ignores_how_many_tokens_were_asked_for(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """As one behind a proxy that leaves out fields: 48 tokens where 6 were asked for."""
    plain = StandIn.complete
    with StandIn(tiny("llama")) as server:
        ours, _ = engines(server, tiny("llama"))
        sample(ours, 1)
        monkeypatch.setattr(StandIn, "complete", lambda self, asked: plain(self, {**asked, "max_tokens": 48}))
        with pytest.raises(Interrupted, match="where 6 were asked for"):
            sample(ours, 4)


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


def test_a_base_that_woke_as_another_is_not_sampled_from(tiny: TinyModels, sleeper: StandIn):
    ours, _ = engines(sleeper, tiny("llama"), sleeps=True)
    ours.start(PROMPTS)
    sleeper.faults.shift_after = 0
    with pytest.raises(GuardStop, match=r"are 0.5 nats per token from ours"):
        sample(ours, role="base")
    assert sleeper.asleep


def test_it_stays_awake_between_the_turns_of_an_episode(tiny: TinyModels, sleeper: StandIn):
    ours, plain = engines(sleeper, tiny("llama"), sleeps=True)
    ours.start(PROMPTS)
    sleeper.log.clear()
    turns: Any = TwoTurns()
    ours.play([Request(PROMPTS[0], 0)], 2, episodes=turns, seed=0, step=0)
    assert [what for what, _ in sleeper.log] == ["wake", "load", "unload", "sleep"]
    assert turns.heard == tokens_of(plain.sample([Request(PROMPTS[0], 0)], 2, seed=0, step=0))[0]
    assert turns.turns == 4


class TwoTurns:
    """Two episodes that are answered once, by one token."""

    def __init__(self) -> None:
        self.turns, self.heard, self.open = 0, list[list[int]](), list[int]()
        self.responses = [Response(), Response()]

    def restart(self) -> None: ...

    def ended(self, episode: int, turn: Any) -> None:
        self.turns += 1
        self.heard += [turn.tokens] if self.turns <= 2 else []
        self.responses[episode].add([*turn.tokens, 30])
        self.open.append(episode)

    def answers(self, *, wait: bool) -> dict[int, list[int] | None]:
        answered: dict[int, list[int] | None] = {i: [30] if self.turns <= 2 else None for i in self.open}
        self.open.clear()
        return answered

    def limit(self, episode: int) -> int:
        return 3


def test_a_server_without_sleep_is_refused_with_what_it_needs(tiny: TinyModels, served: StandIn):
    ours, _ = engines(served, tiny("llama"), sleeps=True)
    with pytest.raises(ValueError, match="does not know /is_sleeping, which VLLM_SERVER_DEV_MODE=1 and") as said:
        ours.start(PROMPTS)
    command = str(said.value).splitlines()[-1].strip()
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 vllm serve ")
    assert "--enable-sleep-mode --gpu-memory-utilization 0.5 --host" in command
    assert not served.log


def test_a_server_that_sleeps_is_not_waited_for_by_a_run_that_does_not_wake_it(tiny: TinyModels, sleeper: StandIn):
    sleeper.asleep = True
    ours, _ = engines(sleeper, tiny("llama"))
    with pytest.raises(ValueError, match=rf"asleep: generation.server_sleep=true .*curl -X POST {sleeper.url}/wake_up"):
        ours.start(PROMPTS)


def test_a_server_that_does_not_wake(tiny: TinyModels, sleeper: StandIn):
    ours, _ = engines(sleeper, tiny("llama"), sleeps=True)
    ours.start(PROMPTS)
    sleeper.faults.wakes = False
    with pytest.raises(Interrupted, match=r"(?s)/wake_up, and /is_sleeping says .*--gpu-memory-util.*vllm serve"):
        sample(ours)


def test_what_fails_while_it_is_awake_is_told_and_it_sleeps(tiny: TinyModels, sleeper: StandIn):
    ours, plain = engines(sleeper, tiny("llama"), sleeps=True)
    ours.start(PROMPTS)
    sleeper.faults.dead_after = sleeper.completions + 2
    with pytest.raises(Interrupted, match=r"did not answer"):
        sample(ours)
    assert sleeper.asleep
    sleeper.faults.dead_after = None
    assert_same(sample(ours), sample(plain))


@pytest.mark.parametrize("freed", [0, 10**6])
def test_a_sleep_that_leaves_no_room_on_this_gpu_is_refused(
    tiny: TinyModels, sleeper: StandIn, monkeypatch: pytest.MonkeyPatch, freed: int
):
    """As of a server on another GPU, or without --enable-sleep-mode: then its endpoints answer, and free nothing."""
    ours, plain = engines(sleeper, tiny("llama"), sleeps=True)
    monkeypatch.setattr(server, "_free_bytes", lambda device: 10**9 + freed * sleeper.asleep)
    monkeypatch.setattr(server, "_on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    weights = sum(p.numel() * p.element_size() for p in plain.roles.causal.parameters())
    assert 0 < weights < 10**6
    if freed:
        assert "leaves 0.0 GB more of this GPU to the run" in ours.start(PROMPTS)[-1]
        return
    with pytest.raises(ValueError, match=r"this GPU has only 0.0 GB more than before: start it on the same GPU"):
        ours.start(PROMPTS)
    with pytest.raises(ValueError, match="than before"):  # and nothing is taken as checked
        ours.start(PROMPTS)


def test_nothing_to_sample(tiny: TinyModels, served: StandIn):
    ours, _ = engines(served, tiny("llama"))
    assert ours.sample([], 3, seed=0, step=0) == []
    assert not served.log
