"""Heads as their models apply them; chunked log-probabilities and distances against plain formulas in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.live_bytes import LiveBytes
from tests.models.passes_over import PassesOver
from tinyrl import models
from tinyrl.algorithms.distillation import jensen_shannon, with_tail
from tinyrl.models import device as devices
from tinyrl.models.logprobs import (
    Head,
    TeacherStates,
    Teaching,
    distances,
    token_logprobs,
    top_k_of,
)

N, V, H, K = 17, 11, 5, 3
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
FROZEN_AND_TRAINED = pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHUNK_ELEMENTS", {"cpu": 4 * V})


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(*, trains: bool, bias: bool = True, scale: float = 1.3, softcap: float | None = None) -> tuple[Tensor, Head]:
    """States (N, H) and a head, whose tensors require gradients as asked."""
    offset = drawn(V, seed=2).requires_grad_(trains) if bias else None
    return drawn(N, H, seed=1).requires_grad_(), Head(
        drawn(V, H, seed=0).requires_grad_(trains), offset, scale, softcap
    )


def leaves(states: Tensor, head: Head) -> list[Tensor]:
    return [x for x in (states, head.weight, head.bias) if x is not None and x.requires_grad]


def plain(states: Tensor, head: Head, temperature: float) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities (N, V) in float64 from softmax's definition, and its own copies of the leaves."""
    copies = {id(x): x.detach().double().requires_grad_() for x in leaves(states, head)}
    x, weight, bias = (None if t is None else copies.get(id(t), t.double()) for t in (states, head.weight, head.bias))
    assert x is not None
    assert weight is not None
    z = (x @ weight.T + (0 if bias is None else bias)) * head.scale
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    p = (z / temperature).exp()
    return (p / p.sum(-1, keepdim=True)).log(), [copies[id(t)] for t in leaves(states, head)]


# ---- against the plain formulas ----


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("trains", "bias", "softcap", "entropy_grad"),
    [(False, False, None, False), (False, True, 1.5, True), (True, True, None, True), (True, False, 1.5, False)],
)
def test_log_probabilities_and_entropy(trains: bool, bias: bool, softcap: float | None, entropy_grad: bool):
    states, head = case(trains=trains, bias=bias, softcap=softcap)
    targets, weights = torch.arange(N) % V, torch.linspace(-1, 2, N)
    ours = token_logprobs(states, head, targets=targets, temperature=0.7, entropy_grad=entropy_grad)
    log_p, copies = plain(states, head, 0.7)
    theirs = log_p[torch.arange(N), targets], -(log_p.exp() * log_p).sum(-1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert ours[1].requires_grad == entropy_grad
    factor = 0.5 if entropy_grad else 0.0
    (weights @ ours[0] + factor * (weights.flip(0) @ ours[1])).backward()
    (weights.double() @ theirs[0] + factor * (weights.double().flip(0) @ theirs[1])).backward()
    assert len(copies) == 1 + trains * (1 + bias)
    for leaf, copy in zip(leaves(states, head), copies, strict=True):
        torch.testing.assert_close(leaf.grad, copy.grad, **CLOSE)


# ---- one pass over the logits, whose kernels are computed by their formulas (their own numbers: tests/benchmarks) ----


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of logits of each call."""
    calls: list[int] = []

    def log_probabilities(z: Tensor, targets: Tensor, *, temperature: float) -> Any:
        calls.append(len(z))
        log_p = (z / temperature).log_softmax(-1)
        return SimpleNamespace(
            logprobs=log_p.gather(1, targets.unsqueeze(1)).squeeze(1),
            entropies=-(log_p.exp() * log_p).sum(-1),
            log_totals=(z / temperature).logsumexp(-1),
        )

    def gradient(
        z: Tensor, targets: Tensor, log_totals: Tensor, *, temperature: float, slope: float, dtype: torch.dtype
    ) -> Tensor:
        p = (z / temperature - log_totals.unsqueeze(1)).exp()
        return (slope * (torch.nn.functional.one_hot(targets, V) - p)).to(dtype)

    kernels = SimpleNamespace(log_probabilities=log_probabilities, gradient=gradient)
    monkeypatch.setattr(models, "logit_kernels", kernels, raising=False)
    return calls


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tokens", [N, 0])
def test_one_pass_over_the_logits(tokens: int, kernel_calls: list[int]):
    states, head = case(trains=False, bias=False)
    targets = torch.arange(tokens) % V
    results = []
    for one_pass in (True, False):
        found = token_logprobs(states[:tokens], head, targets=targets, temperature=0.7, one_pass=one_pass)
        assert [x.requires_grad for x in found] == [True, False]
        results.append([*found, *torch.autograd.grad(found[0] @ torch.linspace(-1, 2, tokens), states)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert kernel_calls == ([4, 4, 4, 4, 1] if tokens else [])


@pytest.mark.parametrize(
    ("trains", "bias", "softcap", "entropy_grad"),
    [(True, False, None, False), (False, True, None, False), (False, False, 1.5, False), (False, False, None, True)],
)
def test_one_pass_is_left_out_where_its_kernels_do_not_compute_the_head(
    trains: bool, bias: bool, softcap: float | None, kernel_calls: list[int], *, entropy_grad: bool
):
    states, head = case(trains=trains, bias=bias, softcap=softcap)
    how: dict[str, Any] = {"targets": torch.arange(N) % V, "temperature": 0.7, "entropy_grad": entropy_grad}
    ours = token_logprobs(states, head, **how, one_pass=True)
    assert kernel_calls == []
    for found, expected in zip(ours, token_logprobs(states, head, **how), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("scale", "softcap", "temperature", "beta", "trains"),
    [(0.5, None, 0.7, 0.0, True), (1.0, 2.0, 1.5, 0.4, False), (2.0, 3.0, 1.0, 1.0, True)],
)
@pytest.mark.parametrize("of", ["states", "top"])
def test_distances(of: str, scale: float, softcap: float | None, temperature: float, beta: float, trains: bool):
    states, head = case(trains=trains, scale=scale, softcap=softcap)
    teacher: Teaching = TeacherStates(drawn(N, 7, seed=3), Head(drawn(V, 7, seed=4), None))
    log_q = (teacher.head.logits(teacher.states) / temperature).double().log_softmax(-1)
    log_p, copies = plain(states, head, temperature)
    expected = jensen_shannon(log_p, log_q, beta=beta)
    if of == "top":
        teacher = top_k_of(teacher.states, teacher.head, top_k=K, temperature=temperature)
        ids = log_q.topk(K).indices
        assert torch.equal(teacher.ids, ids.int())
        expected = jensen_shannon(with_tail(log_p.gather(1, ids)), with_tail(log_q.gather(1, ids)), beta=beta)
    found = distances(states, head, teacher, temperature=temperature, beta=beta)
    weights = drawn(N, seed=5)
    (found.divergence * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.divergence, expected, **CLOSE)
    torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(1), **CLOSE)
    for leaf, copy in zip(leaves(states, head), copies, strict=True):
        torch.testing.assert_close(leaf.grad, copy.grad, **CLOSE)
    assert [x.requires_grad for x in found] == [True, False]


def test_a_teacher_that_shares_the_trained_head_gets_no_gradient():
    """As under teacher.path=self with every weight trained."""
    gradients = []
    for shared in (True, False):
        states, head = case(trains=True, bias=False)
        own = head if shared else Head(head.weight.detach(), None, head.scale)
        teacher = TeacherStates(drawn(N, H, seed=6), own)
        distances(states, head, teacher, temperature=1.0, beta=0.4).divergence.sum().backward()
        gradients.append(head.weight.grad)
    assert torch.equal(*gradients)


# ---- numbers at their limits ----


@FROZEN_AND_TRAINED
@pytest.mark.parametrize("of", ["logprobs", "states", "top"])
def test_tokens_that_never_come_change_nothing(of: str, trains: bool):
    """Heads that rule tokens out by a bias of -inf, against heads without these tokens."""
    left, results = torch.tensor([v for v in range(V) if v not in (2, 7)]), []
    for rows in (torch.arange(V), left):
        whole = len(rows) == V
        heads = [Head(drawn(V, H, seed=seed)[rows], drawn(V, seed=seed + 2)[rows]) for seed in (0, 1)]
        for head in heads if whole else ():
            head.bias[[2, 7]] = -torch.inf  # pyright: ignore[reportOptionalSubscript]
        states, head = drawn(N, H, seed=4).requires_grad_(), heads[0]
        head.weight.requires_grad_(trains)
        if of == "logprobs":
            targets = torch.arange(N) % len(left)
            targets = left[targets] if whole else targets
            found = token_logprobs(states, head, targets=targets, temperature=0.7, entropy_grad=True)
            (found[0] + 0.5 * found[1]).sum().backward()
        else:
            teacher: Teaching = TeacherStates(drawn(N, H, seed=5), heads[1])
            teacher = top_k_of(teacher.states, heads[1], top_k=K, temperature=0.8) if of == "top" else teacher
            found = distances(states, head, teacher, temperature=0.8, beta=0.4)
            found.divergence.sum().backward()
        gradient = head.weight.grad[left] if whole and head.weight.grad is not None else head.weight.grad
        results.append([*found, states.grad, gradient if trains else None])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_probabilities_that_underflow_have_a_finite_entropy_and_gradient():
    states = torch.tensor([[1.0]], requires_grad=True)
    head = Head(torch.tensor([[0.0], [-500.0], [500.0]]), None)
    logprobs, entropies = token_logprobs(states, head, targets=torch.tensor([2]), temperature=1.0, entropy_grad=True)
    (logprobs + entropies).sum().backward()
    assert logprobs.tolist() == entropies.tolist() == [0.0]
    assert states.grad is not None
    assert states.grad.tolist() == [[0.0]]


@FROZEN_AND_TRAINED
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_tail_of_a_confident_teacher(beta: float, trains: bool):
    """A tail of 3e-6 to 7e-10, of which 1 - sum(p) in float32 knows a digit or none."""
    scores = torch.tensor([[15.0, 12, 2, 1, 0], [22.0, 20, 1, 0, 0]])
    states = torch.tensor([[12.0, 13, 0, 1, 2], [19.0, 20, 0, 0, 1]]).requires_grad_()
    wide, eye = states.detach().double().requires_grad_(), torch.eye(5)
    teacher = top_k_of(scores, Head(eye, None), top_k=2, temperature=1.0)
    found = distances(states, Head(eye.requires_grad_(trains), None), teacher, temperature=1.0, beta=beta)
    found.divergence.sum().backward()

    def bins(logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return torch.cat([p[:, :2], p[:, 2:].sum(-1, keepdim=True)], -1).log()

    expected = jensen_shannon(bins(wide), bins(scores.double()), beta=beta)
    (right,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(found.divergence, expected, atol=1e-7, rtol=1e-5, check_dtype=False)
    assert states.grad is not None
    assert ((states.grad - right)[:, 2:].norm(dim=1) < 1e-4 * right[:, 2:].norm(dim=1)).all()


def test_logits_of_bfloat16_operands_are_not_rounded() -> None:
    """Against the product in float64; a bfloat16 logit of that size is off by 0.03 on average."""
    states, weight, bias = drawn(64, 32, seed=0).bfloat16(), (drawn(500, 32, seed=1) * 2).bfloat16(), drawn(500, seed=2)
    exact = states.double() @ weight.double().t() + bias.bfloat16().double()
    assert float((Head(weight, bias.bfloat16()).logits(states).double() - exact).abs().max()) < 1e-4


def test_a_trained_head_under_autocast_keeps_logits_and_has_the_gradient_of_the_plain_product() -> None:
    states, weight = (drawn(n, 16, seed=n).bfloat16().float().requires_grad_() for n in (6, 40))
    log_p = (states @ weight.t()).log_softmax(-1)[torch.arange(6), torch.arange(6)]
    expected = torch.autograd.grad(log_p.sum(), [states, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = token_logprobs(states, Head(weight, None), targets=torch.arange(6), temperature=1.0)
    torch.testing.assert_close(ours, log_p, rtol=0, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(ours.sum(), [states, weight]), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-6)


# ---- memory ----


@FROZEN_AND_TRAINED
def test_no_logits_outlive_their_chunk(monkeypatch: pytest.MonkeyPatch, trains: bool):
    """Chunks of 32 kB, where all logits take 800: a few at once, and none between the passes."""
    monkeypatch.setattr(devices, "CHUNK_ELEMENTS", {"cpu": 8 * 1000})
    states = torch.randn(200, 4, requires_grad=True)
    head = Head(torch.randn(1000, 4).requires_grad_(trains), None, 1.0, 3.0)
    targets = torch.zeros(200, dtype=torch.long)
    with LiveBytes() as live:
        logprobs, entropies = token_logprobs(states, head, targets=targets, temperature=1.0, entropy_grad=True)
        between = live.now
        (logprobs + entropies).sum().backward()
    assert between < 32_000
    assert 32_000 < live.most < 400_000


def test_memory_of_distances_does_not_grow_with_the_vocabulary():
    """Of 4,096 and 16,384 tokens: the same, where all logits of these tokens would take 4 times as much."""
    most = []
    for vocabulary in (4_096, 16_384):
        states, head = drawn(1500, 8, seed=0).requires_grad_(), Head(drawn(vocabulary, 8, seed=1), None)
        with LiveBytes() as memory:
            teacher = TeacherStates(drawn(1500, 8, seed=2), head)
            distances(states, head, teacher, temperature=1.0, beta=1.0).divergence.sum().backward()
        most.append(memory.most)
    assert most[1] < 1.6 * most[0]


# ---- passes over the logits ----


@pytest.mark.parametrize(("trains", "reads", "writes"), [(False, 7, 4), (True, 9, 5)], ids=["scoring", "update"])
def test_matrices_of_a_chunks_logits_are_read_and_written_so_often(trains: bool, reads: int, writes: int):
    """With z the logits of a chunk and e its exponential, scoring reads z for the maximum, the difference, the target
    and the mean, and e for the exponential in place, the sum and the mean (z e and its sum: three reads); it writes the
    product, the difference, the exponential and z e. The gradient scales e in place, changes one entry a row, and is
    read by its product with the head: two reads and a write more.
    """
    states, head = drawn(6, H, seed=1).requires_grad_(trains), Head(drawn(V, H, seed=0), None)
    with PassesOver(6 * V) as passes:
        token_logprobs(states, head, targets=torch.arange(6), temperature=1.0)
    assert (passes.reads, passes.writes) == (reads, writes)
