"""What is talked to: a run, a checkpoint or a model, and the configuration that it is loaded with. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.embedded import starter_path
from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.evaluation.targets import as_policy, check_sections
from tinyrl.runs.checkpoint import checkpoint_of
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import open_run, run_of
from tinyrl.text import did_you_mean

SECTIONS = ("task", "generation", "environment", "reward")  # whose settings the command line may give


@dataclass(frozen=True)
class ChatTarget:
    """The configuration, as grpo's, whatever has trained the policy; checkpoint: its weights (None: a model's own)."""

    name: str
    config: Config
    checkpoint: Path | None


def chat_target(path: str, settings: list[str]) -> ChatTarget:
    """Find what is at `path`. Raises ValueError for a reward model, a run without a checkpoint, other settings."""
    check_sections(settings, SECTIONS, "a chat")
    run = run_of(Path(path))
    if run is None:
        meant = did_you_mean(path, [str(found.parent) for found in Path(path).parent.glob("*/config.yaml")])
        if meant and starter_path(path) is None and not Path(path).expanduser().exists():  # else it may be a hub name
            raise ValueError(f"{path} is neither a run nor a model.{meant}")
        values: dict[str, Any] = {"method": "grpo", "model": {"path": path}, "reference": {"kind": "none"}}
        return ChatTarget(path, _built(values, settings), None)
    config = open_run(run).read_config()
    if not config.trains.policy:
        raise ValueError(f"{path} is a reward model, which writes nothing")
    checkpoint = checkpoint_of(Path(path))
    return ChatTarget(f"{run.resolve().name}/{checkpoint.name}", _built(as_policy(config), settings), checkpoint)


def _built(values: dict[str, Any], settings: list[str]) -> Config:
    values["generation"] = {**values.get("generation", {}), "allow_truncated_sampling": True}  # nothing is trained
    return resolve(build_config(values, settings))
