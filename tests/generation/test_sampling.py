"""Samples: their distribution, greedy decoding, the recorded log-probabilities, temperature and truncation."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.generation.sampling import CPU, ENGINES, PROMPTS, Engine, make_engine, sample, stir, tokens_of
from tests.tiny_models import TinyModels
from tinyrl.generation.engine import RowParams, SamplingParams, truncate
from tinyrl.models.batches import make_batch

EVERY_ENGINE = [("hf", "gemma2"), ("hf-merged", "gpt2"), ("fused", "qwen3")]
WORDS = ("a", "b", "c", "d", "e")


def scored(engine: Engine, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
    """Log-probabilities as a training pass computes them."""
    with torch.no_grad(), engine.roles.acting("policy"):
        rows, _ = engine.roles.logprobs(
            "policy", make_batch(prompts, responses), temperature=engine.settings.temperature
        )
    return [row[: len(response)].tolist() for row, response in zip(rows, responses, strict=True)]


@pytest.mark.parametrize(("name", "temperature"), [("fused", 0.6), ("hf", 1.0)])
def test_sampled_shares_are_the_scored_probabilities(tiny: TinyModels, temperature: float, name: str):
    """Chi-square over every completion of at most two tokens, on a vocabulary of eight; 1 % of seeds would fail."""
    engine = make_engine(tiny("llama", vocabulary=WORDS), name, temperature=temperature, max_new_tokens=2)
    count, eos = 6000, 1
    drawn = Counter(tuple(c.tokens) for c in sample(engine, count, prompts=[[3, 4, 5]], seed=4)[0])
    outcomes = [[eos], *([first, second] for first in range(8) if first != eos for second in range(8))]
    logprobs = scored(engine, [[3, 4, 5]] * len(outcomes), outcomes)
    expected = {tuple(o): count * math.exp(sum(lp)) for o, lp in zip(outcomes, logprobs, strict=True)}
    assert set(drawn) <= set(expected)
    assert sum(expected.values()) == pytest.approx(count, rel=1e-4)
    frequent = [o for o in expected if expected[o] >= 5]
    rest = (sum(drawn[o] for o in expected if expected[o] < 5), sum(e for e in expected.values() if e < 5))
    cells = [(drawn[o], expected[o]) for o in frequent] + ([rest] if rest[1] > 0 else [])
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 99th percentile
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 2.326 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(("name", "kind"), EVERY_ENGINE)
def test_greedy_is_what_the_library_generates(tiny: TinyModels, name: str, kind: str):
    """Against `generate` on each prompt by itself, so left padding and Gemma-2's window of 8 are tested too."""
    engine = make_engine(tiny(kind), name, max_new_tokens=24)
    ours = sample(engine, 1, greedy=True)
    for prompt, (completion,) in zip(PROMPTS, ours, strict=True):
        out = engine.roles.causal.generate(  # pyright: ignore[reportCallIssue]
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
        assert completion.tokens == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.wide
def test_each_role_samples_from_itself(tiny: TinyModels, name: str):
    """Each from its current weights: an update between two calls shows."""
    engine = make_engine(tiny("llama"), name, lora=True)
    base = tokens_of(sample(make_engine(tiny("llama"))))
    assert tokens_of(sample(engine)) == base  # a fresh adapter changes nothing
    with torch.no_grad():
        for parameter in engine.roles.parameters["policy"].values():
            parameter.add_(0.2)
    assert tokens_of(sample(engine)) != base
    assert tokens_of(sample(engine, role="base")) == base
    engine.roles.has_reference = True
    assert tokens_of(sample(engine, role="reference")) == base


@pytest.mark.parametrize(("name", "kind"), EVERY_ENGINE)
def test_sampling_leaves_nothing_that_training_stumbles_over(tiny: TinyModels, name: str, kind: str):
    """Gradients flow, and the base has the same bits: nothing was merged into it and subtracted again."""
    engine = make_engine(tiny(kind), name, lora=True)
    stir(engine)
    before = {n: t.clone() for n, t in engine.roles.causal.state_dict().items()}
    sample(engine)
    after = engine.roles.causal.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert before.keys() == after.keys()
    with engine.roles.acting("policy"):
        engine.roles.logprobs("policy", make_batch(PROMPTS, [[3], [4], [5], [6]]), temperature=1.0)[0].sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in engine.roles.parameters["policy"].values())
    assert engine.roles.device == CPU


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0.15, 0.5, 0.05, 0.3]),
        (2, 1.0, [0.0, 0.5, 0.0, 0.3]),
        (9, 1.0, [0.15, 0.5, 0.05, 0.3]),
        (0, 0.5, [0.0, 0.5, 0.0, 0.0]),
        (0, 0.51, [0.0, 0.5, 0.0, 0.3]),
        (0, 0.9, [0.15, 0.5, 0.0, 0.3]),
        (1, 0.9, [0.0, 0.5, 0.0, 0.0]),
        (0, 1e-9, [0.0, 0.5, 0.0, 0.0]),
    ],
)
def test_truncation_by_hand(top_k: int, top_p: float, kept: list[float]):
    """Beside a row that is not truncated."""
    probs = torch.tensor([[0.15, 0.5, 0.05, 0.3]] * 2)
    params = RowParams.of([SamplingParams(top_p=top_p, top_k=top_k), SamplingParams(top_k=1 << 20)], CPU)
    assert params.top_k is not None
    assert params.top_p is not None
    found = truncate(probs, top_k=params.top_k, top_p=params.top_p)
    torch.testing.assert_close(found, torch.stack([torch.tensor(kept), probs[0]]))


def test_truncated_samples_stay_inside_and_are_scored_by_the_whole_distribution(tiny: TinyModels):
    folder = tiny("llama", vocabulary=WORDS)
    prompts = [[3, 4, 5]]
    whole = make_engine(folder, max_new_tokens=1)
    likeliest = sorted(range(8), key=lambda t: -scored(whole, prompts, [[t]])[0][0])
    few: list[tuple[dict[str, Any], int]] = [({"top_k": 3}, 3), ({"top_p": 1e-6}, 1)]
    for options, allowed in few:
        completions = sample(make_engine(folder, max_new_tokens=1, **options), 300, prompts=prompts)[0]
        assert {c.tokens[0] for c in completions} == set(likeliest[:allowed])
        for completion in completions[:20]:
            assert completion.logprobs == pytest.approx(scored(whole, prompts, [completion.tokens])[0], abs=1e-5)
