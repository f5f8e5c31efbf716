"""The model card of an exported policy: data, rewards, curve, evaluation, licence of the base; model_card.md (jinja2).

What stands in it comes from files of a run, which may quote anything: each value is one line of visible text that
Markdown takes for text. Folders of this machine are named by their last part.
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
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_LICENCE = re.compile(r"^license:\s*[\"']?([\w .+-]{1,60})", re.MULTILINE)


def model_card(
    config: Config,
    steps: dict[int, dict[str, Any]],
    *,
    name: str,
    step: int,
    dtype: str | None,
    notes: tuple[str, ...],
    picture: bool,
) -> str:
    """README.md, from a run's configuration and the lines of its metrics.jsonl by step. dtype: of a whole model's
    weights; None: an adapter.
    """
    evaluated = {at: line for at, line in steps.items() if at <= step and any(key.startswith("eval/") for key in line)}
    licence = licence_of(config.model.path)
    loader = PackageLoader("tinyrl.tools.export", ".")
    environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701  `plain` escapes
    environment.filters |= {"plain": _plain, "value": _value, "source": _source, "json": json.dumps}
    return environment.get_template("model_card.md").render(
        name=name,
        step=step,
        dtype=dtype,
        notes=notes,
        picture=picture,
        config=config,
        version=tinyrl.__version__,
        front=_front_matter(config, licence, whole=dtype is not None),
        base=base_name(config),
        licence=licence,
        task=config.task.name or "rows",
        reward_model=Path(config.reward.model or "").name,
        picture_name=PICTURE,
        curve=curve(evaluated),
        evaluated=max(evaluated, default=None),
        evaluation=_evaluation(evaluated[max(evaluated)]) if evaluated else [],
        settings=_settings(config),
        embedded=starter_path(config.model.path) is not None,
    )


def base_name(config: Config) -> str:
    """The base as others may know it: a hub name, a run's checkpoint, or the last part of a folder's path."""
    path = config.model.path
    run = named_run(path)
    if run is not None:
        return f"{run.name}/{Path(path).name}"
    return Path(path).name if Path(path).expanduser().is_dir() else path


def licence_of(path: str) -> str | None:
    """The licence of a base, from the model card or the licence file in its folder; None where none is at hand."""
    if starter_path(path) is not None:
        return "apache-2.0"
    folder = Path(path).expanduser()
    card = folder / "README.md"
    front = _FRONT.match(card.read_text("utf-8", "replace")[:20_000]) if card.is_file() else None
    named = _LICENCE.search(front[1]) if front else None
    if named:
        return named[1].strip()
    files = sorted(folder.glob("LICEN[SC]E*")) if folder.is_dir() else []
    lines = files[0].read_text("utf-8", "replace")[:2000].split("\n") if files else []
    return next((one_line(line, 60) for line in lines if line.strip()), None)


def curve(evaluated: dict[int, dict[str, Any]]) -> str:
    """A table of the held-out numbers by step, at most MOST_POINTS of them, the first and the last among these."""
    shown = evenly(sorted(evaluated), MOST_POINTS)
    if not shown:
        return "No held-out evaluation."
    known = [(metric.label, metric.keys[1]) for metric in TABLE if metric.label]
    columns = [(label, key) for label, key in known if any(key in evaluated[step] for step in shown)]
    rows = [["step", *(label for label, _ in columns)], ["---:"] * (len(columns) + 1)]
    rows += [[str(step), *(_value(evaluated[step].get(key)) for _, key in columns)] for step in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _front_matter(config: Config, licence: str | None, *, whole: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"library_name": "transformers" if whole else "peft"}
    if not Path(config.model.path).expanduser().is_dir() and starter_path(config.model.path) is None:
        facts["base_model"] = config.model.path
    if licence is not None and re.fullmatch(r"[a-z0-9.-]+", licence):
        facts["license"] = licence
    named = {hub_name(source) for source in (config.task.data, config.task.eval_data) if source} - {None}
    if named:
        facts["datasets"] = sorted(str(name) for name in named)
    return facts | {"tags": ["tinyrl", config.method, *(["lora"] if config.lora.enabled else [])]}


def _evaluation(line: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value, [low, high] or None) of each held-out metric."""
    held_out = {key: value for key, value in sorted(line.items()) if key.startswith("eval/")}
    values = {key: value for key, value in held_out.items() if not isinstance(value, list)}
    return [
        (key[len("eval/") :], value, held_out.get(f"{key.removesuffix('_mean')}_ci")) for key, value in values.items()
    ]


def _settings(config: Config) -> dict[str, Any]:
    shown: dict[str, Any] = {"seed": config.run.seed, "learning rate": config.optim.learning_rate}
    if config.lora.enabled:
        shown |= {"LoRA rank": config.lora.r, "LoRA alpha": config.lora.alpha}
    if config.model.quantization:
        shown["base while training"] = config.model.quantization
    if config.uses("generation"):
        shown |= {"temperature": config.generation.temperature, "max new tokens": config.generation.max_new_tokens}
    if config.uses("grpo"):
        shown |= {"prompts a step": config.grpo.num_prompts, "group size": config.grpo.group_size}
    return shown | {"optimizer": config.optim.optimizer, "schedule": config.optim.schedule}


def _source(source: str) -> str:
    return _plain(source if hub_name(source) is not None else Path(source).name)


def _value(value: Any) -> str:
    found = as_number(value)
    return "-" if found != found else str(int(found)) if found == int(found) else number(found)


def _plain(text: str) -> str:
    """One line that Markdown shows as it is, without invisible characters."""
    line = one_line(str(text), 300)
    return re.sub(r"[\\`*\[\]|#<]", lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", line)
