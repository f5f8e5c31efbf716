"""One optimizer step: gradients summed over micro-batches and processes, guards against non-finite numbers, the step.

The caller gives the loss of a micro-batch. When memory runs out the step is redone in smaller micro-batches
(models/micro_batches.py); the gradient is the same, because losses divide by the count of the whole step. A loss or
gradient that is not finite changes no weight. In float16, where small gradients would vanish, the loss is scaled up
(Micikevicius et al. 2018, 1710.03740): a gradient that overflows halves the scale and leaves out the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyrl.config.schema import Config
from tinyrl.config.sections import OptimConfig
from tinyrl.models.device import free_bytes, reset_peak_memory, restore_torch_rng, torch_rng
from tinyrl.models.memory import MOMENT_BYTES
from tinyrl.models.micro_batches import PassMemory, SequenceLengths, Work
from tinyrl.models.parallel import sum_step
from tinyrl.models.policy import Policy
from tinyrl.process.errors import GuardStop
from tinyrl.training.method import Pass

MOST_SKIPS = 3  # steps in a row without a finite gradient before the run stops


@dataclass
class Updater:
    """Step the optimizers. State: how many steps were skipped, in a row and in all."""

    policy: Policy
    optimizers: dict[str, RoleOptimizer]
    max_grad_norm: float
    dump_bad_batch: Callable[[str], None] = lambda why: None
    skipped: int = 0
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        in_float16 = self.policy.run_device.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.policy.device.type, enabled=in_float16)

    def step(self, passes: Sequence[Pass], *, train: Iterable[str]) -> dict[str, float]:
        """Accumulate the gradient of every pass and step the optimizers named in `train` whose gradient is not 0.

        Returns the step's metrics as floats: those of the losses added up, `optim/grad_norm` and `value/grad_norm`
        before clipping, and in float16 the `optim/loss_scale` they were computed with. Raises GuardStop after three
        non-finite steps in a row, and after one that made weights non-finite; OutOfRoom if one sequence does not fit.
        """
        metrics = self._accumulate(passes)
        optimizers = {role: self.optimizers[role] for role in train}
        scale = self.scaler.get_scale()  # 1 but in float16
        self._unscale(optimizers)
        norms = {role: one.clip(self.max_grad_norm) for role, one in optimizers.items()}

        bad_losses = [name for name, value in metrics.items() if name.endswith("loss") and not math.isfinite(value)]
        bad_gradients = [f"gradient of {role}" for role, norm in norms.items() if not math.isfinite(norm)]
        overflowed = scale > 1 and self.scaler.get_scale() < scale  # the scaled gradient, so the scale was halved
        if bad_losses or (bad_gradients and not overflowed):
            self._skip(f"{', '.join(bad_losses + bad_gradients)} not finite")
        elif bad_gradients:
            norms = {}
        else:
            self.skipped_in_a_row = 0
            for role, norm in norms.items():
                if norm > 0.0:  # else momentum and weight decay alone would move the weights
                    optimizers[role].optimizer.step()
                    self._check_weights(role)
        self.zero_grad()

        names = {"policy": "optim/grad_norm", "critic": "value/grad_norm"}
        if self.scaler.is_enabled():
            metrics["optim/loss_scale"] = scale
        return metrics | {names[role]: norm for role, norm in norms.items()}

    def _unscale(self, optimizers: dict[str, RoleOptimizer]) -> None:
        """Divide the gradients by the loss scale, which is halved where one is not finite."""
        with_gradient = [one for one in optimizers.values() if any(p.grad is not None for p in one.parameters.values())]
        for one in with_gradient:
            self.scaler.unscale_(one.optimizer)
        if with_gradient:
            self.scaler.update()

    def _accumulate(self, passes: Sequence[Pass]) -> dict[str, float]:
        """Add up the gradients of the passes, of all processes; return the metrics of their losses, added up too."""
        policy = self.policy
        totals: dict[str, Tensor] = {}
        start = torch_rng()
        shared = None
        if policy.world.size > 1:  # each process drops out by its own numbers, and goes on with those of all
            seed = int(torch.randint(1 << 48, (1,)))
            shared = torch_rng()
            torch.manual_seed(seed + policy.world.rank)
            start = torch_rng()

        def restart() -> None:
            restore_torch_rng(start)
            totals.clear()
            self.zero_grad()

        work = []
        for one in passes:
            lengths = policy.lengths(one.items)
            work.append(Work(lengths, partial(self._backward, one, totals)))
        policy.micro_batches.run(*work, world=policy.world, restart=restart)
        if shared is not None:
            restore_torch_rng(shared)
        parameters = [p for role in self.optimizers.values() for p in role.parameters.values()]
        return sum_step(policy.world, as_floats(totals), parameters)

    def measure(self, passes: Sequence[Pass]) -> None:
        """Fit run.micro_batch_tokens=auto to a GPU, where it is not known yet: by a micro-batch of the longest rows of
        each pass, whose gradients are thrown away. Adam's moments, which a first step makes, have their room.
        """
        policy = self.policy
        if not policy.micro_batches.unmeasured:
            return
        start = torch_rng()
        allocated = torch.cuda.memory_allocated(policy.device)
        free = free_bytes(policy.device) - sum(one.missing_bytes for one in self.optimizers.values())
        measured = list[PassMemory]()

        def restart() -> None:
            restore_torch_rng(start)
            measured.clear()
            self.zero_grad()

        def run(one: Pass, lengths: SequenceLengths, rows: list[int]) -> None:
            reset_peak_memory(policy.device)
            self.gradient(one, rows)
            taken = torch.cuda.max_memory_allocated(policy.device) - allocated  # with gradients of the pass before
            measured.append(PassMemory(cost=lengths.cost(rows), taken=taken))

        work = []
        for widest in self.widest(passes):
            lengths = policy.lengths(widest.items)
            work.append(Work(lengths, partial(run, widest, lengths)))
        policy.micro_batches.run(*work, restart=restart)
        policy.micro_batches.fit(measured, free=free)
        restart()

    def widest(self, passes: Sequence[Pass]) -> list[Pass]:
        """Return each pass over the items of its largest micro-batch alone."""
        policy = self.policy
        found = []
        for one in passes:
            lengths = policy.lengths(one.items)
            longest = lengths.plan(range(len(lengths)), max_tokens=policy.micro_batches.tokens)[0]
            found.append(one._replace(items=[one.items[row] for row in longest]))
        return found

    def _backward(self, one: Pass, totals: dict[str, Tensor], rows: list[int]) -> None:
        """Add the gradient and the metrics of one micro-batch: the items of the pass at `rows`."""
        for name, value in self.gradient(one, rows).items():
            totals[name] = totals.get(name, torch.zeros_like(value)) + value

    def gradient(self, one: Pass, rows: list[int]) -> dict[str, Tensor]:
        """Add the gradient of the items of a pass at `rows`; return the metrics of their loss."""
        policy = self.policy
        checkpointing = policy.gradient_checkpointing() if policy.config.model.gradient_checkpointing else nullcontext()
        with policy.acting(one.role), checkpointing:
            batch = policy.batch_of([one.items[row] for row in rows], last_tokens=one.last_tokens, rows=rows)
            with policy.run_device.autocast():
                loss, metrics = one.loss(batch)
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
        return metrics

    def restore(self, *, skipped: int, skipped_in_a_row: int, loss_scale: dict[str, Any]) -> None:
        """Go on with the counts of a checkpoint, and in float16 with its loss scale (else {})."""
        self.skipped = skipped
        self.skipped_in_a_row = skipped_in_a_row
        if loss_scale:
            self.scaler.load_state_dict(loss_scale)

    def zero_grad(self) -> None:
        """Discard the gradients of all roles."""
        for role in self.optimizers.values():
            role.optimizer.zero_grad(set_to_none=True)

    def _check_weights(self, role: str) -> None:
        """Raise GuardStop for weights that a finite gradient made non-finite (by a rate or decay that is too large)."""
        weights = list(self.optimizers[role].parameters.values())
        norm = float(nn.utils.get_total_norm(weights))  # one pass; large numbers overflow it too, so look at each then
        if not math.isfinite(norm) and not all(bool(weight.isfinite().all()) for weight in weights):
            raise GuardStop(
                f"an optimizer step made weights of the {role} that are not finite, so they are not saved. The last "
                "checkpoint is sound. Try a lower optim.learning_rate or optim.weight_decay."
            )

    def _skip(self, why: str) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.dump_bad_batch(why)
        if self.skipped_in_a_row >= MOST_SKIPS:
            self.zero_grad()
            raise GuardStop(
                f"{MOST_SKIPS} optimizer steps in a row had numbers that are not finite ({why}) and changed no weight. "
                "The batches are in nonfinite/. Try a lower optim.learning_rate, or model.dtype=float32."
            )


def as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Convert 0-dim tensors to numbers by one copy from a GPU for all of them."""
    found: dict[str, float] = {}
    for device in {value.device for value in metrics.values()}:
        there = {key: value.detach().double() for key, value in metrics.items() if value.device == device}
        found |= zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    return {key: found[key] for key in metrics}


# ---- optimizers ----

Parameters = dict[str, nn.Parameter]
OptimizerKind = Literal["adamw", "adamw8bit"]


class RoleOptimizer:
    """AdamW over one role's parameters by name. Weight decay applies to matrices only: decaying a bias or a norm's gain
    pulls it towards nothing meaningful. `adamw8bit` stores both moments of large tensors in blocks of eight bits
    (2110.02861): 2 bytes a parameter instead of 8. Raises ValueError where bitsandbytes is missing.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        kind: OptimizerKind = "adamw",
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.moment_bytes = MOMENT_BYTES[kind]
        adamw: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        if kind == "adamw8bit":
            try:
                from bitsandbytes.optim.adamw import AdamW8bit as adamw
            except ImportError:
                need = "optim.optimizer=adamw8bit needs bitsandbytes: pip install 'tinyrl[quantization]'"
                raise ValueError(need) from None
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = adamw([g for g in groups if g["params"]], lr=learning_rate, betas=betas)

    @property
    def missing_bytes(self) -> int:
        """Count the bytes of moments that the next steps will make: of parameters that have had no gradient."""
        without = (p for p in self.parameters.values() if p not in self.optimizer.state)
        return self.moment_bytes * sum(p.numel() for p in without)

    def set_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor

    def clip(self, max_norm: float) -> float:
        """Clip this role's gradient in place; returns its norm before clipping (0 without a gradient)."""
        return float(nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm))


def role_optimizers(optim: OptimConfig, parameters: dict[str, Parameters]) -> dict[str, RoleOptimizer]:
    """Make an optimizer for each role that is trained, the critic's with its own learning rate."""
    rates = {"policy": optim.learning_rate, "critic": optim.critic_learning_rate}
    of_mean, of_square = optim.betas
    how: Any = {"weight_decay": optim.weight_decay, "betas": (of_mean, of_square), "kind": optim.optimizer}
    return {role: RoleOptimizer(p, learning_rate=rates[role] or 0.0, **how) for role, p in parameters.items()}


def optimizer_tensors(optimizers: dict[str, RoleOptimizer]) -> dict[str, Tensor]:
    """Return Adam's state of all roles as `<role>|<parameter>|<key>` -> tensor, so that a checkpoint needs no pickle.
    bitsandbytes has one table of eight-bit values for all parameters, which safetensors refuses: it is copied.
    """
    found: dict[str, Tensor] = {}
    for role, one in optimizers.items():
        for name, parameter in one.parameters.items():
            for key, value in one.optimizer.state.get(parameter, {}).items():
                tensor = torch.as_tensor(value)  # bitsandbytes has the step as a number
                found[f"{role}|{name}|{key}"] = tensor.clone() if key.startswith("qmap") else tensor.contiguous()
    return found


def load_optimizers(optimizers: dict[str, RoleOptimizer], tensors: dict[str, Tensor]) -> list[str]:
    """Restore `optimizer_tensors`. Return the parameters, as `<role>|<parameter>`, whose state is dropped because they
    are not trained here, as those of another critic; ones without state begin with none.
    """
    dropped: dict[str, None] = {}
    for one in optimizers.values():
        one.optimizer.state.clear()
    for place, value in tensors.items():
        owner, _, key = place.rpartition("|")
        role, _, name = owner.partition("|")
        parameter = optimizers[role].parameters.get(name) if role in optimizers else None
        if parameter is None:
            dropped[owner] = None
            continue
        optimizer = optimizers[role].optimizer
        if key == "step":
            kept = value.clone() if isinstance(optimizer, torch.optim.AdamW) else int(value)
        else:
            kept = value.to(parameter.device, copy=True)
        optimizer.state.setdefault(parameter, {})[key] = kept
    return list(dropped)


def schedule_notes(config: Config) -> list[str]:
    """Return warnings where the run ends before a warm-up does: the learning rate never gets where it is set, or only
    the critic is trained.
    """
    notes = list[str]()
    steps = config.run.num_steps
    warmup = config.optim.warmup_steps
    if warmup > steps:
        what = f"optim.warmup_steps={warmup} is more than run.num_steps={steps}"
        notes.append(f"warning: {what}: the learning rate gets to {steps / warmup:.0%} of optim.learning_rate")
    of_critic = config.critic.warmup_steps
    if config.uses("critic") and of_critic >= steps:
        what = f"critic.warmup_steps={of_critic} is at least run.num_steps={steps}"
        notes.append(f"warning: {what}: only the critic is trained, and the policy stays as it is")
    return notes


def rate_factor(schedule: str, step: int, *, num_steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate at `step` (0-based): linear warm-up, then the schedule towards 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
