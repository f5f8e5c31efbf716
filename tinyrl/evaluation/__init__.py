"""Held-out evaluation of policies and reward models, and comparison of several."""
