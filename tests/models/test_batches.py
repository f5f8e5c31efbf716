"""The layout of a micro-batch, and that padding changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import TinyModels
from tinyrl.models.batches import RowSizes, backbone_of, last_states, make_batch, response_states
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.roles import Roles


def test_layout_of_two_rows():
    batch = make_batch([[5, 6], [7]], [[8], [9, 10, 11]])
    assert batch.input_ids.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.row.tolist() == [0, 1, 1, 1]
    assert batch.column.tolist() == [0, 0, 1, 2]
    assert batch.state_index.tolist() == [1, 4, 5, 6]  # the position before each response token, rows of 4
    assert batch.targets.tolist() == [8, 9, 10, 11]
    assert batch.last_index is not None
    assert batch.last_index.tolist() == [2, 7]
    assert batch.num_columns == 3


def test_tokens_outside_of_a_mask_are_read_and_not_listed():
    masks = [[True], [True, False, True]]
    batch = make_batch([[5, 6], [7]], [[8], [9, 10, 11]], masks)
    assert batch.input_ids.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert (batch.row.tolist(), batch.column.tolist()) == ([0, 1, 1], [0, 0, 2])
    assert (batch.state_index.tolist(), batch.targets.tolist()) == ([1, 4, 6], [8, 9, 11])
    assert batch.to_rows(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]]
    with pytest.raises(AssertionError, match="a mask for each response token"):
        make_batch([[5]], [[8, 9]], [[True]])


def test_flat_values_go_back_to_their_rows_with_their_gradient():
    batch = make_batch([[5, 6], [7]], [[8], [9, 10, 11]])
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    rows = batch.to_rows(flat)
    assert rows.tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    (rows * torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


class Adding(TorchDispatchMode):
    """Keeps the names of operators that, on a CPU, add up in the order in which threads arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in str(func) and len(args) > 3 and args[3]:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_no_gradient_is_added_up_in_the_order_of_threads(tiny: TinyModels, packed: bool):
    """Rows of a group read the state of their prompt's last token, all of them."""
    roles = Roles(load_causal_lm(str(tiny("llama")), dtype=torch.float32), device=torch.device("cpu"), reference=False)
    roles.packs = packed
    batch = roles.batch([[5, 6]] * 4, [[8], [9, 10], [11], [12, 13]], last_tokens=True)
    with torch.autograd.set_multithreading_enabled(False), Adding() as adding:
        states = response_states(roles.backbone("policy"), batch)
        (states.square().sum() + last_states(roles.backbone("policy"), batch).square().sum()).backward()
    assert adding.found == []


def test_micro_batches_by_padded_tokens_longest_first():
    sizes = RowSizes.alone([3, 10, 4, 4, 99], packed=False)
    assert sizes.plan(range(4), max_tokens=12) == [[1], [2, 3, 0]]
    assert sizes.plan([0, 4, 2], max_tokens=8) == [
        [4],
        [2, 0],
    ]  # a row over the budget goes alone
    assert sizes.plan([], max_tokens=8) == []


@pytest.mark.parametrize(("kind", "pad_is_eos"), [("gpt2", True), ("gemma2", False)])
def test_padded_log_probabilities_are_the_unpadded_ones(tiny: TinyModels, kind: str, pad_is_eos: bool):
    """Against the model's own logits of each row by itself; responses hold the pad token."""
    model = load_causal_lm(str(tiny(kind, pad_is_eos=pad_is_eos)), dtype=torch.float32)
    roles = Roles(model, device=torch.device("cpu"), reference=False)
    prompts = [[7, 8, 9], [0, 4], list(range(20, 40))]
    responses = [[11, 0, 12, 0], list(range(50, 62)), [0]]
    with torch.no_grad(), roles.acting("policy"):
        logprobs, entropies = roles.logprobs("policy", make_batch(prompts, responses), temperature=0.7)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / 0.7
            p = logits.exp() / logits.exp().sum(-1, keepdim=True)
            before = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            expected = [p[t, token].log().item() for t, token in zip(before, response, strict=True)]
            torch.testing.assert_close(logprobs[row, : len(response)], torch.tensor(expected), atol=2e-5, rtol=0)
            entropy = [-(p[t] * p[t].log()).sum().item() for t in before]
            torch.testing.assert_close(entropies[row, : len(response)], torch.tensor(entropy), atol=2e-5, rtol=0)
            assert logprobs[row, len(response) :].tolist() == [0.0] * (12 - len(response))


def test_a_model_without_a_separate_decoder_is_refused():
    with pytest.raises(ValueError, match="Linear keeps no separate decoder"):
        backbone_of(nn.Linear(2, 2))
