"""The versions of Python in pyproject.toml: types are checked for each, fast tests pass on the later ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
VERSIONS = [one.rpartition(" ")[2] for one in CLASSIFIERS if one.startswith("Programming Language")]
ROOMS = ("algorithms", "config", "data", "cli", "tasks", "workers")


def test_types_are_checked_for_each_version():
    [versions] = re.findall(r"for version in ([\d. ]+); do pyright", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert versions.split() == VERSIONS


def interpreter(version: str) -> str | None:
    """Return the interpreter of a version, or None. pyenv's stand-in for one that is not chosen fails."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "--version"], capture_output=True).returncode != 0:
        return None
    return found


@pytest.mark.release
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_fast_tests_pass_on_a_later_python(version: str, tmp_path: Path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    subprocess.run([python, "-m", "venv", str(tmp_path / "v")], check=True)
    own = str(tmp_path / "v" / "bin" / "python")
    install = ["-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable", ".[dev]"]
    installed = subprocess.run([own, *install], cwd=ROOT, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"a package has no wheel for {version}: {installed.stderr[-400:]}")
    rooms = [f"tests/{room}" for room in ROOMS]
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
