"""Defaults of other libraries that a name brings along: what a run has there beside the name where nothing else gives
it, and this package has otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyrl.config.foreign_values import ForeignNames, is_above_zero, under_method, written

PLACE = "{}"


def always(value: Any, given: ForeignNames) -> bool:
    return True


def if_above_zero(value: Any, given: ForeignNames) -> bool:
    return is_above_zero(value)


def if_verl_has_kl(value: Any, given: ForeignNames) -> bool:
    return value is True and "kl_estimator" not in given.values


def if_openrlhf_has_kl(value: Any, given: ForeignNames) -> bool:
    return value is True and "kl_estimator" in given.values


def if_no_clip_is_given(value: Any, given: ForeignNames) -> bool:
    return not given.has("epsilon", "clip_ratio", "eps_clip")


def if_simpo(value: Any, given: ForeignNames) -> bool:
    return value == "simpo"


@dataclass(frozen=True)
class Default:
    """setting: of grpo, or that of the same name of the method; value: PLACE is that of the name; counts: for which
    values of the name.
    """

    setting: str
    value: str
    counts: Callable[[Any, ForeignNames], bool] = always


SAME_ABOVE = (Default("grpo.clip_eps_high", PLACE),)
ABOVE = Default("grpo.clip_eps_high", "0.2", if_no_clip_is_given)  # of verl and OpenRLHF
BROUGHT: dict[str, tuple[Default, ...]] = {
    "epsilon": SAME_ABOVE,
    "clip_ratio": SAME_ABOVE,
    "eps_clip": SAME_ABOVE,
    "clip_ratio_low": (ABOVE,),
    "adv_estimator": (ABOVE,),
    # OpenRLHF has a KL in the reward where nothing is given.
    "advantage_estimator": (ABOVE, Default("grpo.kl_coef", "0.01"), Default("grpo.kl_estimator", "k1")),
    "init_kl_coef": (Default("grpo.kl_estimator", "k1", if_above_zero),),
    "kl_ctrl.kl_coef": (Default("grpo.kl_estimator", "k1", if_above_zero),),
    "kl_loss_coef": (Default("ppo.kl_estimator", "k3", if_above_zero),),
    "use_kl_loss": (
        Default("grpo.kl_coef", "0.001", if_verl_has_kl),
        Default("grpo.kl_coef", "0.01", if_openrlhf_has_kl),
    ),
    "use_kl_in_reward": (Default("grpo.kl_coef", "0.001", if_verl_has_kl),),
    "beta": (Default("grpo.kl_unbiased", "true", if_above_zero),),  # of TRL since 1.11
    "lora_rank": (Default("lora.alpha", "16", if_above_zero),),  # of verl and OpenRLHF
    "r": (Default("lora.alpha", "8"),),  # of PEFT
    "loss_type": (Default("dpo.beta", "0.1", if_simpo), Default("dpo.target_margin", "0.5", if_simpo)),  # TRL's CPO
}


def brought_by(name: str, value: Any, given: ForeignNames) -> str:
    """Return the defaults that a name with this value brings along, as words of the command line."""
    words = list[str]()
    for default in BROUGHT.get(name, ()):
        setting = under_method(default.setting, given.method)
        if setting and default.counts(value, given):
            words.append(written(setting, value if default.value == PLACE else default.value))
    return " ".join(words)
