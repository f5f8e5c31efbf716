"""`tinyrl check`: find out whether a run will work and what it costs, on one page, before it costs anything.

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
from tinyrl.data.rows import example_rows, row_key
from tinyrl.errors import ExplainedByCheck
from tinyrl.runs.findings import Finding
from tinyrl.runs.launched import Options
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import versions
from tinyrl.tasks import load_splits, load_task
from tinyrl.text import excerpt, one_line
from tinyrl.tools.check.functions import check_environment, check_reward
from tinyrl.tools.check.offline import CheckSection, check_memory

SHOWN = 400
HARMLESS = {"a long run", "held-out rows are trained on"}


def exit_code(found: list[Finding]) -> int:
    """Return 3 where a finding would keep the run from learning, else 0."""
    return 3 * any(finding.name not in HARMLESS for finding in found)


def check(
    config: Config,
    *,
    options: Options,
    quick: bool = False,
    offline: bool = False,
    memory: str | None = None,
    write: Path | None = None,
    **how: Any,
) -> Iterator[CheckSection]:
    """Yield the sections of the page as they are found. quick: nothing that needs a weight; offline: arithmetic alone,
    for this machine or one of so much memory; write: where to write the pass rates of the prompts that were tried; how:
    options of `policy.look`.
    """
    given, config = config, resolve(config)
    yield check_settings(given, config)
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
    from tinyrl.rollout.load import load_method, resolve_threads
    from tinyrl.tools.check import loaded, policy
    from tinyrl.training.run import out_of_memory_stops
    from tinyrl.training.step import schedule_notes

    trainer, notes, refused = None, list[str](), ""
    try:
        with out_of_memory_stops("while the run was checked"):
            try:
                trainer = load_method(config, options=options)
                notes = [resolve_threads(trainer.policy), *schedule_notes(trainer.policy.config), *trainer.check()]
                cut = excerpt("\n".join(loaded.row_lines(trainer)), 4 * SHOWN)
                rows.lines += [cut.head, *([f"[{cut.omitted:,} characters]", cut.tail] if cut.omitted else [])]
            except ExplainedByCheck as error:
                refused = str(error)
            finally:  # also where the settings are wrong
                yield from (rows, *parts)
            if trainer is None or refused:
                finding = Finding("the run is refused", f"{refused}.", "Mend that first; the rest is not tried.", {})
                yield CheckSection("model", ["not tried: the run is refused"], {}, [finding])
                return
            yield loaded.check_model(trainer, notes)
            if config.samples:
                gold = next((part.facts.get("gold") for part in parts if part.name == "reward"), None)
                knows = gold is not None and gold >= config.task.solved_reward
                section, rates = policy.look(trainer, knows_gold=knows, **how)
                yield section
                if write is not None:
                    yield CheckSection("rates", [policy.write_rates(write, config, rates)])
            yield loaded.worst_step(trainer)
    finally:
        if trainer is not None:
            trainer.close()


def check_settings(given: Config, config: Config) -> CheckSection:
    """Return the settings that differ from the defaults, those that `resolve` chose for the model, and the machine."""
    plain, memory, found = Config(method=config.method).written(), psutil.virtual_memory(), versions()
    sections = {name: of for name, of in config.written().items() if isinstance(of, dict)}
    differing = {f"{name}.{key}": value for name, of in sections.items() for key, value in of.items()
                 if plain.get(name, {}).get(key) != value}  # fmt: skip
    before = {f"{name}.{key}": value for name, of in given.written().items() if isinstance(of, dict)
              for key, value in of.items()}  # fmt: skip
    chosen = {name: value for name, value in differing.items() if isinstance(value, int) and before[name] != value}
    machine = f"{psutil.cpu_count()} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    installed = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "transformers") if name in found)
    set_here = [as_override(*pair) for pair in differing.items() if pair[0] not in chosen]
    lines = [f"{config.method}: {', '.join(set_here) or 'all defaults'}"]
    if chosen:
        lines.append(f"chosen to fit the model: {', '.join(as_override(*pair) for pair in chosen.items())}")
    return CheckSection("settings", [*lines, f"{installed}; {machine}"], {"settings": differing, "versions": found})


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
        lines += [f"prompt: {one_line(text, SHOWN)!r}", f"gold answer: {one_line(repr(gold), SHOWN // 4)}"]
        lines += [] if gold is not None else ["the task knows no gold answers"]
        if config.task.data is not None and task.name == "sort":
            lines.append("read as letters of the task sort; rows of another kind need task.name=rows")
    lines.append("columns: " + ", ".join(f"{name}={one_line(repr(value), 30)}" for name, value in row.items()))
    section = CheckSection("rows", lines, {"train": len(train), "held_out": len(held_out), "first": row})
    known = {row_key(row) for row in train}
    if len(known) == 1 < len(train):
        what = f"All {len(train):,} rows to train on are the same."
        section.findings.append(Finding("one row", what, "Other rows in task.data; task.max_samples=null.", {}))
    seen = sum(row_key(row) in known for row in held_out) if config.task.eval_data is not None else 0
    if seen > len(held_out) / 10:
        what = f"{seen:,} of {len(held_out):,} held-out rows are among those to train on."
        change = "Other rows as task.eval_data, or none: then some of task.data are held out."
        section.findings.append(Finding("held-out rows are trained on", what, change, {}))
    return section, train
