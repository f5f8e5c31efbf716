"""The cache in blocks: who holds which, and the same samples whatever room there is."""

from typing import Any

import pytest
import torch

from tests.generation.episodes import BUDGET, Scripted, Threaded, plain
from tests.generation.sampling import CPU, PROMPTS, assert_same, make_engine, requests, sample, stir
from tests.running import config
from tests.tiny_models import TinyModels
from tinyrl.generation import footprint, fused
from tinyrl.generation.cache import BlockCache
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.fused import Sampling
from tinyrl.generation.slots import Slots
from tinyrl.models.meta import meta_roles

NEW = 20


def in_blocks(engine: Any) -> Any:
    engine.in_blocks = True
    return engine


def decoder_of(engine: Any) -> Decoder:
    decoder = Decoder(engine.roles.causal, dtype=torch.float32, held="merged")
    decoder.sync(None)
    return decoder


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Slots]:
    """Blocks of 4 tokens; the slots that engines have made."""
    made: list[Slots] = []
    begin = Slots.__init__

    def noted(self: Slots, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        made.append(self)

    monkeypatch.setattr(Slots, "__init__", noted)
    monkeypatch.setattr(fused, "BLOCK", 4)
    return made


def only(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """From here on a cache has so many blocks."""
    monkeypatch.setattr(fused, "blocks_that_fit", lambda *_, **__: blocks)


def held(slots: Slots) -> int:
    assert isinstance(slots.cache, BlockCache)
    return slots.cache.total - len(slots.cache.spare)


def test_blocks_are_taken_shared_and_given_back(tiny: TinyModels):
    """Blocks of 4: three rows of a prompt of 9 tokens hold two together and one each, a row of 4 tokens one."""
    cache = decoder_of(make_engine(tiny("llama"))).new_blocks(6, 16, blocks=11, block=4)
    cache.claim([range(3), range(3, 4)], [9, 4])
    assert [len(blocks) for blocks in cache.blocks] == [3, 3, 3, 1, 0, 0]
    assert [blocks[:2] for blocks in cache.blocks[:3]] == [cache.blocks[0][:2]] * 3
    assert len({blocks[2] for blocks in cache.blocks[:3]}) == 3
    assert len(cache.spare) == 11 - 2 - 3 - 1
    assert not cache.grow([0, 1, 2, 3], [16, 16, 16, 16])  # one each, and three
    assert len(cache.spare) == 5
    assert cache.grow([0, 3], [13, 5])
    assert [len(blocks) for blocks in cache.blocks[:4]] == [4, 3, 3, 2]
    cache.publish(4)
    assert cache.table[0].tolist() == cache.blocks[0]
    assert cache.table[3].tolist() == [*cache.blocks[3], 0, 0]
    assert cache.start.tolist() == [8, 8, 8, 0, 0, 0]
    assert cache.groups.tolist() == [[8, 0, 1, 2, -1, -1, -1, -1, -1]] + [[0] + [-1] * 8] * 2
    cache.copy(3, 1, 4)  # row 1 has ended, and row 3 moves there
    cache.publish(3)
    assert cache.groups[0].tolist() == [8, 0, 2, -1, -1, -1, -1, -1, -1]
    assert cache.start.tolist() == [8, 0, 8, 0, 0, 0]
    cache.free([0, 1])
    cache.publish(3)
    assert (cache.start.tolist(), cache.table[:2].tolist()) == ([0] * 6, [[0] * 4] * 2)  # alone with its prompt
    assert len(cache.spare) == 11 - 3
    cache.free([2])
    assert sorted(cache.spare) == list(range(1, 12))


@pytest.mark.parametrize("blocks", [8, 13, 40])
@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.wide
def test_rows_that_are_put_back_give_the_same_samples(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, slots: list[Slots], blocks: int, look_every: int
):
    """The longest row alone takes 8 or 9 blocks of 4 tokens, all sixteen to their ends 140."""
    engine, other = in_blocks(make_engine(tiny("qwen3"), "fused")), make_engine(tiny("qwen3"), "fused")
    engine.eos = other.eos = set(range(1, 12))
    expected, back = sample(other, 4), []
    put_back = Sampling._put_back
    monkeypatch.setattr(Sampling, "_put_back", lambda self: (back.append(dict(self.begun)), put_back(self)))
    engine.look_every = look_every
    only(monkeypatch, blocks + (look_every > 1))
    assert_same(sample(engine, 4), expected)
    assert back
    assert held(slots[-1]) == 0


def test_what_a_row_put_back_had_said_is_read_and_not_drawn_again(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, slots: list[Slots]
):
    engine = in_blocks(make_engine(tiny("llama"), "fused"))
    engine.eos = set()
    drawn, draw = [0], Slots._draw

    def counted(self: Slots, logits: torch.Tensor, rows: slice) -> None:
        drawn[0] += rows.stop - (rows.start or 0)
        draw(self, logits, rows)

    monkeypatch.setattr(Slots, "_draw", counted)
    only(monkeypatch, 12)
    completions = [c for group in sample(engine, 4) for c in group]
    assert drawn[0] == sum(len(c.tokens) for c in completions) == 16 * NEW


def test_short_rows_share_the_memory_of_few_long_ones(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, slots: list[Slots]
):
    """Twenty blocks hold two rows of the longest text there might be, or eight that end early."""
    engine = in_blocks(make_engine(tiny("llama"), "fused", max_new_tokens=24))
    engine.eos = set(range(1, 200))  # most tokens
    live: list[int] = []
    advance = Slots.advance
    monkeypatch.setattr(Slots, "advance", lambda self, *shape: (live.append(self.live), advance(self, *shape)))
    only(monkeypatch, 20)
    sample(engine, 8, prompts=[PROMPTS[0], PROMPTS[3]])
    made = slots[-1]
    assert isinstance(made.cache, BlockCache)
    assert made.cache.total // made.cache.blocks_of(made.width) == 2
    assert max(live) >= 4


def test_a_group_reads_and_holds_its_prompt_once(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, slots: list[Slots]):
    """Of the prompt of twelve tokens, three blocks: eight rows of one token more hold eleven blocks, not 32."""
    engine = in_blocks(make_engine(tiny("llama"), "fused"))
    engine.eos = set()
    seen: list[int] = []
    step = fused.FusedEngine.step

    def noted(self: Any, slots: Slots, advance: Any) -> None:
        seen.append(held(slots))
        step(self, slots, advance)

    monkeypatch.setattr(fused.FusedEngine, "step", noted)
    sample(engine, 8, prompts=[PROMPTS[2]])
    assert seen[0] == 3 + 8


@pytest.mark.parametrize("blocks", [24, 1000])
@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.wide
def test_episodes_in_few_blocks_are_the_same_episodes(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, slots: list[Slots], blocks: int, look_every: int
):
    """Nobody puts their rows back, so no more are played than have room to their end."""
    engine, other = (make_engine(tiny("qwen2"), "fused", max_new_tokens=BUDGET) for _ in range(2))
    engine.eos = other.eos = set(range(1, 16))
    in_blocks(engine).overlaps, engine.look_every = True, look_every
    stir(engine)
    stir(other)
    expected = plain(other, requests(), 4, Scripted())
    only(monkeypatch, blocks)
    for answer in (Scripted(), Threaded()):
        engine.play(requests(), 4, episodes=answer, seed=0, step=0)
        assert_same(answer.completions(4), expected)
        assert held(slots[-1]) == 0


def test_blocks_stay_within_their_share_of_memory(tiny: TinyModels):
    """0.4 of what is free, 256 bytes a token (two of, layers, heads, 8 numbers), one block for nobody."""
    decoder = decoder_of(make_engine(tiny("llama"), "fused"))
    assert decoder.cache_bytes_per_token == 256
    assert fused.blocks_that_fit(decoder, 1000, 4096, free=10_000_000, block=64) == 243
    assert fused.blocks_that_fit(decoder, 2, 4096, free=10_000_000, block=64) == 128  # all that two rows may need
    assert fused.blocks_that_fit(decoder, 1000, 4096, free=0, block=64) == 64  # one row


def test_a_plan_says_what_blocks_hold(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Sixteen rows of up to 6 blocks of 64 tokens, of 256 bytes each, and one block for nobody. In less memory there
    are as many rows at a time, and half as many blocks.
    """
    monkeypatch.setattr(footprint, "has_kernels", lambda _: True)
    settings = config("grpo", tiny("llama"))
    roles = meta_roles(settings, dtype=torch.float32)
    sizes: dict[str, Any] = {"rows": 16, "prompts": 4, "prompt_tokens": 128, "new_tokens": 256, "device": CPU}

    def planned(free: int) -> footprint.SamplingBytes:
        return footprint.sampling_bytes(roles, settings.generation, engine="fused", **sizes, free=free)

    roomy = planned(1 << 40)
    assert (roomy.rows, roomy.blocks, roomy.parts["cache"]) == (16, (96, 64), 97 * 64 * 256)
    assert roomy.fit > 16
    tight = planned(roomy.parts["sampling copy"] + 2_010_000)  # 0.4 of it are 49 blocks, or 8 rows to their end
    assert (tight.rows, tight.blocks, tight.parts["cache"]) == (16, (48, 64), 49 * 64 * 256)
    assert tight.fit == 8
    states = tight.in_graphs - tight.parts["cache"] - tight.parts["sampling copy"]
    assert 0 < states <= tight.parts["states of sampling"]
