"""Readers of rows: .jsonl, .json, .csv and .parquet files, folders of save_to_disk, and the Hugging Face hub.

Every reader yields (place, row) and reads no further than it is asked to, except for .json. An error is a ValueError
that names the file and, for text, the line. An empty cell of a .csv is null, and a chat in one, as JSON, becomes
messages. `datasets` reads folders and the hub, but no text: it turns "007" into 7, fills short lines, and turns
messages with different keys into JSON text.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tinyrl.text import did_you_mean, first_line, truncate

PATH_CHARACTERS = 300  # of a path in a sentence: its end is what tells it from others

Row = dict[str, Any]
Placed = list[tuple[str, Row]]  # rows with their places: "train.jsonl:12", "train.parquet row 12"

_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")
MOST_HUB_CHARS = 500  # of a data set's name, its configuration and split
_SAVED = ("dataset_info.json", "dataset_dict.json")  # in a folder of save_to_disk: of one split, of several


def plain_row(row: Mapping[str, Any], place: str) -> Row:
    """Return a row with values of JSON: dates and times as ISO text, decimals as numbers, NaN as null, arrays as lists.
    Raises ValueError, naming place and column, for bytes, other objects, and texts with a lone surrogate.
    """
    plain = Row()
    for name, value in row.items():
        try:
            plain[_plain(name)] = _plain(value)
        except ValueError as error:
            raise ValueError(f"{place}: column '{truncate(str(name))}' {error}") from None
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value  # as tables write a value that is missing
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {valid_text(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        is_missing = value != value  # pandas' NaT
        return None if is_missing else value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else _plain(float(value))
    if isinstance(value, uuid.UUID | os.PathLike):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("holds bytes, which are read of images alone (in a column `images`, or a part of a message)")
    if hasattr(value, "tolist"):  # of numpy and torch
        return _plain(value.tolist())
    what = "; an image goes in a column `images`" if hasattr(value, "getexif") else ""
    raise ValueError(
        f"holds a {type(value).__name__}, and only what JSON has is read: text, numbers, lists, objects{what}"
    )


def valid_text(text: str) -> str:
    """Return a text that is valid Unicode. Raises ValueError for half of a character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise ValueError(f"holds invalid Unicode: a lone surrogate (half an emoji), {half}") from None
    return text


def reader_of(source: str, *, revision: str | None = None) -> Callable[[], Iterator[tuple[str, Row]]]:
    """Return the reader of a source. Raises ValueError for one that does not exist; the hub is not asked yet."""
    source = os.path.expanduser(source)
    path = Path(source)
    kinds = ", ".join(_READERS)
    if read := _READERS.get(path.suffix.lower()):
        if os.path.isfile(path):  # which is false, not an error, of a name that no file system has
            return partial(read, source)
        near = did_you_mean(path.name, [file.name for file in _beside(path) if file.suffix in _READERS])
        raise ValueError(f"{truncate(source, PATH_CHARACTERS)}: no such file.{near}")
    is_saved = any(os.path.isfile(path / name) for name in _SAVED)
    if is_saved or (_HUB.fullmatch(source) and len(source) <= MOST_HUB_CHARS and not os.path.exists(path)):
        return partial(_read_dataset, source, revision)
    wanted = f"file ({kinds}), folder of save_to_disk, or hub name (openai/gsm8k:main@train)"
    raise ValueError(f"'{truncate(source, PATH_CHARACTERS)}' is no {wanted}")


def _beside(path: Path) -> list[Path]:
    return [*path.parent.glob("*")] if os.path.isdir(path.parent) else []


def hub_name(source: str) -> str | None:
    """Return the data set (owner/name) of a hub source; None for a file."""
    match = _HUB.fullmatch(source)
    is_name = match is not None and len(source) <= MOST_HUB_CHARS and Path(source).suffix.lower() not in _READERS
    return match["id"] if match is not None and is_name and not os.path.exists(source) else None


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


def json_of(text: str, **options: Any) -> Any:
    """Parse JSON. Raises ValueError for an object with a key given twice, of which Python would keep the last."""
    return json.loads(text, object_pairs_hook=_object, **options)


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before; None if all differ."""
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    twice = None if len(found) == len(pairs) else first_repeated(name for name, _ in pairs)
    if twice is not None:
        raise ValueError(f"the key '{truncate(twice)}' is given twice in an object")
    return found


def _parse_json(text: str, source: str, line: int) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"{source}:{line + error.lineno - 1}: broken JSON at column {error.colno}"
        raise ValueError(f"{where}: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # brackets, a constant, a key given twice, thousands of digits
        raise ValueError(f"{source}:{line}: {first_line(error)}") from None


def finite(text: str) -> float:
    """Parse a number. Raises ValueError for one that would be infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{truncate(text)} is larger than any number that is read")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or leave the row out")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=finite)


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict) or not value:
        raise ValueError(f'{place}: a row is an object {{"column": value, ...}}, not {value!r:.40}')
    return value


def _read_csv(source: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)  # the default is 131,072 characters a field
    reader = csv.DictReader((line for _, line in _lines(source)), strict=True)
    try:
        names = reader.fieldnames or []
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ValueError(f"{source}:{reader.line_num}: two columns are called '{truncate(twice)}'")
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or [])
                raise ValueError(f"{source}:{reader.line_num}: this row has not {count} values; quote commas")
            yield f"{source}:{reader.line_num}", {name: value or None for name, value in row.items()}
    except csv.Error as error:
        raise ValueError(f"{source}:{reader.reader.line_num}: broken CSV: {error}") from None


# ---- tables, read by pyarrow and `datasets` (imported where needed: they take seconds) ----


def _batch_size(schema: Any) -> int:
    """Return how many rows of a table are read at once: few where they hold files."""
    has_files = any("binary" in str(column.type) for column in schema)
    return 16 if has_files else 1024


def _table_rows(source: str, batches: Any) -> Iterator[tuple[str, Row]]:
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def _read_parquet(source: str) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            yield from _table_rows(source, file.iter_batches(_batch_size(file.schema_arrow)))
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
        table = data.with_format("arrow")
        yield from _table_rows(source, table.iter(_batch_size(table.features.arrow_schema)))
    except (DatasetsError, OSError, KeyError, ValueError) as error:
        hint = "a hub name is owner/name:config@split; or give task.data=FILE.jsonl"
        raise ValueError(f"{source} cannot be read: {first_line(error)}; {hint}") from error


_READERS: dict[str, Callable[[str], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
