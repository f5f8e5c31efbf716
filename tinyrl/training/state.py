"""state.json of a checkpoint: where the run stands, and hashes of what it reads besides its settings.

Rows, model files and people's functions with their local imports have hashes. A resume under another one is refused as
one under another setting is; other versions of libraries are only noted. A file is hashed again only where its size or
time of change differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.checkpoint import MANIFEST, checkpoint_step
from tinyrl.runs.run_dir import versions
from tinyrl.workers.loading import imported_beside, parse_use

STATE = "state.json"
OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt")  # files of a folder that numbers depend on
OF_A_RUN = (MANIFEST, STATE, "optimizer.safetensors", "random.safetensors", "reference_logprobs.safetensors")
Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class SourceFile(_Strict):
    bytes: Annotated[int, Field(ge=0)]
    modified: Annotated[int, Field(ge=0)]  # nanoseconds
    sha256: str


class InputHashes(_Strict):
    """Hashes of a run's inputs. rows: hashes of "training" and "held-out"; files: by "setting: file"."""

    rows: dict[str, str] = Field(default_factory=dict)
    files: dict[str, SourceFile] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


class Best(_Strict):
    step: Count
    value: Finite


class Controllers(_Strict):
    """State of the methods between steps."""

    kl_coef: Annotated[Finite, Field(ge=0)] | None = None  # PPO's weight of the KL, which may adapt
    exact_sampling: bool | None = None  # sampling log-probabilities are training's; None: not measured yet
    measured_on: str = ""  # engine, device and precision that exact_sampling is of
    pass_rates: dict[str, Annotated[list[Finite], Field(min_length=3, max_length=3)]] = Field(
        default_factory=dict  # of rows by fingerprint: completions that were right, wrong, in which step
    )
    failing_batches: Count = 0  # in a row, whose rewards failed
    flat_steps: Count = 0  # without a gradient of the policy


class RunState(_Strict):
    """The state of a run after `step` finished steps. phase: what comes next, the evaluation after that step (of step
    0: before training), whose other metrics are `values`, or the next step's rollout.
    """

    step: Count = 0
    phase: Literal["evaluation", "rollout"] = "evaluation"
    values: dict[str, int | float | None] = Field(default_factory=dict)
    controllers: Controllers = Field(default_factory=Controllers)
    completions: Count = 0
    tokens: Count = 0
    best: Best | None = None
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    loss_scale: dict[str, Count | Annotated[Finite, Field(gt=0)]] = Field(default_factory=dict)

    @field_validator("loss_scale")
    @classmethod
    def _is_of_a_scaler(cls, state: dict[str, Any]) -> dict[str, Any]:
        if state and (state.keys() != torch.amp.GradScaler("cpu").state_dict().keys() or not state["scale"]):
            raise ValueError("is no state of a torch.amp.GradScaler")
        return state


class CheckpointState(_Strict):
    """state.json: the run's state, and what it was a function of or depends on for an exact resume."""

    run: RunState
    micro_batch_tokens: Annotated[Count, Field(ge=1)]
    threads: Annotated[int, Field(ge=1, le=4096)]
    sources: InputHashes = Field(default_factory=InputHashes)
    config: dict[str, str | dict[str, Any]]
    records: dict[str, Count]  # bytes of metrics.jsonl and the like
    python_random: list[int | list[int] | float | None]

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the configuration; None where the version that wrote it had none."""
        found = self.config.get(section)
        return found.get(name) if isinstance(found, dict) else None

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(self.model_dump(), indent=1), encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """Read state.json of a checkpoint. Raises ValueError, with the first thing that is wrong, for one not of ours."""
    try:
        state = CheckpointState.model_validate_json((folder / STATE).read_bytes())
        if state.run.step == checkpoint_step(folder):
            return state
        problem = f"run.step: {state.run.step}, in {folder.name}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    raise ValueError(f"{folder / STATE} is not what this tinyrl writes: {problem}")


# ---- what a run reads ----


def read_sources(config: Config, *, rows: dict[str, str], known: Mapping[str, SourceFile]) -> InputHashes:
    """Hash a run's inputs; `known` files again only where size or time of change differ."""
    files: dict[str, SourceFile] = {}
    for name, path in _files(config):
        stat, before = path.stat(), known.get(name)
        if before is None or (before.bytes, before.modified) != (stat.st_size, stat.st_mtime_ns):
            digest = _known_digest(path, stat.st_size)
            if digest is None:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            before = SourceFile(bytes=stat.st_size, modified=stat.st_mtime_ns, sha256=digest)
        files[name] = before
    return InputHashes(rows=rows, files=files, versions=versions())


def changed_sources(before: InputHashes, now: InputHashes) -> list[str]:
    """List the sources that have changed. One that only `now` has came with a setting, whose change is noted."""
    changes = [f"{name} rows: the data has changed" for name, rows in before.rows.items() if now.rows.get(name) != rows]
    for name, file in before.files.items():
        there = now.files.get(name)
        if there is None or there.sha256 != file.sha256:
            changes.append(f"{name} {'has changed' if there else 'is not there any more'}")
    return changes


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield every file of models, adapters, rewards and environments, by the setting that names it."""
    models = {"model.path: ": config.model.path, "model.adapter: ": config.model.adapter}
    functions = config.reward.functions if config.uses("reward") else []
    uses = [("reward.functions", function.use) for function in functions if not function.is_judge]
    if config.uses("critic"):
        models["critic.path: "] = config.critic.path
        own = os.path.join(config.critic.path or "", "critic")  # that of a run, beside its policy
        models["critic.path: critic/"] = own if config.critic.path and os.path.isdir(own) else None
    if config.uses("reward"):
        models["reward.model: "] = config.reward.model
    if config.learns_from_teacher and config.teacher.kind in ("model", "adapter"):
        models["teacher.path: "] = config.teacher.path
    for name, path in models.items():
        revision = config.model.revision if name == "model.path: " else None
        for file in [] if path is None else _model_files(path, revision=revision):
            yield f"{name}{file.name}", file
    rubrics = [Path(function.rubric) for function in functions if function.rubric is not None]
    yield from ((f"reward.functions: {rubric.name}", rubric) for rubric in rubrics)
    if config.uses("environment"):
        uses += config.environment.functions
        corpus = config.environment.corpus
        if corpus is not None and os.path.isfile(corpus):
            yield f"environment.corpus: {os.path.basename(corpus)}", Path(corpus)
    for setting, use in uses:
        source = parse_use(use, setting=setting, classes=True)
        name = use.rpartition(":")[0]
        if source.file is not None:
            yield f"{setting}: {name}", source.file
        beside = os.path.dirname(name) if source.module is None else ""
        for file in imported_beside(source):
            yield f"{setting}: {os.path.join(beside, os.path.relpath(file, source.folder))}", file


def _model_files(path: str, *, revision: str | None) -> list[Path]:
    """List the files of a model's folder; of a hub name that of the hub's client, which is one of a revision."""
    folder = starter_path(path) or Path(path).expanduser()
    if not folder.is_dir():
        kept = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(kept, str):
            return []
        folder = Path(kept).parent
    return sorted(p for p in folder.iterdir() if p.suffix in OF_A_MODEL and p.name not in OF_A_RUN and p.is_file())


def _known_digest(path: Path, size: int) -> str | None:
    """Return a hash that was taken before: by a checkpoint's manifest, or the hub's client (its blob's name)."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        return blob.name
    try:
        entry: dict[str, Any] = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))["files"][path.name]
        return str(entry["sha256"]) if entry["bytes"] == size else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
