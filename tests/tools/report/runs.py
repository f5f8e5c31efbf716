"""Synthetic run directories for the report's tests, and a reader of its page."""

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tinyrl.runs.records import read_run
from tinyrl.tools.report import page_html

GRPO_PROMPTS = ["sort: qwhzkalmbc =", "sort: ttexoprael =", "sort: zyxwvutsrq =", "sort: banquethiy ="]


def write_run(
    folder: Path,
    metrics: list[dict[str, Any]],
    *,
    samples: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    tail: str = "",
) -> Path:
    """A run directory with the files that tinyrl writes. `tail` is appended to metrics.jsonl as it is."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(line) + "\n" for line in metrics)
    (folder / "metrics.jsonl").write_text(lines + tail, "utf-8")
    if samples is not None:
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples), "utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"method": "grpo"}, sort_keys=False), "utf-8")
    env = {
        "tinyrl": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "threads": 1,
        "seed": 0,
        "command": "tinyrl train grpo",
    }
    (folder / "env.json").write_text(json.dumps(env), "utf-8")
    return folder


def sample(step: int, index: int, prompt: str, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "kind": "eval",
        "prompt_index": index,
        "sample": 0,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"sorting": reward},
        "reward": reward,
        "advantage": None,
        "finish_reason": "eos",
        **more,
    }


def evaluation(reward: float, *, spread: float = 0.02, kl: float = 0.0, **more: float) -> dict[str, Any]:
    return {"eval/reward_mean": reward, "eval/reward_ci": [reward - spread, reward + spread], "eval/pass@1": reward,
            "eval/kl": kl, "eval/entropy": 0.42, "eval/mean_length": 11.2, "eval/truncated": 0.01,
            "eval/greedy/reward_mean": min(1.0, reward + 0.05), **more}  # fmt: skip


def grpo_metrics(steps: int, *, eval_every: int = 10) -> list[dict[str, Any]]:
    """A GRPO run that learns, as noisy as real ones."""
    rng = random.Random(1)
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        done = 1 - math.exp(-step / 18)
        reward = 0.46 + 0.48 * done
        line: dict[str, Any] = {"step": step}
        if step:
            line |= {
                "reward/mean": reward + rng.gauss(0, 0.025), "reward/std": 0.3 - 0.2 * done, "reward/sorting": reward,
                "reward/dropped": 0.0, "reward/zero_spread_groups": 0.05 + 0.5 * done + rng.gauss(0, 0.03),
                "objective/kl": 1.3 * done + abs(rng.gauss(0, 0.05)),
                "policy/entropy": 0.42 - 0.3 * done + rng.gauss(0, 0.01), "policy/clipfrac": 0.0,
                "policy/approx_kl": 0.0, "optim/grad_norm": 0.6 + rng.gauss(0, 0.1) + (3 if step == 23 else 0),
                "completion/mean_length": 11 + rng.gauss(0, 0.1),
                "completion/truncated": max(0.0, 0.02 * (1 - done) + rng.gauss(0, 0.004)),
                "time/rollout": 0.31 + rng.gauss(0, 0.02), "time/update": 0.36 + rng.gauss(0, 0.02),
                "time/reward": 0.02, "time/total": 0.78 + rng.gauss(0, 0.02),
                "tokens_per_second": 4200 + rng.gauss(0, 100), "memory/peak_gb": 0.71,
            }  # fmt: skip
        if step % eval_every == 0 or step == steps:
            line["time/evaluation"] = 1.9
            line |= evaluation(
                reward, kl=1.3 * done, **{"eval/entropy": 0.42 - 0.3 * done, "eval/truncated": 0.02 * (1 - done)}
            )
            line |= {"eval/greedy/reward_mean": 0.97 + 0.01 * done}
        lines.append(line)
    return lines


def ppo_metrics(steps: int) -> list[dict[str, Any]]:
    """A PPO run on reviews: rewards of any sign, a critic that starts out bad, several phases."""
    rng = random.Random(2)
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        done = 1 - math.exp(-step / 14)
        line: dict[str, Any] = {"step": step}
        if step:
            line |= {
                "reward/mean": -0.3 + 1.9 * done + rng.gauss(0, 0.08), "objective/kl": 6.2 * done + rng.gauss(0, 0.3),
                "policy/entropy": 2.4 - 0.8 * done + rng.gauss(0, 0.03), "policy/clipfrac": 0.09,
                "policy/approx_kl": 0.01, "value/loss": 4 * math.exp(-step / 4) + 0.2 + abs(rng.gauss(0, 0.05)),
                "value/explained_variance": 1 - 9 * math.exp(-step / 3) - 0.6 * math.exp(-step / 30),
                "optim/grad_norm": 1.2, "value/grad_norm": 0.7,
                "completion/mean_length": 34 + 3 * done + rng.gauss(0, 0.6), "completion/truncated": 0.0,
                "time/rollout": 0.5, "time/reference": 0.08, "time/values": 0.07, "time/reward": 0.05,
                "time/update": 1.1 + rng.gauss(0, 0.05), "time/total": 1.9, "tokens_per_second": 2300,
                "memory/peak_gb": 1.02,
            }  # fmt: skip
        if step % 10 == 0:
            line |= {
                "eval/reward_mean": -0.3 + 1.9 * done, "eval/reward_ci": [-0.42 + 1.9 * done, -0.18 + 1.9 * done],
                "eval/kl": 6.2 * done, "eval/entropy": 2.4 - 0.8 * done, "eval/mean_length": 34 + 3 * done,
                "eval/truncated": 0.0, "eval/greedy/reward_mean": 0.1 + 1.7 * done,
            }  # fmt: skip
        lines.append(line)
    return lines


def grpo_run(folder: Path, *, steps: int = 60, planned: int = 60, tail: str = "") -> Path:
    samples = [
        sample(step, index, prompt, "".join(sorted(prompt[6:16]))[: 10 if step else 9], 1.0 if step else 0.0)
        for step in (0, 10, steps)
        for index, prompt in enumerate(GRPO_PROMPTS)
    ]
    config = {
        "method": "grpo",
        "model": {"path": "tinyrl/starter", "dtype": "float32"},
        "lora": {"enabled": True, "r": 16},
        "task": {"name": "sorting"},
        "grpo": {"preset": "dapo", "group_size": 8, "num_prompts": 32, "clip_eps": 0.2},
        "optim": {"learning_rate": 1e-3},
        "run": {"num_steps": planned, "seed": 0},
    }
    run = write_run(folder, grpo_metrics(steps), samples=samples, config=config, tail=tail)
    (run / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    return run


class PageReader(HTMLParser):
    """What a browser would see: tags with attributes, and the text of the page by the tag around it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


def page(run_dir: Path) -> str:
    """The page without its charts: fast."""
    return page_html(read_run(run_dir), [])
