"""Rollouts: samples of a step (sample), how they are sampled and scored (collect), their records."""
