"""Names of settings in TRL, verl, OpenRLHF, PEFT and transformers: what each is here, and how its value is read.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n. That of a
section stands for the section given as a value: `model=NAME`. A setting of grpo is that of the same name under a method
that has one; what differs more is in `under`. A message ends with the line to copy, which the readers
(foreign_values.py) write, with what a name brings along (foreign_defaults.py), and names what is not in it.
"""

from __future__ import annotations

from tinyrl.config.foreign_row import Foreign, cannot_be_set, setting
from tinyrl.config.foreign_values import (
    Column,
    KlSwitch,
    NotCopied,
    OfKl,
    Option,
    Reader,
    Strategy,
    Values,
    adam_betas,
    as_given,
    as_text,
    batch_size,
    clip_low_high,
    critic_path,
    dataset,
    epochs,
    first_step_too,
    in_steps,
    lora_rank,
    missing_eos_penalty,
    modules,
    num_mini_batches,
    part_of_dataset,
    reward_functions,
    reward_weights,
    server_host,
    server_port,
    server_url,
    share_of_run,
    test_split,
    total_episodes,
    trackers,
    train_batch_size,
    verls_minibatch,
)
from tinyrl.config.without_setting import WITHOUT_SETTING

SCHEDULES = Values(
    {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
)  # of two libraries, which spell them alike
ESTIMATORS = Values({"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"})
BATCH_OF_ROWS = {
    "sft": setting("sft.batch_size"),
    "reward": setting("reward_model.batch_size"),
    "dpo": setting("dpo.batch_size"),
}
# Names that only transformers' and TRL's trainers have. Their schedule is linear where none is given.
OF_TRL = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_train_epochs",
          "max_steps", "max_completion_length", "num_iterations", "save_strategy", "eval_strategy",
          "logging_steps"}  # fmt: skip

TABLE = (
    Foreign("num_generations rollout_n rollout.n n_samples_per_prompt", setting("grpo.group_size")),
    Foreign(
        "beta",
        setting("grpo.kl_coef"),
        under={"dpo": setting("dpo.beta"), "distill": setting("teacher.divergence")},
    ),
    Foreign(
        "kl_loss_coef init_kl_coef kl_ctrl.kl_coef",
        setting("grpo.kl_coef"),
        reads={
            "kl_loss_coef": OfKl("use_kl_loss", as_given),
            "kl_ctrl.kl_coef": OfKl("use_kl_in_reward", as_given),
        },
    ),
    Foreign(
        "kl_loss_type kl_penalty",
        setting("grpo.kl_estimator"),
        reads={
            "kl_loss_type": OfKl("use_kl_loss", ESTIMATORS),
            "kl_penalty": OfKl("use_kl_in_reward", NotCopied("k1 is in the reward, k2 and k3 are in the loss")),
        },
    ),
    Foreign(
        "use_kl_loss use_kl_in_reward kl_placement",
        setting("grpo.kl_estimator", ": k1 is in the reward, k2 and k3 are in the loss"),
        reads={
            "use_kl_loss": KlSwitch("k3", ("use_kl_in_reward", "init_kl_coef", "kl_ctrl.kl_coef", "beta", "kl_coef")),
            "use_kl_in_reward": KlSwitch("k1", ("use_kl_loss", "init_kl_coef", "beta", "kl_coef")),
            "kl_placement": NotCopied("grpo.kl_estimator says where"),
        },
    ),
    Foreign(
        "kl_ctrl.type kl_ctrl.target_kl target kl_controller kl_target",
        setting("ppo.target_kl", ": a number adapts kl_coef, null keeps it"),
        reads={
            "kl_ctrl.type": Values({"fixed": "null"}),
            "kl_controller": NotCopied("a target here"),
            "kl_target": NotCopied("nats of a response here"),
        },
    ),
    Foreign(
        "epsilon clip_ratio eps_clip",
        setting("grpo.clip_eps", ", with the same grpo.clip_eps_high where none is given"),
        under={"ppo": setting("ppo.clip_eps")},
    ),
    Foreign("clip_ratio_low", setting("grpo.clip_eps")),
    Foreign("epsilon_high clip_ratio_high", setting("grpo.clip_eps_high")),
    Foreign("cliprange", setting("ppo.clip_eps")),
    Foreign(
        "eps_clip_low_high",
        setting("grpo.clip_eps", " and grpo.clip_eps_high"),
        read=clip_low_high,
        under={"ppo": setting("ppo.clip_eps")},
    ),
    Foreign("value_clip cliprange_value", setting("ppo.value_clip_eps")),
    Foreign("vf_coef", setting("ppo.value_coef")),
    Foreign("lam lambd lam_actor", setting("ppo.gae_lambda")),
    Foreign("algorithm.gamma gamma", setting("ppo.gamma")),
    Foreign("entropy_coeff entropy_loss_coef", setting("ppo.entropy_coef")),
    Foreign("num_ppo_epochs ppo_epochs", setting("ppo.num_epochs")),
    Foreign("num_iterations", setting("grpo.num_epochs")),
    Foreign(
        "max_epochs",
        setting("grpo.num_epochs", ", passes over the samples of a step"),
        under={"sft": setting("run.epochs"), "reward": setting("run.epochs"), "dpo": setting("run.epochs")},
    ),
    Foreign("rollout_batch_size", setting("grpo.num_prompts", ", prompts of a step")),
    Foreign(
        "ppo_mini_batch_size mini_batch_size num_mini_batches",
        setting("ppo.minibatch_size", ", in sequences (verl counts prompts, num_mini_batches minibatches)"),
        reads={"ppo_mini_batch_size": verls_minibatch, "num_mini_batches": num_mini_batches},
    ),
    Foreign("data.train_batch_size", setting("grpo.num_prompts", ", prompts of a step"), under=BATCH_OF_ROWS),
    Foreign(
        "train_batch_size",
        setting(
            "grpo.num_prompts",
            ", prompts of a step, if it is verl's; if it is OpenRLHF's, completions of an optimizer step: "
            "grpo.minibatch_size",
        ),
        read=train_batch_size,
        under=BATCH_OF_ROWS,
    ),
    Foreign(
        "loss_type",
        setting(
            "grpo.aggregation", " (grpo: sequence, dapo and bnpo: token, dr_grpo: constant); cispo is grpo.surrogate"
        ),
        read=Values(
            {
                "grpo": "grpo.aggregation=sequence",
                "dapo": "grpo.aggregation=token",
                "bnpo": "grpo.aggregation=token",
                "dr_grpo": "grpo.aggregation=constant",
                "cispo": "grpo.surrogate=cispo",
                "sigmoid": "dpo.loss=sigmoid",
                "ipo": "dpo.loss=ipo",
                "kto_pair": "dpo.loss=kto",
                "simpo": "dpo.loss=simpo",
            }
        ),
        under={"dpo": setting("dpo.loss"), "sft": cannot_be_set("it is the negative log-likelihood of the tokens")},
    ),
    Foreign("simpo_gamma", setting("dpo.target_margin")),
    Foreign("reference_free", setting("dpo.loss", ": orpo or simpo"), read=NotCopied("a loss here")),
    Foreign(
        "ref_model ref_model_path ref_pretrain",
        setting("model.adapter", ": the reference is what training starts from, the adapter or the base"),
        read=NotCopied("the reference is what training starts from"),
        under={"sft": cannot_be_set("it has no reference"), "reward": cannot_be_set("it has no reference")},
    ),
    Foreign(
        "loss_agg_mode",
        setting(
            "grpo.aggregation",
            " (token-mean: token, seq-mean-token-mean: sequence, seq-mean-token-sum: sequence-sum, "
            "seq-mean-token-sum-norm: constant)",
        ),
        read=Values(
            {
                "token-mean": "token",
                "seq-mean-token-mean": "sequence",
                "seq-mean-token-sum": "sequence-sum",
                "seq-mean-token-sum-norm": "constant",
            }
        ),
    ),
    Foreign(
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm",
        setting("grpo.advantage_scale", " (true or group: std, batch: batch, false: none)"),
        reads={
            "scale_rewards": Values({"true": "std", "group": "std", "batch": "batch", "false": "none", "none": "none"}),
            "norm_adv_by_std_in_grpo": Values({"true": "std", "false": "none"}),
            "no_advantage_std_norm": Values({"true": "none"}),
        },
    ),
    Foreign(
        "importance_sampling_level",
        setting("grpo.surrogate", " (token: clip, sequence: sequence; preset=gspo has its paper's clip)"),
        read=Values({"token": "clip", "sequence": "sequence"}),
    ),
    Foreign("use_bias_correction_kl", setting("grpo.kl_unbiased")),
    Foreign(
        "filter_groups.enable filter_groups.max_num_gen_batches dynamic_filtering",
        setting("grpo.dynamic_sampling_rounds"),
        reads={
            "filter_groups.enable": NotCopied("a number of rounds here"),
            "filter_groups.max_num_gen_batches": NotCopied("rounds beside the first"),
            "dynamic_filtering": NotCopied("a number of rounds here"),
        },
    ),
    Foreign(
        "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_correction.rollout_is "
        "enable_vllm_is_correction",
        setting(
            "grpo.importance_correction",
            " (token_truncate: token, sequence_truncate: sequence, token_mask: token-mask, sequence_mask: "
            "sequence-mask; off: none)",
        ),
        reads={
            "vllm_importance_sampling_mode": Values(
                {
                    "token_truncate": "token",
                    "token_mask": "token-mask",
                    "sequence_truncate": "sequence",
                    "sequence_mask": "sequence-mask",
                }
            ),
            "vllm_importance_sampling_correction": Values({"false": "none"}),
            "rollout_correction.rollout_is": NotCopied("grpo.importance_correction has names of its own"),
            "enable_vllm_is_correction": NotCopied("grpo.importance_correction has names of its own"),
        },
    ),
    Foreign(
        "max_completion_length response_length max_response_length max_tokens generate_max_len",
        setting("generation.max_new_tokens"),
    ),
    Foreign("max_prompt_length prompt_max_len", setting("generation.max_prompt_tokens")),
    Foreign(
        "vllm_server_base_url vllm_server_host vllm_server_port",
        setting("generation.url", ", with generation.engine=server"),
        reads={
            "vllm_server_base_url": server_url,
            "vllm_server_host": server_host,
            "vllm_server_port": server_port,
        },
    ),
    Foreign("stop_strings stop_sequences", setting("generation.stop"), read=NotCopied("a list here")),
    Foreign("temperature", setting("generation.temperature")),
    Foreign("lr actor_learning_rate", setting("optim.learning_rate")),
    Foreign(
        "optim",
        setting("optim.optimizer", ": adamw or adamw8bit"),
        read=Values(
            {
                **dict.fromkeys(
                    ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "paged_adamw_32bit"), "adamw"
                ),
                **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
            }
        ),
    ),
    Foreign("l2", setting("optim.weight_decay")),
    Foreign("adam_beta1 adam_beta2 adam_betas", setting("optim.betas", ", both in one list"), read=adam_betas),
    Foreign(
        "warmup_steps warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio",
        setting("optim.warmup_steps", ", in steps, not as a share of the run"),
        reads={
            "warmup_steps": in_steps,
            "warmup_ratio": share_of_run,
            "lr_warmup_steps": in_steps,
            "lr_warmup_ratio": NotCopied("a number of steps here"),
            "lr_warmup_steps_ratio": NotCopied("a number of steps here"),
        },
    ),
    Foreign("lr_scheduler_type lr_scheduler", setting("optim.schedule"), read=SCHEDULES),
    Foreign(
        "critic.optim.lr",
        setting("optim.critic_learning_rate"),
        under=dict.fromkeys(("grpo", "distill", "sft", "reward", "dpo"), cannot_be_set("it has no critic")),
    ),
    Foreign("grad_clip max_norm", setting("optim.max_grad_norm")),
    Foreign(
        "max_steps total_training_steps total_episodes",
        setting(
            "run.num_steps",
            ", in steps of num_prompts prompts (TRL counts optimizer steps, of which a step may have several)",
        ),
        reads={"max_steps": in_steps, "total_episodes": total_episodes},
        under={"sft": setting("run.num_steps"), "reward": setting("run.num_steps"), "dpo": setting("run.num_steps")},
    ),
    Foreign(
        "num_train_epochs total_epochs num_episodes",
        setting("run.epochs", ", passes over all training rows; or run.num_steps, not both"),
        reads={"num_train_epochs": epochs},
    ),
    Foreign(
        "save_steps save_freq",
        setting("run.save_every", ", in steps (TRL counts optimizer steps, of which a step may have several)"),
        reads={"save_steps": in_steps},
        under={"sft": setting("run.save_every"), "reward": setting("run.save_every"), "dpo": setting("run.save_every")},
    ),
    Foreign(
        "eval_steps test_freq",
        setting("run.eval_every", ", in steps (TRL counts optimizer steps, of which a step may have several)"),
        reads={"eval_steps": in_steps},
        under={"sft": setting("run.eval_every"), "reward": setting("run.eval_every"), "dpo": setting("run.eval_every")},
    ),
    Foreign(
        "eval_strategy evaluation_strategy",
        setting("run.eval_every", ", in steps (with no: run.eval_prompts=0)"),
        read=Strategy("run.eval_prompts=0"),
    ),
    Foreign(
        "save_strategy",
        setting("run.save_every", ", in steps; 0 saves the last one only"),
        read=Strategy("run.save_every=0"),
    ),
    Foreign("save_total_limit", setting("run.keep_checkpoints")),
    Foreign("early_stopping_patience", setting("run.patience")),
    Foreign(
        "report_to trainer.logger use_wandb",
        setting("run.trackers"),
        read=trackers,
        reads={"use_wandb": Values({"true": "[wandb]", "false": "[]"})},
    ),
    Foreign(
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size",
        setting(
            "grpo.num_prompts",
            ": per_device_train_batch_size x gradient_accumulation_steps completions per optimizer step = "
            "num_prompts x group_size",
        ),
        read=batch_size,
        under={
            "sft": setting("sft.batch_size", ": per_device_train_batch_size x gradient_accumulation_steps"),
            "reward": setting("reward_model.batch_size", ": per_device_train_batch_size x gradient_accumulation_steps"),
            "dpo": setting("dpo.batch_size", ": per_device_train_batch_size x gradient_accumulation_steps"),
        },
    ),
    Foreign(
        "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu micro_train_batch_size",
        setting("run.micro_batch_tokens", ", in tokens; auto fits the memory, and no size changes the gradient"),
        read=NotCopied("no size changes the gradient"),
    ),
    Foreign("seed random_state", setting("run.seed")),
    Foreign("full_determinism", setting("run.deterministic")),
    Foreign("lora_alpha", setting("lora.alpha")),
    Foreign("lora_r lora_rank max_lora_rank", setting("lora.r"), reads={"lora_r": lora_rank, "lora_rank": lora_rank}),
    Foreign(
        "use_gradient_checkpointing enable_gradient_checkpointing",
        setting("model.gradient_checkpointing", ": true or false"),
        read=Values({"true": "true", "unsloth": "true", "false": "false"}),
    ),
    Foreign(
        "full_finetuning",
        setting("lora.enabled", ", the other way round"),
        read=Values({"true": "false", "false": "true"}),
    ),
    Foreign(
        "max_tool_calling_iterations",
        setting("environment.max_turns"),
        read=NotCopied("counts with an environment, tools or an agent only"),
    ),
    Foreign(
        "multi_objective_aggregation",
        setting("grpo.reward_aggregation", " (sum_then_normalize: sum, normalize_then_sum)"),
        read=Values({"sum_then_normalize": "sum", "normalize_then_sum": "normalize-then-sum"}),
    ),
    Foreign("lora_dropout", setting("lora.dropout")),
    Foreign("lora_target_modules target_modules", setting("lora.target_modules"), read=modules),
    Foreign("target_parameters lora_target_parameters", setting("lora.target_parameters")),
    Foreign("use_peft lora", setting("lora.enabled")),
    Foreign(
        "model model_name_or_path model_name sft_model_path actor_rollout_ref.model.path pretrain",
        setting("model.path"),
    ),
    Foreign("model_revision", setting("model.revision")),
    Foreign(
        "trust_remote_code",
        setting("--trust-remote-code"),
        read=Option("--trust-remote-code", is_flag=True),
    ),
    Foreign(
        "torch_dtype bf16 fp16",
        setting("model.dtype", ": bfloat16, float16, float32 or auto"),
        reads={
            "torch_dtype": Values({"auto": "auto", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}),
            "bf16": Values({"true": "bfloat16"}),
            "fp16": Values({"true": "float16"}),
        },
    ),
    Foreign("load_in_4bit", setting("model.quantization"), read=Values({"true": "4bit", "false": "null"})),
    Foreign("critic.model.path critic_pretrain value_model critic", setting("critic.path"), read=critic_path),
    Foreign("critic_warmup freezing_actor_steps", setting("critic.warmup_steps")),
    Foreign(
        "dataset_name train_dataset train_files dataset prompt_data",
        setting("task.data"),
        read=as_text,
        reads={"dataset_name": dataset, "prompt_data": dataset},
    ),
    Foreign(
        "dataset_config dataset_train_split prompt_split",
        setting("task.data", ": owner/name:config@split"),
        read=part_of_dataset,
    ),
    Foreign(
        "val_files eval_dataset dataset_test_split",
        setting("task.eval_data"),
        read=as_text,
        reads={"dataset_test_split": test_split},
    ),
    Foreign("task", setting("task.name")),
    Foreign(
        "data.truncation filter_overlong_prompts",
        setting("task.on_overlong_prompt", ": error or drop"),
        reads={
            "data.truncation": Values({"error": "error"}, is_switch=True),
            "filter_overlong_prompts": Values({"true": "drop", "false": "error"}),
        },
    ),
    Foreign("environment environment_factory", setting("environment.name")),
    Foreign(
        "val_before_train eval_on_start", setting("run.eval_every", ", and always at the start"), read=first_step_too
    ),
    Foreign("lmbda", setting("distill.on_policy_fraction")),
    Foreign("teacher_model_name_or_path teacher_model teacher", setting("teacher.path")),
    Foreign(
        "assistant_only_loss completion_only_loss train_on_inputs",
        setting("sft.loss_on", ": completion or all"),
        reads={
            "assistant_only_loss": Values({"true": "completion"}),
            "completion_only_loss": Values({"true": "completion", "false": "all"}),
            "train_on_inputs": Values({"true": "all", "false": "completion"}),
        },
    ),
    Foreign(
        "dataset_text_field prompt_key dataset_prompt_column input_key output_key label_key chosen_key rejected_key",
        setting("task.columns", ": {NEW: OLD}, NEW being text, prompt, completion, answer, chosen or rejected"),
        reads={
            "dataset_text_field": Column("text"),
            "prompt_key": Column("prompt"),
            "dataset_prompt_column": Column("prompt"),
            "input_key": Column("prompt"),
            "output_key": Column("completion"),
            "label_key": Column("answer"),
            "chosen_key": Column("chosen"),
            "rejected_key": Column("rejected"),
        },
    ),
    Foreign(
        "apply_chat_template",
        setting("task.chat", ": auto, true or false"),
        read=Values({"true": "true", "false": "false"}),
    ),
    Foreign(
        "log_completions",
        setting("run.log_completions", ", for wandb and trackio; samples.jsonl has 16 of each step"),
    ),
    Foreign(
        "enable_thinking chat_template_kwargs",
        setting("task.chat_template_kwargs", ": {enable_thinking: true}, or other variables"),
        reads={"enable_thinking": Values({"true": "{enable_thinking: true}", "false": "{enable_thinking: false}"})},
    ),
    Foreign(
        "reward_funcs reward custom_reward_function.path custom_reward_function.name remote_rm_url",
        setting("reward.functions", ": [{use: file.py:function}]"),
        reads={
            "reward_funcs": reward_functions,
            "reward": reward_functions,
            "custom_reward_function.path": NotCopied("a function here is def reward(prompts, completions, **columns)"),
            "custom_reward_function.name": NotCopied("a function here is def reward(prompts, completions, **columns)"),
            "remote_rm_url": NotCopied("a function of reward.functions may ask it"),
        },
    ),
    Foreign(
        "reward_weights",
        setting("reward.functions", ": [{use: file.py:function, weight: 0.5}]"),
        read=reward_weights,
    ),
    Foreign(
        "reward_model_path reward_pretrain reward_model_name_or_path reward_model reward_model.model.path",
        setting("reward.model"),
    ),
    Foreign("overlong_buffer_len", setting("reward.overlong_tokens")),
    Foreign(
        "mask_truncated_completions",
        setting("reward.truncated", " (true: mask, false: keep)"),
        read=Values({"true": "mask", "false": "keep"}),
    ),
    Foreign(
        "missing_eos_penalty",
        setting("reward.truncated", ": penalize subtracts 1"),
        read=missing_eos_penalty,
    ),
    Foreign("output_dir default_local_dir save_path ckpt_path", setting("--output-dir"), read=Option("--output-dir")),
    Foreign("experiment_name run_name run.name wandb.name", setting("--name"), read=Option("--name")),
    Foreign(
        "adv_estimator advantage_estimator",
        setting("grpo.advantage", " (group, leave-one-out, reinforce++); gae is another method, `tinyrl train ppo`"),
        reads={
            "adv_estimator": Values(
                {
                    "grpo": "group",
                    "rloo": "leave-one-out",
                    "reinforce_plus_plus": "reinforce++",
                    "reinforce_plus_plus_baseline": "reinforce++-baseline",
                }
            ),
            "advantage_estimator": Values(
                {
                    "group_norm": "group",
                    "dr_grpo": "grpo.advantage_scale=none",
                    "rloo": "leave-one-out",
                    "reinforce": "reinforce++",
                    "reinforce_baseline": "reinforce++-baseline",
                }
            ),
        },
        under={
            "ppo": cannot_be_set(
                "`tinyrl train ppo` has GAE (ppo.gae_lambda); the others are baselines of `tinyrl train grpo`"
            )
        },
    ),
    Foreign("ipo", setting("dpo.loss", ": ipo, per token, or ipo_sum"), read=NotCopied("per token or summed")),
    *WITHOUT_SETTING,
)

ALIASES = {name: row for row in TABLE for name in row.names.split()}


def reader_of(name: str) -> Reader:
    """Return how the value of a name is read; one that no other library has, as it is."""
    row = ALIASES.get(name)
    return as_given if row is None else row.reads.get(name, row.read)
