"""Fast turns: rows that wait in their slots give the episodes of sampling each turn anew from its whole prefix."""

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generation.episodes import BUDGET, Delayed, Scripted, plain
from tests.generation.sampling import PROMPTS, assert_same, held_in, make_engine, requests, stir
from tests.tiny_models import TinyModels
from tinyrl.generation import scheduler
from tinyrl.generation.decoder import Decoder, RowCache
from tinyrl.generation.engine import Completion

WORDS = tuple(a + b for a in "abcdefg" for b in "vwxyz")


def make(folder: Any, name: str = "fused", **options: Any) -> Any:
    engine = make_engine(folder, name, max_new_tokens=BUDGET, **options)
    engine.eos, engine.overlaps = set(range(1, 9)), True
    return engine


def play(engine: Any, answer: Scripted, group: int = 4, **options: Any) -> list[list[Completion]]:
    engine.play(requests(), group, **{"episodes": answer, "seed": 0, "step": 0, **options})
    return answer.completions(group)


def assert_same_episodes(ours: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    assert_same(ours, theirs)
    assert [[c.action_mask for c in group] for group in ours] == [[c.action_mask for c in group] for group in theirs]


def decoder_of(engine: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(engine.roles.causal, dtype=dtype, held=held_in(dtype))
    decoder.sync(None)
    return decoder


def padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=3)
    return ids, torch.tensor([len(s) for s in sequences])


def strewn(cache: RowCache, start: list[int]) -> RowCache:
    """Junk behind what each row has read, as rows that ran past their end or wait in a graph's bucket leave there."""
    for row, first in enumerate(start):
        cache.entries[:, row, ..., first:, :].normal_(std=30.0)
    return cache


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_reading_on_equals_a_full_forward_pass(tiny: TinyModels, kind: str):
    """Five rows hold prompts, three of them read two further ragged pieces; two query heads share each key."""
    model = make(tiny(kind)).roles.causal
    decoder = decoder_of(make(tiny(kind)))
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 11, 1, 6, 8]
    texts = [torch.randint(9, 200, (n,), generator=generator).tolist() for n in lengths]
    cache = decoder.new_cache(5, 40)
    decoder.prefill(*padded(texts), cache=cache, rows=[range(i, i + 1) for i in range(5)])
    strewn(cache, lengths)
    for pieces in ([[50], [60, 61, 62, 63, 64, 65], [70, 71]], [[80, 81, 82, 83], [90], [100, 101, 102]]):
        before = cache.entries.clone()
        start = [len(t) for t in texts[1:4]]
        ids, counts = padded(pieces)
        width = max(a + len(b) for a, b in zip(start, pieces, strict=True))
        states = decoder.extend(ids, counts, torch.tensor(start), cache=cache, rows=range(1, 4), width=width)
        for row, piece in enumerate(pieces, 1):
            texts[row] += piece
            expected = model(input_ids=torch.tensor([texts[row]])).logits[0, -1].log_softmax(-1)
            ours = decoder.head.logits(states[row - 1 : row])[0].log_softmax(-1)
            assert (ours - expected).abs().max() < 1e-5
        for row, text in enumerate(texts):
            first = start[row - 1] if row in (1, 2, 3) else len(text)
            now, was = cache.entries[:, row], before[:, row]
            assert torch.equal(now[..., :first, :], was[..., :first, :])
            assert torch.equal(now[..., len(text) :, :], was[..., len(text) :, :])
    token, position = torch.full((5,), 77), torch.tensor([len(t) for t in texts])
    states = decoder.step(token, position, cache=cache, width=40)
    for row, text in enumerate(texts):
        expected = model(input_ids=torch.tensor([[*text, 77]])).logits[0, -1].log_softmax(-1)
        assert (decoder.head.logits(states[row : row + 1])[0].log_softmax(-1) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "max_rows"), [("qwen2", 3), ("qwen3", None)])
def test_fast_turns_give_the_episodes_of_plain_turns(tiny: TinyModels, kind: str, max_rows: int | None):
    """Ragged turns, prompts and answers; EOS, stop strings and limits; greedy and sampled."""
    fast, slow, hf = (make(tiny(kind), name, stop=["a", "Z", "}"]) for name in ("fused", "fused", "hf"))
    fast.max_rows = max_rows
    for engine in (fast, slow, hf):
        stir(engine)
    for options in ({}, {"greedy": True}, {"seed": 5, "step": 2}):
        answer = Scripted()
        episodes = play(fast, answer, **options)
        reasons = answer.reasons
        assert_same_episodes(episodes, plain(slow, requests(), 4, answer, **options))
        assert reasons == answer.reasons
        assert_same_episodes(episodes, plain(hf, requests(), 4, answer, **options))
        if not options:
            assert {r for of_one in reasons.values() for r in of_one} == {"eos", "stop", "length"}
            assert {len(of_one) for of_one in reasons.values()} == {1, 2, 3}


@pytest.mark.parametrize(("slow_answers", "look_every", "max_rows"), [(Scripted, 1, 3), (Delayed, 4, 7)])
def test_episodes_do_not_depend_on_when_answers_come(
    tiny: TinyModels, slow_answers: type[Scripted], look_every: int, max_rows: int | None
):
    """Nor on the slots there are, nor on how often finished rows are looked for: rows run past the end of a turn."""
    fast, slow = make(tiny("qwen2"), stop=["a"]), make(tiny("qwen2"), stop=["a"])
    fast.max_rows, fast.look_every = max_rows, look_every
    expected = plain(slow, requests(), 4, Scripted())
    assert_same_episodes(play(fast, slow_answers()), expected)


def spoken(tiny: TinyModels, stop: list[str], observation: list[int]) -> tuple[Any, list[list[list[int]]]]:
    """Eight episodes of two turns of at most 6 words, with this answer between them."""
    engine = make(tiny("llama", vocabulary=WORDS), stop=stop)
    engine.eos = set()
    answer = Scripted(lambda _, turns: observation if len(turns) == 1 else None, limits=(6,))
    engine.play(requests([[20, 21, 22]]), 8, episodes=answer, seed=0, step=0)
    return engine.tokenizer, [answer.turns[i] for i in range(8)]


def test_only_the_policys_own_words_of_this_turn_stop_it(tiny: TinyModels):
    observation = [10, 11, 12]
    tokenizer, free = spoken(tiny, [], observation)
    assert all(len(turn) == 6 for turns in free for turn in turns)
    said = {pair for turns in free for turn in turns for pair in pairwise(turn)}
    around = {pair for first, second in free for pair in pairwise([first[-1], *observation, second[0]])} - said
    assert len(around) > 10  # in the answer, and across its borders
    assert spoken(tiny, [tokenizer.decode(pair) for pair in around], observation)[1] == free
    own = tokenizer.decode(free[3][1][1:3])
    stopped = spoken(tiny, [own], observation)[1]
    assert stopped[3] == [free[3][0], free[3][1][:3]]
    assert stopped[0] == free[0]


def test_only_answers_are_read_and_only_once(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    prompts: list[int] = []
    shapes: list[tuple[int, ...]] = []
    tokens: list[int] = []
    prefill, extend = Decoder.prefill, Decoder.extend

    def read(self: Decoder, ids: Tensor, lengths: Tensor, **named: Any) -> Tensor:
        prompts.append(int(lengths.sum()))
        return prefill(self, ids, lengths, **named)

    def read_on(self: Decoder, ids: Tensor, lengths: Tensor, *rest: Any, **named: Any) -> Tensor:
        shapes.append(tuple(ids.shape))
        tokens.append(int(lengths.sum()))
        return extend(self, ids, lengths, *rest, **named)

    monkeypatch.setattr(Decoder, "prefill", read)
    monkeypatch.setattr(Decoder, "extend", read_on)
    monkeypatch.setattr(scheduler, "EXTEND_TOKENS", {"cpu": 24})
    answer = Scripted()
    episodes = [c for group in play(make(tiny("llama")), answer) for c in group]
    assert sum(prompts) == sum(len(p) for p in PROMPTS)
    observed = sum(c.action_mask.count(False) for c in episodes if c.action_mask)
    resumed = sum(len(turns) - 1 for turns in answer.turns.values())
    assert sum(tokens) == observed + resumed  # and the last token of the turn before
    assert all(rows * length <= 24 or rows == 1 for rows, length in shapes)
    assert max(rows for rows, _ in shapes) > 1


def test_out_of_memory_begins_all_episodes_again_in_fewer_rows(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make(tiny("llama"))
    expected = plain(make(tiny("llama")), requests(), 4, Scripted())
    real = Decoder.extend
    caches: list[weakref.ref[RowCache]] = []

    def full(self: Decoder, *args: Any, **named: Any) -> Any:
        if named["cache"].entries.shape[1] > 5:
            raise torch.OutOfMemoryError("full")
        return real(self, *args, **named)

    monkeypatch.setattr(Decoder, "extend", full)
    made = Decoder.new_cache

    def noted(self: Decoder, rows: int, width: int) -> RowCache:
        assert all(cache() is None for cache in caches)  # a failed attempt holds no memory
        caches.append(weakref.ref(cache := made(self, rows, width)))
        return cache

    monkeypatch.setattr(Decoder, "new_cache", noted)
    answer = Delayed()
    assert_same_episodes(play(engine, answer), expected)
    assert (answer.restarts, engine.max_rows) == (3, 4)


def test_an_answer_that_leaves_no_room_is_found_before_it_is_read(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """It would be written into the next row's part of the cache."""
    monkeypatch.setattr(Decoder, "extend", lambda *_, **__: pytest.fail("read"))
    for length in (Scripted.max_episode_tokens, Scripted.max_episode_tokens - 5):
        engine, answer = make(tiny("llama")), Scripted(lambda *_, n=length: [40] * n, limits=(5,))
        with pytest.raises(AssertionError):
            engine.play(requests(PROMPTS[:1]), 4, episodes=answer, seed=0, step=0)
