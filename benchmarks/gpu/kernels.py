"""A Triton kernel that reads the logits of a draw once. On a CPU it runs in Triton's interpreter, which
TRITON_INTERPRET=1 chooses before triton is first imported (runs.py).
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tinyrl.models.logit_kernels import width_for

BLOCK = 1024  # logits in which the second level looks


@triton.jit
def _block_sums(z, maxima, sums, vocabulary, blocks, stride, width: tl.constexpr):
    """The maximum of a block of a row, and the sum of its exponentials above that."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * width + tl.arange(0, width)
    x = tl.load(z + row * stride + at, mask=at < vocabulary, other=-float("inf"))
    highest = tl.max(x, 0)
    tl.store(maxima + row * blocks + block, highest)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(x - highest), 0))


def block_sums(z: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return maxima and sums of exponentials above them, (R, blocks) each, of blocks of logits (R, V); and the width of
    a block.
    """
    rows, vocabulary = z.shape
    width = width_for(vocabulary, BLOCK)
    blocks = triton.cdiv(vocabulary, width)
    maxima, sums = z.new_empty(2, rows, blocks).unbind()
    _block_sums[(rows, blocks)](z, maxima, sums, vocabulary, blocks, z.stride(0), width=width)  # pyright: ignore[reportIndexIssue]
    return maxima, sums, width
