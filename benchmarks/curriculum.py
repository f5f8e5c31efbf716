"""Completions to a held-out score, prompts in epochs and by difficulty: half of the rows impossible, a third trivial.

    python -m benchmarks.curriculum [--seeds 1 2 3] [--out DIR]

300 rows of the task sort, whose reward is 0 for half of them and 1 for a third whatever is answered; "even" is the same
rows with their own reward, "probed" the first with the rates that a probe would write. Held-out rows are sort's own. A
score is reached where the mean of three evaluations, one every 640 completions, is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from tinyrl.tasks import load_task

REWARD = """
from tinyrl.tasks import load_task

def score(prompts, completions, kind, answer, **columns):
    right = load_task("sort").verify(prompts, completions, answer=answer)
    return [{"impossible": 0.0, "trivial": 1.0}.get(k, r) for k, r in zip(kind, right)]
"""
SETTINGS = ["task.name=sort", "task.eval_data=eval.jsonl", "reward.functions=[{use: rewards.py:score}]",
            "grpo.num_prompts=8", "grpo.group_size=8", "generation.max_new_tokens=24", "optim.learning_rate=0.001",
            "optim.schedule=constant", "run.eval_every=10", "run.eval_prompts=256", "run.save_every=0", "run.threads=1",
            ]  # fmt: skip
RUNS = {"mixed": ("uniform", 400), "mixed, by difficulty": ("difficulty", 400), "probed": ("difficulty", 400),
        "even": ("uniform", 200), "even, by difficulty": ("difficulty", 200)}  # fmt: skip
SCORES = (0.6, 0.7, 0.75, 0.8)
A_STEP = 64  # completions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("curriculum"))
    asked = parser.parse_args()
    _write_rows(asked.out)
    for what, (sampler, steps) in RUNS.items():
        for seed in asked.seeds:
            data, name = what.partition(",")[0], f"{what.replace(', ', '-').replace(' ', '-')}-{seed}"
            ours = [f"task.data={data}.jsonl", f"task.sampler={sampler}", f"run.seed={seed}", f"run.num_steps={steps}"]
            command = [sys.executable, "-m", "tinyrl", "train", "grpo", *SETTINGS, *ours, "--name", name, "--overwrite"]
            subprocess.run(command, cwd=asked.out, check=True, capture_output=True)
            curve = _smooth(asked.out / "runs" / name / "metrics.jsonl")
            reached = [next((step * A_STEP for step, score in curve if score >= wanted), None) for wanted in SCORES]
            shown = ", ".join(f"{wanted}: {at or 'never'}" for wanted, at in zip(SCORES, reached, strict=True))
            print(f"{what:22} seed {seed}  completions to {shown}", flush=True)


def _write_rows(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    rows, held_out = (load_task("sort").rows(split) for split in ("train", "eval"))
    kinds = ["impossible"] * 3 + ["trivial"] * 2 + ["own"]
    mixed = [{**row, "kind": kinds[i % 6]} for i, row in enumerate(rows[:300])]
    rates = {"impossible": 0.0, "trivial": 1.0, "own": 0.5}
    files = {"mixed": mixed, "probed": [{**row, "pass_rate": rates[row["kind"]]} for row in mixed],
             "even": [{**row, "kind": "own"} for row in mixed],
             "eval": [{**row, "kind": "own"} for row in held_out]}  # fmt: skip
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _smooth(metrics: Path) -> list[tuple[int, float]]:
    """(step, the mean of the evaluations before, there and after)."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [(line["step"], line["eval/reward_mean"]) for line in lines if "eval/reward_mean" in line]
    return [(step, fmean(v for _, v in found[max(0, i - 1) : i + 2])) for i, (step, _) in enumerate(found)]


if __name__ == "__main__":
    main()
