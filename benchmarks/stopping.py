"""How long the embedded default takes to stop, and that it goes on: SIGTERM at random moments of the real command.

    python -m benchmarks.stopping grpo|ppo [--stops 10] [--seed 0] [--out DIR]

A run is stopped, resumed, stopped again and so on until it is done; then another begins, until there were enough stops.
Moments are random, counted from the first thing the command says (when all is loaded). Prints seconds from the signal
to the end of the process, and what the run was doing.
"""

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600.0


@dataclass
class Stop:
    """One stop: seconds from the signal to the end, the exit code, and where the run said it was."""

    seconds: float
    code: int
    where: str


def begin(method: str, run: Path, seed: int, said: Path) -> subprocess.Popen[bytes]:
    """The command: a fresh run, or the resume of one that has begun. Returns once it has said something."""
    resuming = (run / "config.yaml").exists()
    fresh = [method, f"run.seed={seed}", "--name", run.name, "--output-dir", str(run.parent)]
    words = ["--resume", str(run)] if resuming else fresh
    with said.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "tinyrl", "train", *words], stdout=file, stderr=file)
    while said.stat().st_size == 0 and process.poll() is None:
        time.sleep(0.01)
    return process


def stop(process: subprocess.Popen[bytes], said: Path, *, after: float) -> Stop | None:
    """Stop a command some seconds from now; None when it was done before."""
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait(TIMEOUT_S)
        seconds = time.perf_counter() - start
        where = re.search(r"SIGTERM: saving (step \d+ \(\w+\))", said.read_text())
        return Stop(seconds, code, where[1] if where else "at the end" if code == 0 else "elsewhere")
    if process.returncode != 0:
        raise SystemExit(f"ended with {process.returncode}:\n{said.read_text()}")
    return None


def whole_seconds(method: str, folder: Path) -> float:
    """Seconds of a run that nobody stops, from the first thing it says."""
    process = begin(method, folder / "whole", 0, folder / "whole.txt")
    start = time.perf_counter()
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit((folder / "whole.txt").read_text())
    return time.perf_counter() - start


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def stop_until_done(
    method: str, run: Path, *, seed: int, most: int, spread: float, draw: random.Random, wanted: list[int]
) -> list[Stop]:
    """Stop a run at most so many times, `spread` seconds apart on average, and let it come to its end."""
    stops: list[Stop] = []
    while True:
        said = run.with_name(f"{run.name}-{len(stops)}.txt")
        process = begin(method, run, seed, said)
        after = draw.uniform(0.0, 2 * spread) if len(stops) < most else TIMEOUT_S
        stopped = stop(process, said, after=after)
        if stopped is None:
            if steps(run) != wanted:
                raise SystemExit(f"{run} is done, and its steps are {steps(run)}")
            return stops
        stops.append(stopped)
        print(f"  {stopped.seconds:6.2f} s, exit code {stopped.code}, {stopped.where}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["grpo", "ppo"])
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out, draw = options.out or Path(tempfile.mkdtemp()), random.Random(options.seed)
    whole = whole_seconds(options.method, out)
    print(f"{options.method}: a whole run takes {whole:.0f} s once it is loaded; runs in {out}", flush=True)
    stops: list[Stop] = []
    runs = 0
    while len(stops) < options.stops:
        stops += stop_until_done(
            options.method,
            out / f"run-{runs}",
            seed=options.seed + runs,
            most=options.stops - len(stops),
            spread=whole / options.stops,
            draw=draw,
            wanted=steps(out / "whole"),
        )
        runs += 1
    seconds, codes = [s.seconds for s in stops], sorted({s.code for s in stops})
    print(
        f"{options.method}: {len(stops)} stops, exit codes {codes}; seconds from the signal to the end: median "
        f"{statistics.median(seconds):.2f}, worst {max(seconds):.2f}; each was resumed, and {runs} of {runs} runs "
        "came to their last step"
    )


if __name__ == "__main__":
    main()
