#!/usr/bin/env bash
# From labelled text to aligned models, offline: SFT, a reward model, DPO, PPO, A2C, GRPO and RLOO on generated film reviews, judged alike.
# 4 minutes on 2 CPU cores. Results: benchmarks/RESULTS.md. Other seeds: add run.seed=N to every command.
set -e
python -m examples.embedded_models.reviews data  # reviews, labels, pairs; held-out ones have other nouns and openings
tinyrl train sft --name sentiment-sft model.path=starter task.data=data/reviews.jsonl task.eval_data=data/reviews.eval.jsonl sft.batch_size=64 optim.learning_rate=1e-3 optim.schedule=linear run.num_steps=40 run.eval_every=0 run.eval_prompts=512 run.save_every=0 run.keep_checkpoints=1
tinyrl train reward sentiment-reward --name sentiment-reward
tinyrl train dpo --name sentiment-dpo model.path=starter model.adapter=runs/sentiment-sft task.data=data/pairs.jsonl task.eval_data=data/pairs.eval.jsonl dpo.beta=0.3 optim.learning_rate=3e-3 optim.schedule=linear run.num_steps=150 run.eval_every=0 run.save_every=0
tinyrl train ppo sentiment-ppo --name sentiment-ppo
tinyrl train ppo sentiment-ppo --name sentiment-a2c ppo.preset=a2c ppo.num_epochs=1 ppo.minibatch_size=null ppo.num_prompts=64 ppo.kl_coef=0.2 optim.learning_rate=3e-3 run.num_steps=40 optim.critic_learning_rate=3e-3
tinyrl train grpo sentiment-ppo --name sentiment-grpo optim.learning_rate=3e-3 run.num_steps=40
tinyrl train grpo sentiment-ppo --name sentiment-rloo grpo.preset=rloo grpo.kl_coef=0.2 optim.learning_rate=3e-3 run.num_steps=40
tinyrl eval runs/sentiment-dpo runs/sentiment-ppo runs/sentiment-a2c runs/sentiment-grpo runs/sentiment-rloo --vs runs/sentiment-sft --task reviews reward.model=runs/sentiment-reward generation.max_new_tokens=64 generation.max_prompt_tokens=64 --num-prompts 256
