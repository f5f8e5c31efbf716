"""What a run will take, said before it begins: memory, disk, what else would fit, seconds a step."""

from __future__ import annotations

import bisect
import contextlib
import re
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tinyrl.config.schema import Config
from tinyrl.generation.engine import Request
from tinyrl.models.batches import fuse_alike
from tinyrl.models.device import memory_room, resolve_dtype, warm_bytes
from tinyrl.models.meta import checkpoint_bytes, meta_reward_model, meta_roles
from tinyrl.models.roles import Roles
from tinyrl.rollout.components import Options, SamplingParts, trainer_of
from tinyrl.text import first_line
from tinyrl.training.memory_plan import MemoryPlan, Planner
from tinyrl.training.trainer import Trainer

COLUMNS = 80  # of a terminal
MOST_DOUBLINGS = 5  # of a micro-batch's budget that are tried
FEW_TOKENS, MORE_TOKENS = 4, 16  # of the two calls that sampling is timed by
ROLLOUT_BYTES = 8 + 1 + 4 * 4  # a token of a rollout: its id, its mask, four numbers
# What a model of an unknown kind may raise on the meta device. A run goes on without a plan then.
RAISED = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class MetaModels:
    """A run's models without numbers, and the bytes that the process has before it loads them."""

    roles: Roles
    reward_model: nn.Module | None
    process: int


def tried_meta_models(config: Config, *, options: Options) -> MetaModels | None:
    """Made before any weight is loaded; None where it cannot be: loading then says why, or does what this cannot."""
    on_cpu, trust = options.device == "cpu" or not torch.cuda.is_available(), options.trust_remote_code
    try:
        dtype = resolve_dtype(config.model.dtype, on_cpu=on_cpu)
        roles = meta_roles(config, dtype=dtype, trust_remote_code=trust)
        judge = meta_reward_model(config, dtype=dtype, trust_remote_code=trust)
        return MetaModels(roles, judge, warm_bytes() if on_cpu else 0)
    except RAISED:
        return None


def tried_plan(trainer: Trainer, meta: MetaModels | None) -> MemoryPlan | None:
    """The memory of a run whose trainer is loaded; None where its passes cannot be tried without numbers.

    Where memory decides on the micro-batches, they are from here on the largest that fit in every process.
    """
    plan = None
    with contextlib.suppress(*RAISED):
        if meta is not None:
            planner = planner_of(trainer, meta)
            fitting = largest_micro_batch(planner) if trainer.micro_batches.by_memory else None
            plan = planner.plan(fitting)
    if trainer.micro_batches.by_memory:
        own = trainer.micro_batches.tokens if plan is None else plan.tokens
        trainer.micro_batches.tokens = min(trainer.world.gather(own))
    return plan


def planner_of(trainer: Trainer, meta: MetaModels) -> Planner:
    meta.roles.packs = trainer.roles.packs  # where its numbers were compared
    with trainer.accelerator.autocast():
        fuse_alike(meta.roles.backbone("policy"), trainer.roles.backbone("policy"))
    room = memory_room(trainer.accelerator.device)
    return Planner(trainer, meta.roles, meta.process, room, reward_model=meta.reward_model)


# ---- what fits ----


def largest_micro_batch(planner: Planner) -> int | None:
    """The largest budget, doubled or halved from the run's, whose plan fits; None where none does."""
    rows, tokens = planner.rows, planner.trainer.micro_batches.tokens
    everything = rows.sizes.cost(range(rows.minibatch))
    alone = max(rows.sizes.cost([row]) for row in range(rows.minibatch))
    candidates = [tokens]
    while candidates[0] > alone:
        candidates.insert(0, candidates[0] // 2)
    while candidates[-1] < everything and candidates[-1] < tokens << MOST_DOUBLINGS:
        candidates.append(2 * candidates[-1])
    fitting = bisect.bisect_left(candidates, True, key=lambda budget: not planner.plan(budget).fits)
    return candidates[fitting - 1] if fitting else None


def largest_group(planner: Planner) -> int | None:
    """The largest group of which all completions are decoded at a time; None where no groups are sampled."""
    config, sampling = planner.trainer.config, planner.sampling
    if sampling is None or config.on_policy.group_size == 1:
        return None
    return max(1, min(sampling.fit, config.generation.max_rows or sampling.fit) // config.on_policy.num_prompts)


def disk_bytes(planner: Planner) -> int:
    run, rows = planner.trainer.config.run, planner.rows
    rollout = ROLLOUT_BYTES * sum(rows.sizes.responses) if planner.sampling is not None else 0
    return (run.keep_checkpoints + 2) * (checkpoint_bytes(planner.meta) + rollout)


# ---- in words ----


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def parts_in_words(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sorted(parts.items(), key=lambda p: -p[1]) if count)


def in_words(plan: MemoryPlan) -> list[str]:
    phases = sorted(plan.phases.items(), key=lambda phase: -sum(phase[1].values()))
    return [
        f"memory on {plan.device}: {size(plan.peak)} at most, while {plan.highest}; there are {size(plan.room)}",
        f"  always: {parts_in_words(plan.standing)}",
        *(f"  {name}: {parts_in_words(parts)}" for name, parts in phases),
    ]


def _wrapped(lines: list[str]) -> str:
    """Lines that fit a narrow terminal, no figure apart from its unit."""
    whole = (re.sub(r"(\d) (.?B\b)", "\\1\u00a0\\2", line) for line in lines)
    return "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="    ") for line in whole).replace("\u00a0", " ")


def beside_measured(plan: MemoryPlan, peak_gb: float) -> str:
    """The end of a run: what was planned, and what it came to."""
    return f"memory   {size(plan.peak)} planned (while {plan.highest}), {size(peak_gb * 1e9)} measured"


@dataclass(frozen=True)
class Planned:
    """A plan in words; problem: why the run does not fit, and what would; offline: by known shapes alone."""

    text: str
    problem: str | None = None
    offline: bool = False


def plan_run(config: Config, *, options: Options, output_dir: str = "runs") -> Planned:
    """Memory and disk of a run before any weight is loaded. Raises ValueError for what the run would refuse."""
    options = replace(options, weights=False)
    try:
        trainer = trainer_of(config.method)(config, options=options)
    except ValueError:
        raise
    except RAISED as error:
        return _unplanned(error)
    try:
        judge = meta_reward_model(config, dtype=trainer.roles.causal.dtype, trust_remote_code=options.trust_remote_code)
        process = warm_bytes() if trainer.accelerator.device.type == "cpu" else 0
        planner = planner_of(trainer, MetaModels(trainer.roles, judge, process))
        plan, tokens = planner.plan(), largest_micro_batch(planner)
        there = next(path for path in (Path(output_dir), *Path(output_dir).absolute().parents) if path.exists())
        free, needed = shutil.disk_usage(there).free, disk_bytes(planner)
        lines = in_words(plan)
        lines += [f"micro-batches of {tokens:,} tokens fit (the run has {plan.tokens:,})"] if tokens else []
        lines += _decoded(planner)
        lines += [f"disk: checkpoints take {size(needed)} at most; {size(free)} are free"]
        return Planned(_wrapped(lines), _problem(plan, tokens, needed=needed, free=free))
    except RAISED as error:
        return _unplanned(error)
    finally:
        trainer.close()


def _unplanned(error: Exception) -> Planned:
    return Planned(
        _wrapped([f"memory: no plan, for this model cannot be tried without its weights ({first_line(error)})"])
    )


def _decoded(planner: Planner) -> list[str]:
    sampling, group = planner.sampling, largest_group(planner)
    if sampling is None:
        return []
    groups = f": groups of up to {group:,} in one go" if group else ""
    fit = f"{sampling.fit:,} that fit"
    if sampling.blocks is not None:
        count, tokens = sampling.blocks
        fit = f"{fit} to their last token, in a cache of {count:,} blocks of {tokens} tokens"
    return [f"sampling: {sampling.rows:,} completions at a time, of {fit}{groups}"]


def _problem(plan: MemoryPlan, tokens: int | None, *, needed: int, free: int) -> str | None:
    if not plan.fits:
        helps = (
            f"It does with run.micro_batch_tokens={tokens}."
            if tokens
            else "What helps: model.gradient_checkpointing=true; a smaller generation.max_new_tokens; "
            "model.quantization=4bit (LoRA); a smaller model."
        )
        return f"the run does not fit: it takes {size(plan.peak)}, and {size(plan.room)} are there.\n{helps}"
    if needed > free:
        return f"the run does not fit on the disk: its checkpoints take {size(needed)}, and {size(free)} are free"
    return None


# ---- seconds ----


def seconds_in_words(trainer: Trainer) -> str:
    """How long a step takes, by a short calibration with the run's own models. No weight is changed."""
    seconds = seconds_a_step(trainer)
    each = ", ".join(f"{name} {taken:.2g}" for name, taken in seconds.items())
    longest = " where every response is as long as it may be; rewards are not counted" if "sampling" in seconds else ""
    return _wrapped([f"a step takes about {sum(seconds.values()):.2g} s ({each}){longest}"])


def seconds_a_step(trainer: Trainer) -> dict[str, float]:
    """By phase: sampling a few tokens of every row, and each pass on one micro-batch, times how often it is done."""
    sampling = {"sampling": _sampling_seconds(trainer)} if isinstance(trainer, SamplingParts) else {}
    return sampling | seconds_of_passes(trainer)


def seconds_of_passes(trainer: Trainer) -> dict[str, float]:
    """`seconds_a_step` without sampling."""
    planner, rows = Planner(trainer, trainer.roles, 0, 0), trainer.step_rows()
    micro, _ = rows.widest(trainer.micro_batches.tokens)
    pairs = rows.pairs(micro)
    plan = rows.sizes.plan(range(len(rows.sizes)), max_tokens=trainer.micro_batches.tokens)
    share = sum(map(rows.sizes.cost, plan)) / rows.sizes.cost(micro)  # of a whole pass to the micro-batch timed
    seconds = {}
    if trainer.readings:
        seconds["reference and values"] = trainer.readings * share * _timed(lambda: planner.read("policy", pairs))
    each = [_timed(lambda role=role: planner.learn(role, pairs)) for role in trainer.passes]
    seconds["update"] = trainer.num_epochs * share * sum(each)
    return seconds


def _sampling_seconds(parts: SamplingParts) -> float:
    section, new = parts.config.on_policy, parts.config.generation.max_new_tokens
    longest = sorted((p.tokens for p in parts.train_prompts), key=len)[-section.num_prompts :]

    def sample(most: int) -> float:
        requests = [Request(tokens, prompt_row=i, max_new_tokens=most) for i, tokens in enumerate(longest)]
        return _timed(lambda: parts.engine.sample(requests, section.group_size, seed=0, step=0))

    few, more = min(FEW_TOKENS, new), min(MORE_TOKENS, new)
    first = sample(few)
    return first if few == more else first + max(0.0, sample(more) - first) / (more - few) * (new - few)


def _timed(work: Callable[[], object], *, repeats: int = 2) -> float:
    """The median of some runs after a first one, in seconds."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
