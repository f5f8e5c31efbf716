"""Write rows as JSON lines."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines; return the path. Folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_command(module: str, write: Callable[[Path], list[Path]]) -> None:
    """`python -m MODULE OUT`: write files, and name them."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {module} OUT")
    for path in write(Path(sys.argv[1])):
        print(path)
