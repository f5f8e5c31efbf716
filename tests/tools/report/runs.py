"""Synthetic run directories for the report's tests, and a reader of its page."""

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tinyrl.runs.records import read_run
from tinyrl.tools.report import page_html, run_values

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
    for name, lines, end in (("metrics", metrics, tail), ("samples", samples, "")):
        text = "".join(json.dumps(line) + "\n" for line in lines or []) + end
        if lines is not None:
            (folder / f"{name}.jsonl").write_text(text, "utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"method": "grpo"}, sort_keys=False), "utf-8")
    (folder / "env.json").write_text(json.dumps({"torch": "2.13.0", "command": "tinyrl train grpo"}), "utf-8")
    return folder


def sample(step: int, index: int, prompt: str, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "kind": "eval", "prompt_index": index, "sample": 0, "prompt": prompt,
            "completion": completion, "rewards": {"sorting": reward}, "reward": reward, "advantage": None,
            "finish_reason": "eos", **more}  # fmt: skip


def grpo_run(folder: Path, *, steps: int = 60, tail: str = "") -> Path:
    """A GRPO run that learns, as noisy as real ones."""
    rng, lines = random.Random(1), list[dict[str, Any]]()
    for step in range(steps + 1):
        done = 1 - math.exp(-step / 18)
        reward, line = 0.46 + 0.48 * done, dict[str, Any](step=step)
        if step:
            line |= {
                "reward/mean": reward + rng.gauss(0, 0.025), "reward/std": 0.3 - 0.2 * done, "reward/sorting": reward,
                "reward/dropped": 0.0, "reward/zero_spread_groups": 0.05 + 0.5 * done, "objective/kl": 1.3 * done,
                "policy/entropy": 0.42 - 0.3 * done, "optim/grad_norm": 0.6 + 3 * (step == 23),
                "completion/mean_length": 11 + rng.gauss(0, 0.1), "completion/truncated": 0.02 * (1 - done),
                "time/rollout": 0.31, "time/update": 0.36, "time/total": 0.78, "tokens_per_second": 4200,
            }  # fmt: skip
        if step % 10 == 0 or step == steps:
            line |= {
                "eval/reward_mean": reward, "eval/reward_ci": [reward - 0.02, reward + 0.02], "eval/pass@1": reward,
                "eval/kl": 1.3 * done, "eval/greedy/reward_mean": 0.97 + 0.01 * done, "eval/mean_length": 11.2,
                "time/evaluation": 1.9,
            }  # fmt: skip
        lines.append(line)
    samples = [
        sample(step, index, prompt, "".join(sorted(prompt[6:16]))[: 10 if step else 9], 1.0 if step else 0.0)
        for step in (0, 10, steps)
        for index, prompt in enumerate(GRPO_PROMPTS)
    ]
    grpo = {"preset": "dapo", "group_size": 8}
    config = {"method": "grpo", "task": {"name": "sorting"}, "grpo": grpo, "run": {"num_steps": 60, "seed": 0}}
    run = write_run(folder, lines, samples=samples, config=config, tail=tail)
    (run / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    return run


class PageReader(HTMLParser):
    """What a browser would see: tags with attributes, and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data if self.lasttag != "style" else ""


def page(run_dir: Path) -> str:
    """The page without its charts: fast."""
    return page_html([], **run_values(read_run(run_dir)))
