"""Models and their outputs: loading, roles on one base, hidden states, log-probabilities, values, scores."""
