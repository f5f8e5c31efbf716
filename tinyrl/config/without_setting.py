"""Names of other libraries for which there is no setting: nothing has to be set, or nothing can be."""

from __future__ import annotations

from tinyrl.config.foreign_row import Foreign, cannot_be_set, not_needed, setting

NOT_CUT = ", and a longer row is refused or dropped (task.on_overlong_prompt), not cut"

WITHOUT_SETTING = (
    Foreign(
        "top_p top_k",
        cannot_be_set(
            "training samples the whole distribution; leave it out. `tinyrl eval` takes generation.top_p and "
            ".top_k, `tinyrl serve` both with a request"
        ),
    ),
    Foreign(
        "min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex vllm_guided_decoding_regex",
        cannot_be_set(
            "training samples the whole distribution, softmax(logits / temperature); leave it out: a loss of "
            "other probabilities would be of another policy"
        ),
    ),
    Foreign(
        "val_kwargs.n val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k val_kwargs.do_sample eval_temperature "
        "eval_n_samples_per_prompt num_generations_eval",
        cannot_be_set("evaluations of a run sample as training does, once a prompt; `tinyrl eval` has --samples"),
    ),
    Foreign("load_best_model_at_end", not_needed("the best checkpoint is kept, and RUN@best means it")),
    Foreign(
        "resume_from_checkpoint resume_mode load_checkpoint",
        not_needed("`tinyrl train --resume RUN` goes on from the newest checkpoint"),
    ),
    Foreign(
        "micro_rollout_batch_size per_device_eval_batch_size local_rollout_forward_batch_size "
        "log_prob_micro_batch_size_per_gpu",
        not_needed("as many rows are computed together as the memory holds (generation.max_rows)"),
    ),
    Foreign(
        "use_vllm vllm_device vllm_mode vllm_gpu_memory_utilization rollout.name gpu_memory_utilization "
        "vllm_num_engines vllm_tensor_parallel_size vllm_sync_backend vllm_enable_sleep vllm_enable_sleep_mode "
        "vllm_max_model_length vllm_model_impl vllm_server_timeout vllm_group_port tensor_model_parallel_size "
        "enforce_eager free_cache_engine",
        not_needed("completions are sampled in this process, or by a server that you start (generation.engine=server)"),
    ),
    Foreign(
        "fast_inference use_transformers_paged cache_implementation",
        not_needed("this process samples by its own engine, which decodes rows together (generation.engine)"),
    ),
    Foreign(
        "max_seq_length max_length max_len",
        not_needed("prompts and completions have limits of their own: generation.max_prompt_tokens and max_new_tokens"),
        under={
            "sft": setting("sft.max_tokens", NOT_CUT),
            "reward": setting("reward_model.max_tokens", NOT_CUT),
            "dpo": setting("dpo.max_tokens", NOT_CUT),
        },
    ),
    Foreign("stop_token", not_needed("a completion ends at the tokenizer's EOS token")),
    Foreign("logging_steps", not_needed("each step is logged, with 16 of its completions")),
    Foreign(
        "use_liger_kernel use_liger_loss padding_free packing packing_samples flash_attn attn_implementation "
        "use_flash_attention_2 use_remove_padding use_dynamic_bsz cast_lm_head_to_fp32",
        not_needed("rows are packed where the model allows it; logits are made in chunks, in float32"),
    ),
    Foreign(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_is_truncated_threshold",
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
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
        cannot_be_set("the reference stays frozen; `tinyrl train --from RUN` takes another"),
    ),
    Foreign(
        "delta clip_ratio_c dual_clip top_entropy_quantile sapo_temperature_neg sapo_temperature_pos "
        "off_policy_mask_threshold rpo_alpha ld_alpha f_divergence_type "
        "loss_weights use_weighting neftune_noise_alpha aux_loss_coef",
        cannot_be_set("no loss here has that term"),
    ),
    Foreign(
        "center_rewards_coefficient",
        cannot_be_set(
            "no loss here has that term; scores of a reward model are centred when it is saved: their mean over "
            "training rows is subtracted"
        ),
    ),
    Foreign("adam_epsilon", cannot_be_set("AdamW's epsilon is 1e-8")),
    Foreign("lr_scheduler_kwargs", cannot_be_set("optim.schedule=cosine or linear ends at 0")),
    Foreign(
        "normalize_reward",
        cannot_be_set(
            "scores of a reward model are centred when it is saved, and not divided by their standard deviation"
        ),
    ),
    Foreign(
        "reward_clip_range whiten_rewards",
        cannot_be_set("rewards are not clipped or whitened, but for what a function of reward.functions does"),
    ),
    Foreign(
        "reward_model.enable reward_model.reward_manager reward_model.strategy reward_model.micro_batch_size_per_gpu",
        not_needed("reward.functions and reward.model are what rewards"),
    ),
    Foreign("nll_loss_coef", cannot_be_set("no loss of pairs here has that term but orpo")),
    Foreign(
        "peft_config",
        not_needed(
            "LoRA is on by default: lora.r, lora.alpha, lora.dropout, lora.target_modules; off: "
            "lora.enabled=false. PEFT trains q_proj and v_proj of Llama and Qwen where target_modules is not "
            "given, this all linear layers: lora.target_modules=[q_proj, v_proj] is the same"
        ),
    ),
    Foreign(
        "lora_task_type task_type inference_mode loftq_config peft_type base_model_name_or_path peft_version",
        not_needed("an adapter is LoRA on weights alone"),
    ),
    Foreign(
        "bias use_rslora use_dora modules_to_save lora_modules_to_save layers_to_transform rank_pattern alpha_pattern",
        cannot_be_set("an adapter is LoRA on weights alone, of one rank and one alpha"),
    ),
    Foreign(
        "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant use_bnb_nested_quant",
        not_needed("model.quantization=4bit is NF4 with nested scales"),
    ),
    Foreign("load_in_8bit", cannot_be_set("a frozen base is loaded as it is, or in 4 bits: model.quantization=4bit")),
    Foreign(
        "push_to_hub hub_model_id hub_private_repo hub_strategy hub_token hub_revision hub_always_push",
        not_needed("a run is uploaded when you say so: `tinyrl export RUN --push USER/NAME`, with --private"),
    ),
    Foreign("remove_unused_columns", not_needed("all columns of a row reach the reward")),
    Foreign("shuffle_dataset", not_needed("each epoch is shuffled, by run.seed")),
    Foreign(
        "deepspeed fsdp fsdp_config ddp_find_unused_parameters ddp_backend ddp_timeout local_rank zero_stage "
        "ds3_gather_for_generation param_offload optimizer_offload adam_offload",
        not_needed("a run is one process per GPU, with whole weights in each"),
    ),
    Foreign(
        "tokenizer processing_class reward_processing_classes tokenizer_name_or_path dataset_streaming "
        "activation_offloading precompute_ref_log_probs use_logits_to_keep padding_value truncation_mode",
        not_needed("the tokenizer is that of the model, and rows are read and padded as it needs them"),
    ),
    Foreign(
        "callbacks optimizers data_collator compute_metrics preprocess_logits_for_metrics formatting_func "
        "compute_loss_func",
        cannot_be_set("a run has no such code; a function of reward.functions is Python, and so is a task"),
    ),
    Foreign(
        "eos_token pad_token chat_template_path",
        cannot_be_set("the files of the model's tokenizer have them"),
    ),
    Foreign(
        "gradient_checkpointing_kwargs",
        not_needed("model.gradient_checkpointing=true recomputes each layer"),
    ),
    Foreign(
        "overwrite_output_dir",
        not_needed("runs have names of their own; --overwrite replaces one of the same name"),
    ),
    Foreign(
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last dataset_num_proc "
        "disable_tqdm do_train do_eval logging_dir logging_first_step logging_strategy log_level "
        "num_completions_to_print log_unique_prompts num_sample_generations save_only_model save_safetensors "
        "tf32 use_cpu torch_compile average_tokens_across_devices group_by_length "
        "log_on_each_node save_on_each_node log_level_replica logging_nan_inf_filter include_num_input_tokens_seen "
        "skip_memory_metrics torch_empty_cache_steps torch_compile_backend torch_compile_mode use_cache do_predict "
        "dataloader_persistent_workers dataloader_in_order "
        "auto_find_batch_size project_name wandb_project wandb_run_name project trackio_space_id",
        not_needed("it does not change what is learnt"),
    ),
)
