"""Readers of rows: .jsonl, .json, .csv and .parquet files, folders of save_to_disk, and the Hugging Face hub.

Every reader yields (place, row) and reads no further than it is asked to, except for .json. An error is a ValueError
that names the file and, for text, the line. `datasets` reads folders and the hub, but no text: it turns "007" into 7,
fills short lines, and turns messages with different keys into JSON text.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tinyrl.text import did_you_mean, first_line, join_truncated, truncate

Row = dict[str, Any]
Placed = list[tuple[str, Row]]  # rows with their places: "train.jsonl:12", "train.parquet row 12"

_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")
_SAVED = ("dataset_info.json", "dataset_dict.json")  # in a folder of save_to_disk: of one split, of several


def placed_rows(
    source: str, *, columns: dict[str, str] | None = None, revision: str | None = None, most: int | None = None
) -> Placed:
    """Read the first `most` rows (None: all) of a file, a folder of save_to_disk or a hub data set
    "owner/name:config@split" at `revision` (without a split: train), each with its place.

    `columns` {new: old} renames, replacing a column `new` that was there; `old` may be a key inside a column, with dots
    (reward_model.ground_truth). Raises ValueError naming the place.
    """
    placed = list(islice(reader_of(source, revision=revision)(), most))
    if not placed:
        raise ValueError(f"{source} is empty: no rows in it")
    return [(place, _renamed(row, columns, place)) for place, row in placed] if columns else placed


def reader_of(source: str, *, revision: str | None = None) -> Callable[[], Iterator[tuple[str, Row]]]:
    """Return the reader of a source. Raises ValueError for one that does not exist; the hub is not asked yet."""
    path, kinds = Path(source), ", ".join(_READERS)
    if read := _READERS.get(path.suffix.lower()):
        if path.is_file():
            return partial(read, source)
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*") if file.suffix in _READERS])
        raise ValueError(f"{source}: no such file.{near}")
    if any((path / name).is_file() for name in _SAVED) or (_HUB.fullmatch(source) and not path.exists()):
        return partial(_read_dataset, source, revision)
    raise ValueError(f"'{source}' is no file ({kinds}), folder of save_to_disk, or hub name (openai/gsm8k:main@train)")


def hub_name(source: str) -> str | None:
    """Return the data set (owner/name) of a hub source; None for a file."""
    match = _HUB.fullmatch(source)
    return match["id"] if match and Path(source).suffix.lower() not in _READERS and not Path(source).exists() else None


def _renamed(row: Row, columns: dict[str, str], place: str) -> Row:
    found = {}
    for new, old in columns.items():
        value: Any = row
        for part in [old] if old in row else old.split("."):
            names = list(value) if isinstance(value, dict) else []
            if part not in names:
                asked = f"which task.columns.{truncate(new)} asks for.{did_you_mean(part, names)}"
                raise ValueError(
                    f"{place}: no column '{truncate(old)}', {asked} Columns: {join_truncated(names) or 'none'}"
                )
            value = value[part]
        found[new] = value
    return {name: value for name, value in row.items() if name not in {*columns, *columns.values()}} | found


def _lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a UTF-8 file, split at \\n only: JSON strings may hold other line separators."""
    with Path(source).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{source}:{number}: not UTF-8; save the file as UTF-8") from None


def _read_jsonl(source: str) -> Iterator[tuple[str, Row]]:
    for number, line in _lines(source):
        if line.strip():
            yield f"{source}:{number}", _row(_parse_json(line.rstrip("\n"), source, number), f"{source}:{number}")


def _read_json(source: str) -> Iterator[tuple[str, Row]]:
    rows = _parse_json("".join(line for _, line in _lines(source)) or "[]", source, 1)
    if not isinstance(rows, list):
        raise ValueError(f"{source}: a .json file is a list of objects; one object a line is called .jsonl")
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", _row(row, f"{source} row {number}")


def _parse_json(text: str, source: str, line: int) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON; write null or leave the row out")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"{source}:{line + error.lineno - 1}: broken JSON at column {error.colno}"
        raise ValueError(f"{where}: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # brackets, a constant, or an integer of thousands of digits
        raise ValueError(f"{source}:{line}: {first_line(error)}") from None


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict) or not value:
        raise ValueError(f'{place}: a row is an object {{"column": value, ...}}, not {value!r:.40}')
    return value


def _read_csv(source: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)  # the default is 131,072 characters a field
    reader = csv.DictReader((line for _, line in _lines(source)), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or [])
                raise ValueError(f"{source}:{reader.line_num}: this row has not {count} values; quote commas")
            yield f"{source}:{reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{source}:{reader.reader.line_num}: broken CSV: {error}") from None


# ---- tables, read by pyarrow and `datasets` (imported where needed: they take seconds) ----


def _table_rows(source: str, batches: Any) -> Iterator[tuple[str, Row]]:
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def _read_parquet(source: str) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            yield from _table_rows(source, file.iter_batches(1024))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{source}: not a parquet file that can be read: {first_line(error)}") from error


def _read_dataset(source: str, revision: str | None = None) -> Iterator[tuple[str, Row]]:
    """Read a folder of save_to_disk (of several splits: train) or a hub data set."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if Path(source).is_dir():
            data: Any = datasets.load_from_disk(source)
            data = data["train"] if isinstance(data, datasets.DatasetDict) else data
        else:
            match = _HUB.fullmatch(source)
            assert match
            split = match["split"] or "train"
            data = datasets.load_dataset(match["id"], match["config"], split=split, revision=revision)
        yield from _table_rows(source, data.with_format("arrow").iter(1024))
    except (DatasetsError, OSError, KeyError, ValueError) as error:
        hint = "a hub name is owner/name:config@split; or give task.data=FILE.jsonl"
        raise ValueError(f"{source} cannot be read: {first_line(error)}; {hint}") from error


_READERS: dict[str, Callable[[str], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
