"""The configuration of a run: its sections, what depends on several of them, and what cannot go together.

Fields, with type, range and default, are in sections.py and method_sections.py. Defaults that depend on other fields (a
learning rate for LoRA or full fine-tuning) are None there and filled in by `Config`, so that config.yaml never holds a
blank that code has to guess. Nothing here imports torch, so `tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from tinyrl.config.method_sections import DistillConfig, DpoConfig, GrpoConfig, PpoConfig, RewardModelConfig, SftConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, Method, MethodName, is_method
from tinyrl.config.sections import (
    URL_SETTINGS,
    CriticConfig,
    EnvironmentConfig,
    GenerationConfig,
    LoraSection,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    Section,
    TaskConfig,
    TeacherConfig,
)
from tinyrl.text import is_address, masked, redact, shortened


class Config(Section):
    """Everything a run is a function of. Sections the method does not use keep their defaults and are not written."""

    method: MethodName = Field(description="what trains")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the base model")
    lora: LoraSection = Field(default_factory=LoraSection, description="low-rank adapters on the frozen base")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="the policy to stay near to")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the value function of PPO")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="whose distribution is learnt")
    task: TaskConfig = Field(default_factory=TaskConfig, description="prompts, and where rows come from")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="what scores completions")
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, description="what answers the policy between its turns"
    )
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="sampling")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and learning rates")
    grpo: GrpoConfig = Field(default_factory=lambda: GrpoConfig.model_validate({}), description="GRPO and its family")
    ppo: PpoConfig = Field(default_factory=lambda: PpoConfig.model_validate({}), description="PPO")
    distill: DistillConfig = Field(default_factory=DistillConfig, description="a policy from a teacher")
    sft: SftConfig = Field(default_factory=SftConfig, description="supervised fine-tuning")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="learning a reward model from pairs or labels"
    )
    dpo: DpoConfig = Field(
        default_factory=lambda: DpoConfig.model_validate({}), description="a policy from pairs: DPO and its kin"
    )
    run: RunConfig = Field(default_factory=RunConfig, description="length, seed, evaluation, checkpoints")

    @model_validator(mode="before")
    @classmethod
    def _sections_of_method(cls, data: Any) -> Any:
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults."""
        if not isinstance(data, dict) or not is_method(data.get("method")):
            return data
        unused = {*OPTIONAL_SECTIONS} - {*METHODS[data["method"]].sections}
        return {k: {} if v is None and k != "method" else v for k, v in data.items() if k not in unused}

    @model_validator(mode="after")
    def _resolve(self) -> Config:
        full, optim = not self.lora.enabled, self.optim
        optim.learning_rate = optim.learning_rate or (1e-6 if full else 5e-5)
        if self.uses("critic"):
            optim.critic_learning_rate = optim.critic_learning_rate or (1e-5 if full else 1e-4)
            if self.critic.kind is None:
                self.critic.kind = "separate" if full or self.critic.path else "adapter"
                self.critic.model_fields_set.discard("kind")  # a run at critic.path decides, in runs/resolve.py
        self.task.name = self.task.name or "rows"
        for problem in conflicts(self):
            raise ValueError(problem)
        return self

    def uses(self, section: str) -> bool:
        return section not in OPTIONAL_SECTIONS or section in self.trains.sections

    @property
    def has_reference(self) -> bool:
        wanted = self.uses("reference") and self.reference.kind == "auto"
        return wanted and getattr(self.own, "needs_reference", True)

    @property
    def trains(self) -> Method:
        """What the method is: its sections, trainer, kind of rows, and whether it makes a policy."""
        return METHODS[self.method]

    @property
    def own(self) -> GrpoConfig | PpoConfig | DistillConfig | SftConfig | RewardModelConfig | DpoConfig:
        """The section that only this method has."""
        return getattr(self, self.trains.own)

    @property
    def on_policy(self) -> GrpoConfig | PpoConfig | DistillConfig:
        """The section of a method that learns from its own samples; no other method has one."""
        own = self.own
        assert isinstance(own, GrpoConfig | PpoConfig | DistillConfig), f"{self.method} samples nothing"
        return own

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a teacher reads the rollouts."""
        return self.method == "distill" or (self.uses("teacher") and self.teacher.coef > 0)

    @property
    def samples(self) -> bool:
        return self.trains.samples

    def written(self) -> dict[str, Any]:
        """The sections that the method uses, as JSON values without secrets: what config.yaml and checkpoints hold."""
        values = self.model_dump(mode="json")
        return without_secrets({name: value for name, value in values.items() if self.uses(name)})


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Sections of settings, with userinfo and queries of URLs masked."""
    for section, name in URL_SETTINGS:
        part = values.get(section)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            values = {**values, section: {**part, name: masked(part[name])}}
    return values


def as_written(value: Any) -> str:
    """A value as an override says it, without secrets."""
    return shortened(redact(value if isinstance(value, str) else json.dumps(value)))


# ---- conflicts ----

# What apply_chat_template has as arguments of its own, and what decides how a prompt ends.
OUR_ARGUMENTS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self",
}  # fmt: skip


def conflicts(config: Config) -> Iterator[str]:
    """A sentence for each pair of settings that cannot go together, most telling first."""
    lora, model, environment = config.lora, config.model, config.environment
    if config.samples and lora.dropout > 0:
        yield f"lora.dropout={lora.dropout} makes the ratio of new to old probabilities random: ppo and grpo need 0"
    if not lora.enabled and model.quantization:
        yield f"model.quantization={model.quantization} needs lora.enabled=true: quantised weights cannot be trained"
    if not lora.enabled and model.adapter:
        yield f"model.adapter={model.adapter} needs lora.enabled=true; to train all weights, merge it into the base"
    if config.uses("critic") and not lora.enabled and config.critic.kind == "adapter":
        yield "critic.kind=adapter needs lora.enabled=true; else use separate, shared or shared-detached"
    for name in OUR_ARGUMENTS & {*config.task.chat_template}:
        yield f"task.chat_template: '{name}' is tinyrl's to set; give what the model's template asks for"
    if environment.agent is not None:
        yield from _agent(config)
    if environment.use and environment.tools:
        yield f"environment.tools are answered by tinyrl, and environment.use={environment.use} answers itself"
    if environment.use == "search" and environment.corpus is None:
        yield "environment.use=search needs environment.corpus: a .jsonl or .parquet file, or a retrieval server's URL"
    if config.samples:
        yield from _sampling(config)
    if config.method in ("grpo", "ppo", "dpo"):
        yield from _losses(config)


def _agent(config: Config) -> Iterator[str]:
    said, grpo = "environment.agent", config.grpo
    if config.environment.use or config.environment.tools:
        yield f"{said} brings its own tools; leave out environment.use and environment.tools"
    if config.method not in ("grpo", "ppo") and config.uses("environment"):
        yield f"{said} is trained by grpo or ppo, of which each conversation of an episode has the reward"
    elif grpo.advantage not in ("group", "leave-one-out"):
        yield f"{said} needs grpo.advantage=group or leave-one-out: its turns have no rewards of their own"
    if grpo.refill_rounds:
        yield f"{said} does not go with grpo.refill_rounds={grpo.refill_rounds}"
    if grpo.kl_coef > 0 and grpo.kl_in_reward:
        yield f"{said} needs grpo.kl_estimator=k3, a KL in the loss: an episode may have several conversations"
    if config.generation.engine == "server":
        yield f"{said} is served by this process; generation.engine=server samples elsewhere"
    if config.teacher.hint is not None:
        yield f"{said} writes its own prompts, so teacher.hint has no place in them"


def _sampling(config: Config) -> Iterator[str]:
    generation, section, method, teacher = config.generation, config.on_policy, config.method, config.teacher
    overlong, longest = config.reward.overlong_tokens, generation.max_new_tokens
    if overlong > longest:
        yield f"reward.overlong_tokens={overlong} penalises every answer: generation.max_new_tokens={longest} is less"
    size, total = section.minibatch_size, section.batch_size
    if size and total % size:
        most = min(size, total)
        fits = next((n for n in range(most, max(0, most - 10_000), -1) if total % n == 0), 1)
        yield f"{method}.minibatch_size={size} does not divide the {total} sequences of a step; {fits} would, null: all"
    if section.kl_coef > 0 and config.reference.kind == "none":
        yield f"{method}.kl_coef={section.kl_coef} needs a reference; set it to 0, or reference.kind=auto"
    if generation.url is not None and not is_address(generation.url):
        url = shortened(masked(generation.url))
        yield f"generation.url: '{url}' is not the address of a server: http://HOST:PORT, such as http://127.0.0.1:8000"
    if generation.engine == "server" and generation.url is None:
        yield "generation.engine=server needs generation.url, the address of a server: http://127.0.0.1:8000"
    if generation.engine == "server" and not config.lora.enabled:
        yield "generation.engine=server takes LoRA adapters, so it needs lora.enabled=true; else use engine=auto"
    if config.learns_from_teacher:
        if teacher.kind in ("self", "start") and teacher.hint is None:
            yield f"teacher.path={teacher.path} needs teacher.hint: without one it knows no more than the policy"
        if teacher.kind == "start" and not config.has_reference:
            yield "teacher.path=start is the reference, and reference.kind=none leaves none"
        if teacher.kind == "server" and generation.temperature != 1.0:
            yield f"generation.temperature={generation.temperature} is not the 1 at which a server's teacher answers"
        if method == "distill" and config.environment.use and config.distill.on_policy < 1:
            yield f"distill.on_policy={config.distill.on_policy}: given answers are no episodes of environment.use"


def _losses(config: Config) -> Iterator[str]:
    grpo, ppo, dpo, reward = config.grpo, config.ppo, config.dpo, config.reward
    if config.method == "grpo":
        if grpo.group_size == 1 and grpo.advantage != "discounted-return":
            yield f"grpo.group_size=1 leaves nothing to compare with for grpo.advantage={grpo.advantage}; take 2"
        if grpo.preset == "gdpo":
            if grpo.advantage != "group":
                yield f"grpo.advantage={grpo.advantage} is not for grpo.preset=gdpo, which compares single rewards"
            in_sum = {
                f"reward.truncated={reward.truncated}": reward.truncated == "penalize",
                f"reward.overlong_tokens={reward.overlong_tokens}": reward.overlong_tokens,
                f"grpo.kl_estimator={grpo.kl_estimator}": grpo.kl_coef and grpo.kl_in_reward,
            }
            for setting in (setting for setting, changes in in_sum.items() if changes):
                yield f"{setting} changes the sum of rewards, and grpo.preset=gdpo normalises each reward by itself"
    if config.method == "ppo" and ppo.ptx_coef > 0 and ppo.ptx_data is None:
        yield f"ppo.ptx_coef={ppo.ptx_coef} needs ppo.ptx_data: rows of text, as `tinyrl train sft` reads them"
    if config.method == "dpo":
        if dpo.needs_reference and config.reference.kind == "none":
            yield f"reference.kind=none leaves dpo.loss={dpo.loss} nothing to measure against; auto, or orpo or simpo"
        if dpo.loss == "kto" and dpo.batch_size == 1:
            yield "dpo.batch_size=1 leaves dpo.loss=kto no answers of other prompts for its KL; take 2 or more"
