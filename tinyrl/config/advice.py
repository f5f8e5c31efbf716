"""Advised settings: each is tried before it is printed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from tinyrl.config.derive import derive_over
from tinyrl.config.schema import Config


def working_advice(
    config: Config, advices: Iterable[Sequence[str]], works: Callable[[Config], bool] = lambda changed: True
) -> str | None:
    """Return the first of some advices that works, as one types it; None where none does. An advice is overrides, which
    the other settings must allow; works: whether what was wrong is right under the changed ones.
    """
    for overrides in advices:
        try:
            changed = derive_over(config, overrides)
        except ValueError:
            continue
        if works(changed):
            return shlex.join(overrides)
    return None


def longer_responses(config: Config, lengths: Iterable[int], *, room: int) -> str | None:
    """Return the setting for responses of the first of these lengths that there is room for; None for none of them.
    room: tokens that a response may have behind the longest prompt.
    """
    advices = [[f"generation.max_new_tokens={length}"] for length in lengths]
    return working_advice(config, advices, lambda changed: changed.generation.max_new_tokens <= room)
