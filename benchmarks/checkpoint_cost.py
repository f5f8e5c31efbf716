"""What checkpoints cost: seconds inside Session.save as a share of the embedded default, at its own interval.

    python -m benchmarks.checkpoint_cost [--methods grpo ppo] [--repeats 3]

Each run is the command in a process of its own with a clock around Session.save. The share is of the time from the
first step to the last (evaluations included), not of the start of Python.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import ROOT

MARK = "COST "


def clocked(method: str, out: str) -> None:
    """Run the command in this process with clocks around saving and training; prints them as JSON after MARK."""
    from tinyrl.cli.commands import main as command
    from tinyrl.training.launch import Launch
    from tinyrl.training.session import Session

    save, go = Session.save, Launch.go
    saves: list[float] = []
    bytes_saved, whole = 0, 0.0

    def timed_save(self: Session) -> Path | None:
        nonlocal bytes_saved
        start = time.perf_counter()
        folder = save(self)
        saves.append(time.perf_counter() - start)
        bytes_saved = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder else bytes_saved
        return folder

    def timed_go(self: Launch, *, report: Callable[[Path], object], until: int | None = None) -> int:
        train = self.trainer.train

        def timed_train(session: Session) -> None:
            nonlocal whole
            start = time.perf_counter()
            train(session)
            whole = time.perf_counter() - start

        self.trainer.train = timed_train
        return go(self, report=report, until=until)

    Session.save, Launch.go = timed_save, timed_go
    sys.argv = ["tinyrl", "train", method, "--output-dir", out]
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise
    print(MARK + json.dumps({"saves": saves, "bytes": bytes_saved, "whole": whole}))


def measure(method: str) -> dict:
    """Seconds of each save, bytes of the last checkpoint, seconds of training."""
    with tempfile.TemporaryDirectory() as out:
        code = f"from benchmarks.checkpoint_cost import clocked; clocked({method!r}, {out!r})"
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(next(line for line in said.splitlines() if line.startswith(MARK)).removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=["grpo", "ppo"], default=["grpo", "ppo"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for method in options.methods:
        results = [measure(method) for _ in range(options.repeats)]
        shares = [sum(r["saves"]) / r["whole"] for r in results]
        saves = [seconds for r in results for seconds in r["saves"]]
        print(
            f"{method}: {len(results[0]['saves'])} checkpoints of {results[0]['bytes'] / 1e6:.2f} MB in "
            f"{statistics.median(r['whole'] for r in results):.1f} s of training; one takes "
            f"{statistics.median(saves) * 1e3:.0f} ms (median; worst {max(saves) * 1e3:.0f}); share "
            + ", ".join(f"{share:.2%}" for share in shares),
            flush=True,
        )


if __name__ == "__main__":
    main()
