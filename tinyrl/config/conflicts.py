"""Conflicts between settings, as sentences; the first one is shown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from tinyrl.config.methods import METHODS
from tinyrl.text import is_address, masked, shortened

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
        if generation.url is not None:
            yield (
                f"generation.url={shortened(masked(generation.url))} is of generation.engine=server; "
                f"the engine is {generation.engine} here"
            )
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
    if config.method == "ppo" and ppo.ptx_coef == 0 and ppo.ptx_data is not None:
        yield f"ppo.ptx_data={ppo.ptx_data} is not read under ppo.ptx_coef=0; give it a weight, or leave it out"


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
    if grpo.advantage != "group":
        for name, value in (("advantage_scale", "batch"), ("normalize_rewards", "each")):
            if getattr(grpo, name) == value:
                yield f"grpo.{name}={value} is for grpo.advantage=group; it is {grpo.advantage} here"
    if grpo.normalize_rewards == "each":
        in_sum = [f"reward.truncated={reward.truncated}"] if reward.truncated == "penalize" else []
        in_sum += [f"reward.overlong_tokens={reward.overlong_tokens}"] if reward.overlong_tokens else []
        in_sum += ["grpo.kl_placement=reward"] if grpo.kl_coef and grpo.kl_placement == "reward" else []
        for setting in in_sum:
            yield f"{setting} is a part of the sum of rewards, which grpo.normalize_rewards=each does without"
    if grpo.loss == "cispo" and grpo.ratio_level != "token":
        yield f"grpo.ratio_level={grpo.ratio_level} is for grpo.loss=clipped; cispo weighs tokens"
    if grpo.mismatch_floor and not grpo.mismatch.endswith("mask"):
        yield (
            f"grpo.mismatch_floor={grpo.mismatch_floor} is for grpo.mismatch=token-mask or sequence-mask; "
            f"it is {grpo.mismatch} here"
        )
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
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        yield f"dpo.label_smoothing={dpo.label_smoothing} is for dpo.loss=sigmoid; dpo.loss is {dpo.loss} here"
    if dpo.loss == "kto" and dpo.batch_size == 1:
        yield (
            "dpo.batch_size=1 leaves dpo.loss=kto no answers of other prompts to estimate the KL from; take 2 or more"
        )
