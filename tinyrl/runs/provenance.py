"""Where a run comes from: the contents of env.json."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from tinyrl.urls import mask_url

PACKAGES = ("tinyrl", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy",
            "pillow", "torchvision")  # fmt: skip


def provenance(command: list[str], **facts: Any) -> dict[str, Any]:
    """Return the contents of env.json: versions, machine, git revisions (of the folder one is in, and of tinyrl's own
    where it is a checkout), and the command with URLs masked.
    """
    revisions = {
        "git": _revision(Path()),
        "tinyrl_git": None if "site-packages" in __file__ else _revision(Path(__file__).parent),
    }
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), **revisions}
    return {"versions": versions(), **machine, "command": shlex.join(map(mask_url, command)), **facts}


def _revision(folder: Path) -> str | None:
    """Return the git revision of a folder under version control, with "-dirty" where files differ from it."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
