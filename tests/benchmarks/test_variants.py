"""Parts of the variants by hand: which keys a ragged row reads, what goes to the host, a limit of memory."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import ours
from benchmarks.gpu.attention import GatheredKeys
from benchmarks.gpu.decode import ragged_view
from benchmarks.gpu.offload import OffloadInputs
from tinyrl.models.packing import pack


def test_a_ragged_row_reads_the_start_its_prompt_and_itself():
    """Flat tokens: start 0 1; prompt 2 3 with responses 4 and 5 6; prompt 7 with its only response 8 9, one row."""
    gathered = GatheredKeys(pack([(2, [1, 2]), (1, [2])], start=2))
    rows = gathered.rows
    assert rows.cu_q.tolist() == [0, 2, 4, 5, 7, 10]
    assert rows.cu_k.tolist() == [0, 2, 6, 11, 17, 22]
    keys = [gathered.keys[a:b].tolist() for a, b in zip(rows.cu_k, rows.cu_k[1:], strict=False)]
    assert keys == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6], [0, 1, 7, 8, 9]]
    assert (rows.most_q, rows.most_k) == (3, 6)


def test_rows_of_the_cache_are_rows_of_one_ragged_tensor():
    """Two rows of the second layer of two, three kv heads, five columns: row r begins at r * 3 * 2 * 5."""
    entries = torch.arange(2 * 2 * 3 * 2 * 5 * 4).view(2, 2, 3, 2, 5, 4)
    keys, values = ragged_view(entries[1])
    for row in range(2):
        begin = row * 3 * 2 * 5
        assert torch.equal(keys[begin : begin + 5], entries[1, row, :, 0].transpose(0, 1))
        assert torch.equal(values[begin : begin + 5], entries[1, row, :, 1].transpose(0, 1))


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """A layer: x (N, 4) and a rotation (N, 1, 4)."""
    return (x.unsqueeze(1) * turn).squeeze(1).tanh()


def test_only_inputs_of_layers_go_to_the_host_and_buffers_are_used_again():
    x = torch.linspace(-1, 1, 12).view(3, 4)
    turn = torch.linspace(0.5, 1.5, 12).view(3, 1, 4)
    leaf = x.clone().requires_grad_()
    turned(turned(leaf, turn), turn).sum().backward()
    pool: list[Tensor] = []
    buffers: list[set[int]] = []
    for _ in range(2):
        ours_leaf = x.clone().requires_grad_()
        hooks = OffloadInputs(4, pool)
        with hooks:
            first = checkpoint(turned, ours_leaf * 1.0, turn, use_reentrant=False)
            total = checkpoint(turned, first, turn, use_reentrant=False).sum()
        total.backward()
        assert len(hooks.stored) == 2
        torch.testing.assert_close(ours_leaf.grad, leaf.grad)
        buffers.append({buffer.data_ptr() for buffer in pool})
    assert len(buffers[0]) == 2
    assert buffers[0] == buffers[1]


def test_a_limit_of_memory_is_set_and_reported(monkeypatch: pytest.MonkeyPatch):
    """Of 80 GB, 70 of them free; 24 allowed and 1 reserved: 23 are free, of 24."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (70_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 1_000_000_000)
    ours.limit_memory(24)
    assert shares == [0.3]
    assert torch.cuda.mem_get_info() == (23_000_000_000, 24_000_000_000)
