"""`tinyrl eval`: evaluation of a run, a checkpoint or a model, and comparison with --vs.

Both sides get the same prompts and uniforms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.components import Options, SamplingParts, load_sampling_parts, settle_threads
from tinyrl.config.methods import METHODS
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import Evaluation, Role, evaluate, paired_difference
from tinyrl.models.loading import load_model_config
from tinyrl.models.weights_io import load_policy
from tinyrl.runs.checkpoint import checkpoint_of
from tinyrl.runs.run_dir import finite, open_run
from tinyrl.tasks import load_task

MAX_NEW_TOKENS = 256  # for a model without a run; less where the model has few positions

__all__ = ["Options", "evaluate_target", "render"]


@dataclass
class Side:
    """One side of a comparison: its parts, the role it samples as, and its name."""

    parts: SamplingParts
    role: Role
    name: str


def evaluate_target(
    target: str,
    *,
    vs: str | None,
    task: str | None,
    split: str,
    num_prompts: int,
    samples: int,
    options: Options,
) -> dict[str, Any]:
    """Metrics of `target` on prompts of `split` (eval or train); with `vs` also "other" and "difference"."""
    if split not in ("eval", "train"):
        raise ValueError(f"--split {split!r}: allowed are eval and train")
    ours = _load(target, task=task, options=options)
    result = _evaluate(ours, split, num_prompts, samples)
    out: dict[str, Any] = {"target": ours.name, **result.metrics}
    if vs is not None:
        theirs = _other(vs, ours, task=task, options=options)
        other = _evaluate(theirs, split, num_prompts, samples)
        out |= {"other": {"target": theirs.name, **other.metrics}, "difference": paired_difference(result, other)}
    return out


def _evaluate(side: Side, split: str, num_prompts: int, samples: int) -> Evaluation:
    settle_threads(side.parts)
    prompts = side.parts.eval_prompts if split == "eval" else side.parts.train_prompts
    try:
        return evaluate(side.parts, num_prompts=num_prompts, samples=samples, role=side.role, prompts=prompts)
    finally:
        side.parts.scorer.close()


def _other(vs: str, ours: Side, *, task: str | None, options: Options) -> Side:
    if vs == "base" and ours.parts.roles.peft is None:
        if ours.parts.roles.reference_model is None:
            raise ValueError(
                "--vs base: this model was fully fine-tuned without a reference, so its base is not at hand"
            )
        return Side(ours.parts, "reference", "base")
    if vs == "base":
        return Side(ours.parts, "base", "base")
    if vs == "start":
        if not ours.parts.roles.has_reference:
            raise ValueError("--vs start: this run has no reference (reference.kind=none)")
        return Side(ours.parts, "reference", "start")
    return _load(vs, task=task, options=options)


def _load(target: str, *, task: str | None, options: Options) -> Side:
    """A run or a checkpoint of one is recognised by its config.yaml; everything else is a model's path or name."""
    path = Path(target)
    run_folder = path if (path / "config.yaml").is_file() else path.parent.parent
    if (run_folder / "config.yaml").is_file():
        config = open_run(run_folder).read_config()
        if not METHODS[config.method].samples:
            raise ValueError(
                f"{target} is a {config.method} run; its held-out numbers are in "
                f"{run_folder}/metrics.jsonl. `tinyrl eval` samples from policies"
            )
        parts = load_sampling_parts(_for_task(config, task), options=options)
        folder = checkpoint_of(path)
        load_policy(parts.roles, folder)
        return Side(parts, "policy", f"{run_folder.name}/{folder.name}")
    if task is None:
        raise ValueError(f"{target} is not a run, so say what to evaluate a model on: --task NAME (see `tinyrl tasks`)")
    load_task(task)
    values = {"method": "grpo", "model": {"path": target}, "task": {"name": task}, "reference": {"kind": "none"}}
    model_config = load_model_config(target, trust_remote_code=options.trust_remote_code)
    positions = getattr(model_config, "max_position_embeddings", None) or 2 * MAX_NEW_TOKENS
    config = Config.model_validate({**values, "generation": {"max_new_tokens": min(MAX_NEW_TOKENS, positions // 2)}})
    return Side(load_sampling_parts(config, options=options), "base", target)


def _for_task(config: Config, task: str | None) -> Config:
    """The run's configuration, on another task's own rows and verifier when one is named."""
    if task is None or task == config.task.name:
        return config
    load_task(task)
    values = config.model_dump()
    values["task"] = {"name": task, "chat": config.task.chat, "system_prompt": config.task.system_prompt}
    values["reward"] = {}
    return Config.model_validate(values)


SHOWN = (
    "reward_mean",
    "reward_median",
    "reward_std",
    "pass@1",
    "verifier_mean",
    "kl",
    "entropy",
    "mean_length",
    "truncated",
    "distinct",
    "distinct_answers",
)


def render(result: dict[str, Any], *, as_json: bool) -> str:
    """One JSON object, or a table for people."""
    if as_json:
        return json.dumps(finite(result))
    sides = [result, result["other"]] if "other" in result else [result]
    extra = [k for k in result if k.startswith(("pass@", "majority@")) and k != "pass@1"]
    lines = [f"{'':18}" + "".join(f"{_short_name(side['target']):>24}" for side in sides)]
    for key in (*SHOWN[:4], *extra, *SHOWN[4:]):
        if key in result:
            lines.append(
                f"{key:18}" + "".join(f"{_cell(side.get(key), side.get('greedy', {}).get(key)):>24}" for side in sides)
            )
    low, high = result["reward_ci"]
    lines.append(
        f"(greedy in brackets; {result['num_prompts']} prompts x {result['num_samples']}; reward 95 "
        f"% interval {low:.3f} to {high:.3f})"
    )
    if "difference" in result:
        difference = result["difference"]
        low, high = difference["reward_ci"]
        verdict = "" if difference["distinguishable"] else ": not distinguishable"
        lines.append(
            f"difference {difference['reward_mean']:+.3f} (95 % interval {low:+.3f} to {high:+.3f}, "
            f"paired by prompt){verdict}"
        )
    return "\n".join(lines)


def _short_name(target: str) -> str:
    return target if len(target) < 24 else f"…{target[-22:]}"  # its end says which checkpoint


def _cell(value: float | None, greedy: float | None) -> str:
    shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    inner = "" if greedy is None else f" ({greedy:.3f})" if isinstance(greedy, float) else f" ({greedy})"
    return shown + inner
