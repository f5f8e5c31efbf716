"""tinyrl: PPO, GRPO, DPO, SFT, reward models and distillation on one GPU, in one process, from one command.

In a script or a notebook: `tinyrl.train`, `tinyrl.evaluate`, `tinyrl.open_run` (tinyrl/api.py).
"""

from typing import Any

__version__ = "0.1.0"
_VERBS = ("train", "evaluate", "open_run")


def __getattr__(name: str) -> Any:
    """The three verbs, loaded when one is first used: `import tinyrl` itself loads nothing."""
    if name not in _VERBS:
        raise AttributeError(f"module 'tinyrl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("tinyrl.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_VERBS])
