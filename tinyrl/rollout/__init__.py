"""Rollouts: what a step learns from (buffer), and how it is sampled and scored (collector)."""
