"""Speed, memory and learning beside TRL, and against the arithmetic floor. Run by hand; tables go into RESULTS.md.

    python -m benchmarks grpo     --peer-python TRL_VENV/bin/python [--sizes s m v] [--pairs 5] [--steps 6]
    python -m benchmarks families --peer-python TRL_VENV/bin/python [--families qwen3 gemma3 qwen3.5 smollm3]
    python -m benchmarks ppo      --peer-python TRL_1_12_VENV/bin/python [--sizes s]
    python -m benchmarks text     --peer-python TRL_VENV/bin/python [--sizes s] [--micro-batches 16]
    python -m benchmarks images   --peer-python TRL_VENV/bin/python [--pairs 5] [--steps 6] [--micro-batches 16 64]
    python -m benchmarks learning --peer-python TRL_VENV/bin/python [--pairs 5] [--steps 60]
    python -m benchmarks real     --peer-python TRL_VENV/bin/python --ppo-peer-python TRL_1_12_VENV/bin/python
    python -m benchmarks long     --peer-python TRL_VENV/bin/python --real-model DIR [--lengths 2048 4096 8192]
    python -m benchmarks gpu      [--minutes 10] [--shapes 0.5b 1.5b 3b 7b] [--list] [--only WORDS]
    python -m benchmarks wheels   download|install FOLDER

`python -m benchmarks COMMAND --help` lists the options of a command. TRL_VENV: `pip install torch==2.13.0 trl==1.16.0
peft` in an environment of its own; TRL_1_12_VENV has trl==1.12.0, the last release with PPO. Both sides run in
processes of their own, in alternation, with the same number of threads; the first step of each process is warm-up.
`--sizes xs --pairs 1 --steps 2` tries a command out in about a minute; `--sizes real` is the model of --real-model.
`gpu` (docs/benchmarks.md) measures what it can within --minutes, cell by cell, into cells.jsonl and table.md; run
again, it goes on where it was. `gpu --shapes tiny` runs all of it on a CPU in minutes, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

# Nothing but the standard library here: `wheels` installs what the other commands import.
GPU_RESULTS = "gpu-results"  # ignored by git
REAL_MODEL = "TINYRL_REAL_MODEL"
CPU_SIZES = ("xs", "s", "m", "v", "real")
GPU_SHAPES = ("0.5b", "1.5b", "3b", "7b", "gemma3-1b", "qwen3.5-0.8b", "qwen3-moe")
FAMILIES = ("qwen3", "gemma3", "qwen3.5", "smollm3")
METHODS = ("sft", "reward", "dpo", "grpo", "ppo")
MODULES = {"gpu": "gpu.command"}  # of commands that are not called as their module
MOST_SEEDS = 10  # of `learning`: its t-intervals are tabulated so far


def parser() -> argparse.ArgumentParser:
    """Each command has the options that it reads, and no other."""
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(dest="what", required=True, metavar="COMMAND")

    one = commands.add_parser("grpo", help="GRPO steps beside TRL: seconds, phases, memory, distance from the floor")
    _beside_a_peer(one, pairs="processes of each side")
    _sizes(one, ["s", "m", "v"])
    _steps(one, steps=6, threads=2)
    _micro_batches(one)

    one = commands.add_parser("families", help="other families: sampling by transformers' modules, GRPO beside TRL")
    _beside_a_peer(one, pairs="processes of each side")
    one.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="models")
    _steps(one, steps=3, threads=1)

    one = commands.add_parser("ppo", help="PPO steps beside TRL 1.12")
    _beside_a_peer(one, pairs="processes of each side")
    _sizes(one, ["s"])
    _steps(one, steps=6, threads=2)
    one.add_argument("--critics", nargs="+", default=["separate", "adapter", "shared"], help="ours")

    one = commands.add_parser("text", help="SFT, reward model and DPO beside TRL")
    _beside_a_peer(one, pairs="processes of each side")
    _sizes(one, ["s"])
    _steps(one, steps=6, threads=2)
    _micro_batches(one)

    one = commands.add_parser("images", help="GRPO on prompts with pictures beside TRL")
    _beside_a_peer(one, pairs="processes of each side")
    _steps(one, steps=6, threads=1)
    _micro_batches(one)

    one = commands.add_parser("learning", help="learning curves of both sides on the embedded model")
    _beside_a_peer(one, pairs=f"seeds, at most {MOST_SEEDS}")
    _steps(one, steps=60, threads=1)

    one = commands.add_parser("real", help="every method on a real model, beside TRL")
    _beside_a_peer(one, pairs="seeds")
    one.add_argument("--ppo-peer-python", help="Python of a virtual environment with TRL 1.12 (method ppo)")
    one.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    one.add_argument("--threads", type=int, default=1, help="of each side (%(default)s)")
    _real_model(one)

    one = commands.add_parser("long", help="memory and CPU time of SFT and GRPO on long texts, beside TRL")
    one.add_argument("--peer-python", required=True, help="Python of a virtual environment with TRL")
    one.add_argument("--methods", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"])
    one.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens of a text")
    one.add_argument("--peer-lengths", type=int, nargs="*", help="of them TRL's, which needs more memory (all)")
    one.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    one.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides for tinyrl")
    one.add_argument("--out", type=Path, help="folder to keep models and results in (default: a temporary one)")
    _sizes(one, ["real"])
    _steps(one, steps=2, threads=1)

    one = commands.add_parser("gpu", help="cells that measure a GPU")
    one.add_argument("--minutes", type=float, default=10.0, help="of this call (%(default)s)")
    one.add_argument("--shapes", nargs="+", default=list(GPU_SHAPES), choices=[*GPU_SHAPES, "tiny"], help="models")
    one.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells with one of these in their name")
    one.add_argument("--list", action="store_true", help="the cells that are left, with estimated minutes")
    one.add_argument("--peer-python", help="Python of a virtual environment with TRL")
    one.add_argument("--ppo-peer-python", help="Python of a virtual environment with TRL 1.12")
    one.add_argument("--threads", type=int, default=2, help="of a CPU (%(default)s)")
    one.add_argument("--out", type=Path, default=Path(GPU_RESULTS), help="folder of models and results (%(default)s)")
    _real_model(one)

    one = commands.add_parser("wheels", help="packages for a machine without a network")
    one.add_argument("action", choices=["download", "install"])
    one.add_argument("folder", type=Path)
    one.add_argument("--python", default="3.12", help="download: version of the machine's Python (%(default)s)")
    one.add_argument("--installed", type=Path, metavar="FILE", help="download: `pip freeze` of the machine")
    return whole


def _beside_a_peer(one: argparse.ArgumentParser, *, pairs: str) -> None:
    one.add_argument("--peer-python", required=True, help="Python of a virtual environment with TRL")
    one.add_argument("--pairs", type=int, default=5, help=f"{pairs} (%(default)s)")
    one.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides for tinyrl")
    one.add_argument("--force", action="store_true", help="show ratios though the sides did not do the same work")
    one.add_argument("--out", type=Path, help="folder to keep models and results in (default: a temporary one)")


def _sizes(one: argparse.ArgumentParser, default: list[str]) -> None:
    one.add_argument("--sizes", nargs="+", default=default, choices=CPU_SIZES, help=f"models ({' '.join(default)})")
    _real_model(one)


def _steps(one: argparse.ArgumentParser, *, steps: int, threads: int) -> None:
    one.add_argument("--steps", type=int, default=steps, help="of a process, the first is warm-up (%(default)s)")
    one.add_argument("--threads", type=int, default=threads, help="of each side (%(default)s)")


def _micro_batches(one: argparse.ArgumentParser) -> None:
    one.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="rows, the peer's")


def _real_model(one: argparse.ArgumentParser) -> None:
    given = os.environ.get(REAL_MODEL) or None
    default = None if given is None else Path(given)
    help_text = f"folder made by `python examples/smollm2.py` (or in {REAL_MODEL})"
    one.add_argument("--real-model", type=Path, default=default, help=help_text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    options = parser().parse_args(words)
    real_model = getattr(options, "real_model", None)
    if real_model is not None:
        options.real_model = real_model.resolve()
    return options


def problem(options: argparse.Namespace) -> str | None:
    """A sentence where these options cannot work."""
    asks_for_real = options.what == "real" or "real" in getattr(options, "sizes", [])
    if asks_for_real and options.real_model is None:
        return f"--real-model is missing: a folder made by `python examples/smollm2.py` (or {REAL_MODEL})"
    if options.what == "real" and "ppo" in options.methods and options.ppo_peer_python is None:
        return "--ppo-peer-python is missing: the Python of a virtual environment with TRL 1.12 (or leave out ppo)"
    if getattr(options, "steps", 2) < 2:
        return "--steps must be at least 2: the first is warm-up"
    shapes = getattr(options, "shapes", [])
    if "tiny" in shapes and len(shapes) > 1:
        return "--shapes: tiny goes by itself, it is for a CPU"
    if options.what == "learning" and options.pairs > MOST_SEEDS:
        return f"--pairs: learning takes at most {MOST_SEEDS} seeds"
    return None


def main() -> None:
    options = parse()
    sentence = problem(options)
    if sentence is not None:
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    command = importlib.import_module(f"benchmarks.{MODULES.get(options.what, options.what)}")
    if options.what == "wheels":
        command.main(options)
        return
    from benchmarks.processes import Failed

    if getattr(options, "real_model", None) is not None:
        os.environ[REAL_MODEL] = str(options.real_model)  # where `real` and --sizes real look
    if options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        print(f"models and every process's settings and answers are in {options.out}", flush=True)
    options.out = options.out.resolve()
    try:
        command.main(options)
    except Failed as failure:
        print(failure.tail, file=sys.stderr)
        raise SystemExit(str(failure)) from failure


if __name__ == "__main__":
    main()
