"""Pure tensor functions: masking, KL estimators, reward shaping, advantages, losses. Imports torch and nothing else."""
