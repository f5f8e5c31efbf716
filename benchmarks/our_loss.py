"""tinyrl's loss and gradient on the fixed batch, by the trainers' own PolicyLoss, compared with the peer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import measuring, our_recipe
from benchmarks.fixed_batch import GROUP_SIZE, Batch, fixed_batch
from benchmarks.fixed_work import SPEED
from tinyrl.config.recipe import load_config
from tinyrl.models.roles import load_policy
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.components import Options
from tinyrl.trainers.on_policy import OnPolicyTrainer
from tinyrl.trainers.policy_loss import PolicyLoss
from tinyrl.training.launch import start


def as_rollout(batch: Batch) -> Rollout:
    """The fixed batch as if it had been sampled and scored."""
    rows, lengths = len(batch.responses), torch.tensor([len(r) for r in batch.responses])
    tokens = torch.zeros(rows, int(lengths.max()), dtype=torch.long)
    for row, response in enumerate(batch.responses):
        tokens[row, : len(response)] = torch.tensor(response)
    return Rollout(
        prompt_tokens=batch.prompts,
        prompt_rows=torch.arange(len(batch.prompts)),
        prompt_index=torch.arange(len(batch.prompts)).repeat_interleave(GROUP_SIZE),
        response_tokens=tokens,
        response_lengths=lengths,
        response_mask=torch.arange(tokens.shape[1]) < lengths.unsqueeze(1),
        sampling_logprobs=torch.zeros(tokens.shape),
        scores=torch.zeros(rows, 1),
        rewards=torch.zeros(rows),
        finish_reasons=torch.zeros(rows, dtype=torch.long),
        kept=torch.ones(rows, dtype=torch.bool),
    )


def loss_and_gradient(settings: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    config = load_config("grpo", str(our_recipe.write(settings)), overrides=settings["overrides"])
    launch = start(
        config,
        options=Options(device="cpu"),
        output_dir=settings["folder"],
        name="run",
        overwrite=False,
        command=[],
    )
    parts = launch.trainer
    assert isinstance(parts, OnPolicyTrainer)
    assert config.grpo is not None
    load_policy(parts.roles, Path(settings["files"]) / "adapter")
    batch = fixed_batch(parts.roles.causal.config.get_text_config().vocab_size, max_new_tokens=SPEED.max_new_tokens)
    rollout, rows = as_rollout(batch), list(range(len(batch.responses)))
    parts.begin(launch.session)
    parts.compute_logprobs(rollout)
    rollout.old_logprobs, rollout.advantages = rollout.ref_logprobs, torch.tensor(batch.advantages)
    loss_settings = parts.loss_settings(kl_coef=config.grpo.kl_coef)
    loss_of = PolicyLoss(rollout, rows, roles=parts.roles, settings=loss_settings, first=True)
    with parts.roles.acting("policy"):
        loss, _ = loss_of(rows)
        loss.backward()
    parts.close()
    gradients = {name: p.grad for name, p in parts.roles.parameters["policy"].items() if p.grad is not None}
    return float(loss.detach()), gradients


def main() -> None:
    settings = measuring.job()
    loss, gradients = loss_and_gradient(settings)
    theirs = load_file(settings["gradients"])
    assert set(theirs) == set(gradients), sorted(set(theirs) ^ set(gradients))[:4]
    names = sorted(theirs)
    difference = torch.cat([(gradients[n] - theirs[n]).flatten() for n in names]).norm()
    norm = torch.cat([theirs[n].flatten() for n in names]).norm()
    measuring.answer(settings, loss=loss, gradient_gap=float(difference / norm), gradient_norm=float(norm))


if __name__ == "__main__":
    main()
