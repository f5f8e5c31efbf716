"""Trainers, one file for each method. grpo, ppo and distill are complete loops, read from top to bottom; sft, dpo and
reward_model say what a batch of rows is and its loss, in the one loop of rows.py.

The other files are what loops are made of.
"""
