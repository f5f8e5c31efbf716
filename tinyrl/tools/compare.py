"""`tinyrl eval`: runs, checkpoints and models on held-out rows, alone or compared by prompt.

The first target judges all: its held-out rows, uniforms, sampling settings, environment, and its reward through its
scorer. Only the model, its tokenizer and its reference are another side's own. Where a trainer measures the first one
on rows (sft, dpo, reward), it measures the other side's model on the same rows.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tinyrl.config.evaluated import base_of, judged_by, measured_by, teacher_of
from tinyrl.data.rows import prompt_keys
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.evaluation.prepared import PreparedEvaluation
from tinyrl.evaluation.result import (
    Against,
    ComparisonResult,
    EvalSide,
    TargetResult,
    TrainedOn,
    TrainerMetrics,
)
from tinyrl.evaluation.side import OwnSide
from tinyrl.evaluation.statistics import paired_difference, win_rate
from tinyrl.evaluation.targets import Asked, Side, Target, seen_in_training, trained_on
from tinyrl.generation.request import SampledRole
from tinyrl.models.policy_files import restore_policy
from tinyrl.process.launched import Options
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, resolve_threads
from tinyrl.rollout.prepared import PreparedRun, with_tower
from tinyrl.runs.records import json_safe
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


@dataclass(frozen=True)
class SampledSides:
    """The evaluations of all sides on the same prompts, of which none that a side was trained on."""

    evaluations: list[Evaluation]
    prompts: list[PreparedPrompt]
    left_out: int

    def against(self, ours: int, other: int) -> Against:
        """Compare two of the sides."""
        our_rewards = self.evaluations[ours].rewards
        other_rewards = self.evaluations[other].rewards
        return Against(
            difference=paired_difference(our_rewards, other_rewards),
            win_rate=win_rate(our_rewards, other_rewards),
            left_out=self.left_out,
        )


@dataclass(frozen=True)
class MeasuredSides:
    """What the first side's trainer measures of all sides on the same rows."""

    measured: list[TrainerMetrics]
    left_out: int | None  # rows that a side was trained on; None where nothing is compared
    trained_on: TrainedOn | None


def evaluate_target(prepared: PreparedEvaluation, *, options: Options) -> TargetResult:
    """Evaluate a target on the rows asked for, and the side that it is compared with, if any."""
    first = prepared.first
    sides = [EvalSide(name) for name in _names(prepared)]
    trained_on = None
    left_out = None
    if prepared.sampled is not None:
        found = _sample(prepared, prepared.sampled, options=options)
        sides = [replace(side, sampled=own) for side, own in zip(sides, found.evaluations, strict=True)]
        if prepared.others:
            sides[0] = replace(sides[0], against=found.against(0, 1))
        else:
            system_prompt = prepared.sampled.config.task.system_prompt
            keys = [prompt_keys(p.prompt, system_prompt=system_prompt) for p in found.prompts]
            trained_on = _trained_on(first, prepared.asked, keys)
    if prepared.measured is not None:
        rows = _measure_sides(prepared, prepared.measured, options=options)
        sides = [replace(side, measured=own) for side, own in zip(sides, rows.measured, strict=True)]
        trained_on = trained_on or rows.trained_on
        left_out = rows.left_out
    other = sides[1] if prepared.others else None
    return TargetResult(side=sides[0], other=other, trained_on=trained_on, left_out=left_out)


def compare(prepared: PreparedEvaluation, *, options: Options) -> ComparisonResult:
    """Evaluate policies as the first one, the baseline, is judged, and compare the others with it."""
    assert prepared.sampled is not None, "something judges samples"
    found = _sample(prepared, prepared.sampled, options=options)
    sides = list[EvalSide]()
    for i, name in enumerate(_names(prepared)):
        against = found.against(i, 0) if i > 0 else None
        sides.append(EvalSide(name, sampled=found.evaluations[i], against=against))
    return ComparisonResult(sides)


def _names(prepared: PreparedEvaluation) -> list[str]:
    """Return what the sides are called; those of one name, as runs of several folders may be, by the paths given."""
    sides = [prepared.first, *prepared.others]
    names = [side.name if isinstance(side, Target) else side.path for side in sides]
    return [side.path if names.count(name) > 1 else name for side, name in zip(sides, names, strict=True)]


# ---- sampled and judged ----


def _sample(prepared: PreparedEvaluation, sampled: PreparedRun, *, options: Options) -> SampledSides:
    """Sample the first target, then the others one after another, on its prompts without those that a side was trained
    on. Raises ValueError where too few remain.
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
    if asked.save_samples is not None and ours.collector.world.is_main:
        named = zip(_names(prepared), sides, strict=True)
        lines = [{"target": name, **line} for name, side in named for line in side.samples]
        with open(asked.save_samples, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=True) + "\n" for line in json_safe(lines))
    return SampledSides(evaluations=sides, prompts=prompts, left_out=left_out)


def _check_enough(first: Target, others: list[Side], asked: Asked, *, left_out: int, remaining: int) -> None:
    """Raise ValueError where a comparison has too few prompts that no side was trained on."""
    if left_out and remaining < min(FEWEST_LEFT, asked.num_prompts):
        sides = [*([first.path] if asked.other_rows else []), *(side.path for side in others)]
        raise ValueError(
            f"{' or '.join(sides)} was trained on {left_out} of the {left_out + remaining} held-out prompts of "
            f"{first.name}, and {remaining} others are too few. Hold out the same rows in all runs "
            "(task.eval_data), or compare on training prompts: --split train"
        )


def _trained_on(target: Target, asked: Asked, prompts: list[set[str]]) -> TrainedOn | None:
    """Count those of the prompts, by their keys, that a run was trained on; None where it holds them out itself."""
    if target.run is None or not asked.other_rows or asked.split == "train":
        return None
    try:
        seen = trained_on(target.path)
    except (OSError, ValueError):  # moved, or changed: evaluating on other rows does not need them
        return TrainedOn(None)
    return TrainedOn(sum(not seen.isdisjoint(keys) for keys in prompts))


def _evaluated(side: LoadedSide, prompts: list[PreparedPrompt], asked: Asked) -> Evaluation:
    """Evaluate a side on the prompts, in its own tokens. Raises ValueError where it has no room for one."""
    resolve_threads(side.collector.policy)
    readable = {p.index: p for p in side.prompts(asked.split)}
    own = [readable[p.index] for p in prompts if p.index in readable]
    if len(own) < len(prompts):
        missing = f"{len(prompts) - len(own)} of the {len(prompts)} prompts are too long for {side.name}"
        raise ValueError(f"{missing}: give generation.max_prompt_tokens or other rows (--data FILE)")
    return evaluate(side.collector, own, role=side.role, samples=asked.samples)


def _load(
    target: Target, sampled: PreparedRun, *, options: Options, judge: Scorer | None = None, seed: int | None = None
) -> LoadedSide:
    """Load the policy of a target; judged by another side's scorer, and sampled by its seed, where they are given."""
    collector = load_collector(sampled, options=options, judge=judge, seed=seed)
    if target.checkpoint is not None:
        restore_policy(collector.policy, target.checkpoint, only="policy")
    return LoadedSide(collector, "base" if target.checkpoint is None else "policy", target.name)


def _other(side: Side, ours: LoadedSide, sampled: PreparedRun, *, options: Options) -> LoadedSide:
    """Load another side, which has the task and the rows of ours. Raises ValueError where ours has none such."""
    policy = ours.collector.policy
    config = ours.collector.config
    judge = ours.collector.scorer
    match side:
        case OwnSide.BASE if policy.adapters.peft is not None:
            return LoadedSide(ours.collector, "base", side.path)
        case OwnSide.BASE | OwnSide.START:
            if not policy.has_reference:
                raise ValueError(f"--vs {side.path}: this run has no reference (reference.kind=none)")
            return LoadedSide(ours.collector, "reference", side.path)
        case OwnSide.TEACHER:
            teacher = replace(sampled, config=teacher_of(config))
            return LoadedSide(load_collector(teacher, options=options, judge=judge), "policy", side.path)
        case Target():
            theirs = replace(sampled, config=with_tower(judged_by(config, side.config), sampled.rows))
            return _load(side, theirs, options=options, judge=judge, seed=config.run.seed)  # our uniforms


# ---- measured by a trainer ----


def _measure_sides(prepared: PreparedEvaluation, run: PreparedRun, *, options: Options) -> MeasuredSides:
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
    measured = [_measure(run, first.checkpoint, options=options)]
    if not others:
        trained_on = _trained_on(first, asked, new[: asked.num_prompts])
        return MeasuredSides(measured=measured, left_out=None, trained_on=trained_on)
    measured.append(_measure_other(run, others[0], options=options))
    return MeasuredSides(measured=measured, left_out=len(keys) - len(new), trained_on=None)


def _measure(run: PreparedRun, checkpoint: Path | None, *, options: Options) -> TrainerMetrics:
    """Return a trainer's metrics on rows, for the weights of a checkpoint (None: those that training starts from)."""
    config = run.config
    with closing(load_row_method(run, options=options)) as trainer:
        if checkpoint is not None and config.trains.policy:  # of any method: that of another run too
            restore_policy(trainer.policy, checkpoint, only="policy")
        elif checkpoint is not None:
            trainer.load(checkpoint)
        resolve_threads(trainer.policy)
        own_reference = config.method == "dpo" and trainer.policy.has_reference
        return TrainerMetrics(trainer.evaluate().metrics, own_reference=own_reference)


def _measure_other(run: PreparedRun, side: Side, *, options: Options) -> TrainerMetrics:
    """Measure another side on the rows of the first."""
    config = run.config
    if isinstance(side, Target):
        theirs = replace(run, config=with_tower(measured_by(config, side.measured or side.config), run.rows))
        return _measure(theirs, side.checkpoint, options=options)
    if side is OwnSide.BASE:
        run = replace(run, config=base_of(config))
    return _measure(run, None, options=options)
