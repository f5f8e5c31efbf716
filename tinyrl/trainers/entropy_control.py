"""The weight of the entropy bonus in a step: as it is set, or steered to a target entropy (algorithms/entropy.py)."""

from __future__ import annotations

from tinyrl.algorithms.entropy import applied_entropy_coef, next_entropy_coef
from tinyrl.config.method_sections import GrpoConfig, PpoConfig
from tinyrl.training.session import Session


def entropy_coef(section: GrpoConfig | PpoConfig, session: Session) -> float:
    """What the bonus is multiplied by in this step."""
    if section.entropy_target is None:
        return section.entropy_coef
    observed = session.state.controllers.entropy
    return applied_entropy_coef(
        _coef(section, session), observed_entropy=observed, target_entropy=section.entropy_target
    )


def steer_entropy(section: GrpoConfig | PpoConfig, session: Session) -> dict[str, float]:
    """At the end of a step: set the weight for the next one by the entropy that this one's updates saw, a mean over
    them; nothing changes where none saw one. Returns the step's metrics: policy/entropy_coef.
    """
    if section.entropy_target is None:
        return {}
    used, controllers = entropy_coef(section, session), session.state.controllers
    if "policy/entropy" in session.metrics.sums:
        total, count = session.metrics.sums["policy/entropy"]
        controllers.entropy = total / count
        controllers.entropy_coef = next_entropy_coef(
            _coef(section, session),
            observed_entropy=controllers.entropy,
            target_entropy=section.entropy_target,
            step=section.entropy_coef_step,
            largest=section.entropy_coef_max,
        )
    return {"policy/entropy_coef": used}


def _coef(section: GrpoConfig | PpoConfig, session: Session) -> float:
    steered = session.state.controllers.entropy_coef
    return section.entropy_coef if steered is None else steered
