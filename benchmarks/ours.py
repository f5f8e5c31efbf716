"""tinyrl's side: recipes of the fixed work, and `tinyrl train` in this process with its steps timed.

Phases come from metrics.jsonl. A step lasts from the end of the step before to its own end, as on the peer's side.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import measuring
from benchmarks.work import CHECKED_STEP, LORA, PPO_EPOCHS, PPO_PROMPTS, SPEED, Grpo

REWARDS = Path(__file__).with_name("rewards.py")
PHASES = ("rollout", "reference", "values", "teacher", "update")
LOSSES = {"sft": "loss", "reward": "preference/loss", "dpo": "preference/loss"}


def common(files: Path, work: Grpo, *, steps: int, options: Namespace, seed: int) -> dict[str, Any]:
    """Sections that all methods share. Nothing is saved or evaluated between steps."""
    every = {"num_steps": steps, "eval_every": 0, "eval_prompts": 1, "save_every": 0}
    return {
        "model": {"path": str(files / "model"), "dtype": "float32"},
        "lora": {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": LORA["target_modules"]},
        "task": {"data": str(files / "prompts.jsonl"), "eval_data": str(files / "eval.jsonl")},
        "generation": {"max_new_tokens": work.max_new_tokens, "temperature": 1.0},
        "optim": {"learning_rate": work.learning_rate, "schedule": "constant"},
        "run": {"seed": seed, "threads": options.threads, **every},
    }


def grpo(files: Path, *, steps: int, options: Namespace, seed: int = 0, work: Grpo = SPEED) -> dict[str, Any]:
    """One update a rollout, all tokens of a step weigh the same, KL to the reference by k3."""
    shape = {"num_prompts": work.num_prompts, "group_size": work.group_size}
    clip = {"clip_eps": work.clip_eps, "clip_eps_high": work.clip_eps}
    return {
        "method": "grpo",
        **common(files, work, steps=steps, options=options, seed=seed),
        "reward": {"functions": [{"use": f"{REWARDS}:{work.reward}"}]},
        "grpo": {**shape, **clip, "kl_coef": work.kl_coef, "kl_estimator": "k3"},
    }


def ppo(files: Path, *, critic: str, steps: int, options: Namespace, seed: int = 0) -> dict[str, Any]:
    """64 prompts with one completion each, four epochs of one optimizer step, a reward model of the policy's shape."""
    recipe = common(files, SPEED, steps=steps, options=options, seed=seed)
    recipe["optim"]["critic_learning_rate"] = SPEED.learning_rate
    start = {"path": str(files / "reward_model")} if critic == "separate" else {}
    return {
        "method": "ppo",
        **recipe,
        "reward": {"model": str(files / "reward_model")},
        "critic": {"kind": critic, "warmup_steps": 0, **start},
        "ppo": {"num_prompts": PPO_PROMPTS, "num_epochs": PPO_EPOCHS, "minibatch_size": PPO_PROMPTS},
    }


def write(settings: dict[str, Any]) -> Path:
    """Write a process's recipe into its folder, which is made; returns the file."""
    path = Path(settings["folder"]) / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings["recipe"]))  # JSON is YAML
    return path


# ---- what is measured ----


@contextmanager
def watched(gradients: str | None) -> Iterator[measuring.Steps]:
    """Note each step's end, draw no report (drawing needs memory of its own), and write the LoRA gradients of one
    optimizer step to the file `gradients`, where one is given, by their names in the base model.
    """
    from safetensors.torch import save_file

    from tinyrl.training.run import Run
    from tinyrl.training.step import Updater

    steps, calls = measuring.Steps(), [0]
    end_step, go, accumulate = Run.end_step, Run.go, Updater._accumulate

    def end(self: Run, **metrics: float) -> None:
        steps.end()
        end_step(self, **metrics)

    def silent(self: Run, **options: Any) -> int:
        return go(self, **{**options, "report": lambda _: None})

    def kept(self: Updater, passes: Any) -> dict[str, float]:
        metrics = accumulate(self, passes)
        calls[0] += 1
        if gradients is not None and calls[0] == CHECKED_STEP:
            named = self.policy.parameters["policy"].items()
            save_file({n: p.grad.clone() for n, p in named if p.grad is not None and "lora_" in n}, gradients)
        return metrics

    Run.end_step, Run.go = end, silent
    Updater._accumulate = kept  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield steps
    finally:
        Run.end_step, Run.go, Updater._accumulate = end_step, go, accumulate


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """A run of settings["recipe"] on settings["device"] (the CPU), within settings["memory_gb"] of a GPU, where that is
    given, with the completions of settings["given"], where there are: what each step after the first took.
    """
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from tinyrl.cli.commands import app

    if "memory_gb" in settings:
        limit_memory(settings["memory_gb"])

    imports, run, method = measuring.resident_mb(), Path(settings["folder"]) / "run", settings["recipe"]["method"]
    command = ["train", method, str(write(settings)), *settings["overrides"]]
    where = ["--output-dir", str(run.parent), "--name", run.name, "--device", settings.get("device", "cpu")]
    counting = measuring.tower_images() if "images" in settings else nullcontext([])
    with watched(settings.get("gradients")) as steps, completions_of(settings), counting as images:
        code = app([*command, *where], standalone_mode=False)
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in every if "time/update" in line]  # without the evaluation before training
    return {
        "seconds": steps.seconds,
        "cpu": steps.cpu,
        "phases": [{p: line[f"time/{p}"] for p in PHASES if f"time/{p}" in line} for line in lines[1:]],
        "tokens": [int(line.get("completion/tokens", 0)) for line in lines[1:]],
        "losses": [line[LOSSES[method]] for line in lines if method in LOSSES],
        "rewards": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "held_out": {key.removeprefix("eval/"): value for key, value in lines[-1].items() if key.startswith("eval/")},
        "adapter": str(max((run / "checkpoints").iterdir())),
        "imports_mb": imports,
        "peak_mb": measuring.peak_mb(),
        "peak_gb": mean_of(lines[1:], "memory/peak_gb"),
        "gap": mean_of(lines[1:], "policy/sampling_gap"),
        "tower_images": len(images),
    }


def completions_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Take the completions of the file settings["given"], where that is given, instead of sampling."""
    if "given" not in settings:
        return nullcontext()
    from benchmarks.given import given_completions

    return given_completions(Path(settings["given"]))


def limit_memory(gigabytes: float) -> None:
    """Have a CUDA device hold, and say that it has, no more than that."""
    import torch

    limit = int(gigabytes * 1e9)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        held = torch.cuda.memory_reserved(device)
        return min(free, limit - held), limit

    torch.cuda.mem_get_info = mem_get_info


def mean_of(lines: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if key in line]
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    measuring.serve(measure)
