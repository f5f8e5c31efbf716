"""The layout of a micro-batch; that padding changes nothing; which rows go through the model together."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.building import CPU, full_roles
from tests.tiny_models import TinyModels
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.micro_batches import MicroBatches, PassMemory, SequenceLengths, Work
from tinyrl.models.states import last_states, response_states
from tinyrl.process.errors import OutOfRoom


def test_layout_of_two_rows_with_and_without_a_mask():
    prompts, responses = [[5, 6], [7]], [[8], [9, 10, 11]]
    batch = batch_of(examples(prompts, responses))
    assert batch.input_ids.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.state_index.tolist() == [1, 4, 5, 6]  # the position before each response token, rows of 4
    assert batch.targets.tolist() == [8, 9, 10, 11]
    assert batch.last_index is not None
    assert batch.last_index.tolist() == [2, 7]
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    rows = batch.to_rows(flat)
    assert rows.tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    (rows * torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    some = batch_of(examples(prompts, responses, [[True], [True, False, True]]), packed=False)
    assert torch.equal(some.input_ids, batch.input_ids)
    assert (some.state_index.tolist(), some.targets.tolist()) == ([1, 4, 6], [8, 9, 11])
    assert some.to_rows(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]]


class Adding(TorchDispatchMode):
    """Collects the operators that, on a CPU, add up in the order in which threads arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in str(func) and len(args) > 3 and args[3]:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_gradient_is_added_up_in_the_order_of_threads(tiny: TinyModels):
    """Rows of a group read the state of their prompt's last token, all of them."""
    roles = full_roles(tiny("llama"), reference=False)
    batch = roles.batch_of(examples([[5, 6]] * 4, [[8], [9, 10], [11], [12, 13]]), last_tokens=True)
    with torch.autograd.set_multithreading_enabled(False), Adding() as adding:
        states = response_states(roles.backbone("policy"), batch)
        (states.square().sum() + last_states(roles.backbone("policy"), batch).square().sum()).backward()
    assert adding.found == []


@pytest.mark.parametrize(("kind", "pad_is_eos"), [("gpt2", True), ("gemma2", False)])
def test_padded_log_probabilities_are_the_unpadded_ones(tiny: TinyModels, kind: str, pad_is_eos: bool):
    """Against the model's own logits of each row by itself; responses hold the pad token."""
    roles = full_roles(tiny(kind, pad_is_eos=pad_is_eos), reference=False)
    prompts = [[7, 8, 9], [0, 4], list(range(20, 40))]
    responses = [[11, 0, 12, 0], list(range(50, 62)), [0]]
    with torch.no_grad(), roles.acting("policy") as model:
        logprobs, entropies = roles.logprobs("policy", batch_of(examples(prompts, responses)), temperature=0.7)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / 0.7
            p = logits.exp() / logits.exp().sum(-1, keepdim=True)
            before = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            expected = [p[t, token].log().item() for t, token in zip(before, response, strict=True)]
            torch.testing.assert_close(logprobs[row, : len(response)], torch.tensor(expected), atol=2e-5, rtol=0)
            entropy = [-(p[t] * p[t].log()).sum().item() for t in before]
            torch.testing.assert_close(entropies[row, : len(response)], torch.tensor(entropy), atol=2e-5, rtol=0)
            assert logprobs[row, len(response) :].tolist() == [0.0] * (12 - len(response))


# ---- micro-batches ----

# Two groups of four after prompts of 10 and 6, and a row by itself.
GROUPS = [[1] * 10] * 4 + [[2] * 6] * 4 + [[3] * 2]
LENGTHS = [5, 1, 3, 9, 2, 2, 2, 2, 8]


def lengths(prompts: list[list[int]], responses: list[int], *, packed: bool = True) -> SequenceLengths:
    return SequenceLengths.of(examples(prompts, [[0] * n for n in responses]), packed=packed)


def test_tokens_of_rows_together():
    """A prompt counts once, and so do the 10 tokens behind which the prompts of two groups have 2 and 3, and a row 1"""
    packed, padded = (lengths(GROUPS, LENGTHS, packed=packed) for packed in (True, False))
    assert (packed.cost([0, 4, 5]), padded.cost([0, 4, 5])) == (10 + 5 + 6 + 4, 3 * 15)
    start = [0] * 10
    prompts = [[*start, 1, 1]] * 2 + [[*start, 2, 2, 2]] * 2 + [[*start, 3]]
    sizes = lengths(prompts, [4, 4, 5, 5, 6])
    assert [sizes.cost(rows) for rows in ([0], [0, 1], [0, 2], range(5))] == [16, 20, 10 + 6 + 8, 10 + 10 + 13 + 7]
    assert sizes.plan(range(5), max_tokens=33) == [[2, 3, 0, 1], [4]]


@pytest.mark.parametrize(
    ("max_tokens", "plan"),
    [
        (51, [[0, 1, 2, 3, 4, 5, 6, 7], [8]]),  # 28 + 14 = 42, and 10 more are too many
        (28, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),  # 14 + 10
        (27, [[4, 5, 6, 7, 8], [0, 1, 2], [3]]),  # 28 is over: 10 + 5 + 1 + 3 and 10 + 9; 14 + 10
        (14, [[3], [0], [1, 2], [4, 5, 6, 7], [8]]),  # 19 and 15 are over the budget and go alone; 10 + 1 + 3
    ],
)
def test_groups_share_their_prompt_while_they_fit_and_are_split_after_that(max_tokens: int, plan: list[list[int]]):
    assert lengths(GROUPS, LENGTHS).plan(range(9), max_tokens=max_tokens) == plan


def test_less_room_breaks_the_widest_until_every_row_is_alone():
    """The row of 90 is alone from the start and does not hide that the others can still be split."""
    sizes = lengths([[1], [1], [1], [2]], [5, 5, 5, 89])
    plan, seen = sizes.plan(range(4), max_tokens=1000), []
    while (budget := sizes.smaller(plan)) is not None:
        plan = sizes.plan(range(4), max_tokens=budget)
        seen.append((budget, plan))
    assert seen == [(53, [[3], [0, 1, 2]]), (8, [[3], [0], [1], [2]])]
    padded = lengths([[1]] * 3, [19, 19, 99], packed=False)
    assert padded.plan([0, 2, 1], max_tokens=40) == [[2], [0, 1]]  # longest first
    assert padded.smaller([[2], [0, 1]]) == 20


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=20),
    st.integers(1, 80),
    st.booleans(),
)
def test_plans_hold_every_row_once_within_the_budget(rows: list[tuple[int, int]], max_tokens: int, packed: bool):
    sizes = lengths([[g] * (3 * g + 1) for g, _ in rows], [n for _, n in rows], packed=packed)
    plan = sizes.plan(range(len(rows)), max_tokens=max_tokens)
    assert sorted(row for micro in plan for row in micro) == list(range(len(rows)))
    assert all(len(micro) == 1 or sizes.cost(micro) <= max_tokens for micro in plan)


def test_out_of_memory_starts_over_with_smaller_micro_batches():
    """Real allocations: more than two rows together ask for more memory than any machine has."""
    sizes, seen = lengths([[i] for i in range(5)], [9] * 5), []

    def run(rows: list[int]) -> None:
        seen.append(rows)
        if len(rows) > 2:
            torch.empty(1 << 50)

    micro_batches = MicroBatches(CPU, 100)
    micro_batches.run(Work(sizes, run), restart=seen.clear)
    assert micro_batches.tokens == 25  # half of the 50 that did not fit, for the passes after this one, too
    assert seen == [[0, 1], [2, 3], [4]]

    def never(rows: list[int]) -> None:
        torch.empty(1 << 50)

    with pytest.raises(OutOfRoom, match="one sequence of 10 tokens"):
        micro_batches.run(Work(sizes, never))


@pytest.mark.parametrize(("freed", "tokens"), [((True, False), 100), ((False, False), 25)])
def test_all_that_keep_memory_are_asked_before_the_budget_halves(freed: tuple[bool, bool], tokens: int) -> None:
    micro_batches = MicroBatches(CPU, 100)
    asked: list[int] = []

    def free(place: int) -> bool:
        asked.append(place)
        return freed[place]

    def run(rows: list[int]) -> None:
        if len(rows) > 2 and True not in (freed[place] for place in asked):
            raise torch.OutOfMemoryError("full")

    for place in range(2):
        micro_batches.when_full(partial(free, place))
    micro_batches.run(Work(lengths([[i] for i in range(5)], [9] * 5), run))
    assert asked[:2] == [0, 1]
    assert micro_batches.tokens == tokens


GPU = torch.device("cuda")


def test_a_measured_pass_on_a_gpu_sets_the_budget() -> None:
    """1,000 tokens took 2 MB, and 0.8 of 40 MB are for a micro-batch: 16,000 tokens."""
    gpu = MicroBatches(GPU)
    assert gpu.unmeasured
    gpu.fit([PassMemory(1000, 2_000_000)], free=40_000_000)
    assert (gpu.tokens, gpu.unmeasured) == (16_000, False)
    gpu.fit([PassMemory(1000, 2_000_000)], free=1_000_000)
    assert gpu.tokens == 1000  # it fitted; where it no longer does, memory running out halves it
    assert not MicroBatches(GPU, 4096).unmeasured


def test_the_pass_that_takes_the_most_memory_sets_the_budget_of_all() -> None:
    gpu = MicroBatches(GPU)
    gpu.fit([PassMemory(1000, 2_000_000), PassMemory(1000, 4_000_000)], free=40_000_000)
    assert gpu.tokens == 8_000


def test_a_restored_budget_is_not_measured_again() -> None:
    gpu = MicroBatches(GPU)
    gpu.restore(9_000)
    assert (gpu.tokens, gpu.unmeasured) == (9_000, False)


@pytest.mark.parametrize(
    ("device", "deterministic", "tokens", "unmeasured"),
    [(GPU, True, 3_533, False), (GPU, False, 4_096, True), (CPU, True, 1_024, False)],
)
def test_the_budget_of_a_deterministic_run_on_a_gpu_is_a_constant_by_the_vocabulary(
    device: torch.device, tokens: int, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool, unmeasured: bool
) -> None:
    """2^29 logits; of a small vocabulary no more than 32,768 tokens."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    made = MicroBatches(device, vocabulary=151_936)
    assert (made.tokens, made.unmeasured) == (tokens, unmeasured)
    if device == GPU and deterministic:
        assert MicroBatches(GPU, vocabulary=1_000).tokens == 32_768
