"""Names of settings in TRL, verl, OpenRLHF, PEFT and transformers: what each is here, and how its value is read.

A name with dots stands for the end of a dotted one: `rollout.n` is verl's actor_rollout_ref.rollout.n. A setting of
grpo is that of the same name under a method that has one; what differs more is in `under`. A message ends with the line
to copy, which the readers (foreign_values.py) write, and names what is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinyrl.config.foreign_values import (
    NotCopied,
    Option,
    Reader,
    Values,
    as_given,
    batch_size,
    epochs,
    in_steps,
    kl_bias_correction,
    kl_coef,
    log_completions,
    lora_rank,
    server_url,
)


@dataclass(frozen=True)
class Ours:
    """What a name is here: a setting, with a remark behind it; or the reason why there is none (is_needless: nothing
    has to be set).
    """

    setting: str = ""
    remark: str = ""
    reason: str = ""
    is_needless: bool = False


@dataclass(frozen=True)
class Foreign:
    """A row of the table. names: apart by spaces; read: how the value of each is read, but for those in `reads`;
    under: what the names are under some methods instead.
    """

    names: str
    ours: Ours
    read: Reader = as_given
    reads: Mapping[str, Reader] = field(default_factory=dict)
    under: Mapping[str, Ours] = field(default_factory=dict)


def setting(name: str, remark: str = "") -> Ours:
    return Ours(setting=name, remark=remark)


def not_needed(reason: str) -> Ours:
    return Ours(reason=reason, is_needless=True)


def cannot_be_set(reason: str) -> Ours:
    return Ours(reason=reason)


SCHEDULES = Values(
    {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
)  # of two libraries, which spell them alike
# Names that only transformers' and TRL's trainers have. Their schedule is linear where none is given.
OF_TRL = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_train_epochs",
          "max_steps", "max_completion_length", "num_iterations", "save_strategy", "eval_strategy",
          "logging_steps"}  # fmt: skip

TABLE = (
    Foreign("num_generations rollout_n rollout.n n_samples_per_prompt", setting("grpo.group_size")),
    Foreign(
        "beta",
        setting("grpo.kl_coef"),
        read=kl_coef,
        under={"dpo": setting("dpo.beta"), "distill": setting("teacher.divergence")},
    ),
    Foreign("kl_loss_coef init_kl_coef kl_ctrl.kl_coef", setting("grpo.kl_coef")),
    Foreign(
        "kl_loss_type",
        setting("grpo.kl_estimator"),
        read=Values({"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}),
    ),
    Foreign(
        "use_kl_loss use_kl_in_reward kl_placement",
        setting("grpo.kl_estimator", ": k1 is in the reward, k2 and k3 are in the loss"),
        reads={
            "use_kl_loss": Values({"true": "k3"}, is_switch=True),
            "use_kl_in_reward": Values({"true": "k1"}, is_switch=True),
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
    Foreign("epsilon clip_ratio clip_ratio_low", setting("grpo.clip_eps")),
    Foreign("epsilon_high clip_ratio_high", setting("grpo.clip_eps_high")),
    Foreign("cliprange", setting("ppo.clip_eps")),
    Foreign(
        "eps_clip",
        setting("grpo.clip_eps", ", with the same grpo.clip_eps_high"),
        read=NotCopied("two settings here, of which one has another default", but_for=("ppo",)),
        under={"ppo": setting("ppo.clip_eps")},
    ),
    Foreign("value_clip cliprange_value", setting("ppo.value_clip_eps")),
    Foreign("vf_coef", setting("ppo.value_coef")),
    Foreign("lam lambd lam_actor", setting("ppo.gae_lambda")),
    Foreign("algorithm.gamma", setting("ppo.gamma")),
    Foreign("entropy_coeff entropy_loss_coef", setting("ppo.entropy_coef")),
    Foreign("num_ppo_epochs ppo_epochs", setting("ppo.num_epochs")),
    Foreign("num_iterations", setting("grpo.num_epochs")),
    Foreign(
        "max_epochs",
        setting("grpo.num_epochs", ", passes over the samples of a step"),
        under={"sft": setting("run.epochs"), "reward": setting("run.epochs"), "dpo": setting("run.epochs")},
    ),
    Foreign("rollout_batch_size", setting("grpo.num_prompts", ", prompts of a step")),
    Foreign("ppo_mini_batch_size mini_batch_size", setting("ppo.minibatch_size", ", in sequences")),
    Foreign(
        "train_batch_size",
        setting(
            "grpo.num_prompts",
            ", prompts of a step, if it is verl's; if it is OpenRLHF's, completions of an optimizer step: "
            "grpo.minibatch_size",
        ),
        read=NotCopied(
            "prompts in verl, completions of an optimizer step in OpenRLHF", but_for=("sft", "reward", "dpo")
        ),
        under={
            "sft": setting("sft.batch_size"),
            "reward": setting("reward_model.batch_size"),
            "dpo": setting("dpo.batch_size"),
        },
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
            }
        ),
        under={"dpo": setting("dpo.loss")},
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
        "scale_rewards norm_adv_by_std_in_grpo",
        setting("grpo.advantage_scale", " (true or group: std, batch: batch, false: none)"),
        reads={
            "scale_rewards": Values({"true": "std", "group": "std", "batch": "batch", "false": "none", "none": "none"}),
            "norm_adv_by_std_in_grpo": Values({"true": "std", "false": "none"}),
        },
    ),
    Foreign(
        "importance_sampling_level",
        setting("grpo.surrogate", " (token: clip, sequence: sequence; preset=gspo has its paper's clip)"),
        read=Values({"token": "clip", "sequence": "sequence"}),
    ),
    Foreign("use_bias_correction_kl", setting("grpo.kl_unbiased"), read=kl_bias_correction),
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
    Foreign("vllm_server_base_url", setting("generation.url"), read=server_url),
    Foreign("stop_strings stop_sequences", setting("generation.stop"), read=NotCopied("a list here")),
    Foreign("temperature", setting("generation.temperature")),
    Foreign(
        "top_p top_k",
        cannot_be_set(
            "training samples the whole distribution; leave it out. `tinyrl eval` takes generation.top_p and "
            ".top_k, `tinyrl serve` both with a request"
        ),
    ),
    Foreign("lr actor_learning_rate", setting("optim.learning_rate")),
    Foreign("l2", setting("optim.weight_decay")),
    Foreign(
        "warmup_ratio lr_warmup_steps lr_warmup_ratio",
        setting("optim.warmup_steps", ", in steps, not as a share of the run"),
        reads={
            "warmup_ratio": in_steps,
            "lr_warmup_steps": in_steps,
            "lr_warmup_ratio": NotCopied("a number of steps here"),
        },
    ),
    Foreign("lr_scheduler_type lr_scheduler", setting("optim.schedule"), read=SCHEDULES),
    Foreign("critic.optim.lr", setting("optim.critic_learning_rate")),
    Foreign("grad_clip", setting("optim.max_grad_norm")),
    Foreign(
        "max_steps total_training_steps",
        setting(
            "run.num_steps",
            ", in steps of num_prompts prompts (TRL counts optimizer steps, of which a step may have several)",
        ),
        reads={"max_steps": in_steps},
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
        read=Values({"no": "run.eval_prompts=0"}),
    ),
    Foreign(
        "save_strategy", setting("run.save_every", ", in steps; 0 saves the last one only"), read=Values({"no": "0"})
    ),
    Foreign("save_total_limit", setting("run.keep_checkpoints")),
    Foreign("early_stopping_patience", setting("run.patience")),
    Foreign("load_best_model_at_end", not_needed("the best checkpoint is kept, and RUN@best means it")),
    Foreign(
        "report_to trainer.logger use_wandb",
        setting("run.trackers"),
        reads={
            "report_to": Values(
                {
                    "none": "[]",
                    "wandb": "[wandb]",
                    "trackio": "[trackio]",
                    "tensorboard": "[tensorboard]",
                    "mlflow": "[mlflow]",
                }
            ),
            "trainer.logger": NotCopied("a list of trackers"),
            "use_wandb": NotCopied("a list of trackers"),
        },
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
    Foreign(
        "micro_rollout_batch_size",
        not_needed("as many rows are decoded together as the memory holds (generation.max_rows)"),
    ),
    Foreign("seed random_state", setting("run.seed")),
    Foreign("lora_alpha", setting("lora.alpha")),
    Foreign("lora_r lora_rank max_lora_rank", setting("lora.r"), reads={"lora_r": lora_rank, "lora_rank": lora_rank}),
    Foreign(
        "use_gradient_checkpointing",
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
    Foreign("lora_target_modules", setting("lora.target_modules")),
    Foreign("target_parameters lora_target_parameters", setting("lora.target_parameters")),
    Foreign("use_peft", setting("lora.enabled")),
    Foreign("model_name_or_path actor_rollout_ref.model.path pretrain", setting("model.path")),
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
    Foreign("critic.model.path critic_pretrain", setting("critic.path")),
    Foreign("critic_warmup freezing_actor_steps", setting("critic.warmup_steps")),
    Foreign("dataset_name train_files dataset prompt_data", setting("task.data")),
    Foreign("val_files eval_dataset", setting("task.eval_data")),
    Foreign("lmbda", setting("distill.on_policy_fraction")),
    Foreign("teacher_model_name_or_path teacher_model", setting("teacher.path")),
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
        "dataset_text_field prompt_key input_key output_key label_key chosen_key rejected_key",
        setting("task.columns", ": {NEW: OLD}, NEW being prompt, completion, answer, chosen or rejected"),
        read=NotCopied("a new name for a column"),
    ),
    Foreign(
        "apply_chat_template",
        setting("task.chat", ": auto, true or false"),
        read=Values({"true": "true", "false": "false"}),
    ),
    Foreign(
        "log_completions",
        setting("run.log_completions", ", for wandb and trackio; samples.jsonl has 16 of each step"),
        read=log_completions,
    ),
    Foreign(
        "enable_thinking chat_template_kwargs",
        setting("task.chat_template_kwargs", ": {enable_thinking: true}, or other variables"),
        reads={"enable_thinking": Values({"true": "{enable_thinking: true}", "false": "{enable_thinking: false}"})},
    ),
    Foreign(
        "reward_funcs custom_reward_function.path remote_rm_url",
        setting("reward.functions", ": [{use: file.py:function}]"),
        reads={
            "reward_funcs": NotCopied("files or modules of reward.functions"),
            "custom_reward_function.path": NotCopied("a file of reward.functions"),
            "remote_rm_url": NotCopied("a function of reward.functions may ask it"),
        },
    ),
    Foreign(
        "reward_weights",
        setting("reward.functions", ": [{use: file.py:function, weight: 0.5}]"),
        read=NotCopied("weights of reward.functions"),
    ),
    Foreign("reward_model_path reward_pretrain", setting("reward.model")),
    Foreign(
        "mask_truncated_completions",
        setting("reward.truncated", " (true: mask, false: keep)"),
        read=Values({"true": "mask", "false": "keep"}),
    ),
    Foreign(
        "missing_eos_penalty",
        setting("reward.truncated", " (penalize subtracts 1)"),
        read=NotCopied("penalize subtracts 1"),
    ),
    Foreign("output_dir default_local_dir save_path ckpt_path", setting("--output-dir"), read=Option("--output-dir")),
    Foreign("experiment_name run_name", setting("--name"), read=Option("--name")),
    Foreign(
        "use_vllm vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization vllm_num_engines "
        "vllm_tensor_parallel_size vllm_sync_backend vllm_enable_sleep",
        not_needed("completions are sampled in this process, or by a server that you start (generation.engine=server)"),
    ),
    Foreign(
        "max_seq_length max_length max_len",
        not_needed("prompts and completions have limits of their own: generation.max_prompt_tokens and max_new_tokens"),
        under={
            "sft": cannot_be_set("a row may be as long as the model's context (longer ones: task.on_overlong_prompt)"),
            "reward": cannot_be_set(
                "a row may be as long as the model's context (longer ones: task.on_overlong_prompt)"
            ),
            "dpo": setting("dpo.max_tokens"),
        },
    ),
    Foreign("logging_steps", not_needed("each step is logged, with 16 of its completions")),
    Foreign(
        "use_liger_kernel padding_free packing packing_samples flash_attn",
        not_needed("rows are packed where the model allows it; logits are made in chunks"),
    ),
    Foreign(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
        cannot_be_set("weights of grpo.importance_correction are capped at 2"),
    ),
    Foreign("disable_dropout", cannot_be_set("dropout is off; lora.dropout is for sft, reward and dpo")),
    Foreign(
        "colocate_all_models colocate_actor_ref colocate_critic_reward actor_num_nodes actor_num_gpus_per_node "
        "critic_num_nodes critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node reward_num_nodes "
        "reward_num_gpus_per_node",
        not_needed("policy, reference, critic and reward model share one base in one process"),
    ),
    Foreign("n_gpus_per_node nnodes", not_needed("`accelerate launch -m tinyrl ...` has the number of processes")),
    Foreign(
        "sync_ref_model ref_model_sync_steps",
        cannot_be_set("the reference stays frozen; `tinyrl train --from RUN` takes another"),
    ),
    Foreign("delta clip_ratio_c top_entropy_quantile", cannot_be_set("no loss here has that term")),
    Foreign(
        "adv_estimator advantage_estimator",
        setting("grpo.preset", " (grpo, rloo, reinforce++); gae is another method, `tinyrl train ppo`"),
        reads={
            "adv_estimator": Values(
                {
                    "grpo": "grpo.preset=grpo",
                    "rloo": "grpo.preset=rloo",
                    "reinforce_plus_plus": "grpo.preset=reinforce++",
                    "reinforce_plus_plus_baseline": "grpo.preset=reinforce++-baseline",
                }
            ),
            "advantage_estimator": Values(
                {"rloo": "grpo.preset=rloo", "group_norm": "grpo.preset=grpo", "dr_grpo": "grpo.preset=dr_grpo"}
            ),
        },
        under={
            "ppo": cannot_be_set(
                "`tinyrl train ppo` has GAE (ppo.gae_lambda); the others are presets of `tinyrl train grpo`"
            )
        },
    ),
    Foreign(
        "adam_beta1 adam_beta2 adam_epsilon adam_betas",
        cannot_be_set("AdamW's betas are 0.9 and 0.999, its epsilon is 1e-8"),
    ),
    Foreign(
        "min_p repetition_penalty",
        cannot_be_set(
            "training samples the whole distribution, softmax(logits / temperature); leave it out: a loss of "
            "other probabilities would be of another policy"
        ),
    ),
    Foreign(
        "normalize_reward",
        cannot_be_set(
            "scores of a reward model are centred when it is saved, and not divided by their standard deviation"
        ),
    ),
    Foreign(
        "reward_clip_range", cannot_be_set("rewards are not clipped, but for what a function of reward.functions does")
    ),
    Foreign("nll_loss_coef", cannot_be_set("no loss of pairs here has that term but orpo")),
    Foreign("ipo", setting("dpo.loss", ": ipo, per token, or ipo_sum"), read=NotCopied("per token or summed")),
    Foreign(
        "peft_config",
        not_needed(
            "LoRA is on by default: lora.r, lora.alpha, lora.dropout, lora.target_modules; off: "
            "lora.enabled=false. PEFT trains q_proj and v_proj of Llama and Qwen where target_modules is not "
            "given, this all linear layers: lora.target_modules=[q_proj, v_proj] is the same"
        ),
    ),
    Foreign(
        "push_to_hub hub_model_id hub_private_repo hub_strategy",
        not_needed("a run is uploaded when you say so: `tinyrl export RUN --push USER/NAME`, with --private"),
    ),
    Foreign(
        "fast_inference",
        not_needed("this process samples by its own engine, which decodes rows together (generation.engine)"),
    ),
    Foreign("remove_unused_columns", not_needed("all columns of a row reach the reward")),
    Foreign(
        "deepspeed fsdp fsdp_config ddp_find_unused_parameters zero_stage",
        not_needed("a run is one process per GPU, with whole weights in each"),
    ),
)

ALIASES = {name: row for row in TABLE for name in row.names.split()}


def reader_of(name: str) -> Reader:
    """Return how the value of a name of ALIASES is read."""
    row = ALIASES[name]
    return row.reads.get(name, row.read)
