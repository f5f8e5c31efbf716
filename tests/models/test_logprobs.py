"""Heads as their models apply them, and chunked log-probabilities against the plain formula in float64."""

import pytest
import torch
from torch import Tensor

from tests.models.live_bytes import LiveBytes
from tests.tiny_models import TinyModels
from tinyrl.models import logprobs as module
from tinyrl.models.batches import backbone_of
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.logprobs import Head, head_of, token_logprobs

NUM_TOKENS, VOCABULARY, HIDDEN = 17, 11, 5


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_head_of_states_is_the_models_own_logits(tiny: TinyModels, kind: str):
    model = load_causal_lm(str(tiny(kind)), dtype=torch.float32)
    head = head_of(model)
    ids = torch.randint(0, 250, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = head.logits(backbone_of(model)(input_ids=ids).last_hidden_state.flatten(0, 1))
        own = model(input_ids=ids).logits.flatten(0, 1)
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    assert head.softcap == (2.0 if kind == "gemma2" else None)
    assert head.scale == pytest.approx({"granite": 1 / 3}.get(kind, 1.0))


def random_case(*, bias: bool, softcap: float | None, trainable: bool) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_(trainable)
    offset = torch.randn(VOCABULARY, generator=generator).requires_grad_(trainable) if bias else None
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    return states, Head(weight, offset, 1.3, softcap), targets


def dense(states: Tensor, head: Head, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A second implementation, token by token in float64, from softmax's definition."""
    logprobs, entropies = [], []
    for state, target in zip(states, targets, strict=True):
        z = (head.weight @ state + (0 if head.bias is None else head.bias)) * head.scale
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        p = (z / temperature).exp() / (z / temperature).exp().sum()
        logprobs.append(p[target].log())
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def as_float64(states: Tensor, head: Head) -> tuple[Tensor, Head, list[Tensor]]:
    def copied(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_(x.requires_grad)

    weight, bias = copied(head.weight), None if head.bias is None else copied(head.bias)
    states = copied(states)
    leaves = [x for x in (states, weight, bias) if x is not None and x.requires_grad]
    return states, Head(weight, bias, head.scale, head.softcap), leaves


@pytest.mark.parametrize(
    ("trainable", "bias", "softcap", "entropy_grad", "chunk"),
    [
        (False, False, None, False, 1),
        (False, True, 1.5, True, 4 * VOCABULARY),
        (True, True, None, True, 4 * VOCABULARY),
        (True, False, 1.5, False, 10_000),
    ],
)
def test_chunked_is_dense(
    monkeypatch: pytest.MonkeyPatch, trainable: bool, bias: bool, softcap: float | None, entropy_grad: bool, chunk: int
):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk})
    states, head, targets = random_case(bias=bias, softcap=softcap, trainable=trainable)
    states64, head64, leaves64 = as_float64(states, head)
    ours = token_logprobs(states, head, targets=targets, temperature=0.7, entropy_grad=entropy_grad)
    theirs = dense(states64, head64, targets, 0.7)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), atol=2e-6, rtol=1e-5)
    assert ours[1].requires_grad == entropy_grad

    weights = torch.linspace(-1, 2, NUM_TOKENS)
    factor = 0.5 if entropy_grad else 0.0
    (weights @ ours[0] + factor * (weights.flip(0) @ ours[1])).backward()
    (weights.double() @ theirs[0] + factor * (weights.double().flip(0) @ theirs[1])).backward()
    leaves = [x for x in (states, head.weight, head.bias) if x is not None and x.requires_grad]
    assert len(leaves) == 1 + trainable * (1 + bias)
    for leaf, leaf64 in zip(leaves, leaves64, strict=True):
        assert leaf.grad is not None
        assert leaf64.grad is not None
        torch.testing.assert_close(leaf.grad, leaf64.grad.float(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_a_token_that_never_comes_changes_nothing(trainable: bool):
    """A head that rules a token out by a bias of -inf, against a head without that token."""
    states, head, targets = random_case(bias=True, softcap=None, trainable=trainable)
    targets, results = torch.where(targets == VOCABULARY - 1, 0, targets), []
    assert head.bias is not None
    for last in (VOCABULARY, VOCABULARY - 1):
        weight, bias = head.weight.detach()[:last].clone(), head.bias.detach()[:last].clone()
        if last == VOCABULARY:
            bias[-1] = -torch.inf
        own = Head(weight.requires_grad_(trainable), bias, head.scale)
        x = states.detach().clone().requires_grad_()
        logprobs, entropy = token_logprobs(x, own, targets=targets, temperature=0.7, entropy_grad=True)
        (logprobs + 0.5 * entropy).sum().backward()
        of_weight = [] if weight.grad is None else [weight.grad[: VOCABULARY - 1]]
        results.append([logprobs, entropy, x.grad, *of_weight])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_probabilities_that_underflow_have_a_finite_entropy_and_gradient():
    states = torch.tensor([[1.0]], requires_grad=True)
    head = Head(torch.tensor([[0.0], [-500.0], [500.0]]), None)
    logprobs, entropies = token_logprobs(states, head, targets=torch.tensor([2]), temperature=1.0, entropy_grad=True)
    (logprobs + entropies).sum().backward()
    assert logprobs.tolist() == entropies.tolist() == [0.0]
    assert states.grad is not None
    assert states.grad.tolist() == [[0.0]]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_no_logits_outlive_their_chunk(monkeypatch: pytest.MonkeyPatch, trainable: bool):
    """Chunks of 32 kB, where all logits take 800: a few at once, and none between the passes."""
    num_tokens, vocabulary, hidden, rows = 200, 1000, 4, 8
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": rows * vocabulary})
    states = torch.randn(num_tokens, hidden, requires_grad=True)
    head = Head(torch.randn(vocabulary, hidden).requires_grad_(trainable), None, 1.0, 3.0)
    targets = torch.zeros(num_tokens, dtype=torch.long)
    with LiveBytes() as live:
        logprobs, entropies = token_logprobs(states, head, targets=targets, temperature=1.0, entropy_grad=True)
        between = live.now
        (logprobs + entropies).sum().backward()
    assert between < 32_000
    assert 32_000 < live.most < 400_000


def test_logits_of_bfloat16_operands_are_not_rounded() -> None:
    """Against the product in float64; a bfloat16 logit of that size is off by 0.03 on average."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 32, generator=generator).bfloat16()
    weight = (torch.randn(500, 32, generator=generator) * 2).bfloat16()
    bias = torch.randn(500, generator=generator).bfloat16()
    exact = states.double() @ weight.double().t() + bias.double()
    assert float((Head(weight, bias).logits(states).double() - exact).abs().max()) < 1e-4


def test_a_trained_head_under_autocast_keeps_logits_and_has_the_gradient_of_the_plain_product() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(6, 16, generator=generator).bfloat16().float().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().float().requires_grad_()
    targets = torch.arange(6)
    plain = (states @ weight.t()).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    expected = torch.autograd.grad(plain.sum(), [states, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = token_logprobs(states, Head(weight, None), targets=targets, temperature=1.0)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(ours.sum(), [states, weight]), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-6)
