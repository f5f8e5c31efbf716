"""Episodes of several turns: rows that wait for a reply in the cache give the episodes of prefilling each turn anew."""

from __future__ import annotations

import random
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults.lookup_runs import lookup
from tests.generation.sampling import PROMPTS, assert_same, make_engine, requests, stir
from tests.tiny_models import TinyModels, tiny_tokenizer
from tinyrl.environments import Reply
from tinyrl.environments.environment import Episode
from tinyrl.environments.tool_calls import ToolCall, calls_of
from tinyrl.generation import scheduler
from tinyrl.generation.decoder import Decoder, RowCache
from tinyrl.generation.drawing import sample_keys, uniforms
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.generation.sample import FinishReason, Sample, SampleBuilder
from tinyrl.generation.turns import Episodes
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare
from tinyrl.tasks import load_task
from tinyrl.tasks.prompts import NO_LIMIT, prepare_prompts

TURNS, BUDGET, LONGEST = 3, 20, 9  # of an episode: turns, tokens sampled in all; tokens of a reply
WORDS = tuple(a + b for a in "abcdefg" for b in "vwxyz")
Respond = Callable[[int, list[list[int]]], list[int] | None]


def echo(sample: int, turns: list[list[int]]) -> list[int] | None:
    """A function of what was said: 0 to LONGEST tokens; about one episode in eight ends before its last turn."""
    number = sum((i + 1) * t for i, t in enumerate(turns[-1])) + 31 * len(turns)
    return None if number % 8 == 7 else [(number + 7 * i) % 200 + 2 for i in range(number % (LONGEST + 1))]


class Scripted:
    """Replies `respond(sample, turns so far)`; over after TURNS turns or BUDGET tokens. late: each reply comes after a
    few polls, or when waited for, in an order of its own.
    """

    max_episode_tokens = BUDGET + (TURNS - 1) * LONGEST

    def __init__(
        self, respond: Respond = echo, *, limits: tuple[int, ...] = (5, 9, 3, 20, 12), late: bool = False
    ) -> None:
        self.respond, self.limits, self.late, self.restarts = respond, limits, late, 0

    def restart(self) -> None:
        self.restarts += 1
        self.samples = defaultdict[int, SampleBuilder](lambda: SampleBuilder(Request([], np.uint64(0), limit=0)))
        self.random = random.Random(0)
        self.turns, self.reasons = defaultdict[int, list[list[int]]](list), defaultdict[int, list[FinishReason]](list)
        self.ready: list[tuple[int, list[int] | None]] = []

    def limit(self, sample: int) -> int:
        turns = self.turns[sample]
        return min(self.limits[(sample + len(turns)) % len(self.limits)], BUDGET - sum(map(len, turns)))

    def ended(self, sample: int, turn: DecodedSequence) -> None:
        turns = self.turns[sample]
        turns.append(turn.tokens)
        self.samples[sample].chose(turn.tokens, turn.logprobs)
        assert turn.finish_reason is not None
        self.reasons[sample].append(turn.finish_reason)
        over = len(turns) == TURNS or sum(map(len, turns)) == BUDGET
        self.ready.append((sample, None if over else self.respond(sample, [*turns])))

    def answers(self, *, wait: bool) -> list[tuple[int, list[int] | None]]:
        assert self.ready or not wait, "waiting for replies that never come"
        come = [i for i in range(len(self.ready)) if not self.late or self.random.random() < 0.15]
        come = come or ([self.random.randrange(len(self.ready))] if wait else [])
        self.random.shuffle(come if self.late else [])
        came, self.ready = [self.ready[i] for i in come], [r for i, r in enumerate(self.ready) if i not in come]
        for sample, tokens in came:
            self.samples[sample].read(tokens or [])
        return came

    def completions(self, group: int) -> list[list[Sample]]:
        flat = [self.samples[i].sample(finish=self.reasons[i][-1]) for i in range(len(self.samples))]
        return [flat[i : i + group] for i in range(0, len(flat), group)]


def make(folder: Any, name: str = "fused", **options: Any) -> Any:
    engine = make_engine(folder, name, max_new_tokens=BUDGET, **options)
    engine.eos, engine.overlaps = set(range(1, 9)), True
    return engine


def played(engine: Any, script: Scripted, **options: Any) -> list[list[Sample]]:
    engine.play(requests(engine, 4, **options), episodes=script)
    return script.completions(4)


def assert_same_episodes(ours: list[list[Sample]], theirs: list[list[Sample]], *, tolerance: float = 1e-5) -> None:
    assert_same(ours, theirs, tolerance=tolerance)
    assert [[c.mask for c in group] for group in ours] == [[c.mask for c in group] for group in theirs]


@pytest.mark.parametrize(
    ("decoder", "kind", "max_rows", "look_every", "late"),
    [
        ("fused", "qwen2", 3, 4, True),
        ("fused", "qwen3", None, 1, False),
        ("hf", "gemma3", 3, 4, True),
        pytest.param("hf", "qwen3.5", 5, 4, True, marks=pytest.mark.slow),
    ],
)
def test_held_rows_give_the_episodes_of_whole_prefixes(
    tiny: TinyModels, decoder: str, kind: str, max_rows: int | None, look_every: int, late: bool
):
    """Ragged turns, prompts and replies; EOS, stop strings and limits; greedy and sampled. Whenever replies come,
    whichever rows there are, and however far rows run past the end of a turn. Where a state is continued, Qwen3.5's
    modules add up in another order than over a whole prefix, by chunks: 2.5e-5 of a log-probability of -9.
    """
    tolerance = 1e-4 if kind == "qwen3.5" else 1e-5
    engine, library = (make(tiny(kind), name, stop=["a", "Z", "}"]) for name in (decoder, "plain"))
    engine.max_rows, engine.look_every = max_rows, look_every
    for each in (engine, library):
        stir(each)
    for options in ({"greedy": True}, {"seed": 5, "step": 2}):
        script, plainly = Scripted(late=late), Scripted()
        ours = played(engine, script, **options)
        assert_same_episodes(ours, played(library, plainly, **options), tolerance=tolerance)
        assert script.reasons == plainly.reasons
    assert {r for of_one in script.reasons.values() for r in of_one} == {"eos", "stop", "length"}
    assert {len(of_one) for of_one in script.reasons.values()} == {1, 2, 3}


def spoken(tiny: TinyModels, stop: list[str], observation: list[int]) -> tuple[Any, list[list[list[int]]]]:
    """Eight episodes of two turns of at most 6 words, with this reply between them."""
    engine = make(tiny("llama", vocabulary=WORDS), stop=stop)
    engine.eos = set()
    script = Scripted(lambda _, turns: observation if len(turns) == 1 else None, limits=(6,))
    engine.play(requests(engine, 8, [[20, 21, 22]]), episodes=script)
    return engine.tokenizer, [script.turns[i] for i in range(8)]


def test_only_the_policys_own_words_of_this_turn_stop_it(tiny: TinyModels):
    observation = [10, 11, 12]
    tokenizer, free = spoken(tiny, [], observation)
    assert all(len(turn) == 6 for turns in free for turn in turns)
    said = {pair for turns in free for turn in turns for pair in pairwise(turn)}
    around = {pair for first, second in free for pair in pairwise([first[-1], *observation, second[0]])} - said
    assert len(around) > 10  # in the reply, and across its borders
    assert spoken(tiny, [tokenizer.decode(pair) for pair in around], observation)[1] == free
    stopped = spoken(tiny, [tokenizer.decode(free[3][1][1:3])], observation)[1]
    assert (stopped[3], stopped[0]) == ([free[3][0], free[3][1][:3]], free[0])


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("fused", "llama", torch.float32),
        ("hf", "qwen3.5", torch.float32),
        pytest.param("hf", "gemma3", torch.bfloat16, marks=pytest.mark.wide),
        pytest.param("hf", "gpt-oss", torch.float32, marks=pytest.mark.wide),
        pytest.param("hf", "qwen3.5", torch.bfloat16, marks=pytest.mark.wide),
        pytest.param("hf", "gpt-oss", torch.bfloat16, marks=pytest.mark.wide),
    ],
)
def test_only_replies_are_prefilled_and_only_once(
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    prefills: list[tuple[str, list[int]]],
    name: str,
    kind: str,
    dtype: torch.dtype,
):
    monkeypatch.setattr(scheduler, "EXTEND_TOKENS", {"cpu": 24})
    script = Scripted()
    episodes = [c for group in played(make(tiny(kind), name, dtype=dtype), script) for c in group]
    assert [lengths for name, lengths in prefills if name == "prefill"] == [[len(p) for p in PROMPTS]]
    extended = [lengths for name, lengths in prefills if name == "extend"]
    observed = sum(c.mask.count(False) for c in episodes)
    resumed = sum(len(turns) - 1 for turns in script.turns.values())
    assert sum(map(sum, extended)) == observed + resumed  # and the last token of the turn before
    assert all(len(rows) * max(rows) <= 24 or len(rows) == 1 for rows in extended)
    assert max(map(len, extended)) > 1


def test_out_of_memory_begins_all_episodes_again_in_fewer_rows(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    expected, script = played(make(tiny("llama"), "plain"), Scripted()), Scripted(late=True)
    engine, extend, new_cache, caches = make(tiny("llama")), Decoder.extend, Decoder.new_cache, list[Any]()

    def full(self: Decoder, *args: Any, **named: Any) -> Any:
        if named["cache"].entries.shape[1] > 5:
            raise torch.OutOfMemoryError("full")
        return extend(self, *args, **named)

    def noted(self: Decoder, rows: int, width: int) -> RowCache:
        assert all(cache() is None for cache in caches)  # a failed attempt holds no memory
        caches.append(weakref.ref(cache := new_cache(self, rows, width)))
        return cache

    monkeypatch.setattr(Decoder, "extend", full)
    monkeypatch.setattr(Decoder, "new_cache", noted)
    assert_same_episodes(played(engine, script), expected)
    assert (script.restarts, engine.max_rows) == (3, 4)


# ---- with an environment: the lookup task ----

GROUP, SEED, STEP = 8, 3, 2


@pytest.fixture(scope="module")
def parts() -> Collector:
    """The lookup model with an adapter that is not zero."""
    parts = load_collector(prepare(lookup(generation={"engine": "fused"})), options=Options(device="cpu"))
    stir(parts, by=0.02)  # pyright: ignore
    return parts


def episodes_of(parts: Any, *, num_prompts: int | None = None, step: int = STEP) -> list[Sample]:
    prompts = parts.train_prompts[:num_prompts]
    asked = list[Request]()
    for prompt in prompts:
        asked += parts.engine.requests_for(prompt.tokens, GROUP, row=prompt.index, seed=SEED, step=step)
    return parts.runner.play([p for p in prompts for _ in range(GROUP)], asked, engine=parts.engine)


def test_when_replies_come_changes_no_bit(parts: Any, monkeypatch: pytest.MonkeyPatch):
    """Which rows are decoded together changes the rounding, so it must not hang on the clock."""
    environment, delay = parts.runner.environment, random.Random(0)
    respond = environment._respond

    def late(prompts: list[Any], transcripts: list[Any], **columns: Any) -> list[Any]:
        time.sleep(delay.random() * 0.02)
        return [reply or Reply("found Amy Berg ;") for reply in respond(prompts, transcripts, **columns)]

    monkeypatch.setattr(environment, "_respond", late)
    for num_prompts in (1, 2):  # few rows, where each one more is another rounding
        first, *others = [episodes_of(parts, num_prompts=num_prompts) for _ in range(4)]
        assert all([c.logprobs for c in other] == [c.logprobs for c in first] for other in others)


def test_an_episode_is_drawn_and_scored_as_one_sequence(parts: Any):
    """One forward pass of the library over each whole row gives the log-probabilities, and with the random numbers of
    the row's places the tokens.
    """
    samples = episodes_of(parts)
    for row, completion in enumerate(samples):
        prompt = parts.train_prompts[row // GROUP]
        with torch.inference_mode(), parts.policy.acting("policy") as model:
            logits = model(input_ids=torch.tensor([prompt.tokens + completion.response])).logits[0]
        logits = logits[len(prompt.tokens) - 1 : -1].float().log_softmax(-1)
        key = sample_keys(SEED, STEP, prompts=np.array([prompt.index]), samples=np.array([row % GROUP]))
        [u] = uniforms(key, num_tokens=len(completion.response))
        for t, chosen in enumerate(completion.mask):
            if not chosen:
                assert completion.logprobs[t] == 0.0
                continue
            assert completion.logprobs[t] == pytest.approx(float(logits[t, completion.response[t]]), abs=1e-5)
            assert int((logits[t].double().exp().cumsum(0) <= u[t]).sum()) == completion.response[t]
    assert max(len(sample.played.turn_ends) for sample in samples if sample.played) == 3


def test_each_episode_has_a_seed_of_its_own(parts: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def noted(prompts: list[Any], transcripts: list[Any], seed: list[int], **columns: Any) -> list[Reply | None]:
        asked.extend(seed)
        return [Reply(done=True)] * len(prompts)

    monkeypatch.setattr(parts.runner.environment, "_respond", noted)
    for step in (STEP, STEP, STEP + 1):
        episodes_of(parts, num_prompts=1, step=step)
    assert sorted(asked[:GROUP]) == sorted(asked[GROUP : 2 * GROUP])
    assert (len(asked), len({*asked})) == (3 * GROUP, 2 * GROUP)


# ---- a turn that has ended ----


def ended(episodes: Episodes, tokens: list[int], finish: FinishReason) -> Episode:
    """End the first episode's turn with these tokens; return its record."""
    turn = DecodedSequence(episodes.requests[0])
    turn.end(tokens, [-1.0] * len(tokens), finish)
    episodes.ended(0, turn)
    return episodes.episodes[0]


def begun(parts: Any, *, max_new_tokens: int) -> Episodes:
    """One episode of the lookup task, whose policy has so many tokens."""
    prompt = parts.train_prompts[0]
    runner = replace(parts.runner, max_new_tokens=max_new_tokens)
    return Episodes([prompt], [Request(prompt.tokens, np.uint64(0), max_new_tokens)], runner=runner)


@pytest.mark.parametrize(("chosen", "goes_on"), [(4, True), (5, False)])
def test_an_episode_whose_tokens_are_used_up_is_over(
    parts: Any, monkeypatch: pytest.MonkeyPatch, *, chosen: int, goes_on: bool
):
    """The reply stands in the transcript, and nothing more is prefilled; one token less, and it goes on."""
    monkeypatch.setattr(parts.runner.environment, "_respond", lambda prompts, **_: [Reply("found ;") for _ in prompts])
    with begun(parts, max_new_tokens=5) as episodes:
        episode = ended(episodes, [20] * chosen, "stop")
        [(_, answer)] = episodes.answers(wait=True)
    assert (answer is not None) is goes_on
    assert [message["role"] for message in episode.transcript] == ["assistant", "tool"]
    assert goes_on or episode.finish_reason == "length"


def test_a_turn_knows_the_token_that_ended_it(parts: Any):
    """By which the template's own end is not written twice; a stop string is no such token."""
    with begun(parts, max_new_tokens=9) as episodes:
        assert ended(episodes, [20, 21], "stop").ended_at is None
        assert ended(episodes, [20, 3], "eos").ended_at == 3
        assert ended(episodes, [20, 21], "length").ended_at is None


def test_a_call_that_the_prompt_begins_is_run() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    begun = '<tool_call>\n{"name": "add", '
    prompt = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": begun}]
    how: Any = {"chat": "auto", "system_prompt": None, "variables": {}, "limit": NO_LIMIT}
    rows = [{"prompt": prompt}]
    prepared = prepare_prompts(load_task("rows"), rows, tokenizer=tokenizer, on_overlong_prompt="error", **how)
    environment = SimpleNamespace(has_openings=False)
    runner: Any = SimpleNamespace(tokenizer=tokenizer, max_episode_tokens=9, environment=environment, form=None)
    request = Request(prepared[0].tokens, np.uint64(0), limit=9)
    tokens = tokenizer('"arguments": {"a": 2}}\n</tool_call><eos>', add_special_tokens=False)["input_ids"]
    with Episodes(prepared, [request], runner=runner) as episodes:
        turn: Any = SimpleNamespace(tokens=tokens, logprobs=[0.0] * len(tokens), finish_reason="eos")
        episodes.ended(0, turn)
        (message,) = episodes.episodes[0].transcript
        assert calls_of(message) == [ToolCall("add", {"a": 2})]
        assert episodes.samples[0].response == tokens  # the beginning is no part of what is trained
