"""What a run begins with, checked before torch is imported (prepared, preflight); rollouts: how a step's samples are
sampled and scored (collect), and their records.
"""
