"""Training runs: opening and resuming, the session, one optimizer step, metrics."""
