"""`tinyrl eval`: evaluation of a run, a checkpoint or a model, and comparison with --vs, paired by prompt.

Both sides of a comparison are judged by the first one: its held-out rows, uniforms, sampling settings, and its reward
through its scorer. Only the model, its tokenizer and its reference are the other's own. Where a trainer measures the
first one on rows (sft, dpo, reward), it measures the other side's model on the same rows.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyrl.components import Options, SamplingParts, settle_threads
from tinyrl.config.schema import Config
from tinyrl.data.rows import prompt_key
from tinyrl.evaluation.evaluate import Evaluation, Role, evaluate
from tinyrl.evaluation.held_out import measure
from tinyrl.evaluation.pairing import paired_difference, win_rates
from tinyrl.evaluation.table import render
from tinyrl.evaluation.targets import (
    Asked,
    Target,
    check_asked,
    find,
    find_other,
    judged_by,
    locate,
    measured_by,
    prompt_keys,
    trained_on,
)
from tinyrl.models.weights_io import load_policy
from tinyrl.rewards.scorer import Scorer
from tinyrl.runs.run_dir import finite, run_of
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.text import hidden

FEWEST_LEFT = 10  # prompts, after those that the other side was trained on are left out
# Generation settings that say how a model is run, not what is sampled.
OWN_SAMPLING = ("engine", "dtype", "max_rows", "url", "timeout_s")

__all__ = ["Options", "evaluate_target", "render"]


@dataclass(frozen=True)
class How:
    """How much of which rows: split (eval or train), prompts, samples a prompt, and of how many each is the best."""

    split: str
    num_prompts: int
    samples: int
    best_of: int


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its parts, the role it samples as, its name, and keys of the prompts it learnt from."""

    parts: SamplingParts
    role: Role
    name: str
    trained_on: frozenset[str] = frozenset()

    def prompts(self, split: str) -> list[PreparedPrompt]:
        """Those of a split, as this side's tokenizer reads them. Raises ValueError where there are none."""
        found = self.parts.eval_prompts if split == "eval" else self.parts.train_prompts
        if not found:
            raise ValueError(
                f"{self.name} has no prompts of split {split}: evaluate those of training (--split train), or other "
                "rows (--data FILE)"
            )
        return found


def evaluate_target(
    target: str,
    *,
    vs: str | None,
    task: str | None,
    split: str,
    num_prompts: int,
    samples: int,
    options: Options,
    data: str | None = None,
    settings: list[str] | None = None,
    best_of: int = 1,
    save_samples: str | None = None,
) -> dict[str, Any]:
    """Metrics of `target` on prompts of `split` (eval or train); with `vs` also "other", "difference" and "win_rate".

    `data`: rows in place of the held-out ones; `settings`: of reward, generation and task, in place of the run's;
    `best_of`: each sample of the target is the best of so many by the reward; `save_samples`: a file for the samples.
    "held_out" is what a trainer measures (of sft, dpo and reward runs).
    Held-out prompts that `vs` was trained on are left out and counted ("left_out"); ValueError where too few remain.
    With split "train" none is left out: neither side need be new to them.
    """
    if split not in ("eval", "train"):
        raise ValueError(f"--split {split!r}: allowed are eval and train")
    how = How(split, num_prompts, samples, best_of)
    asked = Asked(task, data, tuple(settings or ()))
    first = locate(find(target, asked))
    check_asked(first, asked, split=split, best_of=best_of, save_samples=save_samples)
    result: dict[str, Any] = {"target": first.name}
    if first.sampled is not None:
        result |= _sampled(first, vs, asked, how, options=options, save_samples=save_samples)
    if first.measured is not None:
        result["held_out"] = _measured(first.measured, first.checkpoint, how, options=options)
        if vs is not None:
            other = _other_measured(first.measured, vs, how, options=options)
            result["other"] = {**other, **result.get("other", {})}
    return result


# ---- sampled and judged ----


def _sampled(
    first: Target, vs: str | None, asked: Asked, how: How, *, options: Options, save_samples: str | None
) -> dict[str, Any]:
    with ExitStack() as opened:
        ours = load_side(first, options=options)
        opened.callback(ours.parts.close)
        result: dict[str, Any] = {}
        if vs is None:
            prompts = ours.prompts(how.split)[: how.num_prompts]
            done = [(ours, evaluate_side(ours, prompts, how))]
        else:
            theirs = _other(vs, ours, asked=asked, options=options)
            opened.callback(theirs.parts.close)
            prompts, left_out = _shared_prompts(ours, theirs, split=how.split, num_prompts=how.num_prompts)
            by_index = {p.index: p for p in theirs.prompts(how.split)}
            mine = evaluate_side(ours, prompts, how)
            other = evaluate_side(theirs, [by_index[p.index] for p in prompts], replace(how, best_of=1))
            done = [(ours, mine), (theirs, other)]
            result = {
                "other": {"target": theirs.name, **other.metrics},
                "difference": {**paired_difference(mine, other), "left_out": left_out},
                "win_rate": win_rates(mine, other),
            }
        if asked.data is not None:  # the run's own split would have held them out
            seen = trained_on(first.path)
            result["trained_on"] = sum(prompt_key(p.prompt) in seen for p in prompts)
    if save_samples is not None and ours.parts.world.is_main:
        _save(save_samples, done)
    return {**done[0][1].metrics, **result}


def _save(file: str, done: list[tuple[Side, Evaluation]]) -> None:
    """Write the samples of all sides, a line each, as samples.jsonl has them, with the side's name."""
    lines = [{"target": side.name, **line} for side, evaluation in done for line in evaluation.samples]
    with open(file, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=True) + "\n" for line in hidden(finite(lines)))


def evaluate_side(side: Side, prompts: list[PreparedPrompt], how: How) -> Evaluation:
    """Samples of one side, judged."""
    settle_threads(side.parts)
    return evaluate(
        side.parts, num_prompts=len(prompts), samples=how.samples, role=side.role, prompts=prompts, best_of=how.best_of
    )


def _shared_prompts(ours: Side, theirs: Side, *, split: str, num_prompts: int) -> tuple[list[PreparedPrompt], int]:
    """The first `num_prompts` of our prompts that are new to the other side and that its model has room for; and how
    many are left out because it was trained on them.
    """
    asked, readable = ours.prompts(split), {p.index for p in theirs.prompts(split)}
    seen = theirs.trained_on if split == "eval" else frozenset()
    fresh = [p for p in asked if prompt_key(p.prompt) not in seen]
    left_out = len(asked) - len(fresh)
    if left_out and len(fresh) < min(FEWEST_LEFT, num_prompts):
        raise ValueError(
            f"{theirs.name} was trained on {left_out} of the {len(asked)} held-out prompts of {ours.name}; the "
            f"{len(fresh)} others are too few to compare on. Hold out the same rows in both runs (task.eval_data, or "
            "one task.split_seed), or compare on training prompts: --split train"
        )
    kept = [p for p in fresh if p.index in readable]
    if not kept:
        raise ValueError(f"{theirs.name} has no room for any prompt of {ours.name}: all are too long for it")
    return kept[:num_prompts], left_out


def _other(vs: str, ours: Side, *, asked: Asked, options: Options) -> Side:
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
    target, first = locate(find_other(vs, asked)), ours.parts.config
    assert target.sampled is not None
    config = judged_by(first, target.sampled, own=OWN_SAMPLING)
    side = load_side(replace(target, sampled=config), options=options, judge=ours.parts.scorer)
    run = side.parts.config.run.model_copy(update={"seed": first.run.seed})  # whose uniforms the samples are drawn by
    side.parts.config = side.parts.config.model_copy(update={"run": run})
    return replace(side, trained_on=trained_on(vs))


def load_side(target: Target, *, options: Options, judge: Scorer | None = None) -> Side:
    """The side of a target that is sampled; judged by another side's scorer where one is given."""
    assert target.sampled is not None
    parts = SamplingParts(target.sampled, options=options, judge=judge)
    for line in parts.template_warnings() if parts.world.is_main else ():
        print(f"{target.name}: {line}", file=sys.stderr)
    if target.checkpoint is None:
        return Side(parts, "base", target.name)
    load_policy(parts.roles, target.checkpoint)
    return Side(parts, "policy", target.name)


# ---- measured by a trainer ----


def _other_measured(config: Config, vs: str, how: How, *, options: Options) -> dict[str, Any]:
    """The other side's numbers on the rows of the first one, whose configuration `config` is."""
    if vs in ("base", "start"):
        if not config.trains.policy:
            raise ValueError(
                f"--vs {vs}: a reward model starts from nothing; name another run of `tinyrl train reward`"
            )
        model = config.model.model_copy(update={"adapter": None} if vs == "base" else {})
        begin = config.model_copy(update={"model": model})
        return {"target": vs, "held_out": _measured(begin, None, how, options=options)}
    other = locate(find(vs, Asked(task=None if run_of(Path(vs)) else "rows")))
    result: dict[str, Any] = {"target": other.name}
    result["held_out"] = _measured(measured_by(config, other), other.checkpoint, how, options=options)
    seen = len(prompt_keys(config, "eval") & trained_on(vs)) if how.split == "eval" else 0
    return result | ({"trained_on": seen} if seen else {})


def _measured(config: Config, checkpoint: Path | None, how: How, *, options: Options) -> dict[str, Any]:
    return measure(config, checkpoint, split=how.split, most=how.num_prompts, options=options)
