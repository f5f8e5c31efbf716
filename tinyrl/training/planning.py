"""What a run will take, said before it begins: memory by part, disk, what else would fit, seconds a step.

Memory is that of the trainer's own passes, on models without numbers (models/meta.py). The highest of its phases
counts: loading, sampling, a pass over the fullest micro-batch, an optimizer step. On a CPU what sampling has freed is
still there while weights are updated (models/device.py, keep_freed_memory). Sampled responses are taken to be as long
as they may be, those of a micro-batch as long as fills it.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinyrl.config.schema import Config
from tinyrl.generation.engine import Request
from tinyrl.generation.footprint import SamplingBytes, sampling_bytes
from tinyrl.models.batches import fuse_alike
from tinyrl.models.device import memory_room, resolve_dtype, warm_bytes
from tinyrl.models.loading import saved_dtype
from tinyrl.models.logprobs import CHUNK_ELEMENTS, token_logprobs
from tinyrl.models.meta import (
    META,
    AsOn,
    LiveBytes,
    bytes_by_role,
    checkpoint_bytes,
    four_bit_bytes,
    meta_reward_model,
    meta_roles,
    quantized_bytes,
)
from tinyrl.models.roles import Roles
from tinyrl.rollout.components import Options, SamplingParts, trainer_of
from tinyrl.text import first_line
from tinyrl.training.trainer import Trainer
from tinyrl.training.update import Pass

COLUMNS = 80  # of a terminal
MOST_DOUBLINGS = 5  # of a micro-batch's budget that are tried
FEW_TOKENS, MORE_TOKENS = 4, 16  # of the two calls that sampling is timed by
LARGEST_TEMPORARIES = 2  # of the size of a parameter, in an AdamW step that takes one parameter after the other
SHARES = 8  # of the longest rows, that a plan tries
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


# ---- bytes, by part ----


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part: `standing` are there all the time, `phases` what each phase adds. room: what there may be in all.
    tokens: the budget of a micro-batch; sampling: None where nothing is sampled.
    """

    device: str
    standing: dict[str, int]
    phases: dict[str, dict[str, int]]
    room: int
    tokens: int
    sampling: SamplingBytes | None = None

    @property
    def highest(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.standing.values()) + sum(self.phases[self.highest].values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.room


@dataclass
class Planner:
    """Plans of one run for several budgets. meta: the trainer's models without numbers.

    process: bytes that the process has before it loads a model (0 on a GPU, where only tensors are counted);
    reward_model: without numbers too, where it is a model of its own.
    """

    trainer: Trainer
    meta: Roles
    process: int
    room: int
    reward_model: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        return self.trainer.accelerator.device

    @cached_property
    def steps(self) -> list[list[Pass]]:
        """The passes of an optimizer step by the length of its rows: the longest there are, and cut by eighths."""
        with self._without_numbers():
            return [self.trainer.longest_step(eighths / SHARES) for eighths in range(SHARES, 0, -1)]

    def fullest(self, tokens: int) -> list[Pass]:
        """The step of which a micro-batch of this budget is as full as can be: where a group of the longest rows leaves
        it half empty, shorter ones of two groups fill it.
        """
        return max(self.steps, key=lambda passes: passes[0].sizes.cost(widest(passes[0], tokens)[0]))

    @contextlib.contextmanager
    def _without_numbers(self) -> Iterator[None]:
        """Inside, the trainer's models are those on the meta device."""
        own, self.trainer.roles = self.trainer.roles, self.meta
        try:
            yield
        finally:
            self.trainer.roles = own

    @cached_property
    def standing(self) -> dict[str, int]:
        """Bytes of weights by role, of Adam's moments, and of the process itself."""
        roles = bytes_by_role(self.meta, reward_model=self.reward_model)
        if self.trainer.config.model.quantization == "4bit":
            roles["base"] = four_bit_bytes(self.meta)
        teacher, few_bits = self.meta.teacher_model, self.trainer.config.teacher.quantization
        if teacher is not None and few_bits is not None:
            roles["teacher"] = quantized_bytes(teacher, [*teacher.parameters()], few_bits)
        moments = 8 if self.trainer.config.optim.optimizer == "adamw" else 2
        own = {"process": self.process} if self.process else {}
        return {**own, **roles, "Adam": moments * sum(p.numel() for p in trained(self.meta))}

    @cached_property
    def sampling(self) -> SamplingBytes | None:
        """Of a rollout, or of an evaluation where that samples more rows at a time."""
        trainer, config = self.trainer, self.trainer.config
        if not isinstance(trainer, SamplingParts):
            return None
        held_out = min(config.run.eval_prompts, len(trainer.eval_prompts))
        rows = min(max(config.on_policy.batch_size, held_out), config.generation.max_rows or 1 << 30)
        longest = max(len(p.tokens) for p in (*trainer.train_prompts, *trainer.eval_prompts))
        free = max(0, self.room - sum(self.standing.values()))
        return sampling_bytes(
            self.meta,
            config.generation,
            engine=trainer.engine.name,
            rows=rows,
            prompts=max(config.on_policy.num_prompts, held_out),
            prompt_tokens=longest,
            new_tokens=trainer.longest_response,
            device=self.device,
            free=free,
            quantized=config.model.quantization is not None,
        )

    def plan(self, tokens: int | None = None) -> MemoryPlan:
        """At a micro-batch budget of `tokens` (None: the run's)."""
        tokens = tokens or self.trainer.micro_batches.tokens
        phases = {"updating": self._update(tokens), "an optimizer step": self._optimizer_step()}
        if self.sampling is not None:
            kept = {"kept from sampling": self.sampling.kept(self.device)}
            phases = {"sampling": self.sampling.parts, **{name: {**kept, **parts} for name, parts in phases.items()}}
        if (read := self._as_read()) > 0:
            phases["loading"] = {"weights as read": read}
        return MemoryPlan(self.device.type, self.standing, phases, self.room, tokens, self.sampling)

    def _as_read(self) -> int:
        """Bytes of the base's files beside the model while it is loaded; none on a CPU where the dtype is theirs."""
        model, dtype = self.trainer.config.model, self.meta.causal.dtype
        if self.device.type != "cpu" or model.random_init:
            return 0
        saved = saved_dtype(model.path, revision=model.revision)
        return 0 if saved == dtype else self.standing["base"] // dtype.itemsize * saved.itemsize

    def _update(self, tokens: int) -> dict[str, int]:
        """Gradients, activations and the logits of a chunk, at the most of any pass of an optimizer step."""
        passes = self.fullest(tokens)
        rows, count = widest(passes[0], tokens)
        CHUNK_ELEMENTS["meta"] = CHUNK_ELEMENTS[self.device.type]
        precision = self.trainer.accelerator.mixed_precision
        acting = AsOn(self.device, autocast={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision))
        with self._without_numbers(), _with_gradients(self.meta, whole=count > 1), acting, LiveBytes() as live:
            before = sum(p.numel() * p.itemsize for p in trained(self.meta) if p.grad is not None)
            for one in passes:
                learn(self.trainer, one, widest(one, tokens)[0])
            most = live.most + before
        gradients = sum(p.numel() * p.itemsize for p in trained(self.meta))
        targets = sum(passes[0].sizes.responses[row] for row in rows)
        chunk = self._chunk_bytes(targets) if self.trainer.config.trains.policy else 0
        return {"gradients": gradients, "logits chunk": chunk, "activations": max(0, most - gradients - chunk)}

    def _chunk_bytes(self, count: int) -> int:
        head = self.meta.head("policy")
        with torch.no_grad(), LiveBytes() as live:
            states = torch.empty(count, head.weight.shape[1], dtype=head.weight.dtype, device=META)
            before, targets = live.now, torch.zeros(count, dtype=torch.long, device=META)
            token_logprobs(states, head, targets=targets, temperature=1.0)
        return live.most - before

    def _optimizer_step(self) -> dict[str, int]:
        """Gradients, and what AdamW makes for itself: on a GPU a temporary for every parameter at once."""
        sizes = [p.numel() * p.itemsize for p in trained(self.meta)]
        own = sum(sizes) if self.device.type == "cuda" else LARGEST_TEMPORARIES * max(sizes, default=0)
        return {"gradients": sum(sizes), "AdamW's temporaries": own}


def widest(one: Pass, tokens: int) -> tuple[list[int], int]:
    """(rows of the widest micro-batch, how many micro-batches there are) of a pass at this budget."""
    plan = one.sizes.plan(one.rows, max_tokens=tokens)
    return max(plan, key=one.sizes.cost), len(plan)


def learn(trainer: Trainer, one: Pass, rows: list[int]) -> None:
    """The forward and backward pass of a micro-batch, on whatever models the trainer has now."""
    roles = trainer.roles
    recompute = (
        roles.gradient_checkpointing() if trainer.config.model.gradient_checkpointing else contextlib.nullcontext()
    )
    with trainer.accelerator.autocast(), roles.acting(one.role), recompute:
        loss, _ = one.loss(rows)
        # Tensor.backward is a torch function, inside which AsOn would be off while layers are recomputed.
        engine: Any = torch.autograd.Variable._execution_engine
        ones = (torch.ones_like(loss),)
        engine.run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def trained(roles: Roles) -> list[nn.Parameter]:
    return [p for of_role in roles.parameters.values() for p in of_role.values()]


def read(trainer: Trainer, one: Pass, rows: list[int]) -> None:
    """The forward pass of a micro-batch, without gradient."""
    with torch.no_grad(), trainer.roles.acting(one.role), trainer.accelerator.autocast():
        one.loss(rows)


@contextlib.contextmanager
def _with_gradients(roles: Roles, *, whole: bool) -> Iterator[None]:
    """`whole`: every gradient is there from the start, as it is from a step's second micro-batch on. None is left."""
    for parameter in trained(roles) if whole else []:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter in trained(roles):
            parameter.grad = None


# ---- what fits ----


def largest_micro_batch(planner: Planner) -> int | None:
    """The largest budget, doubled or halved from the run's, whose plan fits; None where none does."""
    longest, tokens = planner.steps[0][0], planner.trainer.micro_batches.tokens
    everything = longest.sizes.cost(longest.rows)
    alone = max(longest.sizes.cost([row]) for row in longest.rows)
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
    trainer, rollout = planner.trainer, 0
    if isinstance(trainer, SamplingParts):
        rollout = ROLLOUT_BYTES * trainer.config.on_policy.batch_size * trainer.longest_response
    return (trainer.config.run.keep_checkpoints + 2) * (checkpoint_bytes(planner.meta) + rollout)


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
    sampling = {"sampling": _sampling_seconds(trainer)} if isinstance(trainer, SamplingParts) else {}
    seconds = sampling | seconds_of_passes(trainer)
    each = ", ".join(f"{name} {taken:.2g}" for name, taken in seconds.items())
    longest = " where every response is as long as it may be; rewards are not counted" if "sampling" in seconds else ""
    return _wrapped([f"a step takes about {sum(seconds.values()):.2g} s ({each}){longest}"])


def seconds_of_passes(trainer: Trainer) -> dict[str, float]:
    """Of a step, by phase: each pass on one micro-batch, times how often it is done."""
    passes, budget = trainer.longest_step(), trainer.micro_batches.tokens
    first = passes[0]
    steps = -(-len(first.sizes) // len(first.rows))  # of the optimizer in an epoch

    def taken(one: Pass, *, learning: bool) -> float:
        """Of a whole pass over the step, by one micro-batch of it."""
        rows, sizes = widest(one, budget)[0], one.sizes
        work = partial(learn if learning else read, trainer, one, rows)
        return _timed(work) * sum(map(sizes.cost, sizes.plan(range(len(sizes)), max_tokens=budget))) / sizes.cost(rows)

    seconds = {}
    if count := trainer.forward_only_passes:
        seconds["passes without gradient"] = count * taken(first, learning=False)
    with _with_gradients(trainer.roles, whole=False):  # text (ppo.ptx_coef) is read anew in each optimizer step
        epoch = sum(taken(one, learning=True) * (1 if one.sizes is first.sizes else steps) for one in passes)
    seconds["update"] = getattr(trainer.config.own, "num_epochs", 1) * epoch
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


def _timed(work: Callable[[], object]) -> float:
    """The mean of two runs after a first one, in seconds."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.fmean(taken[1:])
