"""Seconds from the command to the first sampled token of the embedded default, beside the cost of the imports alone.

    python -m tests.benchmarks.start_up [grpo|ppo] [--repeats 5]

Fresh processes in alternation: one imports torch, transformers and peft and ends; one runs `tinyrl train` and ends
when the first completion's first token has been drawn.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

IMPORTS = "import os, torch, transformers, peft; os._exit(0)"  # neither side pays for taking Python down
FIRST_TOKEN = """
import os, sys
sys.argv = ["tinyrl", "train", {method!r}, "--output-dir", {out!r}]
from tinyrl.generation.slots import Places
enter = Places.enter
def first(self, *args, **named):
    enter(self, *args, **named)
    os._exit(0 if int(self.count[:self.live].min()) == 1 else 1)
Places.enter = first
from tinyrl.cli.commands import main
main()
"""


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
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
