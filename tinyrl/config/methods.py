"""The training methods: their sections of the configuration, the rows they learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["grpo", "ppo", "distill", "sft", "reward", "dpo"]


@dataclass(frozen=True)
class MethodSpec:
    """section: the one that only this method has; others: optional sections it reads too; rows: the kind of its rows;
    recipe: the default recipe; policy: whether it trains a policy; rewarded: whether it needs a reward.
    """

    section: str
    others: tuple[str, ...]
    rows: Literal["prompts", "text", "pairs", "judged"]
    recipe: str | None = None
    policy: bool = True
    rewarded: bool = True

    @property
    def sections(self) -> tuple[str, ...]:
        return (*self.others, self.section)

    @property
    def samples(self) -> bool:
        return self.rows == "prompts"


EPISODES = ("reference", "teacher", "reward", "environment", "generation")
METHODS: dict[str, MethodSpec] = {
    "grpo": MethodSpec("grpo", EPISODES, "prompts", "starter-grpo"),
    "ppo": MethodSpec("ppo", ("critic", *EPISODES), "prompts", "starter-ppo"),
    "distill": MethodSpec("distill", EPISODES, "prompts", "starter-distill", rewarded=False),
    "sft": MethodSpec("sft", (), "text"),
    "reward": MethodSpec("reward_model", (), "judged", policy=False),
    "dpo": MethodSpec("dpo", ("reference",), "pairs"),
}
OPTIONAL_SECTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.sections))


def is_method(name: object) -> bool:
    """Return whether a value of any type is the name of a method."""
    return isinstance(name, str) and name in METHODS


def or_list(names: list[str], *, word: str = "or") -> str:
    """Join names as a sentence does: "grpo, ppo or sft"."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else "".join(names)


def and_list(names: list[str]) -> str:
    return or_list(names, word="and")
