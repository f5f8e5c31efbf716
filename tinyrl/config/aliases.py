"""Names of settings in TRL, verl, OpenRLHF, PEFT and transformers, with what they are here.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n. An answer is a
setting, with a remark behind it where there is one, or begins with "!" and gives the reason why there is no such
setting.
"""

ANSWERS = {
    "num_generations rollout_n rollout.n n_samples_per_prompt": "grpo.group_size",
    "beta kl_loss_coef": "grpo.kl_coef (for the others ppo.kl_coef, dpo.beta, teacher.divergence)",
    "init_kl_coef kl_ctrl.kl_coef": "ppo.kl_coef, or grpo.kl_coef",
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
    "train_batch_size": "grpo.num_prompts, as verl's; OpenRLHF's is minibatch_size, in completions; dpo.batch_size",
    "loss_type":
        "grpo.aggregation (grpo: sequence, dapo and bnpo: token, dr_grpo: constant); cispo is grpo.surrogate. "
        "With `train dpo` it is dpo.loss",
    "simpo_gamma": "dpo.target_margin",
    "reference_free": "dpo.loss: orpo or simpo",
    "ref_model ref_model_path": "model.adapter: the reference is what training starts from, the adapter or the base",
    "loss_agg_mode":
        "grpo.aggregation (token-mean: token, seq-mean-token-mean: sequence, seq-mean-token-sum: sequence-sum, "
        "seq-mean-token-sum-norm: constant)",
    "scale_rewards norm_adv_by_std_in_grpo":
        "grpo.advantage_scale (true or group: std, batch: batch, false: none)",
    "importance_sampling_level": "grpo.surrogate (token: clip, sequence: sequence; preset=gspo has its paper's clip)",
    "use_bias_correction_kl": "grpo.kl_unbiased",
    "filter_groups.enable filter_groups.max_num_gen_batches dynamic_filtering": "grpo.dynamic_sampling_rounds",
    "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_correction.rollout_is "
    "enable_vllm_is_correction": "grpo.importance_correction (token_truncate: token, sequence_truncate: sequence, "
        "token_mask: token-mask, sequence_mask: sequence-mask; off: none)",
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
    "num_train_epochs total_epochs": "run.num_steps, in steps: one takes num_prompts prompts, an epoch all rows once",
    "save_steps save_freq": "run.save_every",
    "eval_steps test_freq": "run.eval_every",
    "save_total_limit": "run.keep_checkpoints",
    "report_to trainer.logger": "run.trackers",
    "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size":
        "grpo.minibatch_size, completions of an optimizer step in all; a step samples num_prompts x group_size of them",
    "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu":
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
    "enable_thinking chat_template_kwargs": "task.chat_template_kwargs: {enable_thinking: true}, or other variables",
    "reward_funcs custom_reward_function.path": "reward.functions: [{use: file.py:function}]",
    "reward_weights": "reward.functions: [{use: file.py:function, weight: 0.5}]",
    "reward_model_path": "reward.model",
    "mask_truncated_completions": "reward.truncated (true: mask, false: keep)",
    "missing_eos_penalty": "reward.truncated (penalize subtracts 1)",
    "output_dir default_local_dir": "--output-dir",
    "experiment_name run_name": "--name",
    "use_vllm vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization":
        "!completions are sampled in this process, or by a server that you start (generation.engine=server)",
    "max_seq_length max_length":
        "!prompts and completions have limits of their own: generation.max_prompt_tokens and max_new_tokens (dpo: "
        "dpo.max_tokens)",
    "logging_steps log_completions": "!each step is logged, with 16 of its completions",
    "use_liger_kernel padding_free packing": "!rows are packed where the model allows it; logits are made in chunks",
    "vllm_importance_sampling_cap": "!weights of grpo.importance_correction are capped at 2",
    "disable_dropout": "!dropout is off; lora.dropout is for sft, reward and dpo",
    "n_gpus_per_node nnodes": "!`accelerate launch -m tinyrl ...` has the number of processes",
    "sync_ref_model ref_model_sync_steps": "!the reference stays frozen; `tinyrl train --from RUN` takes another",
    "delta clip_ratio_c top_entropy_quantile": "!no loss here has that term",
    "adv_estimator": "!it is the method (`tinyrl train ppo` for gae), or grpo.preset (rloo, reinforce++)",
}  # fmt: skip
ALIASES = {name: answer for names, answer in ANSWERS.items() for name in names.split()}
