"""Three adapters by `tinyrl sweep` beside three single runs, on size s: seconds, and whether they are equal to the bit.

    python -m benchmarks.sweep [--size s] [--steps 12] [--rounds 3]

The single runs one after another, with run.threads=1 as in the sweep, and as `auto` has it. Whole commands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES, build, prompt_texts
from tinyrl.runs.records import VOLATILE

SEEDS = ("1", "2", "3")
REWARD = """
def short(prompts, completions, **columns):
    return [1 / (1 + len(completion.split())) for completion in completions]
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SIZES), default="s")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    shape, taken = SIZES[asked.size], dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(shape, folder / "model")
        rows = [{"prompt": text} for text in prompt_texts(shape, 256)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "rewards.py").write_text(REWARD)
        settings = ["model.path=model", "task.data=rows.jsonl", "reward.functions=[{use: rewards.py:short}]",
                    "grpo.num_prompts=8", "grpo.group_size=8", "generation.max_new_tokens=64", "run.eval_every=0",
                    "run.eval_prompts=32", f"run.num_steps={asked.steps}", "run.save_every=0"]  # fmt: skip
        for i in range(asked.rounds):
            swept = ["sweep", "grpo", *settings, f"run.seed={','.join(SEEDS)}", "--name", f"sweep{i}"]
            taken.setdefault("sweep", []).append(_seconds(swept, folder))
            for threads in ("1", "auto"):
                each = [
                    [
                        "train",
                        "grpo",
                        *settings,
                        f"run.seed={seed}",
                        f"run.threads={threads}",
                        "--name",
                        f"{i}{threads}{seed}",
                    ]
                    for seed in SEEDS
                ]
                taken.setdefault(threads, []).append(sum(_seconds(command, folder) for command in each))
        equal = all(
            _metrics(folder / "runs" / f"sweep{i}" / f"seed{seed}") == _metrics(folder / "runs" / f"{i}1{seed}")
            for i in range(asked.rounds)
            for seed in SEEDS
        )
    medians = {what: statistics.median(seconds) for what, seconds in taken.items()}
    print(f"sweep {medians['sweep']:.1f} s; single runs {medians['1']:.1f} s, with auto {medians['auto']:.1f} s")
    for threads in ("1", "auto"):
        ratios = sorted(a / b for a, b in zip(taken["sweep"], taken[threads], strict=True))
        print(f"  of run.threads={threads}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"metrics of all steps are {'the same' if equal else 'NOT the same'} to the bit")


def _seconds(words: list[str], folder: Path) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tinyrl", *words], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - begun


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(VOLATILE)} for line in lines]


if __name__ == "__main__":
    main()
