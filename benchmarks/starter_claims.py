"""What `tinyrl train grpo` and `tinyrl train ppo` reach on the embedded default, seed by seed.

    python -m benchmarks.starter_claims grpo|ppo [--seeds 11 12 13] [--out DIR]

Runs the commands as a person would (wall time of the whole command, imports and report included) and evaluates the
result on held-out and on training prompts; for PPO also by the grammar, which no model was trained on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tinyrl.starter import sentiment
from tinyrl.tasks.grading import completion_text


def tinyrl(*arguments: str) -> str:
    command = [sys.executable, "-m", "tinyrl", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def unparsable_share(run: Path, step: int) -> float:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    texts = [completion_text(s["completion"]) for s in lines if s["kind"] == "eval" and s["step"] == step]
    return statistics.mean(map(sentiment.unparsable_share, texts))


def grpo(run: Path, seconds: float) -> dict[str, float]:
    first, *_, last = metrics(run)
    train = json.loads(tinyrl("eval", str(run), "--split", "train", "--json"))
    return {
        "sampled before": first["eval/pass@1"],
        "sampled after": last["eval/pass@1"],
        "greedy before": first["eval/greedy/pass@1"],
        "greedy after": last["eval/greedy/pass@1"],
        "training prompts": train["pass@1"],
        "distinct answers before": first["eval/distinct_answers"],
        "distinct answers after": last["eval/distinct_answers"],
        "seconds": seconds,
    }


def ppo(run: Path, seconds: float) -> dict[str, float]:
    first, *_, last = metrics(run)
    return {
        "reward before": first["eval/reward_mean"],
        "reward after": last["eval/reward_mean"],
        "gain in sd": (last["eval/reward_mean"] - first["eval/reward_mean"]) / first["eval/reward_std"],
        "kl": last["eval/kl"],
        "distinct share": last["eval/distinct"] / first["eval/distinct"],
        "length share": last["eval/mean_length"] / first["eval/mean_length"],
        "polarity before": first["eval/verifier_mean"],
        "polarity after": last["eval/verifier_mean"],
        "unparsable before": unparsable_share(run, 0),
        "unparsable after": unparsable_share(run, last["step"]),
        "explained variance": statistics.mean(line["value/explained_variance"] for line in metrics(run)[-5:]),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["grpo", "ppo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp())
    print(f"{os.cpu_count()} cores; runs in {out}")
    results = []
    for seed in options.seeds:
        name = f"{options.method}-{seed}"
        start = time.perf_counter()
        tinyrl("train", options.method, f"run.seed={seed}", "--name", name, "--output-dir", str(out), "--overwrite")
        seconds = time.perf_counter() - start
        results.append({"grpo": grpo, "ppo": ppo}[options.method](out / name, seconds))
    for key in results[0]:
        print(f"{key:26}" + "".join(f"{r[key]:10.3f}" for r in results))
    print(f"median seconds {statistics.median(r['seconds'] for r in results):.0f}")


if __name__ == "__main__":
    main()
