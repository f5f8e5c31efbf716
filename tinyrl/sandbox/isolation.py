"""Limits and visible paths of a sandboxed program, and the command line that gives them to launcher.py.

It sees the standard library and the shared libraries that the interpreter's own modules are linked with: no installed
package (an answer may lie in one), nothing of /proc, /etc or a home.
"""

import functools
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tinyrl.sandbox.seccomp import filter_for

LAUNCHER, HARNESS = (str(Path(__file__).with_name(name)) for name in ("launcher.py", "harness.py"))
MIN_MEMORY_BYTES = 64 << 20  # an interpreter alone needs about half
NAMESPACES = "1"  # "0" does without, as in most containers; tests see to it that the other walls hold alone
# No installed packages, no .pyc written, none of our folders on its path.
PYTHON = ("-s", "-S", "-B", "-P", "-X", "utf8")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OPENSSL_CONF": "/dev/null", "MALLOC_ARENA_MAX": "1"}
ALSO_READABLE = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/zero")
SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")  # to mount on: the first that hides nothing we need
LIST_TIMEOUT_S = 60.0
LIST_LIBRARIES = """
import contextlib, ctypes, os, sys
found = [entry.path for path in sys.path if os.path.isdir(path) for entry in os.scandir(path)]
for file in ["libgcc_s.so.1", *(path for path in found if path.endswith(".so") and "tkinter" not in path)]:
    with contextlib.suppress(OSError):
        ctypes.CDLL(file)
with open("/proc/self/maps") as maps:
    print(*{line[line.index("/"):].rstrip("\\n") for line in maps if "/" in line}, sep="\\n")
"""


class CannotIsolate(ValueError):
    """This system cannot isolate a program, and running it without isolation was not allowed."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use. ValueError: a limit that cannot be kept."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20  # address space; files in scratch come on top
    output_bytes: int = 1 << 20  # of stdout, of stderr, and of a returned value, each
    scratch_bytes: int = 16 << 20  # all files together, in memory; 0: no file can be written
    threads: int = 32

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wall_s) and self.wall_s > 0):
            raise ValueError(f"Limits: wall_s must be a number of seconds above 0, not {self.wall_s}.")
        least = {"cpu_s": 1, "memory_bytes": MIN_MEMORY_BYTES, "output_bytes": 1, "scratch_bytes": 0, "threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"Limits: {name} must be a whole number from {minimum}, not {value!r}.")


def launch_command(
    limits: Limits, *, harness_arguments: list[str], status: int, must_isolate: bool, folder: str
) -> list[str]:
    """The command that isolates itself and becomes a sandbox's interpreter. `folder`: its place without a scratch."""
    instructions = filter_for(platform.machine()) or b""
    settings = {
        "status": status,
        "parent": os.getpid(),
        "must_isolate": int(must_isolate),
        "namespaces": NAMESPACES,
        "reachable": int(os.geteuid() != 0 or _anyone_can_read(interpreter(), *_needed_folders())),
        "scratch_at": _scratch_folder(),
        "folder": folder,
        "seccomp": instructions.hex(),
        "wall_s": limits.wall_s,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "scratch_bytes": limits.scratch_bytes,
        "threads": limits.threads,
    }
    python = [interpreter(), *PYTHON]
    program = [*python, HARNESS, *harness_arguments]
    paths = [*visible_paths(), *([] if must_isolate else [f"s{folder}"])]
    words = [f"{name}={value}" for name, value in settings.items()]
    return [*python, LAUNCHER, *words, "--", *program, "--", *paths]


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def visible_paths() -> tuple[str, ...]:
    """The paths that a program may look at, as launcher.py takes them. Empty where there is no Landlock."""
    if sys.platform != "linux":
        return ()
    library = os.path.dirname(os.__file__)
    entries = [entry.path for entry in os.scandir(library) if not entry.name.endswith("-packages")]
    command = [interpreter(), *PYTHON, "-c", LIST_LIBRARIES]
    listed = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True
    )
    linked = [path for path in listed.stdout.splitlines() if not path.startswith(library)]
    readable = {*entries, *linked, interpreter(), HARNESS, *ALSO_READABLE}
    there = sorted(path for path in readable if os.path.exists(path))
    return (f"l{library}", *(f"{'d' if os.path.isdir(path) else 'f'}{path}" for path in there), "w/dev/null")


@functools.cache
def _needed_folders() -> tuple[str, ...]:
    """Folders that a sandbox's interpreter enters on its way to what it needs."""
    return tuple(sorted({os.path.dirname(os.path.realpath(path[1:])) for path in visible_paths()}))


@functools.cache
def _scratch_folder() -> str:
    for folder in SCRATCH_FOLDERS:
        if os.path.isdir(folder) and not any(f"{needed}/".startswith(f"{folder}/") for needed in _needed_folders()):
            return folder
    return ""


@functools.cache
def _anyone_can_read(*paths: str) -> bool:
    """Whether every folder on the way lets in users who own nothing."""
    return all(above.stat().st_mode & 0o001 for path in paths for above in [Path(path), *Path(path).parents])
