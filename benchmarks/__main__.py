"""Speed, memory and learning beside TRL, and against the arithmetic floor. Run by hand; tables go into RESULTS.md.

    python -m benchmarks grpo     --peer-python TRL_VENV/bin/python [--sizes s m v] [--pairs 5] [--steps 6]
    python -m benchmarks ppo      --peer-python TRL_1_12_VENV/bin/python [--sizes s]
    python -m benchmarks text     --peer-python TRL_VENV/bin/python [--sizes s] [--micro-batches 16]
    python -m benchmarks learning --peer-python TRL_VENV/bin/python [--pairs 5] [--steps 60]
    python -m benchmarks real     --peer-python TRL_VENV/bin/python --ppo-peer-python TRL_1_12_VENV/bin/python
    python -m benchmarks long     --peer-python TRL_VENV/bin/python --real-model DIR [--lengths 2048 4096 8192]
    python -m benchmarks gpu      [--minutes 10] [--shapes 0.5b 1.5b 3b 7b] [--list] [--only WORDS]

TRL_VENV: `pip install torch==2.13.0 trl==1.16.0 peft` in an environment of its own; TRL_1_12_VENV has trl==1.12.0, the
last release with PPO. Both sides run in processes of their own, in alternation, with the same number of threads; the
first step of each process is warm-up. `--sizes xs --pairs 1 --steps 2` tries a command out in about a minute.
`gpu` (docs/benchmarks.md) measures what it can within --minutes, cell by cell, into cells.jsonl and table.md; run
again, it goes on where it was. `gpu --shapes tiny` runs all of it on a CPU in minutes, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import gpu, grpo, learning, long, ppo, processes, real, text
from benchmarks.work import REAL_MODEL, SIZES


@dataclass(frozen=True)
class Command:
    """What runs, and its defaults."""

    main: Callable[[argparse.Namespace], None]
    sizes: tuple[str, ...] = ()
    needs_a_peer: bool = True
    steps: int = 6
    threads: int = 2


COMMANDS = {
    "grpo": Command(grpo.main, ("s", "m", "v")),
    "ppo": Command(ppo.main, ("s",)),
    "text": Command(text.main, ("s",)),
    "learning": Command(learning.main, steps=60, threads=1),
    "real": Command(real.main, threads=1),
    "long": Command(long.main, ("real",), steps=2, threads=1),
    "gpu": Command(gpu.main, needs_a_peer=False),
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--peer-python", help="Python of a virtual environment with TRL")
    parser.add_argument("--ppo-peer-python", help="real, gpu: Python of one with TRL 1.12, the last release with PPO")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--pairs", type=int, default=5, help="processes of each side; learning: seeds, at most 10")
    parser.add_argument("--steps", type=int, help="steps (or rollouts) of a process (6; learning 60)")
    parser.add_argument("--threads", type=int, help="of each side (2; learning and real 1)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="grpo, text: the peer's")
    parser.add_argument("--critics", nargs="+", default=["separate", "adapter", "shared"], help="ppo: ours")
    parser.add_argument("--methods", nargs="+", default=real.METHODS, choices=real.METHODS, help="real")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="long: tokens of a text")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=long.DTYPES, help="long")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides for tinyrl")
    parser.add_argument("--force", action="store_true", help="show ratios though the sides did not do the same work")
    parser.add_argument("--out", type=Path, help="folder to keep models and results in (default: a temporary one)")
    parser.add_argument("--minutes", type=float, default=10.0, help="gpu: of this call")
    parser.add_argument("--shapes", nargs="+", default=gpu.NAMES, choices=[*gpu.NAMES, "tiny"], help="gpu: models")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="gpu: cells with these in their name")
    parser.add_argument("--list", action="store_true", help="gpu: the cells that are left, in their order")
    model = os.environ.get(REAL_MODEL)
    parser.add_argument(
        "--real-model", type=Path, default=model, help=f"real, gpu: folder of the real model (or in {REAL_MODEL})"
    )
    options = parser.parse_args(words)
    if options.real_model is not None:
        os.environ[REAL_MODEL] = str(options.real_model.resolve())  # where `real` and --sizes real look
    command = COMMANDS[options.what]
    options.sizes = options.sizes or list(command.sizes)
    options.steps = command.steps if options.steps is None else options.steps
    options.threads = command.threads if options.threads is None else options.threads
    return options


def problem(options: argparse.Namespace) -> str | None:
    """A sentence where these options cannot work."""
    if COMMANDS[options.what].needs_a_peer and not options.peer_python:
        return f"{options.what} needs --peer-python: the Python of a virtual environment with TRL"
    if options.what == "real" and options.real_model is None:
        return f"real needs --real-model: a folder made by `python examples/smollm2.py` (or {REAL_MODEL})"
    if options.steps < 2:
        return "--steps must be at least 2: the first is warm-up"
    if "tiny" in options.shapes and len(options.shapes) > 1:
        return "--shapes: tiny goes by itself, it is for a CPU"
    if options.what == "learning" and options.pairs > 10:
        return "--pairs: learning takes at most 10 seeds"
    return None


def main() -> None:
    options = parse()
    sentence = problem(options)
    if sentence is not None:
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    fresh = Path(gpu.RESULTS) if options.what == "gpu" else Path(tempfile.mkdtemp(prefix="benchmarks-"))
    options.out = (options.out or fresh).resolve()
    if options.what != "gpu":
        print(f"models and every process's settings and answers are in {options.out}", flush=True)
    try:
        COMMANDS[options.what].main(options)
    except processes.Failed as failure:
        print(failure.tail, file=sys.stderr)
        raise SystemExit(str(failure)) from failure


if __name__ == "__main__":
    main()
