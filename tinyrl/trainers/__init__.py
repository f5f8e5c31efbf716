"""Trainers, one file for each method (grpo, ppo, sft, reward_model, dpo): a complete loop, read from top to bottom.

The other files are what loops are made of.
"""
