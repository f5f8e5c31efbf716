"""`tinyrl eval`: runs, checkpoints and models on held-out rows, alone or compared by prompt.

The first target judges all: its held-out rows, uniforms, sampling settings, environment, and its reward through its
scorer. Only the model, its tokenizer and its reference are another side's own. Where a trainer measures the first one
on rows (sft, dpo, reward), it measures the other side's model on the same rows.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tinyrl.config.evaluated import base_of, judged_by, measured_by, teacher_of
from tinyrl.data.rows import prompt_keys
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.evaluation.prepared import PreparedEvaluation
from tinyrl.evaluation.statistics import paired_difference, win_rate
from tinyrl.evaluation.targets import Asked, Side, Target, seen_in_training, trained_on
from tinyrl.generation.engine import SampledRole
from tinyrl.process.launched import Options
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, resolve_threads
from tinyrl.rollout.prepared import PreparedRun
from tinyrl.runs.records import json_safe
from tinyrl.runs.run_dir import OwnSide
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.load import load_row_method

FEWEST_LEFT = 10  # prompts, after those that another side was trained on are left out


class LoadedSide(NamedTuple):
    """One side of a comparison: its collector, the role it samples as, its name."""

    collector: Collector
    role: SampledRole
    name: str

    def prompts(self, split: str) -> list[PreparedPrompt]:
        """Return the prompts of a split, in this side's tokens. Raises ValueError where there are none."""
        found = self.collector.eval_prompts if split == "eval" else self.collector.train_prompts
        if not found:
            hint = "evaluate those of training (--split train), or other rows (--data FILE)"
            raise ValueError(f"{self.name} has no prompts of split {split}: {hint}")
        return found


def evaluate_target(prepared: PreparedEvaluation, *, options: Options) -> dict[str, Any]:
    """Evaluate a target on the rows asked for; where it is compared also "other", "difference" (ours less the other)
    and "win_rate". "held_out" is what a trainer measures (of sft, dpo and reward runs), and "left_out" beside it how
    many rows that measure leaves out, since a side was trained on their prompts. "trained_on", of rows that the run
    does not hold out itself: how many of them it was trained on; None where its training rows cannot be read.
    """
    first = prepared.first
    result: dict[str, Any] = {"target": first.name}
    if prepared.sampled is not None:
        sides, prompts, left_out = _sides(prepared, prepared.sampled, options=options)
        ours = sides[0]
        result |= ours.metrics
        for other in sides[1:]:
            result |= _difference(ours, other, left_out) | {"other": other.metrics}
        if not prepared.others:
            system_prompt = prepared.sampled.config.task.system_prompt
            keys = [prompt_keys(p.prompt, system_prompt=system_prompt) for p in prompts]
            result |= _trained_on(first, prepared.asked, keys)
    if prepared.measured is not None:
        measured = _measured(prepared, prepared.measured, options=options)
        both = measured.get("other", {}) | result.get("other", {})
        result |= measured | ({"other": both} if both else {})
        for side in prepared.others:
            _tell_apart([result, both], [first.path, side.path])
    return result


def compare(prepared: PreparedEvaluation, *, options: Options) -> list[dict[str, Any]]:
    """Evaluate policies as the first one, the baseline, is judged; one result each, of the others with their
    "difference" from the baseline and their "win_rate" against it.
    """
    assert prepared.sampled is not None, "something judges samples"
    sides, _, left_out = _sides(prepared, prepared.sampled, options=options)
    baseline = sides[0]
    return [baseline.metrics, *(other.metrics | _difference(other, baseline, left_out) for other in sides[1:])]


# ---- sampled and judged ----


def _sides(
    prepared: PreparedEvaluation, sampled: PreparedRun, *, options: Options
) -> tuple[list[Evaluation], list[PreparedPrompt], int]:
    """Sample the first target, then the others one after another, on its prompts without those that a side was trained
    on. Returns the evaluations, named, the prompts, and how many were left out; raises ValueError where too few remain.
    """
    first = prepared.first
    others = prepared.others
    asked = prepared.asked
    ours = _load(first, sampled, options=options)
    with closing(ours.collector):
        available = ours.prompts(asked.split)
        seen = seen_in_training(first, others, asked)
        keys_of = partial(prompt_keys, system_prompt=ours.collector.config.task.system_prompt)
        prompts = [p for p in available if seen.isdisjoint(keys_of(p.prompt))]
        left_out = len(available) - len(prompts)
        _check_enough(first, others, asked, left_out=left_out, remaining=len(prompts))
        prompts = prompts[: asked.num_prompts]
        sides = [_evaluated(ours, prompts, asked)]
        for side in others:
            with ExitStack() as stack:
                theirs = _other(side, ours, sampled, options=options)
                if theirs.collector is not ours.collector:
                    stack.enter_context(closing(theirs.collector))
                sides.append(_evaluated(theirs, prompts, asked))
    _tell_apart([side.metrics for side in sides], [first.path, *(side.path for side in others)])
    if asked.save_samples is not None and ours.collector.world.is_main:
        lines = [{"target": side.metrics["target"], **line} for side in sides for line in side.samples]
        with open(asked.save_samples, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=True) + "\n" for line in json_safe(lines))
    return sides, prompts, left_out


def _tell_apart(sides: list[dict[str, Any]], paths: list[str]) -> None:
    """Call sides of one name, as runs of several folders may be, by the paths that were given."""
    names = [side["target"] for side in sides]
    for side, path in zip(sides, paths, strict=True):
        if names.count(side["target"]) > 1:
            side["target"] = path


def _check_enough(first: Target, others: list[Side], asked: Asked, *, left_out: int, remaining: int) -> None:
    """Raise ValueError where a comparison has too few prompts that no side was trained on."""
    if left_out and remaining < min(FEWEST_LEFT, asked.num_prompts):
        sides = [*([first.path] if asked.other_rows else []), *(side.path for side in others)]
        raise ValueError(
            f"{' or '.join(sides)} was trained on {left_out} of the {left_out + remaining} held-out prompts of "
            f"{first.name}, and {remaining} others are too few. Hold out the same rows in all runs "
            "(task.eval_data), or compare on training prompts: --split train"
        )


def _trained_on(target: Target, asked: Asked, prompts: list[set[str]]) -> dict[str, int | None]:
    """Count those of the prompts, by their keys, that a run was trained on; {} where it holds them out itself."""
    if target.run is None or not asked.other_rows or asked.split == "train":
        return {}
    try:
        seen = trained_on(target.path)
    except (OSError, ValueError):  # moved, or changed: evaluating on other rows does not need them
        return {"trained_on": None}
    return {"trained_on": sum(not seen.isdisjoint(keys) for keys in prompts)}


def _evaluated(side: LoadedSide, prompts: list[PreparedPrompt], asked: Asked) -> Evaluation:
    """Evaluate a side on the prompts, in its own tokens. Raises ValueError where it has no room for one."""
    resolve_threads(side.collector.policy)
    readable = {p.index: p for p in side.prompts(asked.split)}
    own = [readable[p.index] for p in prompts if p.index in readable]
    if len(own) < len(prompts):
        missing = f"{len(prompts) - len(own)} of the {len(prompts)} prompts are too long for {side.name}"
        raise ValueError(f"{missing}: give generation.max_prompt_tokens or other rows (--data FILE)")
    found = evaluate(side.collector, own, role=side.role, samples=asked.samples)
    why = {"why_dropped": found.why_dropped} if found.why_dropped else {}
    return replace(found, metrics={"target": side.name, **found.metrics, **why})


def _difference(ours: Evaluation, other: Evaluation, left_out: int) -> dict[str, Any]:
    difference = {**paired_difference(ours.rewards, other.rewards), "left_out": left_out}
    return {"difference": difference, "win_rate": win_rate(ours.rewards, other.rewards)}


def _load(
    target: Target, sampled: PreparedRun, *, options: Options, judge: Scorer | None = None, seed: int | None = None
) -> LoadedSide:
    """Load the policy of a target; judged by another side's scorer, and sampled by its seed, where they are given."""
    collector = load_collector(sampled, options=options, judge=judge, seed=seed)
    if target.checkpoint is not None:
        collector.policy.load(target.checkpoint, only="policy")
    return LoadedSide(collector, "base" if target.checkpoint is None else "policy", target.name)


def _other(side: Side, ours: LoadedSide, sampled: PreparedRun, *, options: Options) -> LoadedSide:
    """Load another side, which has the task and the rows of ours. Raises ValueError where ours has none such."""
    policy = ours.collector.policy
    config = ours.collector.config
    judge = ours.collector.scorer
    match side:
        case OwnSide.BASE if policy.peft is not None:
            return LoadedSide(ours.collector, "base", side.path)
        case OwnSide.BASE | OwnSide.START:
            if not policy.has_reference:
                raise ValueError(f"--vs {side.path}: this run has no reference (reference.kind=none)")
            return LoadedSide(ours.collector, "reference", side.path)
        case OwnSide.TEACHER:
            teacher = replace(sampled, config=teacher_of(config))
            return LoadedSide(load_collector(teacher, options=options, judge=judge), "policy", side.path)
        case Target():
            theirs = replace(sampled, config=judged_by(config, side.config))
            return _load(side, theirs, options=options, judge=judge, seed=config.run.seed)  # our uniforms


# ---- measured by a trainer ----


def _measured(prepared: PreparedEvaluation, run: PreparedRun, *, options: Options) -> dict[str, Any]:
    """Measure the first target by its trainer, and the other side on the same rows: without those that a side was
    trained on.
    """
    first = prepared.first
    others = prepared.others
    asked = prepared.asked
    if first.sampled is not None:  # other rows are for its samples
        asked = replace(asked, task=None, data=None, settings=())
    rows = run.rows
    seen = seen_in_training(first, others, asked)
    keys = list[set[str]]()
    held_out = rows.train if asked.split == "train" else rows.held_out
    if asked.split == "eval" and (seen or asked.other_rows):
        keys_of = partial(prompt_keys, system_prompt=run.config.task.system_prompt)
        keys = [keys_of(rows.kind.prompt(row)) for row in rows.held_out]
        held_out = [row for row, own in zip(rows.held_out, keys, strict=True) if seen.isdisjoint(own)]
    new = [own for own in keys if seen.isdisjoint(own)]
    _check_enough(first, others, asked, left_out=len(keys) - len(new), remaining=len(new))
    section = run.config.run.model_copy(update={"eval_prompts": asked.num_prompts})
    config = run.config.model_copy(update={"run": section})
    run = replace(run, config=config, rows=replace(rows, held_out=held_out))
    found = {"held_out": _measure(run, first.checkpoint, options=options)}
    if not others:
        return found | _trained_on(first, asked, new[: asked.num_prompts])
    other = _measure_other(run, others[0], options=options)
    return found | {"other": other, "left_out": len(keys) - len(new)}


def _measure(run: PreparedRun, checkpoint: Path | None, *, options: Options) -> dict[str, Any]:
    """Return a trainer's metrics on rows, for the weights of a checkpoint (None: those that training starts from), and
    "reference": "own" where they are against the reference that this model started from.
    """
    config = run.config
    with closing(load_row_method(run, options=options)) as trainer:
        if checkpoint is not None and config.trains.policy:  # of any method: that of another run too
            trainer.policy.load(checkpoint, only="policy")
        elif checkpoint is not None:
            trainer.load(checkpoint)
        resolve_threads(trainer.policy)
        own = {"reference": "own"} if config.method == "dpo" and trainer.policy.has_reference else {}
        return trainer.evaluate().metrics | own


def _measure_other(run: PreparedRun, side: Side, *, options: Options) -> dict[str, Any]:
    """Measure another side on the rows of the first."""
    config = run.config
    if isinstance(side, Target):
        theirs = replace(run, config=measured_by(config, side.measured or side.config))
        return {"target": side.name, "held_out": _measure(theirs, side.checkpoint, options=options)}
    if side is OwnSide.BASE:
        run = replace(run, config=base_of(config))
    return {"target": side.path, "held_out": _measure(run, None, options=options)}
