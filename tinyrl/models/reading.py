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
from tinyrl.text import ERROR_CHARACTERS, first_line, last_line, shortened

TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip
MODEL_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json", "*.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@contextmanager
def reading(
    what: str, *, folder: str | Path | None = None, files: tuple[str, ...] = (), otherwise: str = ""
) -> Iterator[None]:
    """Raise ValueError("{what}: {which file, what is wrong}") for whatever library calls inside raise.

    The first damaged one of `files` (names or patterns) in a local `folder` is named; where there is none, and the
    library's error is not one for people, `otherwise` is the file that it is about.
    """
    try:
        yield
    except (Stop, MemoryError):
        raise
    except Exception as error:  # broad on purpose, see above
        if no_memory(error) is not None or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = damage_in(Path(folder), files) if folder is not None else None
        raise ValueError(f"{what}: {found or _message(error, about=otherwise)}") from error


def _message(error: Exception, *, about: str) -> str:
    """Return an error's one line; where it was not written for people, after its kind and the file it is about."""
    first = first_line(error).rstrip()
    if first.endswith(":"):  # it only announces
        all_lines = shortened(" ".join(str(error).split()), ERROR_CHARACTERS)
        first = last_line(error) if first.startswith("Error(s) in loading") else all_lines
    if isinstance(error, ValueError | OSError | ImportError) or type(error) is RuntimeError:
        return first
    kind = f"{type(error).__name__}: " if type(error).__module__ == "builtins" and type(error) is not Exception else ""
    return f"{about}: {kind}{first}" if about else f"{kind}{first}"


def damage_in(folder: Path, files: tuple[str, ...]) -> str | None:
    """Return the first damaged file and what is wrong with it: not UTF-8, not a JSON object, not whole; else None."""
    from safetensors import SafetensorError, safe_open

    for path in (path for pattern in files for path in sorted(folder.glob(pattern))):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    continue
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json" and not isinstance(json.loads(text), dict):
                return f"{path.name} is damaged: it is not a JSON object"
        except RecursionError:
            return f"{path.name} is nested too deep"
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror or error})"
        except (ValueError, SafetensorError) as error:
            return f"{path.name} is damaged: {first_line(error)}"
    return None
