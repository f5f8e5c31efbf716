"""`tinyrl check`: find out whether a run will work and what it costs, on one page, before it costs anything.

section.py         a part of the page
first_row.py       the first row as the model reads it, without a model
reward.py          the reward tried on rows, without a model
environment.py     the environment tried with scripted turns, without a model; tool_arguments.py: calls of a tool
offline.py         memory by arithmetic
right_answers.py   the column of right answers, and the form that a reward pays for
loaded.py          what needs the models: their numbers, answers
sampled.py         answers to some prompts, in the time that there is
images.py          what images take, and whether answers depend on them
trial.py           the answers and their figures
policy.py          what the answers say
early_end.py       whether held-out prompts are too few for run.patience
rates.py           pass rates of the rows that were tried
largest_step.py    the largest step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tinyrl.config.given import as_override
from tinyrl.config.schema import Config
from tinyrl.data.images import shown_text
from tinyrl.data.rows import row_key, solved_from
from tinyrl.process.collector import lasting_imports
from tinyrl.process.errors import ExplainedByCheck
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import PreparedRun, PreparedSettings, prepare, prepare_settings
from tinyrl.runs.finding import Finding
from tinyrl.runs.provenance import versions
from tinyrl.tasks.rewarded import missing_reward
from tinyrl.tasks.run_rows import shared_by_splits
from tinyrl.text import excerpt, one_line
from tinyrl.tools.check.environment import check_environment
from tinyrl.tools.check.first_row import read_first_row
from tinyrl.tools.check.judges import check_judges
from tinyrl.tools.check.offline import check_memory
from tinyrl.tools.check.reward import RewardSection, check_reward, has_environment
from tinyrl.tools.check.section import CheckSection

if TYPE_CHECKING:
    from tinyrl.training.on_policy import OnPolicy
    from tinyrl.training.rows import RowMethod

SHOWN = 400


def exit_code(found: list[Finding]) -> int:
    """Return 3 where a finding would keep the run from learning, else 0."""
    return 0 if all(finding.is_harmless for finding in found) else 3


@dataclass(frozen=True)
class FullCheck:
    """How a page is made with the models, as `check` is asked for it."""

    options: Options
    write: Path | None
    prompts: int
    samples: int | None
    minutes: float


def check(
    config: Config,
    *,
    options: Options,
    quick: bool = False,
    offline: bool = False,
    memory: str | None = None,
    write: Path | None = None,
    prompts: int = 64,
    samples: int | None = None,
    minutes: float = 2.0,
) -> Iterator[CheckSection]:
    """Yield the sections of the page as they are found. quick: nothing that needs a weight; offline: arithmetic alone,
    for this machine or one of so much memory; write: where to write the pass rates of the prompts that were tried;
    prompts, samples: to sample from, and of each (None: a group, at least 8); minutes: for this and the largest step.
    """
    if offline:
        settings = prepare_settings(config)
        yield check_settings(config, settings)
        yield check_memory(settings.config, device=options.device, memory=memory)
        return
    prepared = prepare(config)
    yield check_settings(config, prepared)
    rows = check_rows(prepared, quick=quick)
    parts = _without_models(prepared, asks_judges=quick)
    if quick:
        yield from (rows, *parts)
        return
    wanted = FullCheck(options=options, write=write, prompts=prompts, samples=samples, minutes=minutes)
    yield from _with_models(prepared, rows, parts, wanted)


def _without_models(prepared: PreparedRun, *, asks_judges: bool) -> list[CheckSection]:
    """Try reward and environment on rows, of a method that samples; asks_judges: each judge answers one question too,
    where no model is loaded, whose start asks it more.
    """
    config = prepared.config
    task = prepared.task
    train = prepared.rows.train
    if not config.samples:
        return []
    environment = check_environment(config, task, train)
    is_replaced = environment is not None and environment.rewards == "all"
    parts = [check_reward(config, task, train, is_replaced=is_replaced), environment]
    if asks_judges:
        parts.append(check_judges(config, task, train))
    return [part for part in parts if part is not None]


def _with_models(
    prepared: PreparedRun,
    rows: CheckSection,
    parts: list[CheckSection],
    wanted: FullCheck,
) -> Iterator[CheckSection]:
    """Load the models; yield the sections about rows (the first one as tokens), reward and environment, then what the
    models themselves show.
    """
    with lasting_imports():
        from tinyrl.tools.check import images, largest_step, loaded  # with torch
        from tinyrl.training.on_policy import OnPolicy
        from tinyrl.training.run import out_of_memory_stops

    with out_of_memory_stops("while the run was checked"):
        try:
            method, notes = _start(prepared, wanted.options)
        except ExplainedByCheck as error:
            yield from (rows, *parts)
            yield refused(str(error))
            return
        except Exception:  # what was found explains it
            yield from (rows, *parts)
            raise
        with closing(method):
            _show(rows, loaded.row_lines(method))
            yield from (rows, *parts)
            yield loaded.check_model(method, notes)
            if not isinstance(method, OnPolicy):
                if (pictures := images.image_section(method.policy, None)) is not None:
                    yield pictures
                yield largest_step.worst_step(method, text=prepared.rows.text)
                return
            reward = next(part for part in parts if isinstance(part, RewardSection))
            yield from _of_answers(prepared, method, reward, wanted)


def _of_answers(
    prepared: PreparedRun,
    method: OnPolicy,
    reward: RewardSection,
    wanted: FullCheck,
) -> Iterator[CheckSection]:
    """Sample answers; yield the sections about them and, in the time that is left, about the largest step."""
    from tinyrl.tools.check import early_end, images, largest_step, policy, rates, sampled  # with torch

    config = prepared.config
    solved = solved_from(config.task.solved_reward)
    trial = sampled.look(
        method.collector,
        knows_gold=reward.knows_right(solved),
        is_environment_alone=missing_reward(config, prepared.task, prepared.rows.train) is not None,
        paid=reward.paid,
        prompts=wanted.prompts,
        samples=wanted.samples,
        minutes=wanted.minutes,
    )
    answers = policy.section(trial)
    if (ends := early_end.an_early_end(method.collector, trial.rewards)) is not None:
        answers.findings.append(ends)
    yield answers
    looks = images.Looks(trial.looks, solved, is_rewarded=config.trains.rewarded)
    if (pictures := images.image_section(method.policy, looks)) is not None:
        yield pictures
    if wanted.write is not None:
        line = rates.write_rates(wanted.write, prepared, rates.rates_by_row(trial))
        yield CheckSection("rates", [line])
    if trial.seconds + trial.step_seconds > 60 * wanted.minutes:
        yield largest_step.rough_step(trial, method.collector, minutes=wanted.minutes, device=wanted.options.device)
    else:
        yield largest_step.worst_step(method, text=prepared.rows.text)


def _start(prepared: PreparedRun, options: Options) -> tuple[OnPolicy | RowMethod, list[str]]:
    """Load the method of a run and check what it checks before step 1; return it and its notes. Raises ExplainedByCheck
    where the run would be refused.
    """
    from tinyrl.rollout.load import resolve_threads  # with torch
    from tinyrl.training.load import load_method
    from tinyrl.training.saver import check_saves
    from tinyrl.training.step import schedule_notes

    method = load_method(prepared, options=options)
    try:
        threads = resolve_threads(method.policy)
        check_saves(method)
        return method, [threads, method.epoch_note(), *schedule_notes(method.config), *method.check()]
    except BaseException:
        method.close()
        raise


def refused(reason: str) -> CheckSection:
    """Return the section of a run that is refused before step 1."""
    finding = Finding(name="the run is refused", what=f"{reason}.", change="Mend that first; the rest is not tried.")
    return CheckSection("model", ["not tried: the run is refused"], findings=[finding])


def check_settings(given: Config, prepared: PreparedSettings) -> CheckSection:
    """Return the settings that differ from the defaults, those that `resolve` chose for the model, and the machine."""
    config = prepared.config
    defaults = _by_name(Config(method=config.method))
    before = _by_name(given)
    unused = () if config.environment.agent or has_environment(config, prepared.task) else ("environment.",)
    now = {name: value for name, value in _by_name(config).items() if not name.startswith(unused)}
    differing = {name: value for name, value in now.items() if defaults.get(name) != value}
    chosen = {name: value for name, value in differing.items() if isinstance(value, int) and before[name] != value}
    set_here = [as_override(name, value) for name, value in differing.items() if name not in chosen]
    lines = [f"{config.method}: {', '.join(set_here) or 'all defaults'}"]
    if chosen:
        lines.append(f"chosen to fit the model: {', '.join(as_override(*pair) for pair in chosen.items())}")
    memory = psutil.virtual_memory()
    machine = f"{psutil.cpu_count()} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    found = versions()
    installed = [f"{name} {found[name]}" for name in ("python", "torch", "transformers") if name in found]
    lines.append(f"{', '.join(installed)}; {machine}")
    return CheckSection("settings", lines, {"settings": differing, "versions": found})


def _by_name(config: Config) -> dict[str, Any]:
    """Return the settings of a configuration by section.key."""
    found: dict[str, Any] = {}
    for section, fields in config.written().items():
        if isinstance(fields, dict):
            found |= {f"{section}.{key}": value for key, value in fields.items()}
    return found


def _show(section: CheckSection, lines: list[str]) -> None:
    """Add lines with a row's texts to a section, without the middle of long ones."""
    cut = excerpt("\n".join(lines), 4 * SHOWN)
    section.lines.append(cut.head)
    if cut.omitted:
        section.lines += [f"[{cut.omitted:,} characters]", cut.tail]


def check_rows(prepared: PreparedRun, *, quick: bool) -> CheckSection:
    """Return how many rows there are of each split, and the first of them."""
    config = prepared.config
    task = prepared.task
    rows = prepared.rows
    train = rows.train
    held_out = rows.held_out
    source = config.task.data or f"the task {config.task.name}"
    known = {row_key(row) for row in train}
    seen = [row for row in held_out if row_key(row) in known]
    held = f"{len(held_out):,} held out"
    if len(seen) == len(held_out):
        held = f"none held out (evaluation has {len(held_out):,} of them)"
    lines = [f"{len(train):,} to train on, {held}, of {source}", *rows.notes]
    if quick and config.run.eval_prompts:  # else the method's own notes have it
        lines += shared_by_splits(train, held_out, rows.kind, system_prompt=config.task.system_prompt)
    row = train[0]
    if config.samples:
        gold = task.gold(row)
        prompt = task.prompt(row)
        text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {shown_text(m)}" for m in prompt)
        lines += [f"prompt: {one_line(text, SHOWN)!r}", f"reference answer: {one_line(repr(gold), SHOWN // 4)}"]
        lines += [] if gold is not None else ["the task knows no reference answers"]
        if config.task.data is not None and task.name == "sort":
            lines.append("read as letters of the task sort; rows of another kind need task.name=rows")
    lines.append("columns: " + ", ".join(f"{name}={one_line(repr(value), 30)}" for name, value in row.items()))
    section = CheckSection("rows", lines, {"train": len(train), "held_out": len(held_out), "first": row})
    if quick:
        first = read_first_row(config, task, rows.kind, row)
        section.facts["tokens"] = first.tokens
        _show(section, first.lines)
    if len(known) == 1 < len(train):
        finding = Finding(
            name="one row",
            what=f"All {len(train):,} rows to train on are the same.",
            change="Other rows in task.data; task.max_samples=null.",
        )
        section.findings.append(finding)
    is_split = config.task.data is not None and config.task.eval_data is None and not rows.kind.has_own_rows
    if not is_split and len(seen) > len(held_out) / 10:
        change = "Other rows as task.eval_data, or none: then some of task.data are held out."
        if config.task.data is None:
            change = f'Other rows for the split "eval" of the task {config.task.name}.'
        finding = Finding(
            name="held-out rows are trained on",
            what=f"{len(seen):,} of {len(held_out):,} held-out rows are among those to train on.",
            change=change,
            is_harmless=True,
        )
        section.findings.append(finding)
    return section
