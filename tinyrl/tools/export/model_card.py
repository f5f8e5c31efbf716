"""The model card of an exported policy: data, rewards, curve, evaluation, licence of the base; model_card.md (jinja2).

Its values come from files of a run, which may quote anything: each is one line of visible text that Markdown takes for
text. Folders of this machine are named by their last part.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

import tinyrl
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import hub_name
from tinyrl.runs.metrics import TABLE
from tinyrl.runs.records import evenly
from tinyrl.runs.records import number as as_number
from tinyrl.runs.run_dir import named_run
from tinyrl.text import number, one_line

MOST_POINTS = 12  # of the curve
PICTURE = "report.png"


def model_card(
    config: Config,
    steps: dict[int, dict[str, Any]],
    *,
    name: str,
    step: int,
    dtype: str | None,
    notes: list[str],
    picture: bool,
) -> str:
    """Return README.md, from a run's configuration and the lines of its metrics.jsonl by step. dtype: of a whole
    model's weights; None: an adapter.
    """
    path, licence, run = config.model.path, licence_of(config.model.path), named_run(config.model.path)
    is_folder, embedded = Path(path).expanduser().is_dir(), starter_path(path) is not None
    front: dict[str, Any] = {"library_name": "transformers" if dtype else "peft"}
    front |= {} if is_folder or embedded else {"base_model": path}
    front |= {"license": licence} if licence and re.fullmatch(r"[a-z0-9.-]+", licence) else {}
    sources = {hub_name(source) for source in (config.task.data, config.task.eval_data) if source} - {None}
    front |= {"datasets": sorted(map(str, sources))} if sources else {}
    front["tags"] = ["tinyrl", config.method, *(["lora"] if config.lora.enabled else [])]
    evaluated = {at: line for at, line in steps.items() if at <= step and any(key.startswith("eval/") for key in line)}
    environment = Environment(  # noqa: S701  `plain` escapes
        loader=PackageLoader("tinyrl.tools.export", "."), trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": _plain, "value": _value, "source": _source, "json": json.dumps}
    return environment.get_template("model_card.md").render(
        name=name,
        step=step,
        dtype=dtype,
        notes=notes,
        picture=PICTURE if picture else None,
        config=config,
        version=tinyrl.__version__,
        front=front,
        base=f"{run.name}/{Path(path).name}" if run else Path(path).name if is_folder else path,
        licence=licence,
        task=config.task.name or "rows",
        reward_model=Path(config.reward.model or "").name,
        curve=curve(evaluated),
        evaluated=max(evaluated, default=None),
        evaluation=evaluated[max(evaluated)] if evaluated else {},
        embedded=embedded,
    )


def licence_of(path: str) -> str | None:
    """Return the licence of a base, from the model card or the licence file in its folder; None where there is none."""
    if starter_path(path) is not None:
        return "apache-2.0"
    folder = Path(path).expanduser()
    card = folder / "README.md"
    text = card.read_text("utf-8", "replace")[:20_000] if card.is_file() else ""
    front = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    named = re.search(r"^license:\s*[\"']?([\w .+-]{1,60})", front[1] if front else "", re.MULTILINE)
    if named:
        return named[1].strip()
    files = sorted(folder.glob("LICEN[SC]E*")) if folder.is_dir() else []
    lines = files[0].read_text("utf-8", "replace")[:2000].split("\n") if files else []
    return next((one_line(line, 60) for line in lines if line.strip()), None)


def curve(evaluated: dict[int, dict[str, Any]]) -> str:
    """Return a table of the held-out numbers by step, at most MOST_POINTS, the first and the last among these."""
    shown = evenly(sorted(evaluated), MOST_POINTS)
    columns = {metric.label: metric.keys[1] for metric in TABLE if metric.label}
    columns = {label: key for label, key in columns.items() if any(key in evaluated[step] for step in shown)}
    rows = [["step", *columns], ["---:"] * (len(columns) + 1)]
    rows += [[str(step), *(_value(evaluated[step].get(key)) for key in columns.values())] for step in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if shown else "No held-out evaluation."


def _source(source: str) -> str:
    return _plain(source if hub_name(source) is not None else Path(source).name)


def _value(value: Any) -> str:
    found = as_number(value)
    return "-" if found != found else str(int(found)) if found == int(found) else number(found)


def _plain(text: str) -> str:
    """Return one line that Markdown shows as it is, without invisible characters."""
    line = one_line(str(text), 300)
    return re.sub(r"[\\`*\[\]|#<]", lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", line)
