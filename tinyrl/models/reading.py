"""Find a model's folder; say which file of a model, tokenizer, template or adapter a library cannot read, and why.

Folders come from anywhere, and libraries answer a damaged one with nearly every exception there is (TypeError,
KeyError, RecursionError, ZeroDivisionError, safetensors' own), so this is the one place that catches broadly.
What is not the folder's fault passes: no memory, no room on the disk, a stop.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyrl.config.sections import EMBEDDED, starter_path
from tinyrl.errors import Stop, no_memory
from tinyrl.text import ERROR_CHARACTERS, did_you_mean, first_line, shortened

TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def resolve_model_path(path: str, *, key: str = "model.path", adapters: bool = False) -> str:
    """Return the folder of an embedded model (`starter`, `starter-reward`), a folder as it is, or a hub name.

    Raises ValueError, with `key`, for a path that looks local and is not there, and for a folder that is no whole model
    (nor an adapter, with `adapters`): without config.json, or with weights only in pickled files.
    """
    if (embedded := starter_path(path)) is not None:
        return str(embedded)
    folder = Path(os.path.expanduser(path))
    if os.path.isfile(folder):
        raise ValueError(f"{key}={path} is a file; name the folder that holds config.json and *.safetensors")
    if not os.path.isdir(folder):
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            meant = did_you_mean(folder.name, [*sorted(file.name for file in folder.parent.glob("*")), *EMBEDDED])
            where = f"{key}={shortened(path, 300)}"
            raise ValueError(f"{where}: there is no such folder, and a hub name is owner/name.{meant}")
        return path
    names = sorted(file.name for file in folder.glob("*"))
    if "config.json" not in names and not (adapters and ADAPTER_FILES[0] in names):
        there = f"it has: {', '.join(names[:8]) or 'nothing'}"
        if ADAPTER_FILES[0] in names:
            there = "it is an adapter: name it as model.adapter, its base as model.path"
        raise ValueError(f"{key}={path} is not a model folder: it has no config.json ({there})")
    pickled = [name for name in names if name.endswith(PICKLED) and name != "training_args.bin"]
    if pickled and not any(name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"{key}={path}: {pickled[0]} is pickled and can execute code when read; convert to safetensors"
        )
    return str(folder)


@contextmanager
def reading(what: str, folder: str | Path | None = None) -> Iterator[None]:
    """Raise ValueError("{what}: {what is wrong}") for whatever library calls inside raise: the first damaged file of a
    local folder, else the library's error in one line.
    """
    try:
        yield
    except (Stop, MemoryError):
        raise
    except Exception as error:  # broad on purpose, see above
        if no_memory(error) is not None or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = shortened(" ".join(str(error).split()), ERROR_CHARACTERS)
        if type(error).__module__ == "builtins" and not isinstance(error, ValueError | OSError | RuntimeError):
            found = f"{type(error).__name__}: {found}"
        raise ValueError(f"{what}: {_damage_in(folder) or found}") from error


def _damage_in(folder: str | Path | None) -> str | None:
    """Return the first damaged file and what is wrong with it: not UTF-8, not JSON, not whole."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(folder).glob("*")) if folder is not None else ():
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    continue
            if path.suffix in (".json", ".jinja"):
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".json":
                    json.loads(text)
        except (ValueError, RecursionError, OSError, SafetensorError) as error:
            return f"{path.name} is damaged: {first_line(error)}"
    return None
