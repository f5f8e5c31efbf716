"""Readers of rows from files (jsonl, json, csv, parquet), folders of save_to_disk and the Hugging Face hub, placed.

The text formats are read by hand because people's files are broken in ordinary ways and every error should name the
file, the place and the value: a cut-off line, an Excel encoding, a key written twice, NaN. Everything a file can do
wrong is a ValueError; a file is data only and nothing in it is executed.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tinyrl.text import decode_utf8, did_you_mean, first_line, listed, shortened

Row = dict[str, Any]
Placed = list[tuple[str, Row]]  # a row and where it stands: "train.jsonl:12", "train.parquet row 12"

_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")
SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves in a folder of one split, and of several
_HALF = re.compile(r"\\u[dD]")  # how an escape of half a character begins
_FOREIGN_STARTS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"PK\x03\x04": "zipped", b"\x1f\x8b": "gzipped"}


def placed_rows(
    source: str, *, columns: dict[str, str] | None = None, revision: str | None = None, most: int | None = None
) -> Placed:
    """Read the first `most` rows (None: all) of a file, of a folder that `datasets` has saved, or of a hub data set
    "owner/name:config@split", at `revision` (of several splits train, where none is named), each with its place. Except
    for .json, nothing after them is read.

    `columns` {new: old} renames, replacing a column `new` that was there; `old` may be a key inside a column, with dots
    (reward_model.ground_truth). Raises ValueError naming the place.
    """
    path = Path(source)
    read = FILE_READERS.get(path.suffix.lower())
    kinds = ", ".join(FILE_READERS)
    if is_saved_set(source):
        placed = _read_saved(source, most)
    elif read is not None:
        placed = read(source, most)
    elif source and path.exists():
        what = "is a folder" if path.is_dir() else f"has the ending '{path.suffix}'"
        raise ValueError(
            f"{source}: {what}; data is a file ending in {kinds}, a folder of save_to_disk, or a hub name such as "
            "openai/gsm8k:main"
        )
    elif match := _HUB.fullmatch(source):
        placed = _read_hub(source, most=most, revision=revision, **match.groupdict())
    else:
        raise ValueError(f"'{source}' is neither a file ({kinds}) nor a hub name such as openai/gsm8k:main@train")
    if not placed:
        raise ValueError(f"{source}: no rows in it")
    return [(place, _renamed(row, columns, place)) for place, row in placed] if columns else placed


def _renamed(row: Row, columns: dict[str, str], place: str) -> Row:
    found = {}
    for new, old in columns.items():
        value: Any = row
        for part in [old] if old in row else old.split("."):
            if not isinstance(value, dict) or part not in value:
                names = listed(value) if isinstance(value, dict) else _kind(value)
                meant = did_you_mean(part, list(value)) if isinstance(value, dict) else ""
                asked = f"which task.columns.{shortened(new)} asks for.{meant} Columns: {names}"
                raise ValueError(f"{place}: no column '{shortened(old)}', {asked}")
            value = value[part]
        found[new] = value
    kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return {**kept, **found}


def is_saved_set(source: str) -> bool:
    """Whether it is a folder of `datasets`' save_to_disk, of one split or of several."""
    return any((Path(source) / name).is_file() for name in SAVED)


def hub_name(source: str) -> str | None:
    """The data set (owner/name) of a hub source; None for a file."""
    match = _HUB.fullmatch(source)
    is_file = Path(source).suffix.lower() in FILE_READERS or Path(source).exists()
    return match["id"] if match and not is_file else None


def _numbered(source: str, rows: list[Row]) -> Placed:
    return [(f"{source} row {number}", row) for number, row in enumerate(rows, start=1)]


# ---- text files ----


def _read_text(source: str, most: int | None = None, *, quotes: bool = False) -> str:
    """Read a text file, or its first `most` lines that are not blank; `quotes`: a line break inside quotes is none."""
    path, lines, inside = Path(source), list[bytes](), False
    try:
        with path.open("rb") as file:
            while most is None or most > 0:
                line = file.readline() if most is not None else file.read()
                if not line:
                    break
                lines.append(line)
                inside ^= quotes and line.count(b'"') % 2 == 1
                most = None if most is None else most - (bool(line.strip()) and not inside)
        raw = b"".join(lines)
    except FileNotFoundError:
        folder = path.parent
        there = sorted(p.name for p in folder.iterdir() if p.suffix in FILE_READERS) if folder.is_dir() else []
        nothing = "" if folder.is_dir() else f" (there is no folder {folder})"
        raise ValueError(f"{source}: no such file{nothing}.{did_you_mean(path.name, there)}") from None
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    for start, kind in _FOREIGN_STARTS.items():
        if raw.startswith(start):
            raise ValueError(f"{source}: the file is {kind}, not UTF-8 text; save it as UTF-8")
    text = decode_utf8(raw, source)
    if not text.strip():
        raise ValueError(f"{source}: the file is empty")
    return text


def _read_jsonl(source: str, most: int | None) -> Placed:
    # only \n ends a line: JSON strings may hold the other characters that splitlines() splits at
    lines = enumerate(_read_text(source, most).split("\n"), start=1)
    return [(f"{source}:{number}", parse_row(line, source, number=number)) for number, line in lines if line.strip()]


def parse_row(line: str, source: str, *, number: int) -> Row:
    """The row that line `number` of a .jsonl file holds. Raises ValueError, with the line, where it holds none."""
    row = _parse_json(line, source, number)
    _check_row(row, f"{source}:{number}", escaped=bool(_HALF.search(line)))
    return row


def _read_json(source: str, most: int | None) -> Placed:
    text = _read_text(source)
    rows = _parse_json(text, source, 1)
    if not isinstance(rows, list):
        hint = "; one object a line is called .jsonl"
        raise ValueError(f"{source}: a .json file holds a list of objects [{{...}}, ...], not {_kind(rows)}{hint}")
    escaped, placed = bool(_HALF.search(text)), _numbered(source, rows[:most])
    for place, row in placed:
        _check_row(row, place, escaped=escaped)
    return placed


def _parse_json(text: str, source: str, line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        where, around = f"{source}:{line + error.lineno - 1}", error.doc[max(error.pos - 20, 0) : error.pos + 20]
        more = "; one object a line is called .jsonl" if error.msg == "Extra data" and source.endswith(".json") else ""
        raise ValueError(f"{where}: broken JSON at column {error.colno}, near {around!r}: {error.msg}{more}") from None
    except RecursionError:
        raise ValueError(f"{source}:{line}: JSON nested too deep to read") from None
    except ValueError as error:  # from the hooks below, or an integer of thousands of digits
        raise ValueError(f"{source}:{line}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or leave the row out")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _check_row(value: Any, place: str, *, escaped: bool) -> None:
    """ValueError unless it is an object with columns and, where escapes are to be looked at, whole characters."""
    if not isinstance(value, dict):
        raise ValueError(f'{place}: a row is an object {{"column": value, ...}}, not {_kind(value)}')
    if not value:
        raise ValueError(f"{place}: a row without columns")
    if escaped:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: half a character (a lone surrogate): {error.object[error.start]!a}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    shown = repr(value)
    return f"{names.get(type(value), 'a number')}: {shown[:40]}{'...' if len(shown) > 40 else ''}"


def _read_csv(source: str, most: int | None) -> Placed:
    text = _read_text(source, None if most is None else most + 1, quotes=True)
    limit = csv.field_size_limit(len(text) + 1)  # the module's own limit, 131,072 characters a field, is too low
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    placed, line = [], 1
    try:
        for cells in reader:
            place, line = f"{source}:{line}", reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = cells
                _check_header(header, place)
            elif len(cells) != len(header):
                columns = ", ".join(header)
                raise ValueError(f"{place}: {len(cells)} values for {len(header)} columns ({columns}); quote commas")
            else:
                placed.append((place, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise ValueError(f"{source}:{line}: broken CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return placed[:most]


def _check_header(cells: list[str], place: str) -> None:
    doubles = sorted({name for name in cells if cells.count(name) > 1 and name})
    if doubles:
        raise ValueError(f"{place}: the column '{doubles[0]}' stands twice in the header")
    if "" in cells:
        raise ValueError(f"{place}: column {cells.index('') + 1} of the header has no name ({', '.join(cells)[:80]})")
    if len(cells) == 1 and re.search(r"[;\t]", cells[0]):
        raise ValueError(f"{place}: columns are separated by commas, not by ';' or tabs: {cells[0][:80]!r}")


# ---- what `datasets` and pyarrow read ----


def _read_parquet(source: str, most: int | None) -> Placed:
    if not Path(source).is_file():
        _read_text(source, 1)  # raises, saying what is wrong
    import pyarrow  # with `datasets`; half a second that other formats need not wait for
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
            return _numbered(source, [*islice(rows, most)])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{source}: not a parquet file that can be read: {first_line(error)}") from error


def _first_rows(data: Any, most: int | None) -> list[Row]:
    """Read rows of a data set, whose table stays on disk."""
    return (data if most is None else data.select(range(min(most, len(data))))).to_list()


def _read_saved(source: str, most: int | None) -> Placed:
    import datasets  # seconds
    from datasets.exceptions import DatasetsError

    try:
        saved = datasets.load_from_disk(source)
        if isinstance(saved, datasets.DatasetDict):
            if "train" not in saved:
                raise ValueError(f"name the folder of one of its splits: {', '.join(map(str, saved))}")
            saved = saved["train"]
        return _numbered(source, _first_rows(saved, most))
    except (DatasetsError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{source}: a folder of save_to_disk that cannot be read: {first_line(error)}") from error


def _read_hub(
    source: str, *, most: int | None, revision: str | None, id: str, config: str | None, split: str | None
) -> Placed:
    import datasets  # seconds
    from datasets.exceptions import DatasetsError

    try:
        data = datasets.load_dataset(id, config, split=split or "train", revision=revision)
        return _numbered(source, _first_rows(data, most))
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"task data '{source}': there is no such file, and the hub does not give it: {first_line(error)}\n"
            "  A hub name is owner/name:config@split. Without a network, give a file: task.data=FILE.jsonl"
        ) from error


FILE_READERS: dict[str, Callable[[str, int | None], Placed]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
