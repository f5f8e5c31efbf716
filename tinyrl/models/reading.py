"""Find a model's folder; turn what libraries raise on a damaged model, tokenizer, template or adapter into ValueError.

Folders come from anywhere, and a damaged one makes a library raise nearly anything (TypeError, RecursionError,
ZeroDivisionError, safetensors' own), so this is the one place that catches broadly. Errors that are not the folder's
fault pass: no memory, no room on the disk, a stop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tinyrl.config.sections import EMBEDDED, starter_path
from tinyrl.process.errors import Stop, no_memory
from tinyrl.runs.records import holds_runs, not_a_run
from tinyrl.text import ERROR_CHARACTERS, did_you_mean, first_line, truncate

TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def is_reward_adapter(path: str) -> bool:
    """Return whether `reward.model` is an adapter for the shared base, not a model of its own."""
    return (Path(path).expanduser() / ADAPTER_FILES[0]).is_file()


def resolve_model_path(path: str, *, key: str = "model.path", adapters: bool = False) -> str:
    """Return the folder of an embedded model (`starter`, `starter-reward`), a folder as it is, or a hub name.

    Raises ValueError, with `key`, for a path that looks local and does not exist, and for a folder that is not a whole
    model (nor an adapter, with `adapters`): without config.json, or with pickled weights only.
    """
    if (embedded := starter_path(path)) is not None:
        return str(embedded)
    folder = Path(os.path.expanduser(path))
    where = f"{key}={truncate(path, 300)}"
    if os.path.isfile(folder):
        raise ValueError(f"{where} is a file; name the folder that holds config.json and *.safetensors")
    has_config = os.path.isfile(folder / "config.json")
    if not has_config and holds_runs(os.path.expanduser(path)):
        raise ValueError(f"{where}: {not_a_run(path)}")
    if not os.path.isdir(folder):
        local = folder.parent != Path() and folder.parent.is_dir()  # runs/NAME beside other runs
        if local or path.startswith((".", "/", "~")) or path.count("/") != 1:
            meant = did_you_mean(folder.name, [*sorted(file.name for file in folder.parent.glob("*")), *EMBEDDED])
            raise ValueError(f"{where}: there is no such folder, and a hub name is owner/name.{meant}")
        return path
    names = sorted(file.name for file in folder.glob("*"))
    if not has_config and not (adapters and ADAPTER_FILES[0] in names):
        there = f"it has: {', '.join(names[:8]) or 'nothing'}"
        if ADAPTER_FILES[0] in names:
            there = "it is an adapter: name it as model.adapter, its base as model.path"
        raise ValueError(f"{where} is not a model folder: it has no config.json ({there})")
    pickled = [name for name in names if name.endswith(PICKLED) and name != "training_args.bin"]
    if pickled and not any(name.endswith(".safetensors") for name in names):
        raise ValueError(f"{where}: {pickled[0]} is pickled and can execute code when read; convert to safetensors")
    return str(folder)


def missing_files(folder: Path, names: Sequence[str]) -> str:
    """Say which of these files a folder lacks; "" where it has all, or is a hub name."""
    missing = [name for name in names if not (folder / name).is_file()] if folder.is_dir() else []
    return f"{truncate(missing[0])} is missing ({len(missing)} of {len(names)} files)" if missing else ""


def tokenizer_folder(resolved: str, *, revision: str | None = None) -> Path:
    """Return the folder with the files of a tokenizer: the model's own, or that of the hub's cache, to which they are
    downloaded.
    """
    if os.path.isdir(resolved):
        return Path(resolved)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(resolved, revision=revision, allow_patterns=[*TOKENIZER_FILES, "*/*.jinja"]))


def reading_tokenizer(path: str, resolved: str) -> AbstractContextManager[None]:
    """Return `reading` for the tokenizer of a model."""
    return reading(f"cannot load a tokenizer from {path!r} (tokenizer_config.json, tokenizer.json)", resolved)


@contextmanager
def reading(what: str, folder: str | Path | None = None) -> Iterator[None]:
    """Raise ValueError("{what}: {error in one line}") for whatever library calls inside raise. A damaged safetensors
    file of a local `folder`, which libraries do not name, is named.
    """
    try:
        yield
    except (Stop, MemoryError):
        raise
    except BaseException as error:  # broad on purpose, see above
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if no_memory(error) is not None or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = truncate(" ".join(str(error).split()), ERROR_CHARACTERS)
        if type(error).__module__ == "builtins" and not isinstance(error, ValueError | OSError | RuntimeError):
            found = f"{type(error).__name__}: {found}"
        raise ValueError(f"{what}: {_damaged_weights(folder) or found}") from error


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a library in Rust (tokenizers, safetensors), which is no Exception."""
    return type(error).__name__ == "PanicException"


def _damaged_weights(folder: str | Path | None) -> str | None:
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(folder).glob("*.safetensors")) if folder is not None else ():
        try:
            safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            return f"{path.name} is damaged: {first_line(error)}"
    return None
