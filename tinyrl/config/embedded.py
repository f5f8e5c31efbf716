"""The embedded models by name; tinyrl/starter has their weights, and what wrote their text."""

from pathlib import Path

EMBEDDED = {
    "starter": "model", "starter-reward": "reward_model", "starter-teacher": "teacher", "lookup": "lookup_model"
}  # fmt: skip


def starter_path(name: str) -> Path | None:
    """The folder of the embedded model called `name`, one of EMBEDDED; None for every other name."""
    return Path(__file__).parents[1] / "starter" / EMBEDDED[name] if name in EMBEDDED else None
