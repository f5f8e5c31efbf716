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

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.rows import prompt_keys
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.evaluation.statistics import paired_difference, win_rate
from tinyrl.evaluation.targets import (
    A_JUDGE,
    Asked,
    Target,
    find,
    judged_by,
    locate,
    measured_by,
    seen_in_training,
    trained_on,
)
from tinyrl.generation.engine import SampledRole
from tinyrl.process.launched import Options
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, resolve_threads
from tinyrl.runs.records import json_safe
from tinyrl.runs.run_dir import run_of
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.tasks.run_rows import rows_of_run
from tinyrl.training.load import load_row_method

FEWEST_LEFT = 10  # prompts, after those that another side was trained on are left out


class Side(NamedTuple):
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


def evaluate_target(target: str, asked: Asked, *, vs: str | None = None, options: Options) -> dict[str, Any]:
    """Evaluate `target` on the rows asked for; with `vs` also "other", "difference" (ours less the other) and
    "win_rate". "held_out" is what a trainer measures (of sft, dpo and reward runs), and "left_out" beside it how many
    rows that measure leaves out, since a side was trained on their prompts. "trained_on", of rows that the run does not
    hold out itself: how many of them it was trained on; None where its training rows cannot be read.
    """
    first = locate(find(target, asked))
    others = [] if vs is None else [vs]
    result: dict[str, Any] = {"target": first.name}
    if first.sampled is not None:
        (ours, *theirs), prompts, left_out = _sides(first, others, asked, options=options)
        result |= ours.metrics
        for other in theirs:
            result |= _difference(ours, other, left_out) | {"other": other.metrics}
        if not others:
            system_prompt = first.sampled.task.system_prompt
            keys = [prompt_keys(p.prompt, system_prompt=system_prompt) for p in prompts]
            result |= _trained_on(first, asked, keys)
    if first.measured is not None:
        measured = _measured(first, vs, asked, options=options)
        both = measured.get("other", {}) | result.get("other", {})
        result |= measured | ({"other": both} if both else {})
        if vs is not None:
            _tell_apart([result, both], [first.path, vs])
    return result


def compare(targets: list[str], asked: Asked, *, options: Options) -> list[dict[str, Any]]:
    """Evaluate targets as the first one, the baseline, is judged; one result each, of the others with their
    "difference" from the baseline and their "win_rate" against it.
    """
    first = locate(find(targets[0], asked))
    if first.sampled is None:
        raise ValueError(f"{targets[0]}: nothing says what samples are judged by; {_a_judge(targets[1:], asked)}")
    (baseline, *others), _, left_out = _sides(first, targets[1:], asked, options=options)
    return [baseline.metrics, *(other.metrics | _difference(other, baseline, left_out) for other in others)]


def _a_judge(others: list[str], asked: Asked) -> str:
    """Return how to name a judge of samples: by a target that has a reward, or by options."""
    rewarded = next((path for path in others if find(path, asked).sampled is not None), None)
    if rewarded is None:
        return f"name {A_JUDGE}"
    how = f"tinyrl eval OTHERS --vs {rewarded}"
    return f"{rewarded} has a reward: to use it, name it as what is compared with ({how}), or else name {A_JUDGE}"


# ---- sampled and judged ----


def _sides(
    first: Target, others: list[str], asked: Asked, *, options: Options
) -> tuple[list[Evaluation], list[PreparedPrompt], int]:
    """Sample the first target, then the others one after another, on its prompts without those that a side was trained
    on. Returns the evaluations, named, the prompts, and how many were left out; raises ValueError where too few remain.
    """
    ours = _load(first, options=options)
    with closing(ours.collector):
        available = ours.prompts(asked.split)
        seen = seen_in_training(first, others, asked)
        keys_of = partial(prompt_keys, system_prompt=ours.collector.config.task.system_prompt)
        prompts = [p for p in available if seen.isdisjoint(keys_of(p.prompt))]
        left_out = len(available) - len(prompts)
        _check_enough(first, others, asked, left_out=left_out, remaining=len(prompts))
        prompts = prompts[: asked.num_prompts]
        sides = [_evaluated(ours, prompts, asked)]
        for path in others:
            with ExitStack() as stack:
                theirs = _other(path, ours, asked=asked, options=options)
                if theirs.collector is not ours.collector:
                    stack.enter_context(closing(theirs.collector))
                sides.append(_evaluated(theirs, prompts, asked))
    _tell_apart([side.metrics for side in sides], [first.path, *others])
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


def _check_enough(first: Target, others: list[str], asked: Asked, *, left_out: int, remaining: int) -> None:
    """Raise ValueError where a comparison has too few prompts that no side was trained on."""
    if left_out and remaining < min(FEWEST_LEFT, asked.num_prompts):
        sides = [*([first.path] if asked.other_rows else []), *others]
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


def _evaluated(side: Side, prompts: list[PreparedPrompt], asked: Asked) -> Evaluation:
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


def _load(target: Target, *, options: Options, judge: Scorer | None = None, seed: int | None = None) -> Side:
    """Load the policy of a target; judged by another side's scorer, and sampled by its seed, where they are given."""
    collector = load_collector(target.config, options=options, judge=judge, seed=seed)
    if target.checkpoint is not None:
        collector.policy.load(target.checkpoint, only="policy")
    return Side(collector, "base" if target.checkpoint is None else "policy", target.name)


def _other(path: str, ours: Side, *, asked: Asked, options: Options) -> Side:
    """Load another side: base, start or teacher of ours, or a target. Raises ValueError where ours has none such."""
    policy = ours.collector.policy
    config = ours.collector.config
    judge = ours.collector.scorer
    if path == "base" and policy.peft is not None:
        return Side(ours.collector, "base", path)
    if path in ("base", "start"):
        if not policy.has_reference:
            raise ValueError(f"--vs {path}: this run has no reference (reference.kind=none)")
        return Side(ours.collector, "reference", path)
    if path == "teacher":
        kind = config.teacher.kind
        teacher = config.teacher.path
        if not config.uses("teacher") or teacher is None or kind not in ("adapter", "model"):
            raise ValueError(f"--vs teacher: teacher.path={teacher} of this run is no adapter and no model to sample")
        model = {"path": teacher, "adapter": None, "revision": None}
        model = {"adapter": str(starter_path(teacher) or teacher)} if kind == "adapter" else model
        sampled = config.model_copy(update={"model": config.model.model_copy(update=model)})
        return Side(load_collector(sampled, options=options, judge=judge), "policy", path)
    target = locate(find(path, replace(asked, task=asked.task or "rows", settings=())))
    target = replace(target, sampled=judged_by(config, target.config))
    return _load(target, options=options, judge=judge, seed=config.run.seed)  # our uniforms, its own weights


# ---- measured by a trainer ----


def _measured(first: Target, vs: str | None, asked: Asked, *, options: Options) -> dict[str, Any]:
    """Measure the first target by its trainer, and `vs` on the same rows: without those that a side was trained on."""
    config = first.measured
    assert config is not None
    if first.sampled is not None:  # other rows are for its samples
        asked = replace(asked, task=None, data=None, settings=())
    others = [] if vs is None else [vs]
    seen = seen_in_training(first, others, asked)
    keys = list[set[str]]()
    if asked.split == "eval" and (seen or asked.other_rows):
        rows = rows_of_run(config)
        keys_of = partial(prompt_keys, system_prompt=config.task.system_prompt)
        keys = [keys_of(rows.kind.prompt(row)) for row in rows.held_out]
    new = [own for own in keys if seen.isdisjoint(own)]
    _check_enough(first, others, asked, left_out=len(keys) - len(new), remaining=len(new))
    found = {"held_out": _measure(config, first.checkpoint, asked, without=seen, options=options)}
    if vs is None:
        return found | _trained_on(first, asked, new[: asked.num_prompts])
    other = _measure_other(config, vs, asked, without=seen, options=options)
    return found | {"other": other, "left_out": len(keys) - len(new)}


def _measure(
    config: Config, checkpoint: Path | None, asked: Asked, *, without: frozenset[str], options: Options
) -> dict[str, Any]:
    """Return a trainer's metrics on rows, for the weights of a checkpoint (None: those that training starts from), and
    "reference": "own" where they are against the reference that this model started from. without: keys of the prompts
    whose held-out rows are left out.
    """
    run = config.run.model_copy(update={"eval_prompts": asked.num_prompts})
    config = config.model_copy(update={"run": run})
    with closing(load_row_method(config, options=options, split=asked.split, without=without)) as trainer:
        if checkpoint is not None and config.trains.policy:  # of any method: that of another run too
            trainer.policy.load(checkpoint, only="policy")
        elif checkpoint is not None:
            trainer.load(checkpoint)
        resolve_threads(trainer.policy)
        own = {"reference": "own"} if config.method == "dpo" and trainer.policy.has_reference else {}
        return trainer.evaluate().metrics | own


def _measure_other(
    config: Config, vs: str, asked: Asked, *, without: frozenset[str], options: Options
) -> dict[str, Any]:
    how: dict[str, Any] = {"without": without, "options": options}
    if vs in ("base", "start"):
        if not config.trains.policy:
            raise ValueError(f"--vs {vs}: a reward model starts from nothing; name another `tinyrl train reward` run")
        if vs == "base":
            config = config.model_copy(update={"model": config.model.model_copy(update={"adapter": None})})
        return {"target": vs, "held_out": _measure(config, None, asked, **how)}
    other = locate(find(vs, Asked(task=None if run_of(Path(vs)) else "rows")))
    found = _measure(measured_by(config, other), other.checkpoint, asked, **how)
    return {"target": other.name, "held_out": found}
