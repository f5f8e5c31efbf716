"""Speed and memory beside a peer, and against the arithmetic floor. Run by hand; tables go into RESULTS.md.

    python -m tests.benchmarks grpo    --peer-python TRL_VENV/bin/python [--sizes s m v] [--pairs 5] [--steps 6]
    python -m tests.benchmarks ppo     --peer-python TRL_1_12_VENV/bin/python [--sizes s]
    python -m tests.benchmarks rollout [--peer-python TRL_VENV/bin/python] [--sizes s m]
    python -m tests.benchmarks memory  --peer-python TRL_VENV/bin/python [--ppo-peer-python TRL_1_12_VENV/bin/python]
    python -m tests.benchmarks scaling [--axes group length vocabulary size]

The work (models s, m, v, prompts, reward, floor) is that of the file --work. Both sides run in processes of their
own, in alternation, with the same number of threads; the first step of each process is warm-up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import compare_grpo, compare_memory, compare_ppo, compare_rollout, our_scaling
from tests.benchmarks.processes import ROOT

COMMANDS = {
    "grpo": compare_grpo.main,
    "ppo": compare_ppo.main,
    "rollout": compare_rollout.main,
    "memory": compare_memory.main,
    "scaling": our_scaling.main,
}
SIZES = {"grpo": ["s", "m", "v"], "ppo": ["s"], "rollout": ["s", "m"], "memory": ["s", "m", "v"], "scaling": ["s", "m"]}
NEED_A_PEER = ("grpo", "ppo", "memory")
WORK = ROOT.parent / "shared" / "benchmark" / "work.py"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--peer", choices=["trl"], default="trl")
    parser.add_argument("--peer-python", help="Python of a virtual environment with the peer")
    parser.add_argument("--ppo-peer-python", help="memory: Python of one with TRL 1.12, the last release with PPO")
    parser.add_argument("--sizes", nargs="+", choices=["s", "m", "v"])
    parser.add_argument("--pairs", type=int, default=5, help="processes of each side")
    parser.add_argument("--steps", type=int, default=6, help="steps (or rollouts) of a process, the first is warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="the peer's")
    parser.add_argument("--critics", nargs="+", default=["separate", "adapter", "shared"])
    parser.add_argument("--axes", nargs="+", default=list(our_scaling.AXES), choices=list(our_scaling.AXES))
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides for tinyrl")
    parser.add_argument("--force", action="store_true", help="show ratios though the sides did not do the same work")
    parser.add_argument("--work", type=Path, default=WORK, help="the file with models, prompts, reward and floor")
    parser.add_argument("--out", type=Path, help="folder to keep models and results in (default: a temporary one)")
    options = parser.parse_args(words)
    options.sizes = options.sizes or SIZES[options.what]
    return options


def problem(options: argparse.Namespace) -> str | None:
    """A sentence where these options cannot work."""
    if not options.work.is_file():
        return f"{options.work} is not there: name the file that defines the benchmark's models and prompts with --work"
    if options.what in NEED_A_PEER and not options.peer_python:
        return f"{options.what} needs --peer-python: the Python of a virtual environment with TRL"
    if options.steps < 2:
        return "--steps must be at least 2: the first is warm-up"
    return None


def main() -> None:
    options = parse()
    sentence = problem(options)
    if sentence is not None:
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    options.work = options.work.resolve()
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="benchmarks-"))).resolve()
    print(f"models and every process's settings and answers are in {options.out}", flush=True)
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()
