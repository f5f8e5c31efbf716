"""Rows of data files, runs that learn from them, and small models with a chat template."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.load import load_method

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def talk(*turns: str) -> list[Row]:
    """Messages of the user and the assistant in turn."""
    return [(assistant if i % 2 else user)(text) for i, text in enumerate(turns)]


def chat_model(folder: Path, template: str, kind: str = "llama", **model: Any) -> Path:
    """Write a tiny model whose tokenizer has a chat template; returns the folder."""
    tiny_model(folder, kind, **model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def loaded(config: Config) -> Any:
    """Load the method of a configuration, with its models."""
    return load_method(prepare(config), options=Options(device="cpu"))


def trained(config: Config, folder: Path, *, name: str = "run") -> RunDir:
    """Train to the end, which is reached."""
    code, run, _ = running.train(config, folder, name=name)
    assert code == 0
    return run


def row_config(method: str, path: Path, data: Path, *, lora: bool = True, **sections: Any) -> Config:
    """Learn from rows; `sections` are laid over small settings."""
    values: dict[str, Any] = {
        "method": method,
        "model": {"path": str(path)},
        "lora": {"enabled": lora},
        "task": {"data": str(data)},
        "optim": {"learning_rate": 1e-2 if lora else 3e-3},
        "run": {"num_steps": 30, "eval_every": 10, "save_every": 10, "threads": 1},
    }
    return config_of({**values, **{k: {**values.get(k, {}), **v} for k, v in sections.items()}})


def on_all(method: str, model: Path, folder: Path, rows: list[Row], **sections: Any) -> Any:
    """Load a method that trains every weight; the held-out rows are those that it learns from."""
    data = write_rows(folder / "rows.jsonl", rows)
    task = {"eval_data": str(data), **sections.pop("task", {})}
    return loaded(row_config(method, model, data, lora=False, task=task, **sections))
