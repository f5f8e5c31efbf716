"""Entropy control: the weight of the entropy bonus, steered so that a policy does not lose its entropy too early.

Skywork-OR1 (2505.22312), "adaptive entropy control": with e[k] the mean entropy of a token in step k,

    alpha[k] = c[k] if e[k] <= target else 0
    c[k + 1] = c[k] + step if e[k] < target, c[k] - step if e[k] > target

alpha is what the bonus of losses.entropy_bonus is multiplied by. What differs: c stays within 0 and a largest value;
callers hand in the entropy of the step before, which an update measures at no cost.
"""

import math


def next_entropy_coef(
    entropy_coef: float, *, observed_entropy: float, target_entropy: float, step: float, largest: float
) -> float:
    """c after a step: up by `step` where the entropy is below its target, down where it is above, in [0, largest].

    observed_entropy, target_entropy: nats per token, all floats -> float. Raises ValueError when observed_entropy is
    not finite.
    """
    if not math.isfinite(observed_entropy):
        raise ValueError(f"observed_entropy is {observed_entropy}: a weight cannot follow a number that is not finite")
    if observed_entropy < target_entropy:
        return min(entropy_coef + step, largest)
    return max(entropy_coef - step, 0.0) if observed_entropy > target_entropy else entropy_coef


def applied_entropy_coef(entropy_coef: float, *, observed_entropy: float | None, target_entropy: float) -> float:
    """alpha: c while the entropy is at most its target, else 0; 0 before it was first observed (None)."""
    return entropy_coef if observed_entropy is not None and observed_entropy <= target_entropy else 0.0
