"""`tinyrl check`: whether a run will work and what it costs, on one page, before it costs anything.

page.py       a section of the page
functions.py  the reward and the environment tried on rows, without a model
offline.py    memory by arithmetic
loaded.py     everything that needs the models: numbers, answers, the largest step
policy.py     what the answers say
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import example_rows
from tinyrl.errors import OutOfRoom
from tinyrl.runs.findings import Finding
from tinyrl.runs.launched import Options
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import versions
from tinyrl.tasks import layout_notes, load_splits, load_task
from tinyrl.text import excerpt, one_line
from tinyrl.tools.check.functions import check_environment, check_reward
from tinyrl.tools.check.page import CheckSection

SHOWN = 400
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def check(
    config: Config,
    *,
    options: Options,
    quick: bool = False,
    prompts: int = 64,
    samples: int | None = None,
    minutes: float = 2.0,
    write: Path | None = None,
) -> Iterator[CheckSection]:
    """Yield the sections of the page as they are found. quick: nothing that needs a weight. The others say how many
    training prompts the policy answers, how often, for how long at most, and where to write its pass rates.
    """
    config = resolve(config)
    yield check_settings(config)
    section, train, _ = _rows(config)
    parts = [section]
    if config.samples:
        task = load_task(config.task.name or "rows", grading=config.task.grading)
        parts += filter(None, [check_reward(config, task, train), check_environment(config, task, train)])
    if quick:
        yield from parts
    else:
        yield from _loaded(config, parts, options, how={"num_prompts": prompts, "samples": samples, "minutes": minutes},
                           write=write)  # fmt: skip


def check_settings(config: Config) -> CheckSection:
    """Return the settings that differ from the defaults, and the machine."""
    plain = flat(Config.model_validate({"method": config.method}).written())
    differing = {key: value for key, value in flat(config.written()).items() if plain.get(key) != value}
    memory, found = psutil.virtual_memory(), versions()
    machine = f"{psutil.cpu_count()} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    installed = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "transformers") if name in found)
    lines = [f"{config.method}: {', '.join(as_override(*pair) for pair in differing.items()) or 'all defaults'}"]
    return CheckSection("settings", [*lines, f"{installed}; {machine}"], {"settings": differing, "versions": found})


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings by section.key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            flat(value, f"{before}{key}.")
            if isinstance(value, dict) and value and not before
            else {before + key: value}
        )
    return found


def _rows(config: Config) -> tuple[CheckSection, list[Row], list[Row]]:
    """Read the rows of both splits; the section shows how many there are and the first."""
    notes: list[str] = []
    train, held_out = load_splits(config) if config.samples else example_rows(config, notes)
    source = config.task.data or f"the task {config.task.name}"
    lines = [f"{len(train):,} to train on, {len(held_out):,} held out, of {source}", *notes]
    row = train[0]
    if config.samples:
        task = load_task(config.task.name or "rows")
        gold = task.gold(row)
        prompt = task.prompt(row)
        text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        lines += [f"prompt: {one_line(text, SHOWN)!r}", f"gold answer: {one_line(str(gold), SHOWN // 4)!r}"]
        lines += [*layout_notes(row), *([] if gold is not None else ["the task knows no gold answers"])]
    lines.append("columns: " + ", ".join(f"{name}={one_line(str(value), 30)!r}" for name, value in row.items()))
    return CheckSection("rows", lines, {"train": len(train), "held_out": len(held_out), "first": row}), train, held_out


def _loaded(
    config: Config, parts: list[CheckSection], options: Options, *, how: dict[str, Any], write: Path | None
) -> Iterator[CheckSection]:
    """Yield the sections that need the models after those that do not."""
    from tinyrl.tools.check import loaded, policy
    from tinyrl.training.launch import out_of_memory_stops

    rows, *others = parts
    with out_of_memory_stops("while the run was checked"):
        trainer, notes = loaded.load(config, options)
        try:
            cut = excerpt("\n".join(loaded.row_lines(trainer)), 4 * SHOWN)
            rows.lines += [cut.head, *([f"[{cut.omitted:,} characters]", cut.tail] if cut.omitted else [])]
            yield rows
            yield from others
            yield _model(trainer, notes)
            if config.samples:
                gold = next((part.facts.get("gold") for part in others if part.name == "reward"), None)
                knows = gold is not None and gold >= config.task.solved_reward
                seen = policy.look(trainer, knows_gold=knows, **how)
                yield policy.section(seen)
                if write is not None:
                    yield CheckSection("rates", [policy.write_rates(write, seen)])
            yield _step(trainer)
        finally:
            trainer.close()


def _model(trainer: Any, notes: list[str]) -> CheckSection:
    from tinyrl.tools.check.loaded import check_numbers

    checks = check_numbers(trainer)
    wrong = [one for one in checks if one.result == "wrong"]
    lines = [*notes, *(f"{one.result}: {one.name}: {one.said}" for one in checks if one.result != "ok")]
    agree = [one.name for one in checks if one.result == "ok"]
    lines.append(f"ok: {', '.join(agree)}")
    found = [
        Finding(f"model: {one.name}", f"{one.said}.", "Another model, or model.dtype=float32.", {}) for one in wrong
    ]
    warned = [note for note in notes if note.startswith("warning: chat template")]
    found += [Finding("chat template", f"{note.removeprefix('warning: chat template: ')}.", "Another template.", {})
              for note in warned]  # fmt: skip
    return CheckSection("model", lines, {"checks": [vars(one) for one in checks], "notes": notes}, found)


def _step(trainer: Any) -> CheckSection:
    """Try the largest step."""
    from tinyrl.models.device import memory_room
    from tinyrl.tools.check.loaded import worst_step
    from tinyrl.tools.check.offline import size
    from tinyrl.training.launch import out_of_memory_stops

    room = memory_room(trainer.accelerator.device)
    try:
        with out_of_memory_stops("in the largest step"):
            step = worst_step(trainer)
    except OutOfRoom as error:
        change = "model.gradient_checkpointing=true, a smaller generation.max_new_tokens, or model.quantization=4bit."
        return CheckSection("worst step", [str(error)], {}, [Finding("not enough memory", f"{error}.", change, {})])
    seconds = ", ".join(f"{name} {value:.2g}" for name, value in step.seconds.items() if name != "total")
    lines = [
        f"{step.size}, tried and thrown away: {step.seconds['total']:.2g} s ({seconds})",
        f"peak {step.peak_gb:.2f} GB; {size(room)} are there; micro-batches of {step.micro_batch_tokens} tokens",
    ]
    found = []
    if step.peak_gb * 1e9 > room:
        found.append(Finding("not enough memory", f"{lines[1]}.", "A smaller generation.max_new_tokens.", {}))
    return CheckSection("worst step", lines, {**vars(step), "room": room}, found)


def bytes_of(text: str) -> float:
    """Read an amount of memory, such as 24GB. Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"--memory {text}: an amount such as 24GB")
    return float(match[1]) * UNITS[match[2].upper()]
