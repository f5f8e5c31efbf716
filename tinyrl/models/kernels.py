"""Faster paths of a pass on a GPU, taken only where a run's trial has chosen them (training/kernel_trial.py)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from tinyrl.models.varlen import varlen_is_missing

KernelName = Literal["varlen_attention", "one_pass_logits"]
TITLES: dict[KernelName, str] = {
    "varlen_attention": "packed attention in one call",
    "one_pass_logits": "log-probabilities by one pass over the logits",
}  # in the order in which they are tried


@dataclass(frozen=True)
class Kernels:
    """Which paths are taken: varlen_attention (varlen.py), one_pass_logits (logprobs.py)."""

    varlen_attention: bool = False
    one_pass_logits: bool = False

    @property
    def names(self) -> list[KernelName]:
        """List what is taken."""
        return [name for name in TITLES if getattr(self, name)]

    def describe(self) -> str:
        """Return what is taken, for people."""
        return " and ".join(TITLES[name] for name in self.names) or "none of the faster paths"


def missing(name: KernelName) -> str | None:
    """Return why a path cannot be computed here; None where it can."""
    if name == "varlen_attention":
        return varlen_is_missing()
    return None if importlib.util.find_spec("triton") else "triton is not installed"
