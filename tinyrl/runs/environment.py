"""What identifies a run and repeats it: versions, machine, git revision, command. The contents of env.json."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib import metadata
from typing import Any

from tinyrl.text import HIDDEN, SECRET, redact

PACKAGES = ("tinyrl", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


def environment(command: list[str], **facts: Any) -> dict[str, Any]:
    """What identifies a run and repeats it: versions, machine, git revision, command (secrets taken out)."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_revision(),
        "command": redact_command(command),
        **facts,
    }


def versions() -> dict[str, str]:
    """Of Python and of the installed packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def redact_command(command: list[str]) -> str:
    """A command line as it would be typed again, without its secrets (`--token abc` among them)."""
    words = []
    for before, word in zip(["", *command], command, strict=False):
        named = before.startswith("-") and "=" not in before and SECRET.search(before)
        name, equals, _ = word.partition("=")
        words.append(HIDDEN if named else f"{name}={HIDDEN}" if equals and SECRET.search(name) else redact(word))
    return shlex.join(words)


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
