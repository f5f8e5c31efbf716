"""Readers of rows from files (jsonl, json, csv, parquet), folders of save_to_disk and the Hugging Face hub.

Text formats are parsed here, so that every error names the file, the place and the value: a cut-off line, an Excel
encoding, a duplicate key, NaN. Whatever is wrong with a file is a ValueError; nothing in a file is executed.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tinyrl.text import did_you_mean, first_line, listed, shortened

Row = dict[str, Any]
Placed = list[tuple[str, Row]]  # rows with their places: "train.jsonl:12", "train.parquet row 12"

_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves in a folder of one split, and of several
_HALF = re.compile(r"\\u[dD]")  # how an escape of a lone surrogate begins
_BOM = b"\xef\xbb\xbf"
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
    placed = reader_of(source, revision=revision)(most)
    if not placed:
        raise ValueError(f"{source} is empty: no rows in it")
    return [(place, _renamed(row, columns, place)) for place, row in placed] if columns else placed


def reader_of(source: str, *, revision: str | None = None) -> Callable[[int | None], Placed]:
    """Return the reader of a source, which takes how many rows to read. Raises ValueError for a source that is not
    there, hub names aside.
    """
    path, kinds = Path(source), ", ".join(_READERS)
    if any((path / name).is_file() for name in _SAVED):
        return partial(_read_saved, source)
    if path.suffix.lower() in _READERS:
        if not path.exists():
            folder = path.parent
            there = sorted(p.name for p in folder.iterdir() if p.suffix in _READERS) if folder.is_dir() else []
            nothing = "" if folder.is_dir() else f" (there is no folder {folder})"
            raise ValueError(f"{source}: no such file{nothing}.{did_you_mean(path.name, there)}")
        return partial(_READERS[path.suffix.lower()], source)
    if source and path.exists():
        what = "is a folder" if path.is_dir() else f"has the ending '{path.suffix}'"
        raise ValueError(
            f"{source}: {what}; data is a file ending in {kinds}, a folder of save_to_disk, or a hub name such as "
            "openai/gsm8k:main"
        )
    if _HUB.fullmatch(source):
        return partial(_read_hub, source, revision)
    raise ValueError(f"'{source}' is neither a file ({kinds}) nor a hub name such as openai/gsm8k:main@train")


def hub_name(source: str) -> str | None:
    """Return the data set (owner/name) of a hub source; None for a file."""
    match = _HUB.fullmatch(source)
    is_file = Path(source).suffix.lower() in _READERS or Path(source).exists()
    return match["id"] if match and not is_file else None


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


def _numbered(source: str, rows: list[Row]) -> Placed:
    return [(f"{source} row {number}", row) for number, row in enumerate(rows, start=1)]


# ---- text files ----


def _lines(source: str) -> Iterator[str]:
    """The lines of a file, each with its end: only \\n, since JSON strings may hold others that splitlines() takes."""
    offset = 0
    try:
        with Path(source).open("rb") as file:
            for number, line in enumerate(file, start=1):
                for start, kind in _FOREIGN_STARTS.items() if number == 1 else ():
                    if line.startswith(start):
                        raise ValueError(f"{source}: the file is {kind}, not UTF-8 text; save it as UTF-8")
                skipped = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                try:
                    text = line[skipped:].decode()
                except UnicodeDecodeError as error:
                    at = skipped + error.start
                    what = f"byte {line[at]:#04x} at offset {offset + at}"
                    raise ValueError(f"{source}:{number}: not UTF-8: {what}; save the file as UTF-8") from None
                yield text
                offset += len(line)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def _read_jsonl(source: str, most: int | None) -> Placed:
    lines = ((number, line) for number, line in enumerate(_lines(source), start=1) if line.strip())
    return [(f"{source}:{number}", parse_row(line, source, number=number)) for number, line in islice(lines, most)]


def parse_row(line: str, source: str, *, number: int) -> Row:
    """Parse line `number` of a .jsonl file. Raises ValueError, with the line, where it holds no row."""
    row = _parse_json(line.rstrip("\n"), source, number)
    return _checked(row, f"{source}:{number}", escaped=_HALF.search(line) is not None)


def _read_json(source: str, most: int | None) -> Placed:
    text = "".join(_lines(source))
    rows = _parse_json(text, source, 1) if text.strip() else []
    if not isinstance(rows, list):
        hint = "; one object a line is called .jsonl"
        raise ValueError(f"{source}: a .json file holds a list of objects [{{...}}, ...], not {_kind(rows)}{hint}")
    escaped = _HALF.search(text) is not None
    return [(place, _checked(row, place, escaped=escaped)) for place, row in _numbered(source, rows[:most])]


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
        raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r} in one object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or leave the row out")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _checked(value: Any, place: str, *, escaped: bool) -> Row:
    """Return a row. Raises ValueError for anything but an object with columns and, where the text has escapes of
    surrogates, valid Unicode.
    """
    if not isinstance(value, dict):
        raise ValueError(f'{place}: a row is an object {{"column": value, ...}}, not {_kind(value)}')
    if not value:
        raise ValueError(f"{place}: a row without columns")
    try:
        if escaped:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise ValueError(f"{place}: invalid Unicode (lone surrogate): {character!a}") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    shown = repr(value)
    return f"{names.get(type(value), 'a number')}: {shown[:40]}{'...' if len(shown) > 40 else ''}"


def _read_csv(source: str, most: int | None) -> Placed:
    limit = csv.field_size_limit(sys.maxsize)  # the module's own, 131,072 characters a field, is too low
    try:
        return list(islice(_csv_rows(source), most))
    finally:
        csv.field_size_limit(limit)


def _csv_rows(source: str) -> Iterator[tuple[str, Row]]:
    lines = chain.from_iterable(io.StringIO(line, newline="") for line in _lines(source))  # \r ends a line here
    reader, header, line = csv.reader(lines, strict=True), list[str](), 1
    try:
        for cells in reader:
            place, line = f"{source}:{line}", reader.line_num + 1
            if cells and not header:
                header = cells
                _check_header(header, place)
            elif cells and len(cells) != len(header):
                columns = ", ".join(header)
                raise ValueError(f"{place}: {len(cells)} values for {len(header)} columns ({columns}); quote commas")
            elif cells:
                yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{source}:{line}: broken CSV: {error}") from None


def _check_header(cells: list[str], place: str) -> None:
    doubles = sorted({name for name in cells if cells.count(name) > 1 and name})
    if doubles:
        raise ValueError(f"{place}: duplicate column '{doubles[0]}' in the header")
    if "" in cells:
        raise ValueError(f"{place}: column {cells.index('') + 1} of the header has no name ({', '.join(cells)[:80]})")
    if len(cells) == 1 and re.search(r"[;\t]", cells[0]):
        raise ValueError(f"{place}: columns are separated by commas, not by ';' or tabs: {cells[0][:80]!r}")


# ---- tables, read by pyarrow and `datasets` (imported where needed: they take seconds) ----


def _read_parquet(source: str, most: int | None) -> Placed:
    import pyarrow
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
    import datasets
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


def _read_hub(source: str, revision: str | None, most: int | None) -> Placed:
    import datasets
    from datasets.exceptions import DatasetsError

    name, config, split = _HUB.fullmatch(source).group("id", "config", "split")  # pyright: ignore[reportOptionalMemberAccess]
    try:
        data = datasets.load_dataset(name, config, split=split or "train", revision=revision)
        return _numbered(source, _first_rows(data, most))
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"task data '{source}': there is no such file, and the hub does not give it: {first_line(error)}\n"
            "  A hub name is owner/name:config@split. Without a network, give a file: task.data=FILE.jsonl"
        ) from error


_READERS: dict[str, Callable[[str, int | None], Placed]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
