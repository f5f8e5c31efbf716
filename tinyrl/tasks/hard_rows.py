"""Training rows by the keys that a run's record of prompts has, written to a file to train on."""

from __future__ import annotations

import json
from pathlib import Path

from tinyrl.config.schema import Config
from tinyrl.data.rows import row_key
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks import load_split, load_task
from tinyrl.text import first_line


def row_texts(run: RunDir, keys: dict[int, str], notes: list[str]) -> dict[int, str]:
    """The texts of prompts by the numbers and keys that a run's record of prompts has: of the training rows, where
    they are still there; of messages the last. Rows that cannot be read are said in `notes`.
    """
    try:
        config = run.read_config()
        prompt = load_task(config.task.name or "rows").prompt
        prompts = {row_key(row): prompt(row) for row in load_split(config, "train")}
    except (OSError, ValueError) as error:
        notes.append(f"prompts are shown as far as samples.jsonl has them: {first_line(error)}")
        return {}
    found = {index: prompts[key] for index, key in keys.items() if key in prompts}
    return {index: said if isinstance(said, str) else str(said[-1]["content"]) for index, said in found.items()}


def export_rows(config: Config, keys: set[str], file: Path) -> str:
    """Write the training rows with these keys, as `task.data` of the same task, and say so. Raises ValueError where the
    file exists, or no row has one of the keys.
    """
    if file.exists():
        raise ValueError(f"--export-hard: {file} exists; give another name")
    rows = {key: row for row in load_split(config, "train") if (key := row_key(row)) in keys}
    if not rows:
        why = "no prompt is hard" if not keys else "none of them is in the training rows any more"
        raise ValueError(f"--export-hard: {why}, so there is nothing to write")
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=True, default=str) + "\n" for row in rows.values())
    gone = len(keys) - len(rows)
    left = f"; {gone:,} are not in the training rows any more" if gone else ""
    return f"{len(rows):,} rows in {file}, to train on: task.data={file}, with a task.eval_data of its own{left}"
