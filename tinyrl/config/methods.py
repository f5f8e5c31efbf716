"""The training methods: their sections of the configuration, their trainer, the rows they learn from.

One line per method, read by the configuration, the command line, the checks before torch is loaded, and the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["grpo", "ppo", "distill", "sft", "reward", "dpo"]
Rows = Literal["prompts", "text", "pairs", "judged"]


@dataclass(frozen=True)
class Method:
    """own: the section only this method has; others: optional sections it reads too; trainer: its class; rows: what a
    row is; recipe: the one used when none is given; policy: whether what it makes can be sampled from; rewarded:
    that it learns from a reward, and so needs one.
    """

    own: str
    others: tuple[str, ...]
    trainer: str
    rows: Rows
    recipe: str | None = None
    policy: bool = True
    rewarded: bool = True

    @property
    def sections(self) -> tuple[str, ...]:
        return (*self.others, self.own)

    @property
    def samples(self) -> bool:
        return self.rows == "prompts"


EPISODES = ("reward", "environment", "generation")
METHODS: dict[str, Method] = {
    "grpo": Method("grpo", ("reference", "teacher", *EPISODES), "tinyrl.trainers.grpo:Grpo", "prompts", "starter-grpo"),
    "ppo": Method(
        "ppo", ("reference", "critic", "teacher", *EPISODES), "tinyrl.trainers.ppo:Ppo", "prompts", "starter-ppo"
    ),
    "distill": Method(
        "distill",
        ("reference", "teacher", *EPISODES),
        "tinyrl.trainers.distill:Distill",
        "prompts",
        "starter-distill",
        rewarded=False,
    ),
    "sft": Method("sft", (), "tinyrl.trainers.sft:Sft", "text"),
    "reward": Method("reward_model", (), "tinyrl.trainers.reward_model:RewardModel", "judged", policy=False),
    "dpo": Method("dpo", ("reference",), "tinyrl.trainers.dpo:Dpo", "pairs"),
}
OPTIONAL_SECTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.sections))


def is_method(name: object) -> bool:
    """Whether a value, which a file may say in any type, is the name of a method."""
    return isinstance(name, str) and name in METHODS


def or_list(names: list[str], *, word: str = "or") -> str:
    """Names as a sentence lists them: "grpo, ppo or sft"."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else "".join(names)


def and_list(names: list[str]) -> str:
    """Names as a sentence lists them: "grpo, ppo and sft"."""
    return or_list(names, word="and")
