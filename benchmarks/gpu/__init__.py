"""Cells that measure one GPU (command.py lists them), and the variants of today's paths that they choose among."""
