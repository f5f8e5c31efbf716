"""Where a run comes from: the contents of env.json."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ImageTokens:
    """How many tokens the images of a run take, as env.json has it."""

    count: int
    least: int = 0
    median: int = 0
    most: int = 0

    @staticmethod
    def of(counts: list[int]) -> ImageTokens:
        """Summarise the tokens of each image."""
        if not counts:
            return ImageTokens(count=0)
        ordered = sorted(counts)
        middle = ordered[len(ordered) // 2]
        return ImageTokens(count=len(ordered), least=ordered[0], median=middle, most=ordered[-1])

    @staticmethod
    def read(value: Any) -> ImageTokens | None:
        """Return what a record has; None for another record."""
        names = ("count", "least", "median", "most")
        if not isinstance(value, dict) or not all(isinstance(value.get(name), int) for name in names):
            return None
        return ImageTokens(**{name: value[name] for name in names})

    @property
    def words(self) -> str:
        if self.count == 0:
            return "no row has an image"
        images = "1 image takes" if self.count == 1 else f"{self.count:,} images take"
        if self.least == self.most:
            return f"{images} {self.median:,} tokens each"
        return f"{images} {self.least:,} to {self.most:,} tokens each, half of them at most {self.median:,}"
