"""The model card of an exported policy.

Values come from files of a run, which may quote anything: each is one line of visible text that Markdown takes for
text.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

import tinyrl
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.readers import hub_name
from tinyrl.formatting import typeset_number
from tinyrl.runs.best import WORDS, score_of
from tinyrl.runs.records import to_float
from tinyrl.text import one_line

PICTURE = "report.png"  # of a run, copied beside the card


def model_card(
    config: Config,
    steps: dict[int, dict[str, Any]],
    *,
    name: str,
    step: int,
    dtype: str | None,
    notes: list[str],
    picture: bool,
    reader: str | None = None,
    since: int = -1,
) -> str:
    """Return README.md, from a run's configuration and the lines of its metrics.jsonl by step. dtype: of a whole
    model's weights; None: an adapter. reader: the class that reads it, where the library's auto class gives
    another. since: the step after which the reward was another one, so that scores up to there do not compare.
    """
    path = config.model.path
    licence = licence_of(config.model.path)
    is_folder = Path(path).expanduser().is_dir()
    embedded = starter_path(path) is not None
    sources = {hub_name(source) for source in (config.task.data, config.task.eval_data) if source} - {None}
    tower = config.model.with_images
    front: dict[str, Any] = {
        "pipeline_tag": "image-text-to-text" if tower else None,
        "library_name": "transformers" if dtype else "peft",
        "base_model": None if is_folder or embedded else path,
        "license": licence if licence and re.fullmatch(r"[a-z0-9.-]+", licence) else None,
        "datasets": sorted(map(str, sources)),
        "tags": ["tinyrl", config.method, *(["lora"] if config.lora.enabled else [])],
    }
    found = [at for at, line in steps.items() if at <= step and any(key.startswith("eval/") for key in line)]
    scored = {at: score_of(line, step=at) for at, line in steps.items() if since < at <= step}
    scores = [score for score in scored.values() if score is not None]
    return _template().render(
        scores=scores, words=WORDS[scores[-1].metric] if scores else "", steps=steps,
        config=config, name=name, step=step, dtype=dtype, notes=notes, licence=licence, embedded=embedded,
        reader=reader or ("AutoModelForImageTextToText" if tower else "AutoModelForCausalLM"),
        preparer=("processor", "AutoProcessor") if tower else ("tokenizer", "AutoTokenizer"),
        picture=PICTURE if picture else None, version=tinyrl.__version__, task=config.task.name or "rows",
        front={key: value for key, value in front.items() if value},
        base=Path(path).name if is_folder else path, is_folder=is_folder,
        reward_model=Path(config.reward.model or "").name,
        evaluated=max(found, default=None), evaluation=steps[max(found)] if found else {},
    )  # fmt: skip


@functools.cache
def _template() -> Template:
    """Compile the card's template: once, as that takes longer than a card."""
    environment = Environment(  # noqa: S701  `plain` escapes
        loader=PackageLoader("tinyrl.training", "."), trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": _plain, "value": lambda value: typeset_number(to_float(value)), "json": json.dumps}
    environment.filters["source"] = lambda one: _plain(one if hub_name(one) is not None else Path(one).name)
    return environment.get_template("model_card.md")


def licence_of(path: str) -> str | None:
    """Return the licence of a base, from the model card in its folder; None where there is none."""
    if starter_path(path) is not None:
        return "apache-2.0"
    card = Path(path).expanduser() / "README.md"
    text = card.read_text("utf-8", "replace")[:20_000] if card.is_file() else ""
    found = re.match(r"---\n(?:(?!---$).*\n)*license:\s*[\"']?([\w .+-]{1,60})", text, re.MULTILINE)
    return one_line(found[1], 60) if found else None


def _plain(text: str) -> str:
    """Return one line that Markdown shows as it is, without invisible characters."""
    line = one_line(str(text), 300)
    return re.sub(r"[\\`*\[\]|#<]", lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", line)
