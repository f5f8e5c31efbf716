"""`tinyrl eval`: runs, checkpoints and models on held-out rows, alone or compared by prompt.

The first target judges all: its held-out rows, uniforms, sampling settings, environment, and its reward through its
scorer. Only the model, its tokenizer and its reference are another side's own. Where a trainer measures the first one
on rows (sft, dpo, reward), it measures the other side's model on the same rows.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.rows import prompt_key
from tinyrl.evaluation.evaluate import Evaluation, Role, evaluate
from tinyrl.evaluation.statistics import paired_difference, win_rates
from tinyrl.evaluation.targets import (
    A_JUDGE,
    Asked,
    Target,
    check_asked,
    find,
    judged_by,
    locate,
    measured_by,
    prompt_keys,
    trained_on,
)
from tinyrl.models.roles import load_policy
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.components import Options, SamplingParts, resolve_threads, trainer_of
from tinyrl.runs.run_dir import finite, run_of
from tinyrl.tasks.prompts import PreparedPrompt

FEWEST_LEFT = 10  # prompts, after those that another side was trained on are left out


def evaluate_target(target: str, asked: Asked, *, vs: str | None = None, options: Options) -> dict[str, Any]:
    """Evaluate `target` on the rows asked for; with `vs` also "other", "difference" and "win_rate".

    "held_out" is what a trainer measures (of sft, dpo and reward runs). Held-out prompts that `vs` was trained on are
    left out and counted ("left_out"); ValueError where too few remain. With split "train" none is left out: neither
    side need be new to them.
    """
    first = locate(find(target, asked))
    check_asked(first, asked)
    result: dict[str, Any] = {"target": first.name}
    if first.sampled is not None:
        others = [] if vs is None else [vs]
        left_out, (mine, *theirs) = _sampled(first, others, asked, seen=_trained_on(others), options=options)
        result |= mine.evaluation.metrics
        for side in theirs:
            difference = paired_difference(mine.evaluation.by_prompt, side.evaluation.by_prompt)
            result |= {
                "other": {"target": side.name, **side.evaluation.metrics},
                "difference": {**difference, "left_out": left_out},
                "win_rate": win_rates(mine.evaluation.values, side.evaluation.values),
            }
        if asked.data is not None:  # the run's own split would have held them out
            result["trained_on"] = sum(prompt_key(p.prompt) in trained_on(first.path) for p in mine.prompts)
    if first.measured is not None:
        result["held_out"] = measure(first.measured, first.checkpoint, asked, options=options)
        if vs is not None:
            other = _other_measured(first.measured, vs, asked, options=options)
            result["other"] = {**other, **result.get("other", {})}
    return result


def compare_policies(targets: list[str], asked: Asked, *, vs: str, options: Options) -> list[dict[str, Any]]:
    """Evaluate the baseline `vs` and every target as the baseline is judged; one row each, the baseline's first.

    A row has `policy`, the metrics of its evaluation, and `win_rate` against the baseline. Prompts that any of them
    was trained on are left out.
    """
    first = locate(find(vs, asked))
    if first.sampled is None:
        raise ValueError(f"{vs}: nothing says what samples are judged by; name {A_JUDGE}")
    _, (baseline, *others) = _sampled(first, targets, asked, seen=_trained_on([vs, *targets]), options=options)
    rows = [{"policy": baseline.name, **baseline.evaluation.metrics}]
    for side in others:
        wins = win_rates(side.evaluation.values, baseline.evaluation.values)
        rows.append({"policy": side.name, **side.evaluation.metrics, "win_rate": wins})
    return rows


def _trained_on(paths: list[str]) -> frozenset[str]:
    return frozenset().union(*(trained_on(path) for path in paths))


# ---- sampled and judged ----


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its parts, the role it samples as, its name."""

    parts: SamplingParts
    role: Role
    name: str

    def prompts(self, split: str) -> list[PreparedPrompt]:
        """Return those of a split, in this side's tokens. Raises ValueError where there are none."""
        found = self.parts.eval_prompts if split == "eval" else self.parts.train_prompts
        if not found:
            hint = "evaluate those of training (--split train), or other rows (--data FILE)"
            raise ValueError(f"{self.name} has no prompts of split {split}: {hint}")
        return found


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a side on the prompts of the first side; values of prompts it has no room for are NaN."""

    name: str
    prompts: list[PreparedPrompt]
    evaluation: Evaluation


def _sampled(
    first: Target, others: list[str], asked: Asked, *, seen: frozenset[str], options: Options
) -> tuple[int, list[Evaluated]]:
    """Evaluate the first target, then the others one after another, on the first one's prompts that are not `seen`
    (in training); return how many those are, and the sides. Raises ValueError where too few prompts are left.
    """
    ours = load_side(first, options=options)
    try:
        available = ours.prompts(asked.split)
        known = seen if asked.split == "eval" else frozenset()
        prompts = [p for p in available if prompt_key(p.prompt) not in known]
        left_out = len(available) - len(prompts)
        if left_out and len(prompts) < min(FEWEST_LEFT, asked.num_prompts):
            raise ValueError(
                f"{' or '.join(others)} was trained on {left_out} of the {len(available)} held-out prompts of "
                f"{ours.name}; the {len(prompts)} others are too few to compare on. Hold out the same rows in all runs "
                "(task.eval_data), or compare on training prompts: --split train"
            )
        prompts = prompts[: asked.num_prompts]
        sides = [Evaluated(ours.name, prompts, _evaluated(ours, prompts, asked))]
        sides += [_evaluated_other(path, ours, prompts, asked, options=options) for path in others]
    finally:
        ours.parts.close()
    if asked.save_samples is not None and ours.parts.world.is_main:
        lines = [{"target": side.name, **line} for side in sides for line in side.evaluation.samples]
        with open(asked.save_samples, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=True) + "\n" for line in finite(lines))
    return left_out, sides


def _evaluated_other(
    path: str, ours: Side, prompts: list[PreparedPrompt], asked: Asked, *, options: Options
) -> Evaluated:
    """Load another side, evaluate it, and free its model."""
    theirs = _other(path, ours, asked=asked, options=options)
    try:
        return Evaluated(theirs.name, prompts, _evaluated(theirs, prompts, asked))
    finally:
        if theirs.parts is not ours.parts:
            theirs.parts.close()


def _evaluated(side: Side, prompts: list[PreparedPrompt], asked: Asked) -> Evaluation:
    """Evaluate a side on the prompts it has room for, in its own tokens; the others have no value."""
    resolve_threads(side.parts)
    readable = {p.index: p for p in side.prompts(asked.split)}
    own = [readable[p.index] for p in prompts if p.index in readable]
    if not own:
        raise ValueError(f"{side.name} has no room for any of the prompts: all are too long for it")
    found = evaluate(side.parts, role=side.role, prompts=own, num_prompts=len(own), samples=asked.samples)
    if len(own) == len(prompts):
        return found
    place = {p.index: i for i, p in enumerate(own)}
    at = [place.get(p.index) for p in prompts]
    by_prompt = [math.nan if i is None else found.by_prompt[i] for i in at]
    values = {name: [[] if i is None else column[i] for i in at] for name, column in found.values.items()}
    return replace(found, by_prompt=by_prompt, values=values)


def _other(path: str, ours: Side, *, asked: Asked, options: Options) -> Side:
    roles = ours.parts.roles
    if path == "base":
        if roles.peft is None and roles.reference_model is None:
            raise ValueError(
                "--vs base: the model was fully fine-tuned without a reference, so its base is not at hand"
            )
        return Side(ours.parts, "reference" if roles.peft is None else "base", "base")
    if path == "start":
        if not roles.has_reference:
            raise ValueError("--vs start: this run has no reference (reference.kind=none)")
        return Side(ours.parts, "reference", "start")
    if path == "teacher":
        return _teacher(ours, options=options)
    target, first = locate(find(path, replace(asked, task=asked.task or "rows", settings=()))), ours.parts.config
    side = load_side(replace(target, sampled=judged_by(first, target.config)), options=options, judge=ours.parts.scorer)
    side.parts.config = _with(side.parts.config, seed=first.run.seed)  # the first one's uniforms
    return side


def _with(config: Config, **run: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def _teacher(ours: Side, *, options: Options) -> Side:
    """Load a run's teacher in the policy's place. Raises ValueError for one that is no model on this machine."""
    config = ours.parts.config
    kind, path = config.teacher.kind, config.teacher.path
    if not config.uses("teacher") or kind not in ("adapter", "model"):
        raise ValueError(f"--vs teacher: teacher.path={path} of this run is no adapter and no model to sample from")
    assert path is not None
    adapter = str(starter_path(path) or path) if kind == "adapter" else None
    model = {"adapter": adapter} if adapter else {"path": path, "adapter": None, "revision": None}
    sampled = config.model_copy(update={"model": config.model.model_copy(update=model)})
    return Side(SamplingParts(sampled, options=options, judge=ours.parts.scorer), "policy", "teacher")


def load_side(target: Target, *, options: Options, judge: Scorer | None = None) -> Side:
    """Load the policy of a target; judged by another side's scorer where one is given."""
    parts = SamplingParts(target.config, options=options, judge=judge)
    for line in parts.template_warnings() if parts.world.is_main else ():
        print(f"{target.name}: {line}", file=sys.stderr)
    if target.checkpoint is None:
        return Side(parts, "base", target.name)
    load_policy(parts.roles, target.checkpoint)
    return Side(parts, "policy", target.name)


# ---- measured by a trainer ----


def measure(config: Config, checkpoint: Path | None, asked: Asked, *, options: Options) -> dict[str, Any]:
    """Return a trainer's metrics on rows, for the weights of a checkpoint (None: those that training starts from)."""
    trainer = trainer_of(config.method)(_with(config, eval_prompts=asked.num_prompts), options=options)
    try:
        if checkpoint is not None and config.trains.policy:  # of any method: that of another run too
            load_policy(trainer.roles, checkpoint)
        elif checkpoint is not None:
            trainer.load_models(checkpoint)
        resolve_threads(trainer)
        if asked.split == "train":
            trainer.held_out = trainer.train_rows
            trainer.forget()
        return trainer.evaluate().metrics
    finally:
        trainer.close()


def _other_measured(config: Config, vs: str, asked: Asked, *, options: Options) -> dict[str, Any]:
    if vs in ("base", "start"):
        if not config.trains.policy:
            raise ValueError(f"--vs {vs}: a reward model starts from nothing; name another `tinyrl train reward` run")
        if vs == "base":
            config = config.model_copy(update={"model": config.model.model_copy(update={"adapter": None})})
        return {"target": vs, "held_out": measure(config, None, asked, options=options)}
    other = locate(find(vs, Asked(task=None if run_of(Path(vs)) else "rows")))
    found = measure(measured_by(config, other), other.checkpoint, asked, options=options)
    seen = len(prompt_keys(config, "eval") & trained_on(vs)) if asked.split == "eval" else 0
    return {"target": other.name, "held_out": found} | ({"trained_on": seen} if seen else {})
