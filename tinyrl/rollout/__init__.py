"""Rollouts: what samples and scores a run's prompts (load), a step of that (collect), records of samples."""
