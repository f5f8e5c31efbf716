"""Held-out numbers: of one policy, and of two against each other."""
