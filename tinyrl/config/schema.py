"""The configuration of a run: its sections, and defaults that depend on several of them.

Nothing here imports torch, so `tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, model_validator

from tinyrl.config import sections
from tinyrl.config.marks import Named, OnlyIf, OnlyKeeps, find_named, replace_named
from tinyrl.config.method_sections import DistillConfig, DpoConfig, GrpoConfig, PpoConfig, RewardModelConfig, SftConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, MethodName, MethodSpec, is_method
from tinyrl.urls import mask_url

if TYPE_CHECKING:
    from tinyrl.config.given import Given


def _section(kind: type[sections.Section], description: str) -> Any:
    return Field(default_factory=lambda: kind.model_validate({}), description=description)


class Config(sections.Section):
    """The whole configuration of a run. Sections that the method does not use keep their defaults and are not written.

    It is made by `derive`, which gives the settings that follow from others (a learning rate of LoRA or of full
    fine-tuning) their values, so that config.yaml holds every value. Two are equal if their settings are.
    """

    _given: Any = PrivateAttr(default=None)

    method: MethodName = Field(description="training method")
    model: sections.ModelConfig = _section(sections.ModelConfig, "the base model")
    lora: sections.LoraSection = _section(sections.LoraSection, "low-rank adapters on the frozen base")
    reference: sections.ReferenceConfig = _section(sections.ReferenceConfig, "reference policy for the KL")
    critic: sections.CriticConfig = _section(sections.CriticConfig, "value function of PPO")
    teacher: sections.TeacherConfig = _section(sections.TeacherConfig, "teacher of a distillation")
    task: sections.TaskConfig = _section(sections.TaskConfig, "prompts, and where rows come from")
    reward: sections.RewardConfig = _section(sections.RewardConfig, "reward of a completion")
    environment: sections.EnvironmentConfig = _section(sections.EnvironmentConfig, "environment of multi-turn episodes")
    generation: sections.GenerationConfig = _section(sections.GenerationConfig, "sampling")
    optim: sections.OptimConfig = _section(sections.OptimConfig, "optimizer and learning rates")
    grpo: GrpoConfig = _section(GrpoConfig, "GRPO and its family")
    ppo: PpoConfig = _section(PpoConfig, "PPO")
    distill: DistillConfig = _section(DistillConfig, "distillation from a teacher")
    sft: SftConfig = _section(SftConfig, "supervised fine-tuning")
    reward_model: RewardModelConfig = _section(RewardModelConfig, "reward model from pairs or labels")
    dpo: DpoConfig = _section(DpoConfig, "DPO and its family")
    run: sections.RunConfig = _section(sections.RunConfig, "length, seed, evaluation, checkpoints")

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_sections(cls, data: Any) -> Any:
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults. What is no
        section under the name of one stays, to be refused.
        """
        if not isinstance(data, dict) or not is_method(data.get("method")):
            return data
        unused = {*OPTIONAL_SECTIONS} - {*METHODS[data["method"]].sections}
        used = {k: v for k, v in data.items() if k not in unused or not isinstance(v, dict | None)}
        return {k: {} if v is None and k != "method" else v for k, v in used.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def given(self) -> Given:
        """Return what was given, of which this was derived."""
        assert self._given is not None, "a configuration is made by `derive`"
        return self._given

    def with_given(self, given: Given) -> Config:
        copy = self.model_copy()
        copy._given = given
        return copy

    def with_setting(self, setting: str, value: Any) -> Config:
        """Return a copy with another value of a setting (section.name), which must be one that it may have."""
        section, _, name = setting.partition(".")
        changed = getattr(self, section).model_copy(update={name: value})
        return self.model_copy(update={section: changed})

    def uses(self, section: str) -> bool:
        return section not in OPTIONAL_SECTIONS or section in self.trains.sections

    @property
    def has_reference(self) -> bool:
        needed = getattr(self.own, "needs_reference", True)
        return needed and self.uses("reference") and self.reference.kind == "auto"

    @property
    def trains(self) -> MethodSpec:
        return METHODS[self.method]

    @property
    def own(self) -> GrpoConfig | PpoConfig | DistillConfig | SftConfig | RewardModelConfig | DpoConfig:
        """Return the section that only this method has."""
        return getattr(self, self.trains.section)

    @property
    def on_policy(self) -> GrpoConfig | PpoConfig | DistillConfig:
        """Return the section of a method that learns from its own samples; no other method has one."""
        own = self.own
        assert isinstance(own, GrpoConfig | PpoConfig | DistillConfig), f"{self.method} samples nothing"
        return own

    @property
    def policy_gradient(self) -> GrpoConfig | PpoConfig:
        """Return the section of a method that reinforces its own samples; no other method has one."""
        own = self.own
        assert isinstance(own, GrpoConfig | PpoConfig), f"{self.method} has no policy gradient"
        return own

    @property
    def learns_from_teacher(self) -> bool:
        """Return whether a teacher scores the rollouts."""
        return self.method == "distill" or (self.uses("teacher") and self.teacher.kl_coef > 0)

    @property
    def credits_turns(self) -> bool:
        """Return whether each turn of an episode has an advantage of its own, which its tokens share."""
        return self.method == "grpo" and self.grpo.credit == "turn"

    @property
    def samples(self) -> bool:
        return self.trains.samples

    def unmet(self, section: str, name: str) -> OnlyIf | None:
        """Return the condition under which a setting counts, if it does not hold."""
        kind: type[sections.Section] = type(getattr(self, section))
        field = kind.model_fields[name]
        return next((mark for mark in field.metadata if isinstance(mark, OnlyIf) and not mark.holds(self)), None)

    @classmethod
    def only_keeps(cls, setting: str) -> bool:
        """Return whether no number of a run depends on a setting (section.name), which may be one that is gone."""
        section, _, name = setting.partition(".")
        held = cls.model_fields.get(section)
        fields = getattr(held.annotation, "model_fields", {}) if held else {}
        return name in fields and any(isinstance(mark, OnlyKeeps) for mark in fields[name].metadata)

    def named(self) -> list[Named]:
        """Return each value that counts and names a model, rows, code, a server or a file."""
        values = find_named(self.model_dump(), schema=type(self))
        return [named for named in values if self.unmet(*named.place[:2]) is None]

    def written(self) -> dict[str, Any]:
        """Return the sections that the method uses, as JSON values without secrets: for config.yaml and checkpoints."""
        values = self.model_dump(mode="json")
        return without_secrets({name: value for name, value in values.items() if self.uses(name)}, schema=type(self))

    def written_given(self) -> dict[str, Any] | None:
        """Return what was given to the sections that the method uses, as JSON values without secrets; None of a run of
        an earlier version, which did not keep it.
        """
        if self.given.is_whole:
            return None
        own = {name: value for name, value in self.given.values.items() if name == "method" or self.uses(name)}
        return without_secrets(own, schema=type(self))


def without_secrets(values: dict[str, Any], *, schema: type[Config] = Config) -> dict[str, Any]:
    """Mask userinfo and queries of the URLs in nested settings."""

    def masked(named: Named) -> str:
        return mask_url(named.value) if named.kind == "server" else named.value

    return replace_named(values, masked, schema=schema)
