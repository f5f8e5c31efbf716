"""Fingerprints of what a run reads besides its settings: rows, weights, people's functions with what they import from
beside them; and the versions it runs on.

A resume under another fingerprint is refused as one under another setting is. Other versions are said: they need not
change a number. Weights are hashed once; while a file keeps its size and time of change, its hash is taken as known.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel, ConfigDict, Field

from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import MANIFEST
from tinyrl.runs.run_dir import versions
from tinyrl.starter import starter_path
from tinyrl.workers.loading import imported_beside, parse_use

OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt")  # files of a folder that numbers depend on
OF_A_RUN = (  # no weights
    MANIFEST,
    "state.json",
    *(f"{name}.safetensors" for name in ("optimizer", "rollout", "random", "reference_logprobs")),
)
HELD_OUT = "held-out rows"
Whole = Annotated[int, Field(ge=0)]


class SourceFile(BaseModel):
    """A file that is read; `modified` in nanoseconds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: Whole
    modified: Whole
    sha256: str


class Sources(BaseModel):
    """What a run reads. rows: "training" and "held-out" to a fingerprint; files: "setting: file" to a file's."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rows: dict[str, str] = Field(default_factory=dict)
    files: dict[str, SourceFile] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


def read_sources(config: Config, *, rows: dict[str, str], known: Mapping[str, SourceFile]) -> Sources:
    """The fingerprints as of now. `known` files are hashed again only where size or time of change differ."""
    files = {name: _fingerprint(path, known.get(name)) for name, path in _files(config)}
    return Sources(rows=rows, files=files, versions=versions())


def changed_sources(before: Sources, now: Sources) -> list[str]:
    """A line for each source that is not what it was. One that only `now` has came with a setting, which is said."""
    different = [name for name, rows in before.rows.items() if now.rows.get(name) != rows]
    changes = [f"{name} rows: the data has changed" for name in different]
    changed: dict[str, list[str]] = {}
    for name, file in before.files.items():
        there = now.files.get(name)
        if there is None or there.sha256 != file.sha256:
            setting, _, file_name = name.partition(": ")
            changed.setdefault(setting, []).append(f"{file_name} {'has changed' if there else 'is not there any more'}")
    for setting, (first, *others) in changed.items():
        changes.append(f"{setting}: {first}{f', and {len(others)} other files' if others else ''}")
    return changes


def changed_versions(before: Sources, now: Sources) -> list[str]:
    """A line for each version that is another one."""
    both = before.versions.keys() & now.versions.keys()
    pairs = {name: (before.versions[name], now.versions[name]) for name in sorted(both)}
    return [f"{name} {then}, now {here}" for name, (then, here) in pairs.items() if then != here]


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Every file of models, adapters and rewards, by the setting that names it."""
    models = {"model.path": config.model.path, "model.adapter": config.model.adapter}
    if config.uses("critic"):
        models["critic.path"] = config.critic.path
    if config.uses("reward"):
        models["reward.model"] = config.reward.model
    for setting, path in models.items():
        revision = config.model.revision if setting == "model.path" else None
        for file in [] if path is None else _model_files(path, revision=revision):
            yield f"{setting}: {file.name}", file
    own = Path(config.critic.path or "") / "critic"  # what a run's critic has beside its policy
    if config.uses("critic") and config.critic.path is not None and own.is_dir():
        yield from ((f"critic.path: critic/{file.name}", file) for file in _model_files(str(own), revision=None))
    uses = [("reward.functions", function.use) for function in config.reward.functions if config.uses("reward")]
    if config.uses("environment"):
        uses += config.environment.functions
        corpus = config.environment.corpus
        if corpus is not None and os.path.isfile(corpus):
            yield f"environment.corpus: {os.path.basename(corpus)}", Path(corpus)
    for setting, use in uses:
        source = parse_use(use, setting=setting, classes=True)
        if source.file is not None:
            yield f"{setting}: {use.rpartition(':')[0]}", source.file
        beside = os.path.dirname(use.rpartition(":")[0]) if source.path else ""
        for file in imported_beside(source):
            yield f"{setting}: {os.path.join(beside, os.path.relpath(file, source.folder))}", file


def _model_files(path: str, *, revision: str | None) -> list[Path]:
    """Files of a folder. Of a hub name the config.json as the hub's client keeps it: its folder is the revision."""
    folder = starter_path(path) or Path(path).expanduser()
    if not folder.is_dir():
        kept = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(kept, str):
            return []
        folder = Path(kept).parent
    names = sorted(p for p in folder.iterdir() if p.suffix in OF_A_MODEL and p.name not in OF_A_RUN)
    return [p for p in names if p.is_file()]


def _fingerprint(path: Path, known: SourceFile | None) -> SourceFile:
    stat = path.stat()
    if known is not None and (known.bytes, known.modified) == (stat.st_size, stat.st_mtime_ns):
        return known
    digest = _written_down(path, stat.st_size)
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceFile(bytes=stat.st_size, modified=stat.st_mtime_ns, sha256=digest)


def _written_down(path: Path, size: int) -> str | None:
    """The hash of a file that somebody took before: a checkpoint's manifest, the hub's client (in its blob's name)."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        return blob.name
    try:
        entry: dict[str, Any] = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))["files"][path.name]
        return str(entry["sha256"]) if entry["bytes"] == size else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
