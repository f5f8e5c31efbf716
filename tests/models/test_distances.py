"""Chunked distances from hidden states against the plain formula in float64: numbers, gradients, memory."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinyrl.algorithms.distillation import jensen_shannon, with_tail
from tinyrl.models import logprobs as chunks
from tinyrl.models.distances import TeacherStates, TeacherTopK, Teaching, distances
from tinyrl.models.logprobs import Head

N, V, H, TEACHER_H, K = 17, 11, 5, 7, 3


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 4 * V})


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("scale", "softcap", "temperature"), [(1.0, None, 1.0), (0.5, None, 0.7), (1.0, 2.0, 1.5), (2.0, 3.0, 1.0)]
)
@pytest.mark.parametrize("of", ["states", "top"])
def test_against_the_plain_formula(
    of: str, scale: float, softcap: float | None, temperature: float, beta: float, trains_head: bool
):
    weight, states = drawn(V, H, seed=0), drawn(N, H, seed=1).requires_grad_()
    head = Head(weight.requires_grad_(trains_head), drawn(V, seed=2), scale, softcap)
    theirs = TeacherStates(drawn(N, TEACHER_H, seed=3), Head(drawn(V, TEACHER_H, seed=4), None))
    targets = torch.arange(N) % V
    log_q = (theirs.head.logits(theirs.states) / temperature).double().log_softmax(-1)
    teacher: Teaching = theirs
    if of == "top":
        top = log_q.topk(K)
        teacher = TeacherTopK(top.indices.int(), top.values.float())
    weights = drawn(N, seed=5)

    result = distances(states, head, teacher, targets=targets, temperature=temperature, beta=beta)
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
    torch.testing.assert_close(result.logprobs, log_p.gather(1, targets.unsqueeze(1)).squeeze(1), **close)
    torch.testing.assert_close(result.entropy, -(log_p.exp() * log_p).sum(1), **close)
    torch.testing.assert_close(states.grad, wide.grad, **close)
    if trains_head:
        torch.testing.assert_close(weight.grad, wide_weight.grad, **close)
    assert [x.requires_grad for x in result] == [True, False, False]


class LargestAlive(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor._base is None and func.overloadpacket.__name__[-1] != "_":
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._freed, size)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("of", ["states", "top"])
def test_memory_does_not_grow_with_the_vocabulary(of: str):
    """Of 4,096 and 151,936 tokens: the same, where all logits of these tokens would take 37 times as much."""
    most = {}
    for vocabulary in (4_096, 151_936):
        states, head = drawn(1500, 8, seed=0).requires_grad_(), Head(drawn(vocabulary, 8, seed=1), None)
        teacher: Teaching = TeacherStates(drawn(1500, 8, seed=2), head)
        if of == "top":
            teacher = TeacherTopK(torch.arange(4).repeat(1500, 1), torch.full((1500, 4), -2.0))
        with LargestAlive() as memory:
            result = distances(
                states, head, teacher, targets=torch.zeros(1500, dtype=torch.long), temperature=1.0, beta=1.0
            )
            result.divergence.sum().backward()
        most[vocabulary] = memory.most
    assert most[151_936] < 1.6 * most[4_096]
