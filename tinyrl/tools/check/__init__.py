"""`tinyrl check`: whether a run will work and what it costs, on one page, before it costs anything.

functions.py  the reward and the environment tried on rows, without a model
offline.py    a section of the page; memory by arithmetic
loaded.py     everything that needs the models: numbers, answers, the largest step
policy.py     what the answers say
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import example_rows
from tinyrl.errors import ExplainedByCheck
from tinyrl.runs.findings import Finding
from tinyrl.runs.launched import Options
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import versions
from tinyrl.tasks import layout_notes, load_splits, load_task
from tinyrl.text import excerpt, one_line
from tinyrl.tools.check.functions import check_environment, check_reward
from tinyrl.tools.check.offline import CheckSection, check_memory

SHOWN = 400


def check(
    config: Config,
    *,
    options: Options,
    quick: bool = False,
    offline: bool = False,
    memory: str | None = None,
    prompts: int = 64,
    samples: int | None = None,
    minutes: float = 2.0,
    write: Path | None = None,
) -> Iterator[CheckSection]:
    """Yield the sections of the page as they are found. quick: nothing that needs a weight; offline: arithmetic alone,
    for this machine or one of so much memory. The others say how many training prompts the policy answers, how often,
    for how long at most, and where to write its pass rates.
    """
    config = resolve(config)
    yield check_settings(config)
    if offline:
        yield check_memory(config, device=options.device, memory=memory)
        return
    rows, train = _rows(config)
    parts = list[CheckSection]()
    if config.samples:
        task = load_task(config.task.name or "rows", grading=config.task.grading)
        parts += filter(None, [check_reward(config, task, train), check_environment(config, task, train)])
    if quick:
        yield from (rows, *parts)
        return
    from tinyrl.rollout.components import resolve_threads, trainer_of
    from tinyrl.tools.check import loaded, policy
    from tinyrl.training.launch import out_of_memory_stops

    trainer: Any = None
    notes, refused = list[str](), ""
    try:
        with out_of_memory_stops("while the run was checked"):
            try:
                trainer = trainer_of(config.method)(config, options=options)
                notes = [resolve_threads(trainer), *trainer.check()]
                cut = excerpt("\n".join(loaded.row_lines(trainer)), 4 * SHOWN)
                rows.lines += [cut.head, *([f"[{cut.omitted:,} characters]", cut.tail] if cut.omitted else [])]
            except ExplainedByCheck as error:
                refused = str(error)
            finally:  # also where the settings are wrong
                yield from (rows, *parts)
            if refused:
                finding = Finding("the run is refused", f"{refused}.", "Mend that first; the rest is not tried.", {})
                yield CheckSection("model", ["not tried: the run is refused"], {}, [finding])
                return
            yield loaded.check_model(trainer, notes)
            if config.samples:
                gold = next((part.facts.get("gold") for part in parts if part.name == "reward"), None)
                knows = gold is not None and gold >= config.task.solved_reward
                how = {"num_prompts": prompts, "samples": samples, "minutes": minutes, "knows_gold": knows}
                section, rates = policy.look(trainer, **how)
                yield section
                if write is not None:
                    yield CheckSection("rates", [policy.write_rates(write, config, rates)])
            yield loaded.worst_step(trainer)
    finally:
        if trainer is not None:
            trainer.close()


def check_settings(config: Config) -> CheckSection:
    """Return the settings that differ from the defaults, and the machine."""
    plain = flat(Config.model_validate({"method": config.method}).written())
    differing = {key: value for key, value in flat(config.written()).items() if plain.get(key) != value}
    memory, found = psutil.virtual_memory(), versions()
    machine = f"{psutil.cpu_count()} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    installed = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "transformers") if name in found)
    lines = [f"{config.method}: {', '.join(as_override(*pair) for pair in differing.items()) or 'all defaults'}"]
    return CheckSection("settings", [*lines, f"{installed}; {machine}"], {"settings": differing, "versions": found})


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of all sections by section.key."""
    sections = {name: of if isinstance(of, dict) else {} for name, of in values.items()}
    return {f"{name}.{key}": value for name, of in sections.items() for key, value in of.items()}


def _rows(config: Config) -> tuple[CheckSection, list[Row]]:
    """Read the rows of both splits; the section shows how many there are and the first. Return those to train on."""
    notes: list[str] = []
    train, held_out = load_splits(config) if config.samples else example_rows(config, notes)
    source = config.task.data or f"the task {config.task.name}"
    lines = [f"{len(train):,} to train on, {len(held_out):,} held out, of {source}", *notes]
    row = train[0]
    if config.samples:
        task = load_task(config.task.name or "rows")
        gold, prompt = task.gold(row), task.prompt(row)
        text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        lines += [f"prompt: {one_line(text, SHOWN)!r}", f"gold answer: {one_line(str(gold), SHOWN // 4)!r}"]
        lines += [*layout_notes(row), *([] if gold is not None else ["the task knows no gold answers"])]
    lines.append("columns: " + ", ".join(f"{name}={one_line(str(value), 30)!r}" for name, value in row.items()))
    return CheckSection("rows", lines, {"train": len(train), "held_out": len(held_out), "first": row}), train
