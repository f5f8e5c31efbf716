"""Rows of a source as a run takes them: columns renamed, chats of a .csv parsed, images in place, values of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tinyrl.data.image_files import ImageFiles
from tinyrl.data.image_rows import with_images
from tinyrl.data.readers import Placed, Row, json_of, plain_row, reader_of
from tinyrl.process.counting import counted
from tinyrl.text import did_you_mean, first_line, join_truncated, truncate

CHAT_COLUMNS = ("prompt", "completion", "chosen", "rejected")  # text or messages; other columns are one of both


def placed_rows(
    source: str,
    *,
    columns: dict[str, str] | None = None,
    revision: str | None = None,
    most: int | None = None,
    fetch_images: bool = False,
) -> Placed:
    """Read the first `most` rows (None: all) of a file, a folder of save_to_disk or a hub data set
    "owner/name:config@split" at `revision` (without a split: train), each with its place.

    `columns` {new: old} renames, replacing a column `new` that was there; `old` may be a key inside a column, with dots
    (reward_model.ground_truth). Images are put in their places (image_rows.py); paths of theirs are relative to the
    file, or to the folder of save_to_disk. Raises ValueError naming the place.
    """
    files = ImageFiles(base=_folder_of(source), fetch=fetch_images)
    is_csv = Path(source).suffix.lower() == ".csv"
    placed = Placed()
    for place, row in counted(islice(reader_of(source, revision=revision)(), most), what="rows read"):
        named = _renamed(row, columns, place) if columns else row
        with_chats = _with_chats(named, place) if is_csv else named
        placed.append((place, row_with_images(with_chats, files, place)))
    if not placed:
        raise ValueError(f"{source} is empty: no rows in it")
    return placed


def read_rows(source: str, **options: Any) -> list[Row]:
    """Read rows without their places."""
    return [row for _, row in placed_rows(source, **options)]


def _folder_of(source: str) -> Path:
    """Return the folder that relative paths in rows belong to: of the file, or the data set's own."""
    path = Path(os.path.expanduser(source))
    return path if os.path.isdir(path) else path.parent


def row_with_images(row: Mapping[str, Any], files: ImageFiles, place: str) -> Row:
    """Return a row of JSON's values, with its images in their places. Raises ValueError naming the place."""
    try:
        with_files = with_images(dict(row), files)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return plain_row(with_files, place)


def _with_chats(row: Row, place: str) -> Row:
    """Parse the chats that a row of a .csv has as JSON text, where text is allowed too."""
    chats = Row()
    for name in CHAT_COLUMNS:
        if not isinstance(row.get(name), str):
            continue
        try:
            chat = _chat_in(row[name])
        except ValueError as error:
            raise ValueError(f"{place}: '{name}': {first_line(error)}") from None
        if chat is not None:
            chats[name] = chat
    return {**row, **chats}


def _chat_in(text: str) -> list[Any] | None:
    """Parse a text that is a JSON list of messages and nothing else; None for other texts."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json_of(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return found if found and all(map(_is_message, found)) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return ("role" in value and ("content" in value or "tool_calls" in value)) or {"from", "value"} <= {*value}


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
