"""The model card of an exported policy: data, rewards, curve, evaluation, licence of the base.

What stands in it comes from files of a run, which may quote anything: each value is one line of visible text that
Markdown takes for text. Folders of this machine are named by their last part.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinyrl
from tinyrl.config.schema import Config
from tinyrl.data.readers import hub_name
from tinyrl.runs.records import number as as_number
from tinyrl.runs.run_dir import named_run
from tinyrl.starter import starter_path
from tinyrl.text import hidden, number, one_line

CURVE = (
    ("reward", "eval/reward_mean"),
    ("greedy", "eval/greedy/reward_mean"),
    ("pass@1", "eval/pass@1"),
    ("KL", "eval/kl"),
    ("length", "eval/mean_length"),
    ("loss", "eval/loss"),
)
MOST_POINTS = 12  # of the curve
PICTURE = "report.png"
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_LICENCE = re.compile(r"^license:\s*[\"']?([\w .+-]{1,60})", re.MULTILINE)


@dataclass(frozen=True)
class Exported:
    """What is in the folder. dtype: of a whole model's weights; None: an adapter. notes: what a reader should know."""

    name: str
    step: int
    dtype: str | None
    notes: tuple[str, ...]
    picture: bool


def model_card(config: Config, steps: dict[int, dict[str, Any]], exported: Exported) -> str:
    """README.md, from a run's configuration and the lines of its metrics.jsonl by step."""
    base, licence = base_name(config), licence_of(config.model.path)
    what = "The weights" if exported.dtype else "A LoRA adapter"
    merged = f", merged in float32 and saved in {exported.dtype}" if exported.dtype and config.lora.enabled else ""
    evaluated = {step: line for step, line in steps.items() if step <= exported.step and _has_evaluation(line)}
    parts = [
        _front_matter(config, licence, whole=exported.dtype is not None),
        f"# {_plain(exported.name)}",
        f"{what} of a policy trained from {_plain(base)} with {config.method} for {exported.step} steps{merged}, by "
        f"[tinyrl](https://github.com/tinyrl/tinyrl) {tinyrl.__version__}.",
        *(f"Note: {_plain(note)}" for note in exported.notes),
        _section("Data", _data(config)),
        _section("Rewards", _rewards(config)),
        _section("Curve", [*([f"![curves of the run]({PICTURE})"] if exported.picture else []), curve(evaluated)]),
        _section("Evaluation", _evaluation(evaluated)),
        _section("Settings", _settings(config)),
        _section("Use", [_use(config, exported)]),
        _section("Licence", [_licence_sentence(base, licence)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    steps = sorted(evaluated)
    if not steps:
        return "No held-out evaluation."
    last, most = len(steps) - 1, min(MOST_POINTS, len(steps))
    shown = sorted({steps[round(i * last / max(1, most - 1))] for i in range(most)})
    columns = [(label, key) for label, key in CURVE if any(key in evaluated[step] for step in shown)]
    rows = [["step", *(label for label, _ in columns)], ["---:"] * (len(columns) + 1)]
    rows += [[str(step), *(_value(evaluated[step].get(key)) for _, key in columns)] for step in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _has_evaluation(line: dict[str, Any]) -> bool:
    return any(key.startswith("eval/") for key in line)


def _front_matter(config: Config, licence: str | None, *, whole: bool) -> str:
    facts: dict[str, Any] = {"library_name": "transformers" if whole else "peft"}
    if not Path(config.model.path).expanduser().is_dir() and starter_path(config.model.path) is None:
        facts["base_model"] = config.model.path
    if licence is not None and re.fullmatch(r"[a-z0-9.-]+", licence):
        facts["license"] = licence
    named = {hub_name(source) for source in (config.task.data, config.task.eval_data) if source} - {None}
    if named:
        facts["datasets"] = sorted(str(name) for name in named)
    facts["tags"] = ["tinyrl", config.method, *(["lora"] if config.lora.enabled else [])]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items()), "---"])


def _data(config: Config) -> list[str]:
    task, own = config.task, "the task's own rows"
    said = [f"Task {_plain(task.name or 'rows')}, trained on {_source(task.data) or own}."]
    held_out = _source(task.eval_data) or ("a tenth of its prompts" if task.data else own)
    said.append(f"Held out: {held_out}.")
    return said


def _source(source: str | None) -> str | None:
    return None if source is None else _plain(source if hub_name(source) is not None else Path(source).name)


def _rewards(config: Config) -> list[str]:
    if config.uses("reward"):
        reward = config.reward
        lines = [f"- {_plain(f.use.rpartition('/')[2])}, weight {f.weight:g}" for f in reward.functions]
        if reward.model is not None:
            lines.append(f"- a reward model, {_plain(Path(reward.model).name)}, weight {reward.model_weight:g}")
        return ["\n".join(lines) or f"The verifier of task {_plain(config.task.name or 'rows')}."]
    learns = "pairs of answers" if config.trains.rows == "pairs" else "written examples"
    return [f"None: it learnt from {learns}."]


def _evaluation(evaluated: dict[int, dict[str, Any]]) -> list[str]:
    if not evaluated:
        return []
    step = max(evaluated)
    line = evaluated[step]
    said = []
    for key, value in sorted(line.items()):
        if not key.startswith("eval/") or isinstance(value, list):
            continue
        pair = line.get(f"{key.removesuffix('_mean')}_ci")
        interval = (
            f" (95 %: {_value(pair[0])} to {_value(pair[1])})" if isinstance(pair, list) and len(pair) == 2 else ""
        )
        said.append(f"| {_plain(key.removeprefix('eval/'))} | {_value(value)}{interval} |")
    return [f"On held-out prompts, at step {step}:", "\n".join(["| | |", "| --- | --- |", *said])]


def _settings(config: Config) -> list[str]:
    optim, shown = config.optim, {"seed": config.run.seed, "learning rate": config.optim.learning_rate}
    if config.lora.enabled:
        shown |= {"LoRA rank": config.lora.r, "LoRA alpha": config.lora.alpha}
    if config.model.quantization:
        shown["base while training"] = config.model.quantization
    if config.uses("generation"):
        shown |= {"temperature": config.generation.temperature, "max new tokens": config.generation.max_new_tokens}
    if config.uses("grpo"):
        shown |= {"prompts a step": config.grpo.num_prompts, "group size": config.grpo.group_size}
    shown |= {"optimizer": optim.optimizer, "schedule": optim.schedule}
    return ["\n".join(f"- {name}: {_plain(str(value))}" for name, value in shown.items())]


def _use(config: Config, exported: Exported) -> str:
    name = _plain(exported.name)
    load = (
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\ntokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
    libraries = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if exported.dtype is None:
        embedded = starter_path(config.model.path) is not None
        base = f'starter_path("{config.model.path}")' if embedded else json.dumps(base_name(config))
        load = (
            f"model = AutoModelForCausalLM.from_pretrained({base})\n"
            f'model = PeftModel.from_pretrained(model, "{name}")\ntokenizer = AutoTokenizer.from_pretrained("{name}")'
        )
        libraries = f"from peft import PeftModel\n{libraries}"
        libraries += "\n\nfrom tinyrl.starter import starter_path" if embedded else ""
    return f"```python\n{libraries}\n\n{load}\n```"


def _licence_sentence(base: str, licence: str | None) -> str:
    if licence is None:
        return f"That of the base, {_plain(base)}, which is not stated in its files here: look at its page."
    return f"That of the base, {_plain(base)}: {_plain(licence)}."


def _section(title: str, lines: list[str]) -> str:
    return "\n\n".join([f"## {title}", *lines]) if any(lines) else ""


def _value(value: Any) -> str:
    found = as_number(value)
    return "-" if found != found else str(int(found)) if found == int(found) else number(found)


def _plain(text: str) -> str:
    """One line that Markdown shows as it is, without invisible characters and secrets."""
    line = one_line(str(hidden(text)), 300)
    return re.sub(r"[\\`*\[\]|#<]", lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", line)
