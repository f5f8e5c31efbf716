"""The configuration of a run: every field, methods, recipes, and sentences for what is wrong. Never imports torch."""
