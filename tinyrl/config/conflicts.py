"""Conflicts between settings, and settings without effect under others, as sentences; the first one is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tinyrl.config.methods import METHODS
from tinyrl.text import is_address, masked, redact, shortened

if TYPE_CHECKING:
    from tinyrl.config.schema import Config

# What apply_chat_template has as arguments of its own, and what decides how a prompt ends.
OUR_ARGUMENTS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self",
}  # fmt: skip


def conflicts(config: Config) -> Iterator[str]:
    """A sentence for each pair of settings that cannot go together, most telling first."""
    return chain(
        _models(config), _prompts(config), _environment(config), _numbers(config), _kl(config), _groups(config),
        _entropy(config), _pairs(config), _text(config), _server(config),
    )  # fmt: skip


@dataclass(frozen=True)
class Idle:
    """A setting that has no effect under another one. where: whether it has none; why: what it is for."""

    setting: str
    under: str
    where: Callable[[Config], bool]
    why: str


def _of_samplers(setting: str, under: str, where: Callable[[Any], bool], why: str) -> list[Idle]:
    """The same in the sections of grpo and of ppo; `where` gets the section."""
    return [
        Idle(f"{own}.{setting}", f"{own}.{under}", lambda c, own=own: where(getattr(c, own)), why)
        for own in ("grpo", "ppo")
    ]


def _not_grouped(config: Config) -> bool:
    return config.grpo.advantage != "group"


def _cispo(config: Config) -> bool:
    return config.grpo.loss == "cispo"


def _no_kl(section: Any) -> bool:
    return section.kl_coef == 0


def _not_steered(section: Any) -> bool:
    return section.entropy_target is None


def _fixed_kl(config: Config) -> bool:
    return config.ppo.kl_controller == "fixed"


def _one_update(config: Config) -> bool:
    ppo = config.ppo
    return ppo.num_epochs == 1 and ppo.minibatch_size in (None, ppo.batch_size)


def _own_trunk(config: Config) -> bool:
    undecided = config.critic.path is not None and "kind" not in config.critic.model_fields_set  # a run may decide
    return config.critic.kind != "shared" and not undecided


NO_LORA = "it is of the adapters, and every weight is trained here"
BOUNDS_RATIO = "cispo has no clipped ratio, and grpo.ratio_cap is its bound"
WITHOUT_EFFECT = [
    *(
        Idle(f"lora.{name}", "lora.enabled", lambda c: not c.lora.enabled, NO_LORA)
        for name in ("r", "alpha", "dropout", "target_modules")
    ),
    Idle("task.solved_reward", "task.skip_solved", lambda c: c.task.skip_solved == 0, "nothing is skipped as solved"),
    Idle("reward.model_label", "reward.model", lambda c: c.reward.model is None, "there is no reward model"),
    Idle("reward.model_weight", "reward.model", lambda c: c.reward.model is None, "there is no reward model"),
    Idle(
        "reward.truncated_penalty", "reward.truncated", lambda c: c.reward.truncated != "penalize",
        "only reward.truncated=penalize subtracts it",
    ),
    *(
        Idle(
            f"environment.{name}", "environment.use", lambda c: c.environment.use not in (None, "search"),
            "only environment.use=search has passages",
        )
        for name in ("corpus", "top_k")
    ),
    *(
        Idle(f"generation.{name}", "generation.engine", lambda c: c.generation.engine != "server",
             "only generation.engine=server asks one")
        for name in ("url", "timeout_s")
    ),
    Idle(
        "grpo.advantage_scale", "grpo.advantage", _not_grouped,
        "only advantages against the group are divided by a deviation",
    ),
    Idle("grpo.gamma", "grpo.advantage", lambda c: not c.grpo.advantage.endswith("-return"), "only returns discount"),
    *(Idle(f"grpo.{name}", "grpo.loss", _cispo, BOUNDS_RATIO) for name in ("clip_eps", "clip_eps_high", "dual_clip")),
    Idle("grpo.ratio_cap", "grpo.loss", lambda c: not _cispo(c), "it is the cap of cispo's weights"),
    Idle(
        "grpo.mismatch_cap", "grpo.mismatch", lambda c: c.grpo.mismatch == "none",
        "there are no weights against a mismatch",
    ),
    Idle(
        "grpo.mismatch_floor", "grpo.mismatch", lambda c: not c.grpo.mismatch.endswith("mask"),
        "only the masks, token-mask and sequence-mask, have a floor",
    ),
    Idle("grpo.refill_rounds", "grpo.group_size", lambda c: c.grpo.group_size == 1, "a group of one has no spread"),
    *_of_samplers("kl_placement", "kl_coef", _no_kl, "there is no KL term"),
    *_of_samplers("kl_estimator", "kl_coef", _no_kl, "there is no KL term"),
    Idle("grpo.kl_ratio_weight", "grpo.kl_coef", lambda c: _no_kl(c.grpo), "there is no KL term"),
    Idle(
        "grpo.kl_ratio_weight", "grpo.kl_placement", lambda c: c.grpo.kl_placement == "reward",
        "only a KL in the loss is weighted by the ratio",
    ),
    *_of_samplers("entropy_coef_step", "entropy_target", _not_steered, "entropy_coef is not steered"),
    *_of_samplers("entropy_coef_max", "entropy_target", _not_steered, "entropy_coef is not steered"),
    Idle(
        "ppo.gae_lambda", "ppo.gae_lambda_alpha", lambda c: c.ppo.gae_lambda_alpha is not None,
        "the length of a response gives lambda; the critic's own is ppo.critic_gae_lambda",
    ),
    Idle("ppo.target_kl", "ppo.kl_controller", _fixed_kl, "only the adaptive controller has a target"),
    Idle("ppo.kl_horizon", "ppo.kl_controller", _fixed_kl, "only the adaptive controller has a horizon"),
    Idle("ppo.stop_kl", "ppo.minibatch_size", _one_update, "a rollout's only update cannot end early"),
    Idle(
        "ppo.value_coef", "critic.kind", _own_trunk,
        "only under critic.kind=shared do the losses of policy and critic move the same weights; the critic's pace "
        "is optim.critic_learning_rate",
    ),
    Idle("ppo.ptx_data", "ppo.ptx_coef", lambda c: c.ppo.ptx_coef == 0, "a weight of 0 reads no text"),
    Idle("ppo.ptx_batch_size", "ppo.ptx_coef", lambda c: c.ppo.ptx_coef == 0, "a weight of 0 reads no text"),
    Idle("dpo.label_smoothing", "dpo.loss", lambda c: c.dpo.loss != "sigmoid", "only sigmoid has it"),
    Idle("dpo.target_margin", "dpo.loss", lambda c: c.dpo.loss != "simpo", "only simpo has a margin"),
]  # fmt: skip


def without_effect(config: Config) -> Iterator[str]:
    """A sentence for each setting that has no effect under another one. A value that is the default, or that the
    section's preset gives, nobody has asked for.

    This is for what people ask for, not for config.yaml: a run of an earlier version may hold such settings, and they
    change nothing about it.
    """
    for idle in WITHOUT_EFFECT:
        (section, name), (other, word) = idle.setting.split("."), idle.under.split(".")
        if not (config.uses(section) and config.uses(other)):
            continue
        chosen = getattr(config, section)
        preset = {"preset": chosen.preset} if hasattr(chosen, "preset") else {}
        value, default = getattr(chosen, name), getattr(type(chosen).model_validate(preset), name)
        if value != default and idle.where(config):
            under = f"{idle.under}={as_written(getattr(getattr(config, other), word))}"
            yield f"{idle.setting}={as_written(value)} has no effect under {under}: {idle.why}"


def as_written(value: Any) -> str:
    """A value as an override says it, without secrets."""
    return shortened(redact(value if isinstance(value, str) else json.dumps(value)))


def _models(config: Config) -> Iterator[str]:
    """Sentences for models, adapters and roles that cannot go together, most telling first."""
    lora, model, critic = config.lora, config.model, config.critic
    if METHODS[config.method].samples and lora.dropout > 0:
        yield (
            f"lora.dropout={lora.dropout}: dropout makes the ratio of new to old log-probabilities random, "
            "so ppo and grpo need 0"
        )
    if not lora.enabled and model.quantization:
        yield (f"model.quantization={model.quantization} needs lora.enabled=true: quantised weights cannot be trained")
    if not lora.enabled and model.adapter:
        yield (
            f"model.adapter={model.adapter} needs lora.enabled=true "
            "(to fine-tune every weight from it, merge the adapter into the base first)"
        )
    if not config.uses("critic"):
        return
    if not lora.enabled and critic.kind == "adapter":
        yield (
            "critic.kind=adapter needs lora.enabled=true; with full fine-tuning use separate, shared or shared-detached"
        )


def _server(config: Config) -> Iterator[str]:
    """Sentences for settings of a sampling server that cannot go together."""
    if not METHODS[config.method].samples:
        return
    generation = config.generation
    if generation.url is not None and not is_address(generation.url):
        url = shortened(masked(generation.url))
        yield f"generation.url: '{url}' is not the address of a server: http://HOST:PORT, such as http://127.0.0.1:8000"
    if generation.engine != "server":
        return
    if generation.url is None:
        yield "generation.engine=server needs generation.url, the address of a server: http://127.0.0.1:8000"
    if not config.lora.enabled:
        yield (
            "generation.engine=server takes LoRA adapters, not whole weights, so it needs lora.enabled=true; "
            "with full fine-tuning sample in this process (generation.engine=auto)"
        )
    if generation.dtype != "auto":
        yield f"generation.dtype={generation.dtype} is not for generation.engine=server: it is the server's own --dtype"


def _prompts(config: Config) -> Iterator[str]:
    """Sentences for variables of a chat template that cannot be given."""
    given = config.task.chat_template
    for name in given:
        if name in OUR_ARGUMENTS or not name.isidentifier():
            what = "tinyrl's to set" if name in OUR_ARGUMENTS else "no name of a variable"
            yield f"task.chat_template: {shortened(repr(name))} is {what}; give what the model's template asks for"
    if given and config.task.chat is False:
        yield f"task.chat_template={given} goes to the chat template, which task.chat=false does without"


def _environment(config: Config) -> Iterator[str]:
    """Sentences for parts of an environment that cannot go together."""
    environment = config.environment
    if environment.use and environment.tools:
        yield (
            f"environment.tools are answered by tinyrl, and environment.use={environment.use} answers itself; give one"
        )
    if environment.use == "search" and environment.corpus is None:
        yield "environment.use=search needs environment.corpus: a .jsonl or .parquet file, or a retrieval server's URL"


def _numbers(config: Config) -> Iterator[str]:
    """Sentences for settings of sampling, rewards and batches that cannot go together."""
    if not METHODS[config.method].samples:
        return
    generation, section, method = config.generation, config.on_policy, config.method
    if not generation.allow_truncated_sampling and (generation.top_p < 1 or generation.top_k):
        name = "top_k" if generation.top_k else "top_p"
        yield (
            f"generation.{name}={getattr(generation, name)} cuts the distribution that is sampled but not the one "
            "that is scored (KL turns negative, ratios lie); "
            "set generation.allow_truncated_sampling=true to train like that anyway"
        )
    if config.reward.overlong_tokens > generation.max_new_tokens:
        yield (
            f"reward.overlong_tokens={config.reward.overlong_tokens} is more than "
            f"generation.max_new_tokens={generation.max_new_tokens}, so every answer would be penalised"
        )
    if section is config.grpo and config.grpo.group_size == 1 and config.grpo.advantage != "discounted-return":
        yield (
            f"grpo.group_size=1 leaves nothing to compare a response with under "
            f"grpo.advantage={config.grpo.advantage}; 2 or more, or grpo.preset=reinforce++"
        )
    if section.minibatch_size and section.batch_size % section.minibatch_size:
        size, total = section.minibatch_size, section.batch_size
        most = min(size, total)
        fits = next((n for n in range(most, max(0, most - 10_000), -1) if total % n == 0), 1)
        yield (
            f"{method}.minibatch_size={size} does not divide the {total} sequences of a step; {fits} would, "
            "and null means all of them at once"
        )


def _text(config: Config) -> Iterator[str]:
    """Sentences for PPO's loss on text, which needs both a weight and rows."""
    ppo = config.ppo
    if config.method == "ppo" and ppo.ptx_coef > 0 and ppo.ptx_data is None:
        yield f"ppo.ptx_coef={ppo.ptx_coef} needs ppo.ptx_data: rows of text, as `tinyrl train sft` reads them"


def _kl(config: Config) -> Iterator[str]:
    """Sentences for KL settings that cannot go together."""
    if not METHODS[config.method].samples:
        return
    section, method, ppo = config.on_policy, config.method, config.ppo
    if section is ppo and ppo.kl_controller == "adaptive" and ppo.kl_coef == 0:
        yield "ppo.kl_coef=0 stays 0 under ppo.kl_controller=adaptive, which multiplies it; start above 0"
    if section.kl_coef == 0:
        return
    if section.kl_placement == "loss" and section.kl_estimator == "k1":
        yield (
            f"{method}.kl_estimator=k1 in the loss has zero mean gradient; "
            f"use k3 or k2, or {method}.kl_placement=reward"
        )
    if section.kl_placement == "reward" and section.kl_estimator != "k1":
        yield (
            f"{method}.kl_estimator={section.kl_estimator} in the reward has a gradient that is not KL's, and training "
            f"ends elsewhere; use k1, or {method}.kl_placement=loss"
        )
    if config.reference.kind == "none":
        yield f"{method}.kl_coef={section.kl_coef} needs a reference; set it to 0, or reference.kind=auto"


def _groups(config: Config) -> Iterator[str]:
    """Sentences for settings of GRPO's groups, ratios and weights that cannot go together."""
    grpo, task, reward = config.grpo, config.task, config.reward
    if task.skip_solved and (config.method != "grpo" or grpo.group_size == 1):
        yield (
            f"task.skip_solved={task.skip_solved} goes by groups that are all right, which only grpo has, with a "
            "grpo.group_size of at least 2"
        )
    if config.method != "grpo":
        return
    if grpo.normalize_rewards == "each":
        if grpo.advantage != "group":
            yield f"grpo.normalize_rewards=each is for grpo.advantage=group; it is {grpo.advantage} here"
        in_sum = [f"reward.truncated={reward.truncated}"] if reward.truncated == "penalize" else []
        in_sum += [f"reward.overlong_tokens={reward.overlong_tokens}"] if reward.overlong_tokens else []
        in_sum += ["grpo.kl_placement=reward"] if grpo.kl_coef and grpo.kl_placement == "reward" else []
        for setting in in_sum:
            yield f"{setting} is a part of the sum of rewards, which grpo.normalize_rewards=each does without"
    if grpo.loss == "cispo" and grpo.ratio_level != "token":
        yield f"grpo.ratio_level={grpo.ratio_level} is for grpo.loss=clipped; cispo weighs tokens"
    if grpo.mismatch_cap <= grpo.mismatch_floor:
        yield f"grpo.mismatch_cap={grpo.mismatch_cap} must be above grpo.mismatch_floor={grpo.mismatch_floor}"


def _entropy(config: Config) -> Iterator[str]:
    """Sentences for settings of the entropy bonus that cannot go together."""
    if not METHODS[config.method].samples:
        return
    section, method = config.on_policy, config.method
    if section.entropy_target is not None and section.entropy_coef > section.entropy_coef_max:
        yield (
            f"{method}.entropy_coef={section.entropy_coef} starts above "
            f"{method}.entropy_coef_max={section.entropy_coef_max}"
        )


def _pairs(config: Config) -> Iterator[str]:
    """Sentences for settings of dpo that cannot go together."""
    if config.method != "dpo":
        return
    dpo = config.dpo
    if dpo.needs_reference and config.reference.kind == "none":
        yield (
            f"reference.kind=none leaves dpo.loss={dpo.loss} nothing to measure against; "
            "use reference.kind=auto, or dpo.loss=orpo or simpo, which need no reference"
        )
    if dpo.loss == "kto" and dpo.batch_size == 1:
        yield (
            "dpo.batch_size=1 leaves dpo.loss=kto no answers of other prompts to estimate the KL from; take 2 or more"
        )
