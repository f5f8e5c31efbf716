"""Chunked distances from hidden states against the plain formula in float64: numbers, gradients, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.live_bytes import LiveBytes
from tinyrl.algorithms.distillation import jensen_shannon, with_tail
from tinyrl.models import logprobs as chunks
from tinyrl.models.distances import TeacherStates, TeacherTopK, Teaching, distances, top_k_of
from tinyrl.models.logprobs import Head

N, V, H, TEACHER_H, K = 17, 11, 5, 7, 3


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 4 * V})


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("scale", "softcap", "temperature", "beta", "trains_head"),
    [(0.5, None, 0.7, 0.0, True), (1.0, 2.0, 1.5, 0.4, False), (2.0, 3.0, 1.0, 1.0, True)],
)
@pytest.mark.parametrize("of", ["states", "top"])
def test_against_the_plain_formula(
    of: str, scale: float, softcap: float | None, temperature: float, beta: float, trains_head: bool
):
    weight, states = drawn(V, H, seed=0), drawn(N, H, seed=1).requires_grad_()
    head = Head(weight.requires_grad_(trains_head), drawn(V, seed=2), scale, softcap)
    theirs = TeacherStates(drawn(N, TEACHER_H, seed=3), Head(drawn(V, TEACHER_H, seed=4), None))
    log_q = (theirs.head.logits(theirs.states) / temperature).double().log_softmax(-1)
    teacher: Teaching = theirs
    if of == "top":
        teacher = top_k_of(theirs.states, theirs.head, top_k=K, temperature=temperature)
        assert torch.equal(teacher.ids, log_q.topk(K).indices.int())
    weights = drawn(N, seed=5)

    result = distances(states, head, teacher, temperature=temperature, beta=beta)
    (result.divergence * weights).sum().backward()

    wide, wide_weight = (x.detach().double().requires_grad_() for x in (states, weight))
    z = scale * (wide @ wide_weight.T + drawn(V, seed=2).double())
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    if of == "top":
        ids = log_q.topk(K).indices
        expected = jensen_shannon(with_tail(log_p.gather(1, ids)), with_tail(log_q.gather(1, ids)), beta=beta)
    else:
        expected = jensen_shannon(log_p, log_q, beta=beta)
    (expected * weights).sum().backward()

    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(result.divergence, expected, **close)
    torch.testing.assert_close(result.entropy, -(log_p.exp() * log_p).sum(1), **close)
    torch.testing.assert_close(states.grad, wide.grad, **close)
    if trains_head:
        torch.testing.assert_close(weight.grad, wide_weight.grad, **close)
    assert [x.requires_grad for x in result] == [True, False]


BETAS = pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
TRAINS_HEAD = pytest.mark.parametrize("trains_head", [False, True])


@BETAS
def test_a_teacher_that_shares_the_trained_head_gets_no_gradient(beta: float):
    """As under teacher.path=self with every weight trained."""
    weight, states, other = drawn(V, H, seed=0), drawn(N, H, seed=1), drawn(N, H, seed=2)
    gradients = []
    for shared in (True, False):
        head = Head(weight.clone().requires_grad_(), None)
        teacher = TeacherStates(other, head if shared else Head(weight, None))
        distances(states, head, teacher, temperature=1.0, beta=beta).divergence.sum().backward()
        gradients.append(head.weight.grad)
    assert gradients[0] is not None
    assert torch.equal(gradients[0], gradients[1])  # pyright: ignore[reportArgumentType]


@TRAINS_HEAD
@BETAS
@pytest.mark.parametrize("of", ["states", "top"])
def test_tokens_that_neither_can_say_change_nothing(of: str, beta: float, trains_head: bool):
    """Heads that rule tokens out by a bias of -inf, against heads without these tokens."""
    weights, biases = [drawn(V, H, seed=i) for i in (0, 1)], [drawn(V, seed=i) for i in (2, 3)]
    left = torch.tensor([v for v in range(V) if v not in (2, 7)])
    results = []
    for whole in (True, False):
        heads = []
        for weight, bias in zip(weights, biases, strict=True):
            if whole:
                bias = bias.clone().index_fill_(0, torch.tensor([2, 7]), -torch.inf)
            heads.append(Head(weight if whole else weight[left], bias if whole else bias[left]))
        states, head = drawn(N, H, seed=4).requires_grad_(), heads[0]
        head.weight.requires_grad_(trains_head)
        teacher: Teaching = TeacherStates(drawn(N, H, seed=5), heads[1])
        if of == "top":
            teacher = top_k_of(teacher.states, heads[1], top_k=K, temperature=0.8)
        found = distances(states, head, teacher, temperature=0.8, beta=beta)
        found.divergence.sum().backward()
        of_weight = (head.weight.grad if not whole else head.weight.grad[left]) if trains_head else None  # pyright: ignore
        results.append([*found, states.grad, *([of_weight] if trains_head else [])])
        head.weight.requires_grad_(False)
        head.weight.grad = None
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@TRAINS_HEAD
@BETAS
def test_the_tail_of_a_confident_teacher(beta: float, trains_head: bool):
    """A tail of 3e-6 to 7e-10, of which 1 - sum(p) in float32 knows a digit or none."""
    scores = torch.tensor([[15.0, 12, 2, 1, 0], [22.0, 20, 1, 0, 0]])
    mine = torch.tensor([[12.0, 13, 0, 1, 2], [19.0, 20, 0, 0, 1]])
    eye = torch.eye(5)
    teacher = top_k_of(scores, Head(eye, None), top_k=2, temperature=1.0)
    states, wide = mine.clone().requires_grad_(), mine.double().requires_grad_()
    found = distances(states, Head(eye.requires_grad_(trains_head), None), teacher, temperature=1.0, beta=beta)
    found.divergence.sum().backward()

    def bins(logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return torch.cat([p[:, :2], p[:, 2:].sum(-1, keepdim=True)], -1).log()

    expected = jensen_shannon(bins(wide), bins(scores.double()), beta=beta)
    expected.sum().backward()
    torch.testing.assert_close(found.divergence, expected, atol=1e-7, rtol=1e-5, check_dtype=False)
    assert states.grad is not None
    assert wide.grad is not None
    of_tail, right = states.grad[:, 2:].double(), wide.grad[:, 2:]
    assert ((of_tail - right).norm(dim=1) < 1e-4 * right.norm(dim=1)).all()


@pytest.mark.parametrize("of", ["states", "top"])
def test_memory_does_not_grow_with_the_vocabulary(of: str):
    """Of 4,096 and 151,936 tokens: the same, where all logits of these tokens would take 37 times as much."""
    most = {}
    for vocabulary in (4_096, 151_936):
        states, head = drawn(1500, 8, seed=0).requires_grad_(), Head(drawn(vocabulary, 8, seed=1), None)
        teacher: Teaching = TeacherStates(drawn(1500, 8, seed=2), head)
        if of == "top":
            teacher = TeacherTopK(torch.arange(4).repeat(1500, 1), torch.full((1500, 5), -2.0))
        with LiveBytes() as memory:
            result = distances(states, head, teacher, temperature=1.0, beta=1.0)
            result.divergence.sum().backward()
        most[vocabulary] = memory.most
    assert most[151_936] < 1.6 * most[4_096]
