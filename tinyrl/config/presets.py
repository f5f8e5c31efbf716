"""Presets as plain fields of `grpo` and of `ppo`; any field can be overridden beside a preset."""

from typing import Any

DAPO: dict[str, Any] = {
    "advantage": "group", "advantage_scale": "std", "loss": "clipped", "ratio_level": "token",
    "clip_eps": 0.2, "clip_eps_high": 0.28, "aggregation": "token",
    "kl_coef": 0.0, "kl_placement": "loss",
}  # fmt: skip
KL_ESTIMATOR = {"loss": "k3", "reward": "k1"}  # by kl_placement, where nothing else is asked for
PRESETS: dict[str, dict[str, Any]] = {  # the differences from dapo
    "dapo": {},
    "grpo": {"clip_eps_high": 0.2, "aggregation": "sequence", "kl_coef": 0.04},
    "dr_grpo": {"clip_eps_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"ratio_level": "sequence", "aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "gdpo": {"normalize_rewards": "each"},
    "cispo": {"loss": "cispo"},
    "rloo": {"advantage": "leave-one-out", "clip_eps_high": 0.2, "aggregation": "sequence-sum", "kl_coef": 0.05,
             "kl_placement": "reward"},
    "reinforce++": {"advantage": "discounted-return", "clip_eps_high": 0.2, "kl_coef": 0.01, "kl_placement": "reward"},
    "reinforce++-baseline": {"advantage": "baseline-return", "clip_eps_high": 0.2, "kl_coef": 0.01,
                             "kl_estimator": "k2"},
}  # fmt: skip
PPO: dict[str, Any] = {
    "num_epochs": 4, "minibatch_size": 64, "value_clip_eps": 0.2, "gae_lambda": 0.95, "whiten_advantages": True,
}  # fmt: skip
PPO_PRESETS: dict[str, dict[str, Any]] = {  # the differences from ppo
    "ppo": {},
    "a2c": {"num_epochs": 1, "minibatch_size": None, "value_clip_eps": None, "gae_lambda": 1.0,
            "whiten_advantages": False},
}  # fmt: skip
