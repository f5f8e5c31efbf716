"""From a `Config` to living objects: tokenizer, roles on their base, task and prompts, rewards, sampling engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.config import Config
from tinyrl.data.rows import fingerprint
from tinyrl.generation.engine import SamplingEngine, SamplingSettings
from tinyrl.generation.select import choose_engine
from tinyrl.models.batches import make_batch
from tinyrl.models.device import calibrate_threads, make_accelerator, resolve_dtype
from tinyrl.models.loading import (
    load_causal_lm,
    load_start_adapter,
    load_tokenizer,
    lora_config,
    wrap_in_lora,
)
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import (
    SequenceRewardModel,
    attach_reward_adapter,
    is_reward_adapter,
    load_classifier,
    load_reward_model,
)
from tinyrl.models.roles import Roles
from tinyrl.models.weights_io import load_roles, save_roles
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout import Truncation
from tinyrl.tasks import Task, load_rows, load_task
from tinyrl.tasks.prompts import PreparedPrompt, prepare_prompts


@dataclass
class Options:
    """What the command line says besides the configuration: it is not part of what a run is a function of."""

    device: str = "auto"
    trust_remote_code: bool = False


@dataclass
class Base:
    """What every method needs: a device, a tokenizer, and the roles on one base. `should_stop` raises when the run is
    to stop; long work calls it now and then.
    """

    config: Config
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    roles: Roles
    micro_batches: MicroBatches
    should_stop: Callable[[], None]

    def save_models(self, folder: Path) -> None:
        """Write the models of a run into a checkpoint folder."""
        save_roles(self.roles, folder, tokenizer=self.tokenizer)

    def load_models(self, folder: Path) -> None:
        """Put back what `save_models` wrote."""
        load_roles(self.roles, folder)

    def close(self) -> None:
        """Let go of processes."""


@dataclass
class Parts(Base):
    """What methods that sample need besides."""

    task: Task
    train_prompts: list[PreparedPrompt]
    eval_prompts: list[PreparedPrompt]
    scorer: Scorer
    engine: SamplingEngine
    engine_reason: str  # why it is that one
    data_fingerprint: str

    def close(self) -> None:
        self.scorer.close()

    @property
    def truncation(self) -> Truncation:
        reward, generation = self.config.reward, self.config.generation
        assert reward is not None
        assert generation is not None
        return Truncation(reward.truncated, reward.truncated_penalty, reward.overlong_tokens, generation.max_new_tokens)


def load_base(config: Config, *, options: Options, should_stop: Callable[[], None] = lambda: None) -> Base:
    """Read the model and build policy, reference and critic. Random weights (LoRA's A) are drawn from run.seed."""
    accelerator = make_accelerator(options.device, dtype=config.model.dtype)
    on_cpu = accelerator.device.type == "cpu"
    dtype = resolve_dtype(config.model.dtype, on_cpu=on_cpu)
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=options.trust_remote_code)
    model = _load_model(config, config.model.path, dtype=dtype, options=options)
    lora = config.lora
    peft_config = (
        lora_config(r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules)
        if lora.enabled
        else None
    )
    if config.model.adapter is not None:
        wrapped = load_start_adapter(model, config.model.adapter)
    else:
        wrapped = wrap_in_lora(model, peft_config) if peft_config else model
    needs_reference = config.reference is not None and config.reference.kind == "auto"
    roles = Roles(wrapped, device=accelerator.device, reference=needs_reference)
    if config.model.adapter is not None and needs_reference:
        roles.freeze_reference_adapter()
    if config.critic is not None:
        _add_critic(roles, config, dtype=dtype, options=options)
    if config.model.gradient_checkpointing:
        roles.enable_gradient_checkpointing()
    micro_batches = MicroBatches(accelerator.device, config.run.micro_batch_tokens, should_stop=should_stop)
    return Base(config, accelerator, tokenizer, roles, micro_batches, should_stop)


def _load_model(config: Config, path: str, *, dtype: torch.dtype, options: Options) -> PreTrainedModel:
    return load_causal_lm(
        path,
        dtype=dtype,
        attention=config.model.attention,
        quantization=config.model.quantization,
        random_init=config.model.random_init,
        trust_remote_code=options.trust_remote_code,
    )


def _add_critic(roles: Roles, config: Config, *, dtype: torch.dtype, options: Options) -> None:
    """The critic of `critic.kind`; a separate one starts from critic.path, with the head of a reward model where it
    has one.
    """
    assert config.critic is not None
    assert config.critic.kind is not None
    kind, path = config.critic.kind, config.critic.path
    lora = config.lora
    peft_config = lora_config(r=lora.r, alpha=lora.alpha, dropout=0.0, target_modules=lora.target_modules)
    if kind != "separate":
        roles.add_critic(kind, lora=peft_config)
        return
    head = None
    try:
        model = (
            load_classifier(path, dtype=dtype)
            if path
            else _load_model(config, config.model.path, dtype=dtype, options=options)
        )
        head = getattr(model, "score", None)
    except ValueError:  # a plain language model has no score head: its trunk is the critic's, under a zero head
        model = _load_model(config, path or config.model.path, dtype=dtype, options=options)
    if config.model.adapter is not None and path is None:
        model = load_start_adapter(model, config.model.adapter).merge_and_unload()  # pyright: ignore
    model.requires_grad_(not lora.enabled)
    roles.add_critic(kind, model=wrap_in_lora(model, peft_config) if lora.enabled else model.float())
    if head is not None and head.weight.shape[0] == 1:
        assert roles.value_head is not None
        roles.value_head.copy_from(head.weight.float(), head.bias)


def settle_threads(base: Base) -> str:
    """Choose torch's thread count (CPU only) by a short calibration with the run's own model, and say which."""
    wanted = base.config.run.threads
    if base.accelerator.device.type != "cpu":
        return f"device {base.accelerator.device} ({torch.cuda.get_device_name(base.accelerator.device)})"
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return f"device cpu, {wanted} threads (run.threads)"
    batch = make_batch([list(range(1, 17))] * 32, [list(range(1, 17))] * 32)

    def work() -> None:
        with torch.no_grad(), base.roles.acting("policy"):
            base.roles.logprobs("policy", batch, temperature=1.0)

    threads, seconds = calibrate_threads(work)
    timings = ", ".join(f"{n}: {s * 1e3:.1f} ms" for n, s in seconds.items())
    return f"device cpu, {threads} thread{'s' if threads > 1 else ''} (calibrated, {timings})"


def load_parts(config: Config, *, options: Options, should_stop: Callable[[], None] = lambda: None) -> Parts:
    """Everything a method that samples needs. Raises ValueError with a sentence for what a person can mend."""
    base = load_base(config, options=options, should_stop=should_stop)
    assert config.reward is not None
    assert config.task.name is not None
    task = load_task(config.task.name)
    train_prompts, eval_prompts = (load_prompts(config, task, split, base=base) for split in ("train", "eval"))
    scorer = Scorer(
        config.reward,
        task,
        tokenizer=base.tokenizer,
        roles=base.roles,
        model=_reward_model(config, base, options),
        micro_batches=base.micro_batches,
        should_stop=should_stop,
    )
    engine, why = make_engine(config, base)
    base.micro_batches.make_room = engine.release
    return Parts(
        **vars(base),
        task=task,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        engine=engine,
        engine_reason=why,
        data_fingerprint=fingerprint([p.row for p in train_prompts]),
    )


def load_prompts(config: Config, task: Task, split: str, *, base: Base) -> list[PreparedPrompt]:
    """The prompts of a split, tokenised and checked."""
    where, generation = config.task, config.generation
    assert generation is not None
    rows = load_rows(
        task,
        split,
        data=where.data,
        eval_data=where.eval_data,
        columns=where.columns,
        max_samples=where.max_samples,
        seed=config.run.seed,
    )
    limit = generation.max_prompt_tokens
    positions = getattr(base.roles.causal.config, "max_position_embeddings", None)
    if positions is not None and generation.max_new_tokens >= positions:
        raise ValueError(
            f"generation.max_new_tokens={generation.max_new_tokens}, but the model has {positions} "
            "positions for prompt and response"
        )
    if positions is not None:
        limit = min(limit, positions - generation.max_new_tokens)
    return prepare_prompts(
        task,
        rows,
        tokenizer=base.tokenizer,
        chat=where.chat,
        system_prompt=where.system_prompt,
        max_prompt_tokens=limit,
        long_prompts=where.long_prompts,
    )


def make_engine(config: Config, base: Base) -> tuple[SamplingEngine, str]:
    """The sampling engine of `generation.engine` over the policy's model, and why it is that one."""
    generation = config.generation
    assert generation is not None
    settings = SamplingSettings(
        temperature=generation.temperature,
        max_new_tokens=generation.max_new_tokens,
        stop=generation.stop,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_rows=generation.max_rows,
        should_stop=base.should_stop,
    )
    dtype = base.roles.causal.dtype if generation.dtype == "auto" else resolve_dtype(generation.dtype, on_cpu=False)
    return choose_engine(
        base.roles,
        base.tokenizer,
        settings,
        wanted=generation.engine,
        dtype=dtype,
        longest=generation.max_prompt_tokens + generation.max_new_tokens,
    )


def _reward_model(config: Config, base: Base, options: Options) -> SequenceRewardModel | None:
    """The reward model as a model of its own; None where there is none or where it is an adapter put on the shared
    base.
    """
    reward = config.reward
    if reward is None or reward.model is None:
        return None
    if is_reward_adapter(reward.model):
        attach_reward_adapter(base.roles, reward.model)
        return None
    dtype = resolve_dtype(config.model.dtype, on_cpu=base.accelerator.device.type == "cpu")
    return load_reward_model(
        reward.model,
        dtype=dtype,
        label=reward.model_label,
        device=base.accelerator.device,
        trust_remote_code=options.trust_remote_code,
    )
