"""One cell: settings["module"] says what is measured. As a script, in a process of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks import measuring


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """The result, with the machine and the versions of what ran."""
    result = import_module(settings["module"]).measure(settings)
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"versions": measuring.versions(), "machine": name, **result}


def main() -> None:
    settings = measuring.job()
    measuring.answer(settings, **measured(settings))


if __name__ == "__main__":
    main()
