"""Triton's kernels beside other implementations, through Triton's interpreter where there is no GPU.

The interpreter has no bfloat16 products: what is found here is a wrong index, mask or sum, in float32 and float16.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.generation.sampling import assert_same, make_engine, sample
from tests.generation.test_rng import LARGEST
from tests.tiny_models import TinyModels
from tinyrl.generation import cache as caches
from tinyrl.generation import fused, select
from tinyrl.generation.cache import BlockCache
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import sample_tokens

pytest.importorskip("triton", reason="Triton comes with torch for CUDA; for a CPU: pip install triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # float16 rounds weights and states, of up to about 3


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes tens of milliseconds; spans are still read in several parts."""
    monkeypatch.setattr(caches, "PROGRAMS", 32)


def filled(heads: int, size: int, dtype: torch.dtype, *, longest: int = 300) -> BlockCache:
    """Rows of a group, one of which has ended, of a pair, and two alone, in blocks that lie in no order."""
    entries = torch.randn(1, 64 * 65, heads, 2, size, device=DEVICE).to(dtype)
    rotation = torch.zeros(2048, 1, 1, size, device=DEVICE)
    shape: dict[str, Any] = {"heads": heads, "scaling": size**-0.5, "rows": 8, "block": 64}
    cache = BlockCache(entries, rotation, rotation, **shape)
    generator = torch.Generator().manual_seed(1)
    cache.spare = (torch.randperm(64, generator=generator) + 1).tolist()
    cache.claim([range(3), range(3, 5), range(5, 6), range(6, 7)], [128, 64, 129, 300])
    held = [longest, 130, 129, 65, 70, 129, 301]
    assert cache.grow(range(7), held)
    cache.free([1])
    cache.publish(7)
    cache.by_kernel = True
    return cache


def positions(cache: BlockCache) -> Tensor:
    """Of the last token of each row: the first fills its blocks but for a few."""
    return torch.tensor([len(cache.blocks[0]) * 64 - 20, 129, 128, 64, 69, 128, 300], device=DEVICE)


def exact(cache: BlockCache, q: Tensor) -> Tensor:
    """Row by row, token by token from the lists of the host, in float64."""
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for row, (queries, last) in enumerate(zip(q.double().cpu(), positions(cache).tolist(), strict=True)):
        if not cache.blocks[row]:
            continue
        places = [cache.blocks[row][t // 64] * 64 + t % 64 for t in range(last + 1)]
        keys, values = cache.entries[0].cpu()[places].double().unbind(2)  # (T, heads, d)
        scores = torch.einsum("hqd,thd->hqt", queries, keys) * cache.scaling
        out[row] = torch.einsum("hqt,thd->hqd", scores.softmax(-1), values)
    return out


def gaps(cache: BlockCache, q: Tensor) -> Tensor:
    """How far the kernel is off in each row, at most."""
    ours = cache.reader(positions(cache), cache.width)(0, q).double().cpu()
    return (ours - exact(cache, q)).abs().flatten(1).amax(1)[[0, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("queries", "size", "dtype"),
    [(3, 64, torch.float32), (1, 96, torch.float16), (8, 128, torch.float32), (1, 128, torch.float16)],
)
@pytest.mark.wide
def test_attention_over_blocks_is_attention(queries: int, size: int, dtype: torch.dtype):
    """65 to 2,000 tokens a row, queries that are a part of a wider tensor, as the decoder's are."""
    cache = filled(2, size, dtype, longest=2000)
    q = torch.randn(7, 2, queries + 2, size, device=DEVICE).to(dtype)[:, :, :queries]
    assert float(gaps(cache, q).max()) < TOLERANCE[dtype]


def test_a_wrong_block_is_seen():
    """In the shared part, in a row's own, and in a group's list of members."""
    q = torch.randn(7, 2, 1, 64, device=DEVICE)
    for spoil in ("table", "groups", "start"):
        cache = filled(2, 64, torch.float32)
        if spoil == "table":
            cache.table[0, 1], cache.table[6, 4] = cache.table[5, 1].clone(), cache.table[5, 0].clone()
        elif spoil == "groups":
            cache.groups[0, 2] = 5
        else:
            cache.start[0] = 64
        assert float(gaps(cache, q).max()) > 0.01, spoil


def test_one_token_and_one_row():
    cache = filled(2, 64, torch.float32)
    q = torch.randn(1, 2, 3, 64, device=DEVICE)
    cache.exchange(0, 6, 0)
    cache.publish(1)
    value = cache.entries[0, cache.blocks[0][0] * 64, :, 1]
    alone = cache.reader(torch.tensor([0], device=DEVICE), cache.width)(0, q)
    assert torch.allclose(alone, value[None, :, None].expand_as(alone), atol=1e-6)


# ---- the draw ----


def drawn(logits: Tensor, u: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "greedy": False, "by_kernel": True, **options}
    token, logprob = sample_tokens(logits.clone().to(DEVICE), u.to(DEVICE), **options)
    return token.cpu(), logprob.cpu()


@pytest.mark.parametrize(("vocabulary", "rows"), [(7, 40), (2048, 40), (2049, 40), (151_936, 6)])
def test_a_token_is_the_one_that_float64_draws(vocabulary: int, rows: int):
    """But for uniforms within 1e-6 of a border between two tokens, where the last digits of a sum decide."""
    logits = torch.randn(rows, vocabulary) * 3
    u = torch.rand(rows, dtype=torch.float64)
    u[0], u[1] = 0.0, LARGEST
    token, logprob = drawn(logits, u, temperature=0.7)
    probs = (logits.double() / 0.7).softmax(-1)
    ends = probs.cumsum(-1)
    expected = np.array(
        [np.searchsorted(e, x * e[-1], side="right") for e, x in zip(ends.numpy(), u.numpy(), strict=True)]
    )
    near = (ends - u.unsqueeze(1)).abs().amin(1) < 1e-6
    near[:2] = False
    assert ((token == torch.from_numpy(expected)) | near).all()
    assert int((~near).sum()) > rows / 2
    told = probs.gather(1, token.unsqueeze(1)).squeeze(1).log()
    assert float((logprob.double() - told).abs().max()) < 2e-6
    plain, scores = drawn(logits, u, temperature=0.7, by_kernel=False)
    assert ((token == plain) | near).all()
    assert float((logprob - scores)[token == plain].abs().max()) < 5e-6


def test_a_greedy_token_is_the_first_of_the_largest():
    logits = torch.randn(4, 5000)
    logits[0, [17, 4100]], logits[1, 4999], logits[2, 2048] = 9.0, 9.0, 9.0
    token, logprob = drawn(logits, torch.zeros(4, dtype=torch.float64), greedy=True)
    assert token.tolist() == [17, 4999, 2048, int(logits[3].argmax())]
    assert torch.allclose(logprob, logits.log_softmax(-1).amax(-1), atol=1e-6)


def test_tokens_without_probability_are_never_drawn():
    """Quarters add up exactly, so the uniforms fall on every border; whole chunks are empty."""
    weights = torch.randint(0, 3, (18, 9000)) * 0.25
    weights[:, 2048:6144], weights[:, 8000] = 0.0, 0.25
    ends = weights.double().cumsum(-1)
    columns = torch.tensor([0, 2047, 4000, 6143, 7000, 8999]).repeat(3)
    nudges = torch.tensor([-1e-16, 0.0, 1e-16], dtype=torch.float64).repeat_interleave(6)
    u = (ends.gather(1, columns.unsqueeze(1)).squeeze(1) / ends[:, -1] + nudges).clamp(0.0, LARGEST)
    token, logprob = drawn(weights.log(), u)
    assert (weights.gather(1, token.unsqueeze(1)) > 0).all()
    assert logprob.isfinite().all()


def test_logits_that_are_not_numbers_stay_inside_the_vocabulary():
    for fill in (torch.nan, torch.inf, -torch.inf):
        for greedy in (False, True):
            token, logprob = drawn(torch.full((1, 5000), fill), torch.tensor([0.9], dtype=torch.float64), greedy=greedy)
            assert 0 <= int(token) < 5000
            assert not logprob.isfinite().any()


# ---- where they are used ----


def by_kernels(monkeypatch: pytest.MonkeyPatch, engine: Any) -> Any:
    """An engine whose caches and draws are those of a GPU."""
    made = Decoder.new_blocks

    def forced(self: Decoder, *shape: Any, **named: Any) -> BlockCache:
        cache = made(self, *shape, **named)
        cache.by_kernel = True
        return cache

    monkeypatch.setattr(Decoder, "new_blocks", forced)
    monkeypatch.setattr(fused, "BLOCK", 16)
    engine.in_blocks = True
    return engine


def test_samples_by_kernels_are_the_same_samples(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """A prompt of 40 tokens in three rows, two blocks of which are shared, and one of 3."""
    monkeypatch.setattr(caches, "PROGRAMS", 1)
    prompts = [list(range(40, 80)), [7, 8, 9]]
    engine, other = (make_engine(tiny("qwen3"), "fused", max_new_tokens=4, temperature=0.8) for _ in range(2))
    engine.eos = other.eos = set(range(1, 12))
    expected = sample(other, 3, prompts=prompts)
    assert_same(sample(by_kernels(monkeypatch, engine), 3, prompts=prompts), expected)


def test_kernels_are_tried_before_they_are_used(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "PROGRAMS", 1)
    engine = by_kernels(monkeypatch, make_engine(tiny("qwen3"), "fused"))
    decoder = Decoder(engine.roles.causal, dtype=torch.float32, held="merged")
    read, said = select.kernel_errors(decoder, block=16)
    assert 0 < read < 1e-6
    assert 0 <= said < 1e-6
    publish = BlockCache.publish

    def elsewhere(self: BlockCache, live: int) -> None:
        publish(self, live)
        if self.by_kernel:
            self.groups[0, 0] -= self.block

    monkeypatch.setattr(select, "TRIAL_LOGITS", 50)
    monkeypatch.setattr(BlockCache, "publish", elsewhere)
    fits, why = select._tried(engine)
    assert fits
    assert "without its kernels: their numbers are off by" in why
    assert not engine.in_blocks
    assert math.isfinite(float(why.rsplit(" ", 1)[-1]))
