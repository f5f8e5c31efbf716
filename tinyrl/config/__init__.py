"""The configuration of a run: fields, methods, recipes, and error sentences. Never imports torch."""
