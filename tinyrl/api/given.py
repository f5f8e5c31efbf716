"""What a notebook gives: settings, reward functions and rows, as the command line would have them.

Rows that are in no file are written to one named by its content. A function that is in no module's file is called in
this process: resume such a run where the function is defined.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import as_override
from tinyrl.config.settings import SECTIONS
from tinyrl.text import listed, shortened
from tinyrl.workers.loading import use_of

Settings = Mapping[str, Any]  # {"run.num_steps": 20} or {"run": {"num_steps": 20}}
Reward = str | Callable[..., Any]  # 'file.py:function', a function, a functools.partial, or an object with __call__
INPUTS = "inputs"  # the folder beside runs for them


def given(settings: list[str], reward: Any, rows: Any, eval_rows: Any, inputs: Path) -> list[str]:
    """Overrides for settings, rewards and rows; rows are written to a file where they are none yet. Rows take the place
    of a recipe's, and of its task, where the settings name no other.
    """
    found = [*settings]
    if reward is not None:
        several = reward if isinstance(reward, list | tuple) else [reward]
        weighted = reward.items() if isinstance(reward, Mapping) else [(each, 1.0) for each in several]
        functions = [_function(each, weight) for each, weight in weighted]
        found.append(as_override("reward.functions", functions))
    if rows is not None:
        named = {setting.partition("=")[0] for setting in settings}
        of_rows = {"task.name": "rows"} | ({"task.eval_data": None} if eval_rows is None else {})
        found += [as_override(key, value) for key, value in of_rows.items() if not named & {"task", key}]
    for key, given in (("task.data", rows), ("task.eval_data", eval_rows)):
        if given is not None:
            file = os.fspath(given) if isinstance(given, str | os.PathLike) else str(_written_rows(given, inputs))
            found.append(as_override(key, file))
    return found


def _function(reward: Any, weight: Any) -> dict[str, Any]:
    if not isinstance(reward, str) and not callable(reward):
        raise ValueError(f"reward={shortened(repr(reward))}: it is a function, or 'file.py:function'")
    plain = _plain(weight)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise ValueError(f"reward: the weight of {shortened(repr(reward))} is {shortened(repr(weight))}, not a number")
    return {"use": reward if isinstance(reward, str) else use_of(reward), "weight": float(plain)}


def path_of(name: str, value: Any) -> str:
    """Text or a path as text; ValueError for anything else that `name` is given."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    raise ValueError(f"{name}={shortened(repr(value))}: it must be text or a path")


def _plain(value: Any) -> Any:
    """A value as YAML would have it: paths as text; numbers, arrays and tensors of numpy and torch as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) and not isinstance(value, type) else value


def _written_rows(rows: Any, inputs: Path) -> Path:
    """Rows as a .jsonl file, named by its content, so that the same rows are the same file."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")  # a data frame
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | bytes):
        raise ValueError(f"rows={shortened(repr(rows))}: they are a file, a hub name, or dictionaries, one a row")
    lines = []
    for at, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {at} is {shortened(repr(row))}, and a row is a dictionary of columns")
        cells = {name: _cell(value) for name, value in row.items()}
        try:
            lines.append(json.dumps(cells, ensure_ascii=True, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            column = next(name for name, value in cells.items() if not _is_json({name: value}))
            raise ValueError(f"row {at}, column {column!r}: cannot be written as JSON: {error}") from None
    text = "".join(lines)
    file = inputs.absolute() / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    return file


def _cell(value: Any) -> Any:
    """Convert a cell to JSON: NaN and pandas' NA and NaT become null, a date its ISO text."""
    if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # dates of numpy
        value = value.astype("datetime64[us]").tolist()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    value = _plain(value)
    if isinstance(value, dict):
        return {key: _cell(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cell(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def overrides_of(settings: Settings | None) -> list[str]:
    """Settings as the command line has them: {"run.num_steps": 20} and {"run": {"num_steps": 20}} are the same."""
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"settings={shortened(repr(settings))}: they are a dictionary, as {{'run.num_steps': 20}}")
    flat: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        elif not isinstance(key, str) or "." not in key:
            raise ValueError(f"settings: {shortened(repr(key))} is no section.key; sections: {listed(SECTIONS)}")
        else:
            flat[key] = value
    try:
        return [as_override(key, _plain(value)) for key, value in flat.items()]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"settings: a value is neither text, a number, a flag, a list nor a mapping: {error}"
        ) from None
