"""Names of settings in TRL, verl, PEFT and transformers, and what they correspond to here.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n.
"""

from __future__ import annotations

from typing import Any

# A name elsewhere: the setting here. Under ppo a setting of `grpo` is that of `ppo`, where it has one.
FAMILIAR = {
    "num_generations": "grpo.group_size", "rollout_n": "grpo.group_size", "rollout.n": "grpo.group_size",
    "n_samples_per_prompt": "grpo.group_size", "beta": "grpo.kl_coef", "kl_loss_coef": "grpo.kl_coef",
    "init_kl_coef": "ppo.kl_coef", "kl_ctrl.kl_coef": "ppo.kl_coef", "kl_penalty": "ppo.kl_estimator",
    "kl_loss_type": "grpo.kl_estimator", "use_kl_loss": "grpo.kl_placement", "use_kl_in_reward": "grpo.kl_placement",
    "kl_ctrl.type": "ppo.kl_controller", "epsilon": "grpo.clip_eps", "clip_ratio": "grpo.clip_eps",
    "clip_ratio_low": "grpo.clip_eps", "epsilon_high": "grpo.clip_eps_high", "clip_ratio_high": "grpo.clip_eps_high",
    "delta": "grpo.dual_clip", "clip_ratio_c": "grpo.dual_clip", "cliprange": "ppo.clip_eps",
    "cliprange_value": "ppo.value_clip_eps", "vf_coef": "ppo.value_coef", "lam": "ppo.gae_lambda",
    "algorithm.gamma": "ppo.gamma", "entropy_coeff": "ppo.entropy_coef", "entropy_loss_coef": "ppo.entropy_coef",
    "use_adaptive_entropy": "ppo.entropy_target", "tgt_entropy": "ppo.entropy_target",
    "entropy_coef_delta": "ppo.entropy_coef_step", "delta_ent_coef": "ppo.entropy_coef_step",
    "max_ent_coef": "ppo.entropy_coef_max", "value_clip": "ppo.value_clip_eps", "clip_range_vf": "ppo.value_clip_eps",
    "lambd": "ppo.gae_lambda", "lam_actor": "ppo.gae_lambda", "lam_critic": "ppo.critic_gae_lambda",
    "normalize_advantage": "ppo.whiten_advantages", "norm_adv": "ppo.whiten_advantages",
    "ppo_whiten_rewards": "ppo.whiten_rewards", "ptx_coeff": "ppo.ptx_coef", "unsup_coef": "ppo.ptx_coef",
    "pretrain_data": "ppo.ptx_data", "ptx_datasets": "ppo.ptx_data", "unsupervised_dataset_name": "ppo.ptx_data",
    "num_ppo_epochs": "ppo.num_epochs", "ppo_epochs": "ppo.num_epochs", "num_iterations": "grpo.num_epochs",
    "ppo_mini_batch_size": "ppo.minibatch_size", "mini_batch_size": "ppo.minibatch_size",
    "train_batch_size": "grpo.num_prompts", "target": "ppo.target_kl", "kl_ctrl.target_kl": "ppo.target_kl",
    "horizon": "ppo.kl_horizon", "loss_type": "grpo.preset", "importance_sampling_level": "grpo.ratio_level",
    "loss_agg_mode": "grpo.aggregation", "scale_rewards": "grpo.advantage_scale",
    "norm_adv_by_std_in_grpo": "grpo.advantage_scale", "filter_groups.enable": "grpo.refill_rounds",
    "filter_groups.max_num_gen_batches": "grpo.refill_rounds", "dynamic_filtering": "grpo.refill_rounds",
    "multi_objective_aggregation": "grpo.normalize_rewards", "vllm_importance_sampling_mode": "grpo.mismatch",
    "vllm_importance_sampling_correction": "grpo.mismatch", "rollout_correction.rollout_is": "grpo.mismatch",
    "rollout_correction.rollout_rs": "grpo.mismatch", "enable_vllm_is_correction": "grpo.mismatch",
    "tis_imp_ratio_cap": "grpo.mismatch_cap", "vllm_importance_sampling_cap": "grpo.mismatch_cap",
    "vllm_importance_sampling_clip_max": "grpo.mismatch_cap", "rollout_is_threshold": "grpo.mismatch_cap",
    "vllm_importance_sampling_clip_min": "grpo.mismatch_floor", "max_completion_length": "generation.max_new_tokens",
    "response_length": "generation.max_new_tokens", "max_response_length": "generation.max_new_tokens",
    "max_tokens": "generation.max_new_tokens", "max_prompt_length": "generation.max_prompt_tokens",
    "vllm_server_base_url": "generation.url",
    "stop_strings": "generation.stop", "stop_sequences": "generation.stop", "temperature": "generation.temperature",
    "top_p": "generation.top_p", "top_k": "generation.top_k", "lr": "optim.learning_rate",
    "warmup_ratio": "optim.warmup_steps", "lr_warmup_steps": "optim.warmup_steps",
    "lr_scheduler_type": "optim.schedule", "adam_epsilon": "optim.adam_eps",
    "critic.optim.lr": "optim.critic_learning_rate", "grad_clip": "optim.max_grad_norm", "max_steps": "run.num_steps",
    "total_training_steps": "run.num_steps", "total_episodes": "run.num_steps", "num_train_epochs": "run.num_steps",
    "total_epochs": "run.num_steps", "save_steps": "run.save_every", "save_freq": "run.save_every",
    "num_completions_to_print": "run.keep_samples",
    "eval_steps": "run.eval_every", "test_freq": "run.eval_every", "save_total_limit": "run.keep_checkpoints",
    "report_to": "run.trackers", "trainer.logger": "run.trackers",
    "per_device_train_batch_size": "run.micro_batch_tokens", "gradient_accumulation_steps": "run.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "run.micro_batch_tokens", "ppo_micro_batch_size_per_gpu": "run.micro_batch_tokens",
    "metric_for_best_model": "run.best_metric", "seed": "run.seed", "lora_alpha": "lora.alpha", "lora_r": "lora.r",
    "lora_rank": "lora.r", "lora_dropout": "lora.dropout", "lora_target_modules": "lora.target_modules",
    "use_peft": "lora.enabled", "model_name_or_path": "model.path", "actor_rollout_ref.model.path": "model.path",
    "attn_implementation": "model.attention", "torch_dtype": "model.dtype", "bf16": "model.dtype",
    "fp16": "model.dtype", "load_in_4bit": "model.quantization",
    "enable_gradient_checkpointing": "model.gradient_checkpointing", "critic.model.path": "critic.path",
    "critic_warmup": "critic.warmup", "dataset_name": "task.data", "train_files": "task.data",
    "val_files": "task.eval_data", "assistant_only_loss": "sft.loss_on", "completion_only_loss": "sft.loss_on",
    "train_on_inputs": "sft.loss_on", "dataset_text_field": "task.columns", "prompt_key": "task.columns",
    "enable_thinking": "task.chat_template", "chat_template_kwargs": "task.chat_template",
    "reward_funcs": "reward.functions", "critic_pretrain": "critic.path", "freezing_actor_steps": "critic.warmup",
    "custom_reward_function.path": "reward.functions", "reward_weights": "reward.functions",
    "reward_model_path": "reward.model", "missing_eos_penalty": "reward.truncated_penalty",
    "mask_truncated_completions": "reward.truncated", "output_dir": "--output-dir",
    "default_local_dir": "--output-dir", "experiment_name": "--name", "run_name": "--name",
}  # fmt: skip

# Names that stand for another setting under one method.
FAMILIAR_UNDER = {
    "dpo": {
        "beta": "dpo.beta", "loss_type": "dpo.loss", "label_smoothing": "dpo.label_smoothing",
        "simpo_gamma": "dpo.target_margin", "gamma_beta_ratio": "dpo.target_margin",
        "train_batch_size": "dpo.batch_size", "max_length": "dpo.max_tokens", "max_seq_length": "dpo.max_tokens",
        "max_prompt_length": "dpo.max_tokens", "max_completion_length": "dpo.max_tokens",
        "ref_model": "model.adapter", "ref_model_path": "model.adapter", "reference_free": "dpo.loss",
    },
}  # fmt: skip

# What else to know about one of them, after "... is `run.num_steps` here".
REMARKS = {
    "train_batch_size": ", as verl's; OpenRLHF's is what one optimizer step takes: minibatch_size, in completions",
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs"), ", in steps: one step takes num_prompts prompts, an epoch all rows once"
    ),
    "total_episodes": ", in steps, not in completions",
    "warmup_ratio": ", in steps, not as a share of the run",
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), ", in sequences"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "ppo_micro_batch_size_per_gpu"),
        ", in tokens; auto fits the memory, and no size changes the gradient",
    ),
    "bf16": ": bfloat16, float16, float32 or auto",
    "fp16": ": bfloat16, float16, float32 or auto",
    "gamma_beta_ratio": ", the product of this ratio and dpo.beta",
    **dict.fromkeys(
        ("ref_model", "ref_model_path"), ": the reference is what training starts from, the adapter given or the base"
    ),
    "reference_free": ": orpo or simpo",
    "use_kl_loss": ": loss or reward",
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "train_on_inputs"), ": completion or all"),
    "dataset_text_field": ": {text: OLD}",
    "scale_rewards": ": std (its `group`), batch or none",
    "multi_objective_aggregation": ": sum or each (its `normalize_then_sum`)",
    **dict.fromkeys(
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction", "rollout_correction.rollout_is"),
        ": token, sequence, token-mask, sequence-mask or none",
    ),
    "rollout_correction.rollout_rs": ": token-mask or sequence-mask",
    "use_adaptive_entropy": ", in nats per token; null: entropy_coef stays as it is",
    "use_kl_in_reward": ": loss or reward",
    "enable_thinking": ": {enable_thinking: true}, or any other variable of the template",
}

# Names that have no counterpart, and why none is needed.
UNNEEDED = {
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "rollout.name", "gpu_memory_utilization"),
        "no serving engine is started; completions are sampled in this process, or by a server that you start "
        "(generation.engine=server, generation.url)",
    ),
    **dict.fromkeys(("logging_steps", "logging_strategy"), "every step is logged, in metrics.jsonl"),
    **dict.fromkeys(
        ("precompute_ref_log_probs", "precompute_ref_batch_size"),
        "reference log-probabilities are computed where a row is first used, and kept in the checkpoint",
    ),
    "padding_free": "sequences are always packed, without padding",
    "disable_dropout": "only LoRA's dropout is ever on, lora.dropout",
    "log_completions": "completions are always kept, in samples.jsonl",
    "packing": "sequences are always packed, without padding",
    **dict.fromkeys(
        ("max_seq_length", "max_length"),
        "prompts and completions have limits of their own, generation.max_prompt_tokens and generation.max_new_tokens",
    ),
    "adv_estimator": "it is the method (`tinyrl train ppo` for gae, `tinyrl train grpo` for grpo); "
    "grpo.preset has rloo and reinforce++, ppo.preset a2c",
    **dict.fromkeys(
        ("n_gpus_per_node", "nnodes", "num_processes"),
        "`torchrun` or `accelerate launch` says how many processes share a run",
    ),
    "tensor_model_parallel_size": "each device holds the whole model",
    "center_rewards_coefficient": "scores are centred when they are saved (reward_model.center), not by a loss",
    "margin_loss": "rows with a `margin` column ask for it",
    "project_name": "a tracker's project is tinyrl, or what its own variable says (such as WANDB_PROJECT)",
}


def known_elsewhere(path: tuple[str, ...], *, method: Any = None) -> str:
    """The longest end of a dotted name that another library has; "" where none has it."""
    path = (path[0].lstrip("+"), *path[1:])  # verl's launcher adds a setting with +name=value
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((end for end in ends if familiar(end, method=method) or end in UNNEEDED), "")


def remark(name: str, *, method: Any = None) -> str:
    """What else to know about a name elsewhere; "" where a method has a setting of its own for it."""
    under = FAMILIAR_UNDER.get(method, {}) if isinstance(method, str) else {}
    return "" if name in under and name in FAMILIAR else REMARKS.get(name, "")


def familiar(name: str, *, method: Any = None) -> str | None:
    """The setting that a name elsewhere stands for, under a method; None where there is none."""
    under = FAMILIAR_UNDER.get(method, {}) if isinstance(method, str) else {}
    return under.get(name, FAMILIAR.get(name))
