"""Packages for a machine that has CUDA and torch, and neither the other packages nor a network.

    python -m benchmarks wheels download wheels     # here: what this environment has, as wheels for that machine
    python -m benchmarks wheels install wheels      # there: into gpu-venv, which sees the machine's torch

Wheels are sorted into parts of at most 64 MiB, wheels/part-1 first, for ways that carry no more at a time; `install`
takes what has arrived so far. Packages are those that tinyrl needs with its 4-bit base and its tests, and TRL, whose
own needs they cover. Only the standard library and packaging are used.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 64 << 20
ENVIRONMENT = Path("gpu-venv")  # ignored by git
ON_THE_MACHINE = ("torch", "triton", "setuptools", "nvidia-", "cuda-")  # names, and beginnings that end in a hyphen
EXACT = ("transformers", "trl", "bitsandbytes")  # which have to be of the pinned version
MORE = ("pytest", "packaging")  # of the tests
PEER = {"trl": "1.16.0"}
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)), "manylinux2014_x86_64")


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def is_on_the_machine(name: str) -> bool:
    return any(name.startswith(own) if own.endswith("-") else name == own for own in ON_THE_MACHINE)


def needed() -> list[str]:
    """The requirements of tinyrl, of its 4-bit base and of its tests, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["quantization"], *MORE]


def closure(requirements: Iterable[str], *, python: str) -> dict[str, str]:
    """Versions here, by name, of all packages that the requirements come to on Linux with that Python; what the machine
    has is left out, with what only that needs.
    """
    from packaging.requirements import Requirement

    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    found: dict[str, str] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop(0)
        name = canonical(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate(environment)
        if not wanted or name in found or is_on_the_machine(name):
            continue
        found[name] = metadata.version(requirement.name)
        waiting += [Requirement(text) for text in metadata.requires(requirement.name) or ()]
    return found


def lacking(versions: dict[str, str], installed: Iterable[str]) -> dict[str, str]:
    """Versions without those that a machine has, by the lines of its `pip freeze`: any version does, but of packages
    that have to be of the pinned one.
    """
    there = {}
    for line in installed:
        name, _, version = line.strip().partition("==")
        there[canonical(name)] = version
    found = {}
    for name, version in versions.items():
        suffices = name in there and (name not in EXACT or there[name] == version)
        if not suffices:
            found[name] = version
    return found


def parts(sizes: Sequence[int], *, most: int = PART_BYTES) -> list[list[int]]:
    """Places of files in parts of at most `most` bytes, each in the first part that has room."""
    found: list[list[int]] = []
    for place, size in enumerate(sizes):
        if size > most:
            raise ValueError(f"one file takes {size / 2**20:.0f} MiB, and a part at most {most / 2**20:.0f}")
        part = next((p for p in found if sum(sizes[i] for i in p) + size <= most), None)
        if part is None:
            found.append([place])
        else:
            part.append(place)
    return found


def download(folder: Path, *, python: str, installed: Path | None) -> None:
    versions = closure(needed(), python=python) | PEER
    if installed is not None:
        versions = lacking(versions, installed.read_text().splitlines())
    arriving = folder / "arriving"
    arriving.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python]
    command += [*platforms, "--quiet", "--dest", str(arriving)]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in versions.items())], check=True)
    order = {name: place for place, name in enumerate(versions)}
    files = sorted(arriving.glob("*.whl"), key=lambda file: order[canonical(file.name.split("-")[0])])
    sizes = [file.stat().st_size for file in files]
    for old in folder.glob("part-*"):
        shutil.rmtree(old)
    for number, places in enumerate(parts(sizes), start=1):
        part = folder / f"part-{number}"
        part.mkdir()
        for place in places:
            files[place].rename(part / files[place].name)
        print(f"{part}: {sum(sizes[place] for place in places) / 2**20:.1f} MiB, {len(places)} wheels")
    arriving.rmdir()
    print(f"{sum(sizes) / 2**20:.1f} MiB in all, {len(files)} wheels")


def install(folder: Path) -> None:
    """Install the wheels that are there into an environment that sees the machine's own packages, with no network."""
    wheels = sorted(str(file) for file in folder.rglob("*.whl"))
    if not wheels:
        raise SystemExit(f"{folder} has no wheels: `python -m benchmarks wheels download {folder}` where a network is")
    python = ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        venv = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(ENVIRONMENT)]
        subprocess.run(venv, check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--quiet",
    ]
    subprocess.run([*pip, *wheels], check=True)
    print(f"{len(wheels)} wheels are installed: {python} -m benchmarks gpu --peer-python {python}")


def main(options: Namespace) -> None:
    if options.action == "download":
        download(options.folder, python=options.python, installed=options.installed)
    else:
        install(options.folder)
