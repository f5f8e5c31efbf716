"""Names of settings in TRL, verl, OpenRLHF, PEFT and transformers, with what they are here.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n. An answer is a
setting, with a remark behind it where there is one, or begins with "!" or "#" and gives the reason why there is no
such setting: "!" for what is not needed, "#" for what cannot be set. A setting of grpo is that of the same name under a
method that has one; what differs more is in ANSWERS_OF_METHODS. A message ends with the line to copy: the settings with
the values that were given, or what LINES has for them, and names those that are not in it (NOT_IN_THE_LINE).
"""

ANSWERS = {
    "num_generations rollout_n rollout.n n_samples_per_prompt": "grpo.group_size",
    "beta": "grpo.kl_coef",
    "kl_loss_coef init_kl_coef kl_ctrl.kl_coef": "grpo.kl_coef",
    "kl_loss_type": "grpo.kl_estimator",
    "use_kl_loss use_kl_in_reward kl_placement": "grpo.kl_estimator: k1 is in the reward, k2 and k3 are in the loss",
    "kl_ctrl.type kl_ctrl.target_kl target kl_controller kl_target":
        "ppo.target_kl: a number adapts kl_coef, null keeps it",
    "epsilon clip_ratio clip_ratio_low": "grpo.clip_eps",
    "epsilon_high clip_ratio_high": "grpo.clip_eps_high",
    "cliprange": "ppo.clip_eps",
    "eps_clip": "grpo.clip_eps, with the same grpo.clip_eps_high",
    "value_clip cliprange_value": "ppo.value_clip_eps",
    "vf_coef": "ppo.value_coef",
    "lam lambd lam_actor": "ppo.gae_lambda",
    "algorithm.gamma": "ppo.gamma",
    "entropy_coeff entropy_loss_coef": "ppo.entropy_coef",
    "num_ppo_epochs ppo_epochs": "ppo.num_epochs",
    "num_iterations": "grpo.num_epochs",
    "max_epochs": "grpo.num_epochs, passes over the samples of a step",
    "rollout_batch_size": "grpo.num_prompts, prompts of a step",
    "ppo_mini_batch_size mini_batch_size": "ppo.minibatch_size, in sequences",
    "train_batch_size":
        "grpo.num_prompts, prompts of a step, if it is verl's; if it is OpenRLHF's, completions of an optimizer step: "
        "grpo.minibatch_size",
    "loss_type":
        "grpo.aggregation (grpo: sequence, dapo and bnpo: token, dr_grpo: constant); cispo is grpo.surrogate",
    "simpo_gamma": "dpo.target_margin",
    "reference_free": "dpo.loss: orpo or simpo",
    "ref_model ref_model_path ref_pretrain":
        "model.adapter: the reference is what training starts from, the adapter or the base",
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
    "max_completion_length response_length max_response_length max_tokens generate_max_len":
        "generation.max_new_tokens",
    "max_prompt_length prompt_max_len": "generation.max_prompt_tokens",
    "vllm_server_base_url": "generation.url",
    "stop_strings stop_sequences": "generation.stop",
    "temperature": "generation.temperature",
    "top_p top_k":
        "#training samples the whole distribution; leave it out. `tinyrl eval` takes generation.top_p and .top_k, "
        "`tinyrl serve` both with a request",
    "lr actor_learning_rate": "optim.learning_rate",
    "l2": "optim.weight_decay",
    "warmup_ratio lr_warmup_steps lr_warmup_ratio": "optim.warmup_steps, in steps, not as a share of the run",
    "lr_scheduler_type lr_scheduler": "optim.schedule",
    "critic.optim.lr": "optim.critic_learning_rate",
    "grad_clip": "optim.max_grad_norm",
    "max_steps total_training_steps":
        "run.num_steps, in steps of num_prompts prompts (TRL counts optimizer steps, of which a step may have several)",
    "num_train_epochs total_epochs num_episodes":
        "run.epochs, passes over all training rows; or run.num_steps, not both",
    "save_steps save_freq": "run.save_every, in steps (TRL counts optimizer steps, of which a step may have several)",
    "eval_steps test_freq": "run.eval_every, in steps (TRL counts optimizer steps, of which a step may have several)",
    "eval_strategy evaluation_strategy": "run.eval_every, in steps (with no: run.eval_prompts=0)",
    "save_strategy": "run.save_every, in steps; 0 saves the last one only",
    "save_total_limit": "run.keep_checkpoints",
    "report_to trainer.logger use_wandb": "run.trackers",
    "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size":
        "grpo.num_prompts: per_device_train_batch_size x gradient_accumulation_steps completions an optimizer step = "
        "num_prompts x group_size",
    "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu micro_train_batch_size":
        "run.micro_batch_tokens, in tokens; auto fits the memory, and no size changes the gradient",
    "micro_rollout_batch_size": "!as many rows are decoded together as the memory holds (generation.max_rows)",
    "seed random_state": "run.seed",
    "lora_alpha": "lora.alpha",
    "lora_r lora_rank max_lora_rank": "lora.r",
    "use_gradient_checkpointing": "model.gradient_checkpointing: true or false",
    "full_finetuning": "lora.enabled, the other way round",
    "max_tool_calling_iterations": "environment.max_turns",
    "multi_objective_aggregation": "grpo.reward_aggregation (sum_then_normalize: sum, normalize_then_sum)",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "use_peft": "lora.enabled",
    "model_name_or_path actor_rollout_ref.model.path pretrain": "model.path",
    "torch_dtype bf16 fp16": "model.dtype: bfloat16, float16, float32 or auto",
    "load_in_4bit": "model.quantization",
    "critic.model.path critic_pretrain": "critic.path",
    "critic_warmup freezing_actor_steps": "critic.warmup_steps",
    "dataset_name train_files dataset prompt_data": "task.data",
    "val_files eval_dataset": "task.eval_data",
    "lmbda": "distill.on_policy_fraction",
    "teacher_model_name_or_path teacher_model": "teacher.path",
    "assistant_only_loss completion_only_loss train_on_inputs": "sft.loss_on: completion or all",
    "dataset_text_field prompt_key input_key output_key label_key chosen_key rejected_key":
        "task.columns: {NEW: OLD}, NEW being prompt, completion, answer, chosen or rejected",
    "apply_chat_template": "task.chat: auto, true or false",
    "log_completions": "run.log_completions, for wandb and trackio; samples.jsonl has 16 of each step",
    "enable_thinking chat_template_kwargs": "task.chat_template_kwargs: {enable_thinking: true}, or other variables",
    "reward_funcs custom_reward_function.path remote_rm_url": "reward.functions: [{use: file.py:function}]",
    "reward_weights": "reward.functions: [{use: file.py:function, weight: 0.5}]",
    "reward_model_path reward_pretrain": "reward.model",
    "mask_truncated_completions": "reward.truncated (true: mask, false: keep)",
    "missing_eos_penalty": "reward.truncated (penalize subtracts 1)",
    "output_dir default_local_dir save_path ckpt_path": "--output-dir",
    "experiment_name run_name": "--name",
    "use_vllm vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization vllm_num_engines "
    "vllm_tensor_parallel_size vllm_sync_backend vllm_enable_sleep":
        "!completions are sampled in this process, or by a server that you start (generation.engine=server)",
    "max_seq_length max_length max_len":
        "!prompts and completions have limits of their own: generation.max_prompt_tokens and max_new_tokens",
    "logging_steps": "!each step is logged, with 16 of its completions",
    "use_liger_kernel padding_free packing packing_samples flash_attn":
        "!rows are packed where the model allows it; logits are made in chunks",
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max":
        "#weights of grpo.importance_correction are capped at 2",
    "disable_dropout": "#dropout is off; lora.dropout is for sft, reward and dpo",
    "colocate_all_models colocate_actor_ref colocate_critic_reward actor_num_nodes actor_num_gpus_per_node "
    "critic_num_nodes critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node reward_num_nodes "
    "reward_num_gpus_per_node": "!policy, reference, critic and reward model share one base in one process",
    "n_gpus_per_node nnodes": "!`accelerate launch -m tinyrl ...` has the number of processes",
    "sync_ref_model ref_model_sync_steps": "#the reference stays frozen; `tinyrl train --from RUN` takes another",
    "delta clip_ratio_c top_entropy_quantile": "#no loss here has that term",
    "adv_estimator advantage_estimator":
        "grpo.preset (grpo, rloo, reinforce++); gae is another method, `tinyrl train ppo`",
    "adam_beta1 adam_beta2 adam_epsilon adam_betas": "#AdamW's betas are 0.9 and 0.999, its epsilon is 1e-8",
    "min_p repetition_penalty":
        "#training samples the whole distribution, softmax(logits / temperature); leave it out: a loss of other "
        "probabilities would be of another policy",
    "normalize_reward": "#scores of a reward model are centred when it is saved, and not divided by their spread",
    "reward_clip_range": "#rewards are not clipped, but for what a function of reward.functions does",
    "nll_loss_coef": "#no loss of pairs here has that term but orpo",
    "ipo": "dpo.loss: ipo, per token, or ipo_sum",
    "peft_config":
        "!LoRA is on by default: lora.r, lora.alpha, lora.dropout, lora.target_modules; off: lora.enabled=false. PEFT "
        "trains q_proj and v_proj of Llama and Qwen where target_modules is not given, this all linear layers: "
        "lora.target_modules=[q_proj, v_proj] is the same",
    "push_to_hub hub_model_id hub_private_repo hub_strategy":
        "!a run is uploaded when you say so: `tinyrl export RUN --push USER/NAME`, with --private",
    "fast_inference": "!this process samples by its own engine, which decodes rows together (generation.engine)",
    "remove_unused_columns": "!all columns of a row reach the reward",
    "deepspeed fsdp fsdp_config ddp_find_unused_parameters zero_stage":
        "!a run is one process a GPU, with whole weights in each",
}  # fmt: skip
ALIASES = {name: answer for names, answer in ANSWERS.items() for name in names.split()}

# Names of ANSWERS that are something else under some methods.
ANSWERS_OF_METHODS = {
    "beta": {"dpo": "dpo.beta", "distill": "teacher.divergence"},
    "train_batch_size": {"sft": "sft.batch_size", "reward": "reward_model.batch_size", "dpo": "dpo.batch_size"},
    "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size": {
        "sft": "sft.batch_size: per_device_train_batch_size x gradient_accumulation_steps",
        "reward": "reward_model.batch_size: per_device_train_batch_size x gradient_accumulation_steps",
        "dpo": "dpo.batch_size: per_device_train_batch_size x gradient_accumulation_steps",
    },
    "loss_type": {"dpo": "dpo.loss"},
    "eps_clip": {"ppo": "ppo.clip_eps"},
    "max_epochs": {"sft": "run.epochs", "reward": "run.epochs", "dpo": "run.epochs"},
    "ref_model ref_model_path ref_pretrain": {"sft": "#it has no reference", "reward": "#it has no reference"},
    "max_steps total_training_steps": {"sft": "run.num_steps", "reward": "run.num_steps", "dpo": "run.num_steps"},
    "save_steps save_freq": {"sft": "run.save_every", "reward": "run.save_every", "dpo": "run.save_every"},
    "eval_steps test_freq": {"sft": "run.eval_every", "reward": "run.eval_every", "dpo": "run.eval_every"},
    "max_seq_length max_length max_len": {
        "sft": "#a row may have as many tokens as the model has positions (longer ones: task.on_overlong_prompt)",
        "reward": "#a row may have as many tokens as the model has positions (longer ones: task.on_overlong_prompt)",
        "dpo": "dpo.max_tokens",
    },
    "adv_estimator advantage_estimator": {
        "ppo": "#`tinyrl train ppo` has GAE (ppo.gae_lambda); the others are presets of `tinyrl train grpo`",
    },
}  # fmt: skip
OF_METHOD = {name: answers for names, answers in ANSWERS_OF_METHODS.items() for name in names.split()}

SCHEDULES = {  # of two libraries, which spell them alike
    "constant": "optim.schedule=constant", "constant_with_warmup": "optim.schedule=constant",
    "linear": "optim.schedule=linear", "cosine": "optim.schedule=cosine",
}  # fmt: skip

# Values of other libraries, as text, that are spelt otherwise here, with the line to copy. A name that is here has no
# line for any other value.
LINES = {
    "loss_type": {
        "grpo": "grpo.aggregation=sequence", "dapo": "grpo.aggregation=token", "bnpo": "grpo.aggregation=token",
        "dr_grpo": "grpo.aggregation=constant", "cispo": "grpo.surrogate=cispo", "sigmoid": "dpo.loss=sigmoid",
        "ipo": "dpo.loss=ipo", "kto_pair": "dpo.loss=kto",
    },
    "multi_objective_aggregation": {
        "sum_then_normalize": "grpo.reward_aggregation=sum",
        "normalize_then_sum": "grpo.reward_aggregation=normalize-then-sum",
    },
    "full_finetuning": {"true": "lora.enabled=false", "false": "lora.enabled=true"},
    "use_gradient_checkpointing": {
        "true": "model.gradient_checkpointing=true", "unsloth": "model.gradient_checkpointing=true",
        "false": "model.gradient_checkpointing=false",
    },
    "loss_agg_mode": {
        "token-mean": "grpo.aggregation=token", "seq-mean-token-mean": "grpo.aggregation=sequence",
        "seq-mean-token-sum": "grpo.aggregation=sequence-sum", "seq-mean-token-sum-norm": "grpo.aggregation=constant",
    },
    "scale_rewards": {
        "true": "grpo.advantage_scale=std", "group": "grpo.advantage_scale=std",
        "batch": "grpo.advantage_scale=batch", "false": "grpo.advantage_scale=none",
        "none": "grpo.advantage_scale=none",
    },
    "norm_adv_by_std_in_grpo": {"true": "grpo.advantage_scale=std", "false": "grpo.advantage_scale=none"},
    "importance_sampling_level": {"token": "grpo.surrogate=clip", "sequence": "grpo.surrogate=sequence"},
    "adv_estimator": {
        "grpo": "grpo.preset=grpo", "rloo": "grpo.preset=rloo", "reinforce_plus_plus": "grpo.preset=reinforce++",
        "reinforce_plus_plus_baseline": "grpo.preset=reinforce++-baseline",
    },
    "advantage_estimator": {
        "rloo": "grpo.preset=rloo", "group_norm": "grpo.preset=grpo", "dr_grpo": "grpo.preset=dr_grpo",
    },
    "kl_loss_type": {
        "k1": "grpo.kl_estimator=k1", "kl": "grpo.kl_estimator=k1", "k2": "grpo.kl_estimator=k2",
        "mse": "grpo.kl_estimator=k2", "k3": "grpo.kl_estimator=k3", "low_var_kl": "grpo.kl_estimator=k3",
    },
    "use_kl_loss": {"true": "grpo.kl_estimator=k3"},
    "use_kl_in_reward": {"true": "grpo.kl_estimator=k1"},
    "kl_ctrl.type": {"fixed": "ppo.target_kl=null"},
    "vllm_importance_sampling_mode": {
        "token_truncate": "grpo.importance_correction=token", "token_mask": "grpo.importance_correction=token-mask",
        "sequence_truncate": "grpo.importance_correction=sequence",
        "sequence_mask": "grpo.importance_correction=sequence-mask",
    },
    "vllm_importance_sampling_correction": {"false": "grpo.importance_correction=none"},
    "lr_scheduler_type": SCHEDULES,
    "lr_scheduler": SCHEDULES,
    "apply_chat_template": {"true": "task.chat=true", "false": "task.chat=false"},
    "eval_strategy": {"no": "run.eval_prompts=0"},
    "evaluation_strategy": {"no": "run.eval_prompts=0"},
    "save_strategy": {"no": "run.save_every=0"},
    "report_to": {
        "none": "run.trackers=[]", "wandb": "run.trackers=[wandb]", "trackio": "run.trackers=[trackio]",
        "tensorboard": "run.trackers=[tensorboard]", "mlflow": "run.trackers=[mlflow]",
    },
    "torch_dtype": {
        "auto": "model.dtype=auto", "bfloat16": "model.dtype=bfloat16", "float16": "model.dtype=float16",
        "float32": "model.dtype=float32",
    },
    "bf16": {"true": "model.dtype=bfloat16"},
    "fp16": {"true": "model.dtype=float16"},
    "load_in_4bit": {"true": "model.quantization=4bit", "false": "model.quantization=null"},
    "assistant_only_loss": {"true": "sft.loss_on=completion"},
    "completion_only_loss": {"true": "sft.loss_on=completion", "false": "sft.loss_on=all"},
    "train_on_inputs": {"true": "sft.loss_on=all", "false": "sft.loss_on=completion"},
    "mask_truncated_completions": {"true": "reward.truncated=mask", "false": "reward.truncated=keep"},
    "enable_thinking": {
        "true": "task.chat_template_kwargs={enable_thinking: true}",
        "false": "task.chat_template_kwargs={enable_thinking: false}",
    },
}  # fmt: skip
OPTIONS = {"output_dir": "--output-dir", "default_local_dir": "--output-dir", "save_path": "--output-dir",
           "ckpt_path": "--output-dir", "run_name": "--name", "experiment_name": "--name"}  # fmt: skip
OPTIMIZER_STEPS = {"max_steps", "save_steps", "eval_steps", "lr_warmup_steps", "warmup_steps"}  # what TRL counts
BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"}
NOT_IN_THE_LINE = {  # names whose value says something else than the setting's, with the reason
    "train_batch_size": "prompts in verl, completions of an optimizer step in OpenRLHF",
    "ppo_max_token_len_per_gpu": "no size changes the gradient",
    "ppo_micro_batch_size_per_gpu": "no size changes the gradient",
    "micro_train_batch_size": "no size changes the gradient",
    "eps_clip": "two settings here, of which one has another default",
    "lr_warmup_ratio": "a number of steps here",
    "kl_target": "nats of a response here",
    "use_wandb": "a list of trackers",
    "remote_rm_url": "a function of reward.functions may ask it",
    "ipo": "per token or summed",
    "ref_pretrain": "the reference is what training starts from",
    "input_key": "a new name for a column",
    "output_key": "a new name for a column",
    "label_key": "a new name for a column",
    "chosen_key": "a new name for a column",
    "rejected_key": "a new name for a column",
    "filter_groups.enable": "a number of rounds here",
    "filter_groups.max_num_gen_batches": "rounds beside the first",
    "dynamic_filtering": "a number of rounds here",
    "ref_model": "the reference is what training starts from",
    "ref_model_path": "the reference is what training starts from",
    "reference_free": "a loss here",
    "reward_funcs": "files or modules of reward.functions",
    "custom_reward_function.path": "a file of reward.functions",
    "reward_weights": "weights of reward.functions",
    "missing_eos_penalty": "penalize subtracts 1",
    "max_tool_calling_iterations": "counts with an environment, tools or an agent only",
    "prompt_key": "a new name for a column",
    "dataset_text_field": "a new name for a column",
    "trainer.logger": "a list of trackers",
    "kl_placement": "grpo.kl_estimator says where",
    "kl_controller": "a target here",
    "stop_strings": "a list here",
    "stop_sequences": "a list here",
    "rollout_correction.rollout_is": "grpo.importance_correction has names of its own",
    "enable_vllm_is_correction": "grpo.importance_correction has names of its own",
}
