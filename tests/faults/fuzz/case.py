"""One case of the fuzz: a command in a folder of its own, and what is wrong with how it ended."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.fuzz.zygote import Zygote

CODES = (0, 2, 3, 4, 75)
MOST_LINES, MOST_CHARACTERS = 6, 500
CPU_S, WALL_S = 20.0, 150.0  # of a command; the second is for one that waits: other programs may have the machine
DRY = "--dry-run"
Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """name: what is odd about it, for the failure's text; prepare: writes what the command finds in its folder."""

    name: str
    argv: Sequence[str]
    prepare: Prepare = lambda folder: None


def together(*steps: Prepare) -> Prepare:
    return lambda folder: [step(folder) for step in steps]


def wrong_with(case: Case, *, zygote: Zygote, root: Path) -> str | None:
    """None, or what a person would complain about."""
    answer, changed = ended(case, zygote=zygote, root=root)
    found = complaint(answer, changed=changed)
    return found and f"{case.name!a:.300}: {[*case.argv]!a:.600} {found}"


def ended(case: Case, *, zygote: Zygote, root: Path) -> tuple[dict[str, Any], list[str]]:
    """How a case ended, and the names of the files that its command wrote, changed or removed."""
    folder = root / "case"
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    case.prepare(work)
    before = contents(work)
    answer = zygote.run([*case.argv], work, cpu_s=CPU_S, wall_s=WALL_S)
    return answer, differing(before, contents(work))


def complaint(answer: dict[str, Any], *, changed: list[str]) -> str | None:
    """What is wrong with a command's end, given the names of files it wrote, changed or removed."""
    code, said = answer["code"], answer["stderr"]
    end = said.strip()[-1500:]
    if answer["hung"]:
        return f"does not end within {WALL_S:g} s: {end}"
    if answer["cpu_s"] > CPU_S:
        return f"takes more than {CPU_S:g} s of computing: {end}"
    if code not in CODES:
        return f"ends with {code}: {end}"
    if "Traceback (most recent call last)" in said + answer["stdout"]:
        return f"shows a traceback and ends with {code}: {end}"
    if code != 2:
        return None
    if changed:
        return f"ends with 2 and changed {changed}: {end}"
    lines = said.strip().splitlines()
    if not lines:
        return "ends with 2 and says nothing"
    if said.startswith("Usage: ") and len(lines) <= MOST_LINES:
        return None  # the parser of the command line gives back the words that were typed, whatever they are
    if len(lines) > MOST_LINES or max(map(len, lines)) > MOST_CHARACTERS:
        return f"says too much ({len(lines)} lines, the longest of {max(map(len, lines))}): {said[:1500]}"
    if any(not (c.isprintable() or c == "\n") for c in said):
        return f"says what a terminal might obey: {said[:1500]!a}"
    return None


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below, and a hash of what is in it."""
    found: dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place, name)
            regular = stat.S_ISREG(path.lstat().st_mode)
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
    return found


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
