"""A run in motion: its session, one optimizer step, checks before the first, opening and resuming."""
