"""What is talked to: a run, a checkpoint or a model, and the configuration that it is loaded with. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.methods import and_list
from tinyrl.config.recipe import apply_overrides, build_config
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import Source
from tinyrl.runs.checkpoint import checkpoint_of
from tinyrl.runs.run_dir import open_run, run_of
from tinyrl.runs.settle import settle
from tinyrl.starter import starter_path
from tinyrl.text import did_you_mean, shortened

SECTIONS = ("task", "generation", "environment", "reward")  # whose settings the command line may give


@dataclass(frozen=True)
class ChatTarget:
    """The configuration, as grpo's, whatever has trained the policy; checkpoint: its weights (None: a model's own)."""

    name: str
    config: Config
    checkpoint: Path | None

    @property
    def has_start(self) -> bool:
        """Whether there is something else that the policy began as."""
        return self.checkpoint is not None and self.config.has_reference


def chat_target(path: str, settings: list[str]) -> ChatTarget:
    """Find what is at `path`. Raises ValueError for a reward model, a run without a checkpoint, other settings."""
    for setting in settings:
        if setting.partition(".")[0] not in SECTIONS:
            raise ValueError(
                f"override '{shortened(setting)}': a chat takes settings of {and_list([*SECTIONS])}; the others are "
                "the run's own"
            )
    run = run_of(Path(path))
    if run is None:
        _check_there(path)
        values: dict[str, Any] = {"method": "grpo", "model": {"path": path}, "reference": {"kind": "none"}}
        return ChatTarget(path, _built(values, settings), None)
    config = open_run(run).read_config()
    if not config.trains.policy:
        raise ValueError(f"{path} is a reward model, which writes nothing")
    checkpoint = checkpoint_of(Path(path))
    return ChatTarget(f"{run.resolve().name}/{checkpoint.name}", _built(_as_policy(config), settings), checkpoint)


def _as_policy(config: Config) -> dict[str, Any]:
    """The sections that a policy is loaded, prompted and answered by; no critic, no trackers, no dropout."""
    names = ["model", "lora", "task", "run"]
    names += ["generation", "environment", "reward", "reference"] if config.samples else []
    values: dict[str, Any] = {name: getattr(config, name).model_dump() for name in names}
    values["run"] |= {"trackers": []}
    values["lora"] |= {"dropout": 0.0}
    kind = "none" if config.model.random_init else config.reference.kind
    return {"method": "grpo", **values, "reference": {"kind": kind}}


def _check_there(path: str) -> None:
    """ValueError for a path that is nothing and nearly that of a run; else it may be a hub name."""
    beside = [str(found.parent) for found in Path(path).parent.glob("*/config.yaml")]
    meant = did_you_mean(path, beside)
    if meant and starter_path(path) is None and not Path(path).expanduser().exists():
        raise ValueError(f"{path} is neither a run nor a model.{meant}")


def _built(values: dict[str, Any], settings: list[str]) -> Config:
    values["generation"] = {**values.get("generation", {}), "allow_truncated_sampling": True}  # nothing is trained
    return settle(build_config(apply_overrides(Source("settings", values), settings)))
