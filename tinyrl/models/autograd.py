"""What torch.autograd.Function leaves untyped."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd import function

Gradients = Tensor | None | tuple[Tensor | None, ...]  # of each argument of `apply`; None: it has none


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Refuse second derivatives through a backward, as torch's decorator does. The result overrides
    `Function.backward`, whose signature has any number of gradients where a subclass has its own.
    """
    return function.once_differentiable(backward)
