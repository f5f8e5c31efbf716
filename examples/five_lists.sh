#!/usr/bin/env bash
# A game of five turns, each with a reward of its own: GRPO on their sum, and with credit by turn.
# 2 minutes on a CPU core. Results: benchmarks/RESULTS.md. Other seeds: add run.seed=N to `tinyrl train grpo`.
set -e
python examples/five_lists.py lists  # rows, and text to start from
tinyrl train sft --name lists-sft model.path=starter task.data=lists/sft.jsonl lora.enabled=false sft.batch_size=32 optim.learning_rate=2e-3 optim.schedule=cosine run.num_steps=250 run.eval_every=125 run.save_every=250 run.threads=1
tinyrl train grpo --name lists-dapo grpo.preset=dapo model.path=runs/lists-sft task.data=lists/train.jsonl task.eval_data=lists/eval.jsonl environment.name=examples/five_lists.py:respond environment.max_turns=5 environment.max_observation_tokens=16 generation.max_new_tokens=60 generation.max_prompt_tokens=32 'generation.stop=["\n"]' grpo.num_prompts=8 grpo.group_size=4 optim.learning_rate=2e-3 optim.schedule=constant run.num_steps=40 run.eval_every=10 run.eval_prompts=200 run.save_every=40 run.threads=1
tinyrl train grpo --name lists-gtpo grpo.preset=gtpo model.path=runs/lists-sft task.data=lists/train.jsonl task.eval_data=lists/eval.jsonl environment.name=examples/five_lists.py:respond environment.max_turns=5 environment.max_observation_tokens=16 generation.max_new_tokens=60 generation.max_prompt_tokens=32 'generation.stop=["\n"]' grpo.num_prompts=8 grpo.group_size=4 optim.learning_rate=2e-3 optim.schedule=constant run.num_steps=40 run.eval_every=10 run.eval_prompts=200 run.save_every=40 run.threads=1
tinyrl report runs/lists-dapo runs/lists-gtpo
