"""Names of settings in TRL, verl, OpenRLHF, PEFT and transformers, and earlier names here, with what they are now.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n. An answer is a
setting, with a remark behind it where there is one, or begins with "!" and gives the reason why there is no such
setting.
"""

ANSWERS = {
    "use": "environment.name",
    "at_once": "environment.max_concurrency",
    "most_requests": "reward.functions: max_requests of a judge",
    "refill_rounds": "grpo.dynamic_sampling_rounds",
    "mismatch": "grpo.importance_correction",
    "long_prompts": "task.on_overlong_prompt",
    "chat_template": "task.chat_template_kwargs",
    "warmup": "critic.warmup_steps",
    "coef": "teacher.kl_coef",
    "on_policy": "distill.on_policy_fraction",
    "num_generations rollout_n rollout.n n_samples_per_prompt": "grpo.group_size",
    "beta kl_loss_coef": "grpo.kl_coef",
    "init_kl_coef kl_ctrl.kl_coef": "ppo.kl_coef",
    "kl_loss_type": "grpo.kl_estimator",
    "use_kl_loss use_kl_in_reward kl_placement": "grpo.kl_estimator: k1 is in the reward, k2 and k3 are in the loss",
    "kl_ctrl.type kl_ctrl.target_kl target kl_controller": "ppo.target_kl: a number adapts kl_coef, null keeps it",
    "epsilon clip_ratio clip_ratio_low": "grpo.clip_eps",
    "epsilon_high clip_ratio_high": "grpo.clip_eps_high",
    "cliprange": "ppo.clip_eps",
    "vf_coef": "ppo.value_coef",
    "lam lambd lam_actor": "ppo.gae_lambda",
    "algorithm.gamma": "ppo.gamma",
    "entropy_coeff entropy_loss_coef": "ppo.entropy_coef",
    "num_ppo_epochs ppo_epochs": "ppo.num_epochs",
    "num_iterations": "grpo.num_epochs",
    "ppo_mini_batch_size mini_batch_size": "ppo.minibatch_size, in sequences",
    "train_batch_size":
        "grpo.num_prompts, as verl's; OpenRLHF's is what one optimizer step takes: minibatch_size, in completions",
    "loss_type": "grpo.preset",
    "loss_agg_mode": "grpo.aggregation",
    "scale_rewards norm_adv_by_std_in_grpo": "grpo.advantage_scale: std (its `group`), batch or none",
    "filter_groups.enable filter_groups.max_num_gen_batches dynamic_filtering": "grpo.dynamic_sampling_rounds",
    "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_correction.rollout_is "
    "enable_vllm_is_correction": "grpo.importance_correction: token, sequence, token-mask, sequence-mask or none",
    "max_completion_length response_length max_response_length max_tokens": "generation.max_new_tokens",
    "max_prompt_length": "generation.max_prompt_tokens",
    "vllm_server_base_url": "generation.url",
    "stop_strings stop_sequences": "generation.stop",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "top_k": "generation.top_k",
    "lr": "optim.learning_rate",
    "warmup_ratio lr_warmup_steps": "optim.warmup_steps, in steps, not as a share of the run",
    "lr_scheduler_type": "optim.schedule",
    "critic.optim.lr": "optim.critic_learning_rate",
    "grad_clip": "optim.max_grad_norm",
    "max_steps total_training_steps": "run.num_steps",
    "num_train_epochs total_epochs":
        "run.num_steps, in steps: one step takes num_prompts prompts, an epoch all rows once",
    "save_steps save_freq": "run.save_every",
    "eval_steps test_freq": "run.eval_every",
    "save_total_limit": "run.keep_checkpoints",
    "report_to trainer.logger": "run.trackers",
    "per_device_train_batch_size gradient_accumulation_steps ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu":
        "run.micro_batch_tokens, in tokens; auto fits the memory, and no size changes the gradient",
    "seed": "run.seed",
    "lora_alpha": "lora.alpha",
    "lora_r lora_rank": "lora.r",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "use_peft": "lora.enabled",
    "model_name_or_path actor_rollout_ref.model.path": "model.path",
    "torch_dtype bf16 fp16": "model.dtype: bfloat16, float16, float32 or auto",
    "load_in_4bit": "model.quantization",
    "critic.model.path critic_pretrain": "critic.path",
    "critic_warmup freezing_actor_steps": "critic.warmup_steps",
    "dataset_name train_files": "task.data",
    "val_files": "task.eval_data",
    "lmbda": "distill.on_policy_fraction",
    "teacher_model_name_or_path teacher_model": "teacher.path",
    "assistant_only_loss completion_only_loss train_on_inputs": "sft.loss_on: completion or all",
    "dataset_text_field prompt_key": "task.columns: {NEW: OLD}",
    "enable_thinking chat_template_kwargs":
        "task.chat_template_kwargs: {enable_thinking: true}, or any other variable of the template",
    "reward_funcs custom_reward_function.path reward_weights": "reward.functions",
    "reward_model_path": "reward.model",
    "missing_eos_penalty mask_truncated_completions": "reward.truncated: penalize or mask",
    "output_dir default_local_dir": "--output-dir",
    "experiment_name run_name": "--name",
    "use_vllm vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization":
        "!no serving engine is started; completions are sampled in this process, or by a server that you start "
        "(generation.engine=server, generation.url)",
    "max_seq_length max_length":
        "!prompts and completions have limits of their own, generation.max_prompt_tokens and "
        "generation.max_new_tokens",
    "adv_estimator":
        "!it is the method (`tinyrl train ppo` for gae, `tinyrl train grpo` for grpo); grpo.preset has rloo and "
        "reinforce++, ppo.preset a2c",
}  # fmt: skip
ANSWERS_OF_DPO = {
    "beta": "dpo.beta",
    "loss_type": "dpo.loss",
    "reference_free": "dpo.loss: orpo or simpo",
    "label_smoothing": "dpo.label_smoothing",
    "simpo_gamma": "dpo.target_margin",
    "train_batch_size": "dpo.batch_size",
    "max_length max_seq_length max_prompt_length max_completion_length": "dpo.max_tokens",
    "ref_model ref_model_path": "model.adapter: the reference is what training starts from, the adapter or the base",
}


ALIASES = {name: answer for names, answer in ANSWERS.items() for name in names.split()}
ALIASES_OF_DPO = ALIASES | {name: answer for names, answer in ANSWERS_OF_DPO.items() for name in names.split()}
