"""Turn libraries' errors on reading a model, tokenizer, template or adapter into a sentence: which file, what is wrong.

Folders come from anywhere, and libraries answer a damaged one with nearly every exception there is (TypeError,
KeyError, RecursionError, ZeroDivisionError, safetensors' own), so this is the one place that catches broadly.
What is not the folder's fault passes: no memory, no room on the disk, a stop.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyrl.errors import Stop, no_memory
from tinyrl.text import ERROR_CHARACTERS, first_line, shortened

TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


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
