"""Errors of libraries while a model, tokenizer, template or adapter is read, as one sentence: which file, what it says.

Folders come from anywhere, and a damaged one is answered by the libraries with nearly every exception there is
(TypeError, KeyError, AttributeError, RecursionError, ZeroDivisionError, safetensors' and regex engines' own), so this
is the one place that catches broadly. What is not the folder's fault passes: no memory, no room on the disk, a stop.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyrl.errors import Stop, no_memory
from tinyrl.text import ERROR_CHARACTERS, first_line, last_line, shortened

TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip
MODEL_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json", "*.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MOST_HEADER_BYTES = 100_000_000  # what the safetensors library itself takes


@contextmanager
def reading(
    what: str, *, folder: str | Path | None = None, files: tuple[str, ...] = (), otherwise: str = ""
) -> Iterator[None]:
    """Around library calls only: whatever they raise becomes ValueError("{what}: {which file, what is wrong}").

    Of a local `folder`, those of `files` (names or patterns) that are damaged on the face of it are named; where there
    is none, and the library's error is not one for people, `otherwise` is the file that it is about.
    """
    try:
        yield
    except (Stop, MemoryError):
        raise
    except Exception as error:
        # Broad on purpose, see above: which exceptions a library knows for a damaged file is not documented anywhere.
        if no_memory(error) is not None or (isinstance(error, OSError) and error.errno in NO_ROOM):
            raise
        found = damage_in(Path(folder), files) if folder is not None else None
        raise ValueError(f"{what}: {found or said(error, about=otherwise)}") from error


def said(error: Exception, *, about: str = "") -> str:
    """What an error says in one line; where it was not written for people, after its kind and the file it is about."""
    first = first_line(error).rstrip()
    if first.endswith(":"):  # it only announces
        all_lines = shortened(" ".join(str(error).split()), ERROR_CHARACTERS)
        first = last_line(error) if first.startswith("Error(s) in loading") else all_lines
    if isinstance(error, ValueError | OSError | ImportError) or type(error) is RuntimeError:
        return first
    kind = f"{type(error).__name__}: " if type(error).__module__ == "builtins" and type(error) is not Exception else ""
    return f"{about}: {kind}{first}" if about else f"{kind}{first}"


def damage_in(folder: Path, files: tuple[str, ...]) -> str | None:
    """What is wrong with the first damaged file: not JSON, not an object, not whole; None where nothing is seen."""
    for pattern in files:
        for path in sorted(folder.glob(pattern)):
            found = _damage_of(path)
            if found is not None:
                return f"{path.name} {found}"
    return None


def _damage_of(path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            tensor_shapes(path)
        elif path.suffix == ".json":
            _check_object(path, json.loads(path.read_text(encoding="utf-8")))
        else:
            path.read_text(encoding="utf-8")
    except RecursionError:
        return "is nested too deep"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start})"
    except json.JSONDecodeError as error:
        return f"is not JSON (line {error.lineno}: {error.msg})"
    except ValueError as error:
        return f"is damaged: {error}"
    return None


def _check_object(path: Path, value: Any) -> None:
    """Raise ValueError unless a JSON file holds an object; that of an index of shards, one whose shards are there; of a
    config.json, one whose pad token has a row.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    pad, rows = value.get("pad_token_id"), value.get("vocab_size")
    if path.name == "config.json" and isinstance(rows, int):
        has_row = type(pad) is int and -rows <= pad < rows  # models of 2023 have -1
        if pad is not None and not has_row:
            raise ValueError(f"pad_token_id is {shortened(repr(pad))}; allowed are null or 0 to {rows - 1}")
    if path.name.endswith(".index.json"):
        shards = value.get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError("it has no weight_map")
        for name in sorted({str(name) for name in shards.values()}):
            if not (path.parent / name).is_file():
                raise ValueError(f"it names {shortened(name)}, which is not there")


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file, from its header alone. Raises ValueError where it is not a whole one."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"its {size:,} bytes do not begin with a safetensors header")
        raw = opened.read(length)
    try:
        header: Any = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
        raise ValueError(f"its header is not a safetensors header: {shortened(raw[:40].decode('latin-1'))}") from None
    if 8 + length + end != size:
        raise ValueError(f"it has {size:,} bytes where its header announces {8 + length + end:,}")
    return shapes
