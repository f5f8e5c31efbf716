"""What PPO on film reviews does to the same model's sorting, with and without PPO-ptx, at matched reward.

    python -m benchmarks.forgetting [--seeds 31 32] [--coef 1.0] [--steps 34] [--out DIR]

The embedded model does both tasks. Each seed is trained twice as `tinyrl train ppo` trains, the second time with
ppo.ptx_coef on sorting text of the kind it was pre-trained on (mistakes included), saved and evaluated every other
step. Of each run the checkpoint is taken whose held-out reward is nearest to the lower of the two last rewards. It is
judged on sorting by transformers and PEFT alone: nats per token of 1,000 held-out texts of that kind, and the exact
probability of the right answer to the 512 held-out prompts of task `sort` (pass@1, without the luck of sampling).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.judge import answer_logprobs, answer_probabilities
from benchmarks.starter_claims import metrics, tinyrl
from tinyrl.starter import starter_path
from tinyrl.starter.text import language_rows, sort_completion, sort_rows

TEXT_ROWS, HELD_OUT_ROWS = 8_192, 1_000
Tokens = list[list[int]]


def sorting_text(count: int, seed: int) -> list[dict[str, str]]:
    """Sorting rows as the pre-training text has them; `seed` is not that of what the model was trained on."""
    found = [row for row in language_rows(3 * count, seed) if row["prompt"].startswith("letters:")]
    return found[:count]


def nats_per_token(model: Any, prompts: Tokens, answers: Tokens) -> float:
    """Mean of -log p over the answers' tokens."""
    total, count = 0.0, 0
    for said, targets in answer_logprobs(model, prompts, answers):
        total -= float(said.gather(1, targets.unsqueeze(1)).sum())
        count += len(targets)
    return total / count


class Sorting:
    """Judges a policy's sorting."""

    def __init__(self) -> None:
        self.base = str(starter_path("starter"))
        tokenizer: Any = AutoTokenizer.from_pretrained(self.base)

        def tokens(texts: Sequence[str], *, end: bool) -> Tokens:
            return [[*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if end else [])] for text in texts]

        text, task = sorting_text(HELD_OUT_ROWS, seed=3), sort_rows("eval", num_rows=512)
        self.text = tokens([r["prompt"] for r in text], end=False), tokens([r["completion"] for r in text], end=True)
        answers = [sort_completion(row["answer"]) for row in task]
        self.task = tokens([row["prompt"] for row in task], end=False), tokens(answers, end=True)

    def __call__(self, adapter: Path | None) -> dict[str, float]:
        model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model = (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()
        exact, _ = answer_probabilities(model, *self.task)
        return {"nats": nats_per_token(model, *self.text), "pass@1": float(exact.mean())}


def evaluated(run: Path) -> dict[int, dict[str, Any]]:
    """The line of every step that was evaluated."""
    return {line["step"]: line for line in metrics(run) if "eval/reward_mean" in line}


def nearest(run: Path, reward: float) -> tuple[int, dict[str, Any]]:
    """The evaluated step, and its line, with the held-out reward nearest to `reward`."""
    return min(evaluated(run).items(), key=lambda item: abs(item[1]["eval/reward_mean"] - reward))


def train(out: Path, name: str, *settings: str) -> float:
    """Seconds of a run."""
    begun = time.perf_counter()
    tinyrl("train", "ppo", *settings, "--name", name, "--output-dir", str(out), "--overwrite")
    return time.perf_counter() - begun


def row(name: str, line: dict[str, Any], judged: dict[str, float], start: dict[str, float], *more: str) -> str:
    """One line of the table, with the change against the start."""
    cells = [f"{line['eval/reward_mean']:.3f}", f"{line['eval/kl']:.2f}"]
    cells += [f"{judged[k]:.4f} ({100 * (judged[k] / start[k] - 1):+.1f} %)" for k in ("nats", "pass@1")]
    return f"| {' | '.join([name, *cells, *more])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32])
    parser.add_argument("--coef", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--eval-prompts", type=int, default=256)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    text = out / "sorting.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in sorting_text(TEXT_ROWS, seed=2)))
    judge = Sorting()
    start = judge(None)
    print(f"{os.cpu_count()} cores, one thread; runs in {out}\n", flush=True)
    print("| | reward | KL | nats per token of sorting text | pass@1 on sort, exact | step | seconds |")
    print("|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        often = [f"run.{name}=2" for name in ("eval_every", "save_every")]
        both = [f"run.seed={seed}", f"run.num_steps={options.steps}", *often, "run.keep_checkpoints=1000"]
        both += [f"run.eval_prompts={options.eval_prompts}", "run.threads=1"]
        forms = {"PPO": [], "PPO-ptx": [f"ppo.ptx_coef={options.coef}", f"ppo.ptx_data={text}"]}
        seconds = {name: train(out, f"{name.lower()}-{seed}", *both, *more) for name, more in forms.items()}
        runs = {name: out / f"{name.lower()}-{seed}" for name in forms}
        first = evaluated(runs["PPO"])[0]
        print(row(f"start, seed {seed}", first, start, start, "0", ""), flush=True)
        for name, run in runs.items():
            step, line = max(evaluated(run).items())
            judged = judge(run / "checkpoints" / f"step-{step:06d}")
            print(row(f"{name}, at its end", line, judged, start, str(step), f"{seconds[name]:.0f}"), flush=True)
        matched = min(evaluated(run)[options.steps]["eval/reward_mean"] for run in runs.values())
        for name, run in runs.items():
            step, line = nearest(run, matched)
            judged = judge(run / "checkpoints" / f"step-{step:06d}")
            print(row(f"{name}, matched", line, judged, start, str(step), ""), flush=True)


if __name__ == "__main__":
    main()
