"""Files of user code among a run's inputs: those that the settings name, and all that workers import for them.

The workers say what they have imported (workers/imports.py), as it was when they loaded it; a checkpoint has what was
known when it was written, so also modules that calls have imported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyrl.config.schema import Config
from tinyrl.training.run_state import InputHashes, SourceFile
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.imports import ImportedFile
from tinyrl.workers.loading import FunctionSource, parse_use


@dataclass(frozen=True)
class NamedCode:
    """A user function that a setting names."""

    setting: str
    source: FunctionSource

    @property
    def name(self) -> str:
        """Return the file or module, as the setting has it."""
        return self.source.use.rpartition(":")[0]

    def label(self, file: Path) -> str:
        """Return "setting: file" for a file of its code: beside the function's own as the setting writes that folder,
        elsewhere with its whole path.
        """
        source = self.source
        folder = os.path.abspath(source.folder)
        if source.file is not None and str(file) == os.path.abspath(source.file):
            return f"{self.setting}: {self.name}"
        if not file.is_relative_to(folder):
            return f"{self.setting}: {file}"
        beside = os.path.dirname(self.name) if source.module is None else ""
        return f"{self.setting}: {os.path.join(beside, file.relative_to(folder))}"

    def is_called_by(self, worker: WorkerFunction) -> bool:
        places = [(source.file, source.module, source.function) for source in worker.sources]
        return (self.source.file, self.source.module, self.source.function) in places


def code_of(config: Config) -> list[NamedCode]:
    """Return the user functions that the settings name. Raises ValueError for one that is not there."""
    return [
        NamedCode(named.setting, parse_use(named.value, setting=named.label))
        for named in config.named()
        if named.kind == "code"
    ]


def with_imports(
    inputs: InputHashes,
    code: Sequence[NamedCode],
    workers: Sequence[WorkerFunction],
    *,
    carried: Mapping[str, SourceFile],
) -> InputHashes:
    """Add the files that workers have imported, as they were loaded, and those `carried` of modules that no worker has
    imported yet.
    """
    imported: dict[str, SourceFile] = {}
    for one in code:
        for worker in filter(one.is_called_by, workers):
            for path, file in worker.code.files.items():
                imported.setdefault(one.label(path), _source_file(file))
    modules = {(setting_of(name), file.module) for name, file in imported.items()}
    waiting = {name: file for name, file in carried.items() if (setting_of(name), file.module) not in modules}
    unread = {name: why for name, why in inputs.unread.items() if name not in imported}
    return inputs.model_copy(update={"files": {**waiting, **inputs.files, **imported}, "unread": unread})


def carried_files(
    known: Mapping[str, SourceFile], code: Sequence[NamedCode], *, changed: set[str]
) -> dict[str, SourceFile]:
    """Hash the files of code that a checkpoint knows as they are now, but for settings that have `changed`: a call may
    import them again. One that is gone is left out.
    """
    settings = {one.setting for one in code} - changed
    found: dict[str, SourceFile] = {}
    for name, file in known.items():
        path = Path.cwd() / Path(name.partition(": ")[2]).expanduser()
        if setting_of(name) in settings and path.is_file():
            content = path.read_bytes()
            stat = path.stat()
            digest = hashlib.sha256(content).hexdigest()
            found[name] = SourceFile(bytes=len(content), modified=stat.st_mtime_ns, sha256=digest, module=file.module)
    return found


def same_module(name: str, file: SourceFile, files: Mapping[str, SourceFile]) -> SourceFile | None:
    """Find a module of a setting's code among other inputs, wherever it lies now."""
    if file.module is None:
        return None
    alike = [
        other for label, other in files.items() if other.module == file.module and setting_of(label) == setting_of(name)
    ]
    unchanged = [other for other in alike if other.sha256 == file.sha256]
    return next(iter(unchanged or alike), None)


def setting_of(name: str) -> str:
    """Return the setting of an input's name, "setting: file"."""
    return name.partition(": ")[0]


def _source_file(file: ImportedFile) -> SourceFile:
    return SourceFile(bytes=file.bytes, modified=file.modified, sha256=file.sha256, module=file.module)
