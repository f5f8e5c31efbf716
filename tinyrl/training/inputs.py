"""The files that a run's settings name, and their hashes. What workers import beside those is in code_inputs.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from tinyrl.config.marks import Named
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.provenance import versions
from tinyrl.training.run_state import InputHashes, SourceFile
from tinyrl.training.saver import OF_A_RUN
from tinyrl.workers.fingerprint import fingerprint
from tinyrl.workers.loading import parse_use

OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt")  # files of a folder that numbers depend on


@dataclass(frozen=True)
class NamedInputs:
    """What the settings name, as it was found when the run was loaded. files: by "setting: file"; functions:
    fingerprints of those that this process defined, by "setting: use".
    """

    files: dict[str, Path]
    functions: dict[str, str]


def named_inputs(config: Config) -> NamedInputs:
    """List the inputs that a run's settings name."""
    return NamedInputs(files=dict(_files(config)), functions=_fingerprints(config))


def read_sources(inputs: NamedInputs, *, rows: dict[str, str], known: Mapping[str, SourceFile]) -> InputHashes:
    """Hash a run's inputs; `known` files again only where size or time of change differ. A file that cannot be read any
    more is among the `unread`.
    """
    files: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    for name, path in inputs.files.items():
        try:
            files[name] = _hashed(path, known=known.get(name))
        except OSError as error:
            unread[name] = f"it cannot be read any more ({error.strerror})"
    return InputHashes(rows=rows, files=files, unread=unread, functions=inputs.functions, versions=versions())


def _hashed(path: Path, *, known: SourceFile | None) -> SourceFile:
    """Hash a file, or return what is `known` of it where size and time of change are the same. Raises OSError."""
    stat = path.stat()
    if known is not None and (known.bytes, known.modified) == (stat.st_size, stat.st_mtime_ns):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceFile(bytes=stat.st_size, modified=stat.st_mtime_ns, sha256=digest)


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield (label, file) for every file that the settings name, but those of rows: the rows that are read have
    fingerprints, and a file may have rows that task.max_samples leaves out.
    """
    for named in config.named():
        match named.kind:
            case "model":
                revision = config.model.revision if named.setting == "model.path" else None
                yield from _files_of_model(named, revision=revision)
            case "code":
                source = parse_use(named.value, setting=named.label)
                if source.file is not None:  # what it imports is known to the worker that loads it
                    yield f"{named.setting}: {named.value.rpartition(':')[0]}", source.file
            case "file" if not named.names.made and os.path.isfile(named.value):
                yield f"{named.setting}: {os.path.basename(named.value)}", Path(named.value)
            case _:  # rows, the hub, a server, a word
                pass


def _fingerprints(config: Config) -> dict[str, str]:
    """Return fingerprints of the functions that this process defined, by "setting: use"."""
    found: dict[str, str] = {}
    for named in config.named():
        if named.kind == "code":
            function = parse_use(named.value, setting=named.label).here
            if function is not None:
                found[f"{named.setting}: {named.value}"] = fingerprint(function)
    return found


def _files_of_model(named: Named, *, revision: str | None) -> Iterator[tuple[str, Path]]:
    folder = starter_path(named.value) or Path(named.value).expanduser()
    if not folder.is_dir():  # a hub name
        cached = try_to_load_from_cache(named.value, "config.json", revision=revision)
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    for file in sorted([*folder.iterdir(), *folder.glob("critic/*")]):
        if file.suffix in OF_A_MODEL and file.name not in OF_A_RUN and file.is_file():
            yield f"{named.setting}: {file.relative_to(folder)}", file
