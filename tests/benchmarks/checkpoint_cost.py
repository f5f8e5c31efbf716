"""What checkpoints cost: seconds inside Session.save as a share of the embedded default, at its own interval.

    python -m tests.benchmarks.checkpoint_cost [--methods grpo ppo] [--repeats 3]

Each run is the command in a process of its own with a clock around Session.save. The share is of the time from the
first step to the last (evaluations included), not of the start of Python.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

CODE = """
import json, sys, time
sys.argv = ["tinyrl", "train", {method!r}, "--output-dir", {out!r}]
from tinyrl.cli.commands import main
from tinyrl.training.launch import Launch
from tinyrl.training.session import Session
save, go, saves, whole = Session.save, Launch.go, [], []
def timed_save(self):
    start = time.perf_counter()
    folder = save(self)
    saves.append((time.perf_counter() - start, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())))
    return folder
def timed_go(self):
    train = self.trainer.train
    def timed_train(session, parts):
        start = time.perf_counter()
        train(session, parts)
        whole.append(time.perf_counter() - start)
    self.trainer.train = timed_train
    return go(self)
Session.save, Launch.go = timed_save, timed_go
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("COST " + json.dumps({{"saves": [s for s, _ in saves], "bytes": saves[-1][1], "whole": whole[0]}}))
"""


def measure(method: str) -> dict:
    """Seconds of each save, bytes of the last checkpoint, seconds of training."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", CODE.format(method=method, out=out)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(next(line for line in said.splitlines() if line.startswith("COST ")).removeprefix("COST "))


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
