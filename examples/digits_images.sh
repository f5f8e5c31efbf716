#!/usr/bin/env bash
# Pictures of digits, offline: SFT, GRPO and PPO with LoRA on a small vision-language model, and GRPO without the pictures, which stays at chance.
# 7 minutes on a CPU core. Results: benchmarks/RESULTS.md. Other seeds: add run.seed=N to every `tinyrl train`.
set -e
python examples/digits_images.py digits  # rows, pictures, and a model that half of its labels misled
tinyrl train sft --name digits-sft model.path=digits/model task.data=digits/rows.jsonl task.eval_data=digits/eval.jsonl task.columns.completion=answer sft.batch_size=64 optim.learning_rate=3e-3 run.num_steps=100 run.eval_every=0 run.eval_prompts=500 run.save_every=0 run.threads=1
tinyrl train grpo --name digits-grpo model.path=digits/model task.data=digits/rows.jsonl task.eval_data=digits/eval.jsonl grpo.num_prompts=64 grpo.group_size=8 generation.max_new_tokens=8 optim.learning_rate=1e-3 run.num_steps=40 run.eval_every=0 run.eval_prompts=500 run.save_every=0 run.threads=1
tinyrl train ppo --name digits-ppo model.path=digits/model task.data=digits/rows.jsonl task.eval_data=digits/eval.jsonl ppo.num_prompts=64 ppo.group_size=8 ppo.num_epochs=2 ppo.minibatch_size=128 ppo.kl_coef=0.01 generation.max_new_tokens=8 optim.learning_rate=3e-4 optim.critic_learning_rate=1e-3 run.num_steps=40 run.eval_every=0 run.eval_prompts=500 run.save_every=0 run.threads=1
tinyrl train grpo --name digits-blind model.path=digits/model model.with_images=true task.data=digits/blind.jsonl task.eval_data=digits/blind.eval.jsonl grpo.num_prompts=64 grpo.group_size=8 generation.max_new_tokens=8 optim.learning_rate=1e-3 run.num_steps=40 run.eval_every=0 run.eval_prompts=500 run.save_every=0 run.threads=1
tinyrl eval digits/model runs/digits-sft runs/digits-grpo runs/digits-ppo --data digits/eval.jsonl generation.max_new_tokens=8 --num-prompts 500
