"""Rows: where they come from, their columns, their order."""
