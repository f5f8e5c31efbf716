"""Training methods. grpo, ppo and distill are complete loops; sft, dpo and reward give examples and a loss to the loop
of rows.py. The other files are what loops are made of.
"""
