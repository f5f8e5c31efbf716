"""Pass rates of the prompts that were tried, as a column of their rows."""

from __future__ import annotations

import json
from pathlib import Path

from tinyrl.data.rows import PASS_RATE, row_key
from tinyrl.rollout.prepared import PreparedRun
from tinyrl.runs.folders import write_atomic
from tinyrl.runs.records import json_safe, to_float
from tinyrl.tasks.run_rows import rows_of_run
from tinyrl.tools.check.trial import Trial


def rates_by_row(trial: Trial) -> dict[str, float]:
    """Return the pass rates of the rows that were tried, by their keys."""
    return {group[0].row: rate for group, rate in zip(trial.groups, trial.pass_rates, strict=True)}


def write_rates(path: Path, prepared: PreparedRun, rates: dict[str, float]) -> str:
    """Write the rows of task.data, or a task's own, with a column `pass_rate` for those that were tried. Read as
    task.data they fall into the same training and held-out rows as before.
    """
    config = prepared.config
    where = config.task
    if prepared.task.generate is not None:
        raise ValueError("--write: rows that are made have no file to put rates into")
    everything = {"max_samples": None, "eval_data": where.eval_data or where.data}
    uncut = config.model_copy(update={"task": where.model_copy(update=everything)})
    rows = rows_of_run(uncut, prepared.task).train
    rated = [{**row, PASS_RATE: json_safe(to_float(rates.get(row_key(row), row.get(PASS_RATE))))} for row in rows]
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rated))
    return f"{path}: {len(rows):,} rows, {len(rates):,} of them with a pass rate"
