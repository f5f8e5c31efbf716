"""Held-out evaluation of one policy, and comparison of two."""
