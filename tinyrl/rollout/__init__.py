"""Rollouts: samples of a step as tensors (buffer), and how they are sampled and scored (collector)."""
