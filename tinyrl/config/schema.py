"""The configuration of a run: its sections, defaults that depend on several of them, and settings that conflict.

Nothing here imports torch, so `tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from tinyrl.config import sections
from tinyrl.config.marks import Named, OnlyIf, OnlyKeeps, find_named, replace_named
from tinyrl.config.method_sections import DistillConfig, DpoConfig, GrpoConfig, PpoConfig, RewardModelConfig, SftConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, MethodName, MethodSpec, is_method
from tinyrl.text import is_address, mask_url, truncate


def _section(kind: type[sections.Section], description: str) -> Any:
    return Field(default_factory=lambda: kind.model_validate({}), description=description)


class Config(sections.Section):
    """Everything a run is a function of. Sections that the method does not use keep their defaults and are not written.

    Defaults that depend on other fields (a learning rate for LoRA or full fine-tuning) are None in their section and
    filled in here, so that config.yaml holds every value.
    """

    method: MethodName = Field(description="training method")
    model: sections.ModelConfig = _section(sections.ModelConfig, "the base model")
    lora: sections.LoraSection = _section(sections.LoraSection, "low-rank adapters on the frozen base")
    reference: sections.ReferenceConfig = _section(sections.ReferenceConfig, "reference policy of the KL")
    critic: sections.CriticConfig = _section(sections.CriticConfig, "the value function of PPO")
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
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults."""
        if not isinstance(data, dict) or not is_method(data.get("method")):
            return data
        unused = {*OPTIONAL_SECTIONS} - {*METHODS[data["method"]].sections}
        return {k: {} if v is None and k != "method" else v for k, v in data.items() if k not in unused}

    @model_validator(mode="after")
    def _resolve(self) -> Config:
        full = not self.lora.enabled
        optim = self.optim
        optim.learning_rate = optim.learning_rate or (1e-6 if full else 5e-5)
        if self.uses("critic"):
            optim.critic_learning_rate = optim.critic_learning_rate or (1e-5 if full else 1e-4)
            self.critic.kind = self.critic.kind or ("separate" if full else "adapter")
        self.task.name = self.task.name or "rows"
        for problem in conflicts(self):
            raise ValueError(problem)
        return self

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


def without_secrets(values: dict[str, Any], *, schema: type[Config] = Config) -> dict[str, Any]:
    """Mask userinfo and queries of the URLs in nested settings."""

    def masked(named: Named) -> str:
        return mask_url(named.value) if named.kind == "server" else named.value

    return replace_named(values, masked, schema=schema)


# ---- conflicts ----


def conflicts(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that would train on something else than was asked for, or not at all."""
    method = config.method
    lora = config.lora
    model = config.model
    environment = config.environment
    if config.samples and lora.dropout > 0:
        yield f"lora.dropout={lora.dropout} makes the ratio of new to old probabilities random: ppo and grpo need 0"
    needs_lora = {
        "model.quantization=4bit": model.quantization is not None,
        f"model.adapter={model.adapter}": model.adapter is not None,
        "critic.kind=adapter": config.uses("critic") and config.critic.kind == "adapter",
        "generation.engine=server": config.samples and config.generation.engine == "server",
    }
    for setting in (setting for setting, given in needs_lora.items() if given and not lora.enabled):
        yield f"{setting} needs lora.enabled=true"
    if environment.agent is not None and config.uses("environment"):
        yield from _agent_conflicts(config)
    if environment.name and environment.tools:
        yield f"environment.tools are answered by tinyrl, and environment.name={environment.name} answers itself"
    if config.samples:
        yield from _sampling_conflicts(config)
    if method == "grpo":
        yield from _grpo_conflicts(config)
    if method == "ppo" and config.ppo.ptx_coef > 0 and config.ppo.ptx_data is None:
        yield f"ppo.ptx_coef={config.ppo.ptx_coef} needs ppo.ptx_data: rows of text, as `tinyrl train sft` reads them"
    if method == "dpo" and config.dpo.needs_reference and config.reference.kind == "none":
        yield f"reference.kind=none: dpo.loss={config.dpo.loss} needs a reference; auto, or loss=orpo or simpo"
    if method == "dpo" and config.dpo.loss == "kto" and config.dpo.batch_size == 1:
        yield "dpo.batch_size=1 leaves dpo.loss=kto no answers of other prompts for its KL; take 2 or more"


def _agent_conflicts(config: Config) -> Iterator[str]:
    grpo = config.grpo
    refused = {
        f"method={config.method}: it is trained by grpo or ppo": config.method not in ("grpo", "ppo"),
        f"grpo.advantage={grpo.advantage}: group and leave-one-out need no rewards of turns":
            grpo.advantage not in ("group", "leave-one-out"),
        f"grpo.dynamic_sampling_rounds={grpo.dynamic_sampling_rounds}": grpo.dynamic_sampling_rounds > 0,
        f"grpo.kl_estimator={grpo.kl_estimator}: k3 is in the loss": grpo.kl_coef > 0 and grpo.kl_in_reward,
        "generation.engine=server, which samples elsewhere": config.generation.engine == "server",
        "teacher.hint: it writes its own prompts": config.teacher.hint is not None,
        "environment.name and tools": bool(config.environment.name or config.environment.tools),
    }  # fmt: skip
    yield from (f"environment.agent does not go with {setting}" for setting, given in refused.items() if given)


def _sampling_conflicts(config: Config) -> Iterator[str]:
    generation = config.generation
    teacher = config.teacher
    if config.method != "distill":
        section = config.policy_gradient
        size = section.minibatch_size
        total = section.batch_size
        if size and total % size:
            factors = (
                f"{config.method}.num_prompts={section.num_prompts} x {config.method}.group_size={section.group_size}"
            )
            yield (
                f"{config.method}.minibatch_size={size} does not divide the {total} sequences of a step ({factors}); "
                "null: all"
            )
        if section.kl_coef > 0 and config.reference.kind == "none":
            yield f"{config.method}.kl_coef={section.kl_coef} needs a reference; set it to 0, or reference.kind=auto"
    if generation.engine == "server" and not is_address(generation.url or ""):
        url = truncate(mask_url(generation.url or "null"))
        yield f"generation.url={url} is not the address of a server: http://HOST:PORT, such as http://127.0.0.1:8000"
    if config.learns_from_teacher:
        if teacher.kind in ("self", "start") and teacher.hint is None:
            yield f"teacher.path={teacher.path} needs teacher.hint: without one it knows no more than the policy"
        if teacher.kind == "start" and not config.has_reference:
            yield "teacher.path=start is the reference, and reference.kind=none leaves none"
        if teacher.kind == "server" and generation.temperature != 1.0:
            yield f"generation.temperature={generation.temperature} is not the 1 at which a server's teacher answers"


def _grpo_conflicts(config: Config) -> Iterator[str]:
    grpo = config.grpo
    reward = config.reward
    if grpo.group_size == 1 and grpo.advantage != "reinforce++":
        yield f"grpo.group_size=1 leaves nothing to compare with for grpo.advantage={grpo.advantage}; take 2"
    in_sum = reward.truncated == "penalize" or reward.overlong_tokens > 0 or (grpo.kl_coef > 0 and grpo.kl_in_reward)
    if grpo.reward_aggregation == "normalize-then-sum" and (grpo.advantage != "group" or in_sum):
        yield (
            "grpo.reward_aggregation=normalize-then-sum needs grpo.advantage=group, and no reward.truncated=penalize, "
            "reward.overlong_tokens or grpo.kl_estimator=k1, which are of the sum"
        )
    if grpo.kl_unbiased and grpo.kl_coef > 0 and grpo.kl_estimator != "k3":
        yield f"grpo.kl_unbiased=true is for grpo.kl_estimator=k3; with {grpo.kl_estimator} it is the gradient of no KL"


def check_training(config: Config) -> None:
    """Raise ValueError for settings that `tinyrl eval` takes and training does not."""
    for name in ("top_k", "top_p"):
        value = getattr(config.generation, name)
        field = sections.GenerationConfig.model_fields[name]
        if config.samples and value != field.default:
            raise ValueError(
                f"generation.{name}={value} cuts the distribution that is sampled, not the one that is scored: KL "
                "turns negative, ratios lie. Leave it out: training samples the whole distribution. "
                "`tinyrl eval` takes it"
            )
