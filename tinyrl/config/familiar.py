"""Names of settings in TRL, verl, PEFT and transformers, and what they correspond to here.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n.
"""

from __future__ import annotations

from typing import Any


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """{"a b": text} as {"a": text, "b": text}."""
    return {name: text for names, text in table.items() for name in names.split()}


def _by_setting(table: dict[str, str]) -> dict[str, str]:
    """{setting: "a b"} as {"a": setting, "b": setting}."""
    return {name: setting for setting, names in table.items() for name in names.split()}


# A setting here: its names elsewhere. Under ppo a setting of `grpo` is that of `ppo`, where it has one.
FAMILIAR = _by_setting({
    "grpo.group_size": "num_generations rollout_n rollout.n n_samples_per_prompt", "grpo.kl_coef": "beta kl_loss_coef",
    "ppo.kl_coef": "init_kl_coef kl_ctrl.kl_coef", "ppo.kl_estimator": "kl_penalty",
    "grpo.kl_estimator": "kl_loss_type", "grpo.kl_placement": "use_kl_loss use_kl_in_reward",
    "ppo.kl_controller": "kl_ctrl.type", "grpo.clip_eps": "epsilon clip_ratio clip_ratio_low",
    "grpo.clip_eps_high": "epsilon_high clip_ratio_high", "grpo.dual_clip": "delta clip_ratio_c",
    "ppo.clip_eps": "cliprange", "ppo.value_clip_eps": "cliprange_value value_clip clip_range_vf",
    "ppo.value_coef": "vf_coef", "ppo.gae_lambda": "lam lambd lam_actor", "ppo.gamma": "algorithm.gamma",
    "ppo.entropy_coef": "entropy_coeff entropy_loss_coef", "ppo.whiten_advantages": "normalize_advantage norm_adv",
    "ppo.whiten_rewards": "ppo_whiten_rewards", "ppo.ptx_coef": "ptx_coeff unsup_coef",
    "ppo.ptx_data": "pretrain_data ptx_datasets unsupervised_dataset_name",
    "ppo.num_epochs": "num_ppo_epochs ppo_epochs", "grpo.num_epochs": "num_iterations",
    "ppo.minibatch_size": "ppo_mini_batch_size mini_batch_size", "grpo.num_prompts": "train_batch_size",
    "run.forked_from": "run.origin",
    "ppo.target_kl": "target kl_ctrl.target_kl", "ppo.kl_horizon": "horizon", "grpo.preset": "loss_type",
    "grpo.ratio_level": "importance_sampling_level", "grpo.aggregation": "loss_agg_mode",
    "grpo.advantage_scale": "scale_rewards norm_adv_by_std_in_grpo",
    "grpo.refill_rounds": "filter_groups.enable filter_groups.max_num_gen_batches dynamic_filtering",
    "grpo.normalize_rewards": "multi_objective_aggregation",
    "grpo.mismatch":
        "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_correction.rollout_is "
        "rollout_correction.rollout_rs enable_vllm_is_correction",
    "grpo.mismatch_cap":
        "tis_imp_ratio_cap vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold",
    "grpo.mismatch_floor": "vllm_importance_sampling_clip_min",
    "generation.max_new_tokens": "max_completion_length response_length max_response_length max_tokens",
    "generation.max_prompt_tokens": "max_prompt_length", "generation.url": "vllm_server_base_url",
    "generation.stop": "stop_strings stop_sequences", "generation.temperature": "temperature",
    "generation.top_p": "top_p", "generation.top_k": "top_k", "optim.learning_rate": "lr",
    "optim.warmup_steps": "warmup_ratio lr_warmup_steps", "optim.schedule": "lr_scheduler_type",
    "optim.adam_eps": "adam_epsilon", "optim.critic_learning_rate": "critic.optim.lr",
    "optim.max_grad_norm": "grad_clip",
    "run.num_steps": "max_steps total_training_steps total_episodes num_train_epochs total_epochs",
    "run.save_every": "save_steps save_freq", "run.keep_samples": "num_completions_to_print",
    "run.eval_every": "eval_steps test_freq", "run.keep_checkpoints": "save_total_limit",
    "run.trackers": "report_to trainer.logger",
    "run.micro_batch_tokens":
        "per_device_train_batch_size gradient_accumulation_steps ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size_per_gpu",
    "run.best_metric": "metric_for_best_model", "run.seed": "seed", "lora.alpha": "lora_alpha",
    "lora.r": "lora_r lora_rank", "lora.dropout": "lora_dropout", "lora.target_modules": "lora_target_modules",
    "lora.enabled": "use_peft", "model.path": "model_name_or_path actor_rollout_ref.model.path",
    "model.attention": "attn_implementation", "model.dtype": "torch_dtype bf16 fp16",
    "model.quantization": "load_in_4bit", "model.gradient_checkpointing": "enable_gradient_checkpointing",
    "critic.path": "critic.model.path critic_pretrain", "critic.warmup": "critic_warmup freezing_actor_steps",
    "task.data": "dataset_name train_files", "task.eval_data": "val_files",
    "distill.on_policy": "lmbda", "teacher.path": "teacher_model_name_or_path teacher_model",
    "sft.loss_on": "assistant_only_loss completion_only_loss train_on_inputs",
    "task.columns": "dataset_text_field prompt_key", "task.chat_template": "enable_thinking chat_template_kwargs",
    "reward.functions": "reward_funcs custom_reward_function.path reward_weights", "reward.model": "reward_model_path",
    "reward.truncated_penalty": "missing_eos_penalty", "reward.truncated": "mask_truncated_completions",
    "--output-dir": "output_dir default_local_dir", "--name": "experiment_name run_name",
})  # fmt: skip

# Names that stand for another setting under one method.
FAMILIAR_UNDER = {
    "dpo": _by_setting({
        "dpo.beta": "beta", "dpo.loss": "loss_type reference_free", "dpo.label_smoothing": "label_smoothing",
        "dpo.target_margin": "simpo_gamma gamma_beta_ratio", "dpo.batch_size": "train_batch_size",
        "dpo.max_tokens": "max_length max_seq_length max_prompt_length max_completion_length",
        "model.adapter": "ref_model ref_model_path",
    })
}  # fmt: skip

# What else to know about one of them, after "... is `run.num_steps` here".
REMARKS = _by_name({
    "train_batch_size": ", as verl's; OpenRLHF's is what one optimizer step takes: minibatch_size, in completions",
    "num_train_epochs total_epochs": ", in steps: one step takes num_prompts prompts, an epoch all rows once",
    "total_episodes": ", in steps, not in completions",
    "warmup_ratio": ", in steps, not as a share of the run",
    "ppo_mini_batch_size mini_batch_size": ", in sequences",
    "per_device_train_batch_size gradient_accumulation_steps ppo_micro_batch_size_per_gpu":
        ", in tokens; auto fits the memory, and no size changes the gradient",
    "bf16 fp16": ": bfloat16, float16, float32 or auto",
    "gamma_beta_ratio": ", the product of this ratio and dpo.beta",
    "ref_model ref_model_path": ": the reference is what training starts from, the adapter given or the base",
    "reference_free": ": orpo or simpo",
    "use_kl_loss use_kl_in_reward": ": loss or reward",
    "assistant_only_loss completion_only_loss train_on_inputs": ": completion or all",
    "dataset_text_field": ": {text: OLD}",
    "scale_rewards": ": std (its `group`), batch or none",
    "multi_objective_aggregation": ": sum or each (its `normalize_then_sum`)",
    "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_correction.rollout_is":
        ": token, sequence, token-mask, sequence-mask or none",
    "rollout_correction.rollout_rs": ": token-mask or sequence-mask",
    "enable_thinking": ": {enable_thinking: true}, or any other variable of the template",
})  # fmt: skip

# Names that have no counterpart, and why none is needed.
UNNEEDED = _by_name({
    "use_vllm vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization":
        "no serving engine is started; completions are sampled in this process, or by a server that you start "
        "(generation.engine=server, generation.url)",
    "logging_steps logging_strategy": "every step is logged, in metrics.jsonl",
    "precompute_ref_log_probs precompute_ref_batch_size":
        "reference log-probabilities are computed where a row is first used, and kept in the checkpoint",
    "padding_free packing": "sequences are always packed, without padding",
    "disable_dropout": "only LoRA's dropout is ever on, lora.dropout",
    "log_completions": "completions are always kept, in samples.jsonl",
    "max_seq_length max_length":
        "prompts and completions have limits of their own, generation.max_prompt_tokens and "
        "generation.max_new_tokens",
    "adv_estimator":
        "it is the method (`tinyrl train ppo` for gae, `tinyrl train grpo` for grpo); grpo.preset has rloo and "
        "reinforce++, ppo.preset a2c",
    "n_gpus_per_node nnodes num_processes": "`torchrun` or `accelerate launch` says how many processes share a run",
    "tensor_model_parallel_size": "each device holds the whole model",
    "center_rewards_coefficient": "scores are centred when they are saved (reward_model.center), not by a loss",
    "margin_loss": "rows with a `margin` column ask for it",
    "project_name": "a tracker's project is tinyrl, or what its own variable says (such as WANDB_PROJECT)",
})  # fmt: skip


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
