"""The critic of PPO: its values before an update, its loss in one, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyrl.algorithms.losses import Metrics, clipped_value_loss
from tinyrl.config.method_sections import PpoConfig
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.device import to_device
from tinyrl.models.micro_batches import Work, own_rows
from tinyrl.models.roles import Roles
from tinyrl.parts import SamplingParts
from tinyrl.rollout import Rollout
from tinyrl.trainers.on_policy import RolloutCollector
from tinyrl.trainers.policy_loss import PolicyLoss


def predict_values(rollout: Rollout, roles: Roles, collector: RolloutCollector) -> Tensor:
    """The critic's values before this rollout's update, (B, T)."""

    own = roles.value_role == "critic"

    def compute(batch: SequenceBatch) -> tuple[Tensor, ...]:
        return (roles.values(batch, states=None if own else roles.policy_states(batch)),)

    return collector.forward(rollout, role=roles.value_role, compute=compute)


def predict_final_values(rollout: Rollout, parts: SamplingParts) -> Tensor:
    """(B,) the critic's value of what would have followed a response that was cut off; 0 for one that ended."""
    roles, out = parts.roles, torch.zeros(len(rollout), device=parts.roles.device)
    cut = (rollout.cut_off & rollout.kept).nonzero().squeeze(-1).tolist()

    def run(rows: list[int]) -> None:
        prompts = [rollout.prompt_tokens[int(rollout.prompt_index[row])] for row in rows]
        batch = roles.batch(prompts, [rollout.response(row) for row in rows], last_tokens=True)
        out[to_device(torch.as_tensor(rows), roles.device)] = roles.final_values(batch).float()

    with torch.no_grad(), roles.acting(roles.value_role), parts.accelerator.autocast():
        sizes = rollout.sizes(roles)
        parts.micro_batches.run(Work(sizes, run, own_rows(sizes, cut, parts.world)))
    parts.world.sum(out)
    return out.cpu()


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss on micro-batches of a minibatch that has `tokens` tokens; the critic is acting."""

    rollout: Rollout
    roles: Roles
    config: PpoConfig
    tokens: int

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self.of_values(rows, batch, self.roles.values(batch))

    def of_values(self, rows: list[int], batch: SequenceBatch, values: Tensor) -> tuple[Tensor, Metrics]:
        """The same from values (b, T) that were computed elsewhere."""
        rollout = self.rollout
        assert rollout.values is not None
        assert rollout.returns is not None
        kept = (rollout.values, rollout.returns, rollout.loss_mask)
        old_values, returns, mask = (rollout.take(x, rows, batch=batch) for x in kept)
        eps = self.config.value_clip_eps
        return clipped_value_loss(values, old_values, returns, mask, value_clip_eps=eps, denominator=self.tokens)


@dataclass(frozen=True)
class SharedTrunkLoss:
    """Policy and value from one forward pass of the policy's trunk. While the critic warms up, and for a detached one
    always, no gradient of the value reaches the trunk.
    """

    policy: PolicyLoss
    value: ValueLoss
    warming_up: bool

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        roles = self.value.roles
        batch = self.value.rollout.batch(rows, roles)
        states = roles.policy_states(batch)
        shared = roles.critic_kind == "shared" and not self.warming_up
        values = roles.values(batch, states=states if shared else states.detach())
        value_loss, value_metrics = self.value.of_values(rows, batch, values)
        if self.warming_up:
            return value_loss, value_metrics
        loss, metrics = self.policy.from_states(rows, batch, states)
        return loss + (self.value.config.value_coef if shared else 1.0) * value_loss, metrics | value_metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over tokens that count; 0 when the returns do not vary."""
    chosen, predicted = returns[mask], values[mask]
    variance = chosen.var() if len(chosen) > 1 else torch.zeros(())
    return float(1.0 - (chosen - predicted).var() / variance) if variance > 0 else 0.0
