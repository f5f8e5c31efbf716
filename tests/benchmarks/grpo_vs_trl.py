"""GRPO side by side with TRL on the starter's task: learning curves, and the interval of the difference at the end.

    python -m tests.benchmarks.grpo_vs_trl --peer-python TRL_VENV/bin/python [--seeds 5] [--steps 60] [--out DIR]

Same model, LoRA, learning rate (constant), clip 0.2, no KL, one update of 64 x 8 samples a step, one thread;
nothing is tuned for either side. Runs alternate. Both adapters are then judged by tinyrl's evaluation on the same
512 held-out prompts with the same uniforms.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tinyrl.components import Options, load_sampling_parts
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import evaluate
from tinyrl.models.weights_io import load_policy
from tinyrl.starter import starter_path
from tinyrl.tasks import load_rows, load_task

LEARNING_RATE, NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 1e-3, 64, 8, 16


def config(seed: int, steps: int) -> Config:
    return Config.model_validate(
        {
            "method": "grpo",
            "task": {"name": "sort"},
            "generation": {"max_new_tokens": MAX_NEW_TOKENS},
            "optim": {"learning_rate": LEARNING_RATE},
            "grpo": {"num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "clip_eps_high": 0.2},
            "run": {
                "num_steps": steps,
                "seed": seed,
                "eval_every": 0,
                "eval_prompts": 64,
                "save_every": 0,
                "threads": 1,
            },
        }
    )


def ours(seed: int, steps: int, out: Path) -> tuple[list[float], float, Path]:
    """(reward of each step, seconds of the steps, adapter)."""
    values = config(seed, steps).model_dump(mode="json", exclude_none=True)
    recipe = out / f"ours-{seed}.yaml"
    recipe.write_text(json.dumps(values))
    command = [
        sys.executable,
        "-m",
        "tinyrl",
        "train",
        "grpo",
        str(recipe),
        "--output-dir",
        str(out),
        "--name",
        f"ours-{seed}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / f"ours-{seed}" / "metrics.jsonl").read_text().splitlines()]
    steps_done = [line for line in lines if "reward/mean" in line]
    adapter = sorted((out / f"ours-{seed}" / "checkpoints").iterdir())[-1]
    return [line["reward/mean"] for line in steps_done], sum(line["time/total"] for line in steps_done), adapter


def peer(seed: int, steps: int, out: Path, *, python: str) -> tuple[list[float], float, Path]:
    folder = out / f"trl-{seed}"
    folder.mkdir()
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in load_rows(load_task("sort"), "train")]
    settings = {
        "out": str(folder),
        "model": str(starter_path("starter")),
        "rows": rows,
        "num_steps": steps,
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "num_prompts": NUM_PROMPTS,
        "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("peer_trl_grpo.py")
    subprocess.run([python, str(script), str(folder / "settings.json")], check=True, capture_output=True)
    curve = json.loads((folder / "curve.json").read_text())
    return curve["reward"], curve["seconds"], folder


def held_out(adapter: Path) -> dict[str, float]:
    """Sampled and greedy pass@1 of an adapter on 512 held-out prompts."""
    parts = load_sampling_parts(config(0, 1), options=Options(device="cpu"))
    load_policy(parts.roles, adapter)
    metrics = evaluate(parts, num_prompts=512).metrics
    return {"sampled": metrics["pass@1"], "greedy": metrics["greedy"]["pass@1"]}


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % t-interval of a mean of 2 to 10 paired differences."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}[len(differences)]
    mean, half = statistics.mean(differences), t * statistics.stdev(differences) / len(differences) ** 0.5
    return mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(options.seeds):
        sides = {
            "tinyrl": ours(seed, options.steps, out),
            "trl": peer(seed, options.steps, out, python=options.peer_python),
        }
        row = {
            name: {"curve": curve, "seconds": seconds, **held_out(adapter)}
            for name, (curve, seconds, adapter) in sides.items()
        }
        results.append(row)
        (out / "results.json").write_text(json.dumps(results))
        print(seed, {n: {k: round(v, 3) for k, v in r.items() if k != "curve"} for n, r in row.items()}, flush=True)
    for key in ("sampled", "greedy"):
        differences = [row["tinyrl"][key] - row["trl"][key] for row in results]
        low, high = interval(differences)
        print(f"{key}: tinyrl - TRL = {statistics.mean(differences):+.3f} (95 % interval {low:+.3f} to {high:+.3f})")
    print("steps    tinyrl  TRL   (training reward, mean over seeds of ten steps)")
    for start in range(0, options.steps, 10):
        means = [
            statistics.mean(statistics.mean(r[n]["curve"][start : start + 10]) for r in results)
            for n in ("tinyrl", "trl")
        ]
        print(f"{start + 1:3}-{start + 10:3}  {means[0]:.3f}   {means[1]:.3f}")
    ratio = statistics.median(r["trl"]["seconds"] / r["tinyrl"]["seconds"] for r in results)
    print(f"seconds of all steps, median ratio TRL / tinyrl: {ratio:.2f}")


if __name__ == "__main__":
    main()
