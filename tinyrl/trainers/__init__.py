"""Trainers, one file for each method: a complete loop, read from top to bottom."""
