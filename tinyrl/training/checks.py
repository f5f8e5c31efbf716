"""What is settled and checked before the first step: threads, the reference at step 0, and whether the reward knows
a good answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tinyrl.components import Parts
from tinyrl.data.rows import token_ids
from tinyrl.models.batches import make_batch
from tinyrl.models.memory import bytes_by_role
from tinyrl.rewards.trial import NONSENSE
from tinyrl.tasks.prompts import PreparedPrompt

KL_AT_START = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def check_reference(parts: Parts) -> None:
    """KL(policy, reference) is 0 before the first step. Raises ValueError, naming what the reference is, when it is
    not.
    """
    roles, generation = parts.roles, parts.config.generation
    assert generation is not None
    if not roles.has_reference:
        return
    prompts = [p.tokens[:32] for p in parts.train_prompts[:4]]
    batch = make_batch(prompts, [tokens[-8:] for tokens in prompts], device=roles.device)
    logprobs = []
    for role in ("policy", "reference"):
        with torch.no_grad(), roles.acting(role), parts.accelerator.autocast():
            logprobs.append(roles.logprobs(role, batch, temperature=generation.temperature)[0])
    gap = float((logprobs[0] - logprobs[1]).abs().max())
    if not gap <= KL_AT_START.get(roles.causal.dtype, 1e-5):
        kind = f"adapter `{roles.reference_adapter}`" if roles.reference_adapter else "the base without adapters"
        kind = "a frozen copy of the model" if roles.reference_model is not None else kind
        raise ValueError(
            f"policy and reference differ before the first step (log-probabilities by {gap:.2g}); "
            f"the reference is {kind}"
        )


def memory_of_roles(parts: Parts) -> dict[str, int]:
    """Bytes of weights by role, of the copy that sampling reads, and of the optimizers once they have stepped."""
    model = parts.scorer.model.model if parts.scorer.model is not None else None
    trained = sum(p.numel() for role in parts.roles.parameters.values() for p in role.values())
    per_parameter = 8 if parts.config.optim.optimizer == "adamw" else 2
    return {
        **bytes_by_role(parts.roles, reward_model=model),
        "sampling copy": parts.engine.copy_bytes,
        "optimizers": trained * per_parameter,
    }


def describe_memory(parts: Parts) -> str:
    """One line for the log."""
    return "memory of weights: " + ", ".join(f"{n} {b / 1e6:,.1f} MB" for n, b in memory_of_roles(parts).items() if b)


@dataclass(frozen=True)
class RewardTrial:
    """One prompt's reward on its gold answer (None where the task has none), on nothing, and on nonsense. NaN: no
    score.
    """

    prompt: PreparedPrompt
    gold_text: str | None
    gold: float | None
    empty: float
    nonsense: float

    @property
    def warning(self) -> str | None:
        """A sentence when the gold answer does not win, or nothing at all is scored."""
        if self.gold is None:
            return None
        rivals = [s for s in (self.empty, self.nonsense) if not math.isnan(s)]
        if math.isnan(self.gold):
            return "the gold answer gets no score"
        if rivals and self.gold <= max(rivals):
            return (
                f"the gold answer scores {self.gold:.3g}, no more than an empty one ({self.empty:.3g}) "
                f"or nonsense ({self.nonsense:.3g})"
            )
        return None


def try_reward(parts: Parts) -> RewardTrial:
    """Score the first training prompt's gold answer, an empty completion, and nonsense, as training would score
    them.
    """
    prompt = parts.train_prompts[0]
    gold = parts.task.gold(prompt.row)
    texts = [gold or "", "", NONSENSE]
    if prompt.opened and gold is not None:
        texts[0] = gold.removeprefix(prompt.opened.rstrip()) if gold.startswith(prompt.opened.rstrip()) else gold
    tokens = [[*token_ids(parts.tokenizer, text), parts.tokenizer.eos_token_id] for text in texts]
    totals = parts.scorer([prompt] * len(tokens), tokens).totals.tolist()
    return RewardTrial(prompt, gold, totals[0] if gold is not None else None, totals[1], totals[2])
