"""Packed attention in one call of torch's varlen_attn, whose formula stands in for the kernel: the path by blocks."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from benchmarks.gpu import flash
from tinyrl.models import varlen
from tinyrl.models.packing import Packing, attend, pack
from tinyrl.models.varlen import VarlenRows, attend_varlen

LAYOUTS = {
    "a single row": pack([(5, [])]),
    "a row of one token": pack([(1, [])]),
    "rows": pack([(3, [2]), (4, []), (1, [6])]),
    "a group": pack([(3, [2, 5, 1])]),
    "a group beside rows": pack([(4, []), (3, [2, 5]), (1, [1])]),
    "empty responses": pack([(3, [0, 2, 0, 4]), (2, [0, 0]), (2, [0, 3])]),
    "rows of one token": pack([(1, [1, 1, 1]), (1, [])]),
    "a start": pack([(3, [2, 5]), (4, [1]), (1, [0])], start=9),
    "a start and one-token prompts": pack([(1, [1, 1]), (1, [7])], start=8),
}
HEADS = [(4, 4), (4, 2), (6, 1)]  # of queries, and of keys


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Compute varlen_attn by its formula; the keywords of each call, which torch's own has to take."""
    own = inspect.signature(torch_varlen.varlen_attn)
    found: list[dict[str, Any]] = []

    def stand_in(*tensors: Any, **options: Any) -> Tensor:
        own.bind(*tensors, **options)
        found.append(options)
        return flash.varlen_attn(*tensors, **options)

    varlen.varlen_options()  # of torch's own
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    return found


def drawn(layout: Packing, heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    tokens = len(layout.slots)
    shapes = [(tokens, count, 8) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    weights = torch.arange(out.numel(), device=out.device).cos().view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), given)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_call_equals_the_path_by_blocks(name: str, heads: tuple[int, int], calls: list[dict[str, Any]]):
    layout = LAYOUTS[name]
    given = drawn(layout, heads)
    q, k, v = given
    for scaling in (None, 0.3):
        ours = results(attend_varlen(q, k, v, layout.varlen_rows, scaling), given)
        for found, expected in zip(ours, results(attend(q, k, v, layout, scaling), given), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [call.get("enable_gqa", False) for call in calls] == [heads[0] != heads[1]] * 2


def test_a_torch_whose_call_takes_no_gqa_gets_fewer_key_heads_unsaid(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """As 2.11 does."""
    monkeypatch.setattr(varlen, "varlen_options", lambda: frozenset({"scale", "window_size"}))
    q, k, v = drawn(LAYOUTS["rows"], (4, 2))
    with pytest.raises(AssertionError, match="enable_gqa"):
        attend_varlen(q, k, v, LAYOUTS["rows"].varlen_rows, None)
    assert [*calls[0]] == ["scale", "window_size"]


@pytest.mark.parametrize(
    ("options", "is_missing"),
    [({"scale", "window_size", "enable_gqa"}, False), ({"scale", "window_size"}, False), ({"is_causal"}, True)],
)
def test_a_torch_without_windows_cannot_attend_in_one_call(
    options: set[str], is_missing: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of 2.13, 2.11 and 2.10."""
    monkeypatch.setattr(varlen, "varlen_options", lambda: frozenset(options))
    assert (varlen.varlen_is_missing() is not None) == is_missing


@pytest.mark.parametrize(
    ("chosen", "dtype", "size", "taken"),
    [
        (True, torch.bfloat16, 8, 1),
        (True, torch.float16, 256, 1),
        (True, torch.float32, 8, 0),
        (True, torch.bfloat16, 12, 0),
        (True, torch.bfloat16, 264, 0),
        (False, torch.bfloat16, 8, 0),
    ],
)
def test_one_call_is_taken_where_it_was_chosen_and_a_kernel_is_there(
    chosen: bool, dtype: torch.dtype, size: int, taken: int, calls: list[dict[str, Any]]
):
    layout = replace(LAYOUTS["a group"], varlen=chosen)
    q, k, v = (torch.ones(len(layout.slots), 2, size, dtype=dtype) for _ in range(3))
    assert attend(q, k, v, layout, None).shape == q.shape
    assert len(calls) == taken


def test_gradients_of_a_shared_key_are_summed_in_float32(calls: list[dict[str, Any]]):
    """598 rows of one token read a prompt of one: half of each output is the prompt's value. A sum of halves in
    bfloat16 would stop at 128; it is 299, beside the prompt's own 1.
    """
    layout = pack([(1, [1] * 598)])
    q, k, v = (torch.zeros(599, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend_varlen(q, k, v, layout.varlen_rows, None).sum().backward()
    assert v.grad is not None
    assert v.grad[0].tolist() == [[300.0] * 8]
    assert v.grad[1:].unique().tolist() == [0.5]


def test_rows_without_shared_keys_are_not_copied():
    assert pack([(3, [2]), (4, [])]).varlen_rows.keys is None


def test_a_row_reads_the_start_its_prompt_and_itself():
    """Flat tokens: start 0 1; prompt 2 3 with responses 4 and 5 6; prompt 7 with its only response 8 9, one row."""
    layout = pack([(2, [1, 2]), (1, [2])], start=2)
    rows = VarlenRows.of(layout.rows, pieces=layout.pieces, device=torch.device("cpu"))
    assert rows.starts_q.tolist() == [0, 2, 4, 5, 7, 10]
    assert rows.starts_k.tolist() == [0, 2, 6, 11, 17, 22]
    assert rows.keys is not None
    keys = [rows.keys[a:b].tolist() for a, b in zip(rows.starts_k, rows.starts_k[1:], strict=False)]
    assert keys == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6], [0, 1, 7, 8, 9]]
    assert (rows.most_q, rows.most_k) == (3, 6)
