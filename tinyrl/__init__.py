"""tinyrl: PPO, GRPO, DPO, SFT, reward models and distillation on one GPU, in one process, from one command.

In a script or a notebook: `tinyrl.train`, `tinyrl.evaluate`, `tinyrl.open_run`, `tinyrl.from_trl` (tinyrl/api.py).
"""

from typing import Any

__version__ = "0.1.0"
_MODULES = {  # of each name
    "train": "tinyrl.api",
    "evaluate": "tinyrl.api",
    "open_run": "tinyrl.api",
    "from_trl": "tinyrl.api",
    "DropEpisode": "tinyrl.environments",
}


def __getattr__(name: str) -> Any:
    """Return a verb or class, loaded when it is first used: `import tinyrl` itself loads nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tinyrl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
