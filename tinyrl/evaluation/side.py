"""The models of a run itself, as sides of a comparison: base, start, teacher."""

from __future__ import annotations

from enum import StrEnum


class OwnSide(StrEnum):
    """A model of a run itself, where a target is asked for; the value is the word for it."""

    BASE = "base"  # below its adapters
    START = "start"  # before its training
    TEACHER = "teacher"

    @property
    def path(self) -> str:
        return self.value


def own_side(word: str) -> OwnSide | None:
    """Return the model of a run itself that a word means; None for a path, or the name of a model."""
    return OwnSide(word) if word in [*OwnSide] else None
