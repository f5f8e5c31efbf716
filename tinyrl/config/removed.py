"""Settings that were renamed, removed or added, so that run folders of earlier versions stay readable.

A run's config.yaml and its checkpoints hold every setting there was when they were written. One that is gone is ignored
there at its neutral value: the one under which that version did what this one always does. Any other value is refused
by name, and so is the setting in a recipe or on the command line. One that was a fact of the run and changed nothing is
ignored there at every value. One that has another name now is read by it; in a recipe or on the command line its old
name is answered with the new one. One that is newer than a run is read there at the value under which this version does
what that one did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tinyrl.config.refusal import Refusal
from tinyrl.text import truncate


class Removed(NamedTuple):
    """A setting that is gone. instead: what replaced it, or what happens now, for an error; is_fact: nothing depended
    on it, so every value is neutral.
    """

    neutral: Any
    instead: str
    is_fact: bool = False

    def ignores(self, value: Any) -> bool:
        """Return whether nothing changes where a run or checkpoint has this value."""
        return self.is_fact or value == self.neutral

    def refusal(self, setting: str, value: Any) -> Refusal:
        """Return the answer to the setting, given with this value."""
        given = truncate(repr(value))
        return Refusal((setting,), f"`{setting}` is {given}, and this setting was removed: {self.instead}")


REMOVED: dict[str, Removed] = {
    "distill.objective": Removed("divergence", "distillation always minimises the divergence (teacher.divergence)"),
    "run.forked_from": Removed(None, "`tinyrl train --from` writes it into the run's env.json", is_fact=True),
}


RENAMED = {
    "critic.warmup": "critic.warmup_steps",
    "distill.on_policy": "distill.on_policy_fraction",
    "environment.at_once": "environment.max_concurrency",
    "environment.use": "environment.name",
    "grpo.mismatch": "grpo.importance_correction",
    "grpo.refill_rounds": "grpo.dynamic_sampling_rounds",
    "task.chat_template": "task.chat_template_kwargs",
    "task.long_prompts": "task.on_overlong_prompt",
    "teacher.coef": "teacher.kl_coef",
}


def ignore_neutral(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings of a run or checkpoint with today's names, and without the removed ones whose value
    is ignored.
    """
    values = {name: {**section} if isinstance(section, dict) else section for name, section in values.items()}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and name in fields:
            value = fields.pop(name)
            fields.setdefault(new.partition(".")[2], value)
    for setting, removed in REMOVED.items():
        section, _, name = setting.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and name in fields and removed.ignores(fields[name]):
            del fields[name]
    return values


def with_newer(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings of a run or checkpoint with those that it is older than, where their default would
    do something else than that version did: it left the matrices of experts to PEFT.
    """
    lora = values.get("lora")
    model = values.get("model")
    if not isinstance(lora, dict) or not isinstance(model, dict) or "target_parameters" in lora:
        return values
    is_pefts = lora.get("enabled", True) and lora.get("target_modules") == "all-linear" and model.get("adapter") is None
    return {**values, "lora": {**lora, "target_parameters": "peft"}} if is_pefts else values


def given_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the removed settings in the settings of a run or checkpoint that have another value, by section.name."""
    found = {}
    for setting in REMOVED:
        section, _, name = setting.partition(".")
        fields = ignore_neutral(values).get(section)
        if isinstance(fields, dict) and name in fields:
            found[setting] = fields[name]
    return found
