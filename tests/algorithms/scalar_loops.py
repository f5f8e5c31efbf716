"""Reference implementations of the losses as loops over Python floats, and a batch to try them on."""

import math

import torch
from torch import Tensor


def random_batch(seed: int = 0) -> dict[str, Tensor]:
    """Six rows of up to eight tokens: a full one, an empty one, the rest with holes; the policies are far apart."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2.0 * torch.rand(6, 8, generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    mask[0], mask[1] = True, False
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(6, 8, generator=generator),
        "advantages": torch.randn(6, 8, generator=generator),
        "mask": mask,
        "token_weights": 2.0 * torch.rand(6, 8, generator=generator),
    }


def average(rows: list[list[float]], aggregation: str, denominator: float | None) -> float:
    """The mean of per-token terms, as a loop; `rows` holds the True tokens only."""
    if aggregation == "sequence":
        means = [sum(row) / len(row) for row in rows if row]
        return sum(means) / (denominator or len(means))
    return sum(sum(row) for row in rows) / (denominator or sum(len(row) for row in rows))


def scalar_policy_loss(
    batch: dict[str, Tensor],
    *,
    clip_eps: float,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    ratio_level: str = "token",
    aggregation: str = "token",
    denominator: float | None = None,
) -> dict[str, float]:
    """PPO's clipped objective written as the paper does: minus min(r A, clip(r) A), token by token."""
    terms: dict[str, list[list[float]]] = {k: [] for k in ("loss", "clipfrac", "approx_kl", "ratio", "dual_clipfrac")}
    high = clip_eps if clip_eps_high is None else clip_eps_high
    for b in range(6):
        true = [t for t in range(8) if batch["mask"][b, t]]
        log_ratios = [float(batch["logprobs"][b, t]) - float(batch["old_logprobs"][b, t]) for t in true]
        row: dict[str, list[float]] = {k: [] for k in terms}
        for t, token_log_ratio in zip(true, log_ratios, strict=True):
            advantages = batch["advantages"]
            advantage = float(advantages[b] if advantages.dim() == 1 else advantages[b, t])
            log_ratio = sum(log_ratios) / len(log_ratios) if ratio_level != "token" else token_log_ratio
            ratio = math.exp(log_ratio)
            objective = min(ratio * advantage, min(max(ratio, 1 - clip_eps), 1 + high) * advantage)
            row["clipfrac"].append(float(objective != ratio * advantage))
            if dual_clip is not None and advantage < 0:
                row["dual_clipfrac"].append(float(dual_clip * advantage > objective))
                objective = max(objective, dual_clip * advantage)
            else:
                row["dual_clipfrac"].append(0.0)
            weight = float(batch["token_weights"][b, t]) if "token_weights" in batch else 1.0
            row["loss"].append(-weight * objective)
            row["ratio"].append(ratio)
            row["approx_kl"].append(math.exp(token_log_ratio) - 1 - token_log_ratio)
        for k, x in row.items():
            terms[k].append(x)
    metrics = {
        f"policy/{k}": average(x, "token" if aggregation == "constant" else aggregation, None) for k, x in terms.items()
    }
    metrics["policy/loss"] = average(terms["loss"], aggregation, denominator)
    if dual_clip is None:
        del metrics["policy/dual_clipfrac"]
    return metrics
