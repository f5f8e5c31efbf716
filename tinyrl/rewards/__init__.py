"""Rewards of completions: user functions in a process that can be killed, the tasks' own verifiers in ours."""
