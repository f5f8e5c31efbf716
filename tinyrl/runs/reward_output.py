"""reward_output.log of a run: the end of what its reward functions printed. It is read by people and by nothing here.

A resume goes on at its end, after a line that says so: unlike the records it is not cut, for what was printed before a
crash may be the reason for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

NAME = "reward_output.log"
MOST_BYTES = 1 << 20  # of which the later half is kept when there is more
RESUMED = "--- resumed ---\n"
CUT = "--- the beginning was left out ---\n"


class RewardOutput:
    """The file of one run. When the disk refuses (full, gone), `warn` is called once and the run goes on without it."""

    def __init__(self, run: Path, *, warn: Callable[[str], None]) -> None:
        self.path = run / NAME
        self._warn = warn
        self._opened = self._refused = False

    def append(self, text: str) -> None:
        """Add whole lines."""
        try:
            there = self.path.stat().st_size if self.path.exists() else 0
            if not self._opened and there:
                text = RESUMED + text
            self._opened = True
            data = text.encode("utf-8", errors="replace")
            if there + len(data) > MOST_BYTES:
                self._rewrite(data)
            else:
                with self.path.open("ab") as file:
                    file.write(data)
        except OSError as error:
            if not self._refused:
                self._warn(f"warning: what the reward prints cannot be written to {self.path}: {error.strerror}")
            self._refused = True

    def _rewrite(self, data: bytes) -> None:
        old = self.path.read_bytes() if self.path.exists() else b""
        kept = (old + data)[-MOST_BYTES // 2 :].partition(b"\n")[2]
        temporary = self.path.with_suffix(".writing")
        temporary.write_bytes(CUT.encode() + kept)
        os.replace(temporary, self.path)
