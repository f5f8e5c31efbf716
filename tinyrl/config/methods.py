"""The training methods: their sections of the configuration, their trainer, the rows they learn from.

One line per method, read by the configuration, the command line, the checks before torch is loaded, and the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["grpo", "ppo", "sft", "reward", "dpo"]
Rows = Literal["prompts", "text", "pairs", "judged"]


@dataclass(frozen=True)
class Method:
    """own: the section only this method has; others: optional sections it reads too; trainer: its file in
    tinyrl/trainers; rows: what a row is; recipe: the one used when none is given; policy: whether what it makes can be
    sampled from.
    """

    own: str
    others: tuple[str, ...]
    trainer: str
    rows: Rows
    recipe: str | None = None
    policy: bool = True

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that some methods have and this one reads."""
        return (*self.others, self.own)

    @property
    def samples(self) -> bool:
        """Whether completions are sampled and scored."""
        return self.rows == "prompts"


METHODS: dict[str, Method] = {
    "grpo": Method("grpo", ("reference", "reward", "environment", "generation"), "grpo", "prompts", "starter-grpo"),
    "ppo": Method(
        "ppo", ("reference", "critic", "reward", "environment", "generation"), "ppo", "prompts", "starter-ppo"
    ),
    "sft": Method("sft", (), "sft", "text"),
    "reward": Method("reward_model", (), "reward_model", "judged", policy=False),
    "dpo": Method("dpo", ("reference",), "dpo", "pairs"),
}
OPTIONAL_SECTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.sections))


def is_method(name: object) -> bool:
    """Whether a value, which a file may say in any type, is the name of a method."""
    return isinstance(name, str) and name in METHODS


def or_list(names: list[str]) -> str:
    """Names as a sentence lists them: "grpo, ppo or sft"."""
    return _in_a_row(names, "or")


def and_list(names: list[str]) -> str:
    """Names as a sentence lists them: "grpo, ppo and sft"."""
    return _in_a_row(names, "and")


def _in_a_row(names: list[str], word: str) -> str:
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else "".join(names)
