"""Seconds from the command to the first sampled token of the embedded default, beside the cost of the imports alone.

    python -m benchmarks.start_up [grpo|ppo] [--repeats 5]

Fresh processes in alternation: one imports torch, transformers and peft and ends; one runs `tinyrl train` and ends
when the first completion's first token has been drawn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.processes import ROOT

IMPORTS = "import os, torch, transformers, peft; os._exit(0)"  # neither side pays for taking Python down
FIRST_TOKEN = "from benchmarks.start_up import end_at_first_token; end_at_first_token({method!r}, {out!r})"


def end_at_first_token(method: str, out: str) -> None:
    """Run the command in this process, and end it (0) once every row of a first batch has one token."""
    sys.argv = ["tinyrl", "train", method, "--output-dir", out]
    from tinyrl.generation.slots import Slots

    enter = Slots.enter

    def first(self: Slots, *args: Any, **named: Any) -> None:
        enter(self, *args, **named)
        os._exit(0 if int(self.count[: self.live].min()) == 1 else 1)

    Slots.enter = first
    from tinyrl.cli.commands import main as command

    command()


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pairs = []
    for _ in range(options.repeats + 1):
        with tempfile.TemporaryDirectory() as out:
            pairs.append((seconds(IMPORTS), seconds(FIRST_TOKEN.format(method=options.method, out=out))))
    pairs = pairs[1:]  # the first pair warms the disk's cache up
    imports, first = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    over = statistics.median(f - i for i, f in pairs)
    print(f"imports {imports:.2f} s, first token {first:.2f} s; over the imports, median {over:.2f} s")


if __name__ == "__main__":
    main()
