"""`tinyrl eval`: evaluation of runs, checkpoints and models, and comparison paired by prompt.

Under `eval --vs` both sides are judged by the first one: its held-out rows, uniforms, sampling settings, and its reward
through its scorer. Only the model, its tokenizer and its reference are the other's own. Where a trainer measures the
first one on rows (sft, dpo, reward), it measures the other side's model on the same rows.
`compare_policies` judges each of several policies by its own configuration, and refuses policies that would not be
judged alike.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.rows import prompt_key
from tinyrl.evaluation.evaluate import Evaluation, Role, evaluate
from tinyrl.evaluation.statistics import paired_difference, win_rates
from tinyrl.evaluation.targets import (
    OWN_SAMPLING,
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
from tinyrl.generation.turns import plays
from tinyrl.models.roles import load_policy
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.components import Options, SamplingParts, resolve_threads, trainer_of
from tinyrl.runs.run_dir import finite, run_of
from tinyrl.tasks.prompts import PreparedPrompt

FEWEST_LEFT = 10  # prompts, after those that the other side was trained on are left out
LIMITS = ("timeout_s", "memory_gb")  # of the processes of people's code
JUDGED_BY = {  # the sections that say how samples are judged, and which of their settings do not
    "task": ("sampler", "sampler_uniform", "sampler_half_life", "solved_reward"),
    "reward": (*LIMITS, "truncated", "truncated_penalty", "overlong_tokens"),
    "generation": OWN_SAMPLING,
}


def evaluate_target(target: str, asked: Asked, *, vs: str | None = None, options: Options) -> dict[str, Any]:
    """Metrics of `target` on the rows asked for; with `vs` also "other", "difference" and "win_rate".

    "held_out" is what a trainer measures (of sft, dpo and reward runs). Held-out prompts that `vs` was trained on are
    left out and counted ("left_out"); ValueError where too few remain. With split "train" none is left out: neither
    side need be new to them.
    """
    first = locate(find(target, asked))
    check_asked(first, asked)
    result: dict[str, Any] = {"target": first.name}
    if first.sampled is not None:
        result |= _sampled(first, vs, asked, options=options)
    if first.measured is not None:
        result["held_out"] = measure(first.measured, first.checkpoint, asked, options=options)
        if vs is not None:
            other = _other_measured(first.measured, vs, asked, options=options)
            result["other"] = {**other, **result.get("other", {})}
    return result


# ---- sampled and judged ----


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
            hint = "evaluate those of training (--split train), or other rows (--data FILE)"
            raise ValueError(f"{self.name} has no prompts of split {split}: {hint}")
        return found

    def evaluate(self, prompts: list[PreparedPrompt], asked: Asked, *, best_of: int = 1) -> Evaluation:
        resolve_threads(self.parts)
        count = {"num_prompts": len(prompts), "samples": asked.samples, "best_of": best_of}
        return evaluate(self.parts, role=self.role, prompts=prompts, **count)


def _sampled(first: Target, vs: str | None, asked: Asked, *, options: Options) -> dict[str, Any]:
    with ExitStack() as opened:
        ours = load_side(first, options=options)
        opened.callback(ours.parts.close)
        theirs, left_out = None, 0
        prompts = ours.prompts(asked.split)[: asked.num_prompts]
        if vs is not None:
            theirs = _other(vs, ours, asked=asked, options=options)
            opened.callback(theirs.parts.close)
            prompts, left_out = _shared_prompts(ours, theirs, asked)
        mine = ours.evaluate(prompts, asked, best_of=asked.best_of)
        result, lines = mine.metrics, [{"target": ours.name, **line} for line in mine.samples]
        if theirs is not None:
            by_index = {p.index: p for p in theirs.prompts(asked.split)}
            other = theirs.evaluate([by_index[p.index] for p in prompts], asked)
            lines += [{"target": theirs.name, **line} for line in other.samples]
            result |= {
                "other": {"target": theirs.name, **other.metrics},
                "difference": {**paired_difference(mine.by_prompt, other.by_prompt), "left_out": left_out},
                "win_rate": win_rates(mine.values, other.values),
            }
        if asked.data is not None:  # the run's own split would have held them out
            seen = trained_on(first.path)
            result["trained_on"] = sum(prompt_key(p.prompt) in seen for p in prompts)
    if asked.save_samples is not None and ours.parts.world.is_main:
        with open(asked.save_samples, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=True) + "\n" for line in finite(lines))
    return result


def _shared_prompts(ours: Side, theirs: Side, asked: Asked) -> tuple[list[PreparedPrompt], int]:
    """Our first prompts that are new to the other side and not too long for it; and how many it was trained on."""
    all_ours, readable = ours.prompts(asked.split), {p.index for p in theirs.prompts(asked.split)}
    seen = theirs.trained_on if asked.split == "eval" else frozenset()
    fresh = [p for p in all_ours if prompt_key(p.prompt) not in seen]
    left_out = len(all_ours) - len(fresh)
    if left_out and len(fresh) < min(FEWEST_LEFT, asked.num_prompts):
        raise ValueError(
            f"{theirs.name} was trained on {left_out} of the {len(all_ours)} held-out prompts of {ours.name}; the "
            f"{len(fresh)} others are too few to compare on. Hold out the same rows in both runs (task.eval_data, or "
            "one task.split_seed), or compare on training prompts: --split train"
        )
    shared = [p for p in fresh if p.index in readable]
    if not shared:
        raise ValueError(f"{theirs.name} has no room for any prompt of {ours.name}: all are too long for it")
    return shared[: asked.num_prompts], left_out


def _other(vs: str, ours: Side, *, asked: Asked, options: Options) -> Side:
    roles = ours.parts.roles
    if vs == "base":
        if roles.peft is None and roles.reference_model is None:
            raise ValueError(
                "--vs base: the model was fully fine-tuned without a reference, so its base is not at hand"
            )
        return Side(ours.parts, "reference" if roles.peft is None else "base", "base")
    if vs == "start":
        if not roles.has_reference:
            raise ValueError("--vs start: this run has no reference (reference.kind=none)")
        return Side(ours.parts, "reference", "start")
    if vs == "teacher":
        return _teacher(ours, options=options)
    # It needs a configuration to be sampled with, whatever it says: the first one's takes its place.
    target, first = locate(find(vs, replace(asked, task=asked.task or "rows", settings=()))), ours.parts.config
    side = load_side(replace(target, sampled=judged_by(first, target.config)), options=options, judge=ours.parts.scorer)
    side.parts.config = _with(side.parts.config, seed=first.run.seed)  # whose uniforms the samples are drawn by
    return replace(side, trained_on=trained_on(vs))


def _with(config: Config, **run: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def _teacher(ours: Side, *, options: Options) -> Side:
    """The teacher of a run, in the policy's place. Raises ValueError for one that is no model on this machine."""
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
    """The side of a target that is sampled; judged by another side's scorer where one is given."""
    parts = SamplingParts(target.config, options=options, judge=judge)
    for line in parts.template_warnings() if parts.world.is_main else ():
        print(f"{target.name}: {line}", file=sys.stderr)
    if target.checkpoint is None:
        return Side(parts, "base", target.name)
    load_policy(parts.roles, target.checkpoint)
    return Side(parts, "policy", target.name)


# ---- measured by a trainer ----


def measure(config: Config, checkpoint: Path | None, asked: Asked, *, options: Options) -> dict[str, Any]:
    """What a trainer measures on rows, for the weights of a checkpoint; None: for what training starts from."""
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


# ---- several policies beside one ----


def compare_policies(targets: list[str], asked: Asked, *, vs: str, options: Options) -> list[dict[str, Any]]:
    """A row for the baseline `vs`, with `best_of` above 1 one for the best of so many of its samples, one a target.

    A row has `policy`, what `evaluate` says of it, and `win_rate` against the baseline; `environment` names settings of
    its environment that are not the baseline's. All are sampled on the same prompts, which none of them was trained on,
    with the same uniforms. Raises ValueError where they would not be judged alike or on other prompts, and where no
    prompt is left.
    """
    found = alike([vs, *targets], asked)
    first, seen = found[0], frozenset().union(*(trained_on(target.path) for target in found))
    wanted = [(first.name, first, 1), *((target.name, target, 1) for target in found[1:])]
    if asked.best_of > 1:
        wanted.insert(1, (f"{first.name}, best of {asked.best_of}", first, asked.best_of))
    rows, prompts, baseline = [], [], Evaluation({}, [], [])
    for name, target, best_of in wanted:
        places, evaluation = _evaluated(
            target, replace(asked, best_of=best_of), seen=seen, seed=first.config.run.seed, options=options
        )
        rows.append({"policy": name, **evaluation.metrics})
        if len(rows) == 1:
            prompts, baseline = places, evaluation
            continue
        if places != prompts:
            raise ValueError(
                f"{vs} and {target.path} have room for different prompts, so they cannot be compared: "
                "task.long_prompts=drop leaves some out; give a generation.max_prompt_tokens that both have room for"
            )
        rows[-1]["win_rate"] = win_rates(evaluation.values, baseline.values)
        if other := _other_environment(first, target):
            rows[-1]["environment"] = other
    return rows


def alike(paths: list[str], asked: Asked) -> list[Target]:
    """The targets at these paths. ValueError names the first setting by which they would be judged differently."""
    found = [locate(find(path, asked)) for path in paths]
    for target in found:
        if not target.is_policy:
            raise ValueError(f"{target.path} is a reward model, which writes nothing that could be judged")
        if target.sampled is None:
            hint = "give --task NAME or reward.model=PATH"
            raise ValueError(f"{target.path}: nothing says what its samples are judged by; {hint}")
        for section, besides in JUDGED_BY.items():
            for name, (left, right) in _differences(found[0], target, section, besides=besides).items():
                raise ValueError(
                    f"{found[0].path} and {target.path} differ in {section}.{name} ({left} and {right}), so they would "
                    f"not be judged alike; give it for all: {section}.{name}=..."
                )
    return found


def _differences(first: Target, other: Target, section: str, *, besides: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    left, right = (getattr(target.config, section).model_dump() for target in (first, other))
    return {name: (left[name], right[name]) for name in left if name not in besides and left[name] != right[name]}


def _other_environment(first: Target, other: Target) -> list[str]:
    """The settings of its environment in which a target differs from the first: each plays in its own."""
    played = any(plays(target.config) for target in (first, other))
    return list(_differences(first, other, "environment", besides=LIMITS)) if played else []


def _evaluated(
    target: Target, asked: Asked, *, seen: frozenset[str], seed: int, options: Options
) -> tuple[list[int], Evaluation]:
    """One policy on the prompts that nobody was trained on (their numbers too), with the uniforms of `seed`."""
    side = load_side(replace(target, sampled=_with(target.config, seed=seed)), options=options)
    try:
        prompts = [p for p in side.prompts(asked.split) if prompt_key(p.prompt) not in seen][: asked.num_prompts]
        if not prompts:
            raise ValueError("no held-out prompt is left that none of the policies was trained on; give --task")
        return [p.index for p in prompts], side.evaluate(prompts, asked, best_of=asked.best_of)
    finally:
        side.parts.close()
