"""What a run begins with, checked before torch is imported (prepared, preflight); rollouts: what samples and scores a
run's prompts (load), a step of that (collect), records of samples.
"""
