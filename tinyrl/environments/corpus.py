"""A corpus searched by BM25 (Robertson and Zaragoza 2009): an SQLite FTS5 index, built once and kept beside the file.

The index holds the passages too, so nothing reads the corpus once the index is open. It is rebuilt when the corpus's
size or modification time has changed. A new index replaces the old one by a rename: a process that has the old one open
goes on reading it, and a kill leaves no half-written index under its name.

Differs from Lucene's BM25 with English analysis in small ways: the same k1 = 1.2 and b = 0.75, Porter's stemmer and
stop words (of a query only), but a word found in half the passages or more weighs next to nothing. Words are what
stands between spaces and punctuation, so languages written without spaces are not searched well.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import sqlite3
import stat
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from tinyrl.data.readers import Row, parse_row
from tinyrl.runs.signals import watched
from tinyrl.text import first_line, listed

# ---- Passages, one text each ----
# Rows are Search-R1's, `{"id": ..., "contents": "\"Title\"\ntext"}`, or have a `title` and a `text`. A file is read
# row by row: Search-R1's own corpus has 21 million passages in 14 GB.

COLUMNS = ("contents", "title", "text")


class SearchFailed(Exception):
    """A search that gave no passages for a reason outside the query: a damaged index, a server that did not answer."""


def read_passages(source: Path) -> Iterator[str]:
    """Yield the passages of a .jsonl or .parquet file, in its order. ValueError, with file and line, for a bad one."""
    read = READERS.get(source.suffix.lower())
    if read is None:
        raise ValueError(f"{source}: a corpus is a file ending in {' or '.join(READERS)}")
    empty = True
    try:
        for place, row in read(str(source)):
            passage = passage_of(row, place)
            if not passage.strip():
                raise ValueError(f"{place}: an empty passage")
            yield passage
            empty = False
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise ValueError(f"{source}: no passages in it")


def passage_of(row: Row, place: str) -> str:
    """Return the text of a row. ValueError, with `place`, where it has none."""
    contents, title, text = (row.get(name) for name in COLUMNS)
    if contents is None and isinstance(title, str) and isinstance(text, str):
        contents = f'"{" ".join(title.split())}"\n{text}'
    if not isinstance(contents, str):
        found = f"one with the columns {listed(row)}" if contents is None else f"the contents {repr(contents)[:60]}"
        raise ValueError(
            f"{place}: a passage is a row with a text 'contents', or texts 'title' and 'text'; not {found}"
        )
    return contents


def _read_jsonl(source: str) -> Iterator[tuple[str, Row]]:
    with open(source, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                wrong = f"byte {error.object[error.start]:#04x}"
                raise ValueError(f"{source}:{number}: not UTF-8: {wrong}; save the file as UTF-8") from None
            if line.strip():
                yield f"{source}:{number}", parse_row(line.removesuffix("\n"), source, number=number)


def _read_parquet(source: str) -> Iterator[tuple[str, Row]]:
    import pyarrow  # half a second that other formats need not wait for
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            known = [name for name in file.schema_arrow.names if name in COLUMNS]
            number = 0
            for batch in file.iter_batches(columns=known or None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source} row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: not a parquet file that can be read: {first_line(error)}") from error


READERS: dict[str, Callable[[str], Iterator[tuple[str, Row]]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


# ---- The index ----

LEFT_S = 3600.0  # an unfinished index that was not written to for so long has no writer any more
FORMAT = 3  # of the index; one of another format is rebuilt
TOKENIZER = "porter unicode61 remove_diacritics 2"
MAX_QUERY_CHARS = 1000  # a policy may ask anything
MAX_WORDS = 64
# Lucene's English list, and what the apostrophes of "it's" and "don't" leave behind
STOPPED = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with s t"""
STOP_WORDS = frozenset(STOPPED.split())
_WORD = re.compile(r"[^\W_]+")


class Corpus:
    """A file of passages that can be searched, from any thread; each process opens it for itself."""

    def __init__(self, source: Path, index: Path, connection: sqlite3.Connection, num_passages: int) -> None:
        self.source, self.index = source, index
        self._connection, self._num_passages = connection, num_passages
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, *, say: Callable[[str], None] = lambda text: None) -> Corpus:
        """Open a .jsonl or .parquet file of passages; make its index first where there is none, which `say` is told.

        The index is beside the file, or in the user's cache where that folder takes no file.
        ValueError: the file cannot be used. OSError: no index can be written.
        """
        source = Path(path).expanduser()
        state, refused = _state(source), list[OSError]()
        for place in _places(source):
            if found := _opened(place, state):
                return cls(source, place, *found)
        for place in _places(source):
            say(f"{source}: {source.stat().st_size / 1e6:,.0f} MB of passages are indexed, once; the index is {place}")
            try:
                _write(place, source, state)
            except OSError as error:
                refused.append(error)
                continue
            found = _opened(place, state)
            assert found is not None
            return cls(source, place, *found)
        reasons = "; ".join(f"{error.filename}: {error.strerror}" for error in refused)
        raise OSError(refused[0].errno, f"no place for the index of this corpus ({reasons})", str(source))

    def __len__(self) -> int:
        return self._num_passages

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """Return at most `top_k` passages for each query, the best first; of two that are as good, the earlier in the
        file. A query without a word finds nothing. SearchFailed: the index was damaged since it was opened.
        """
        assert top_k >= 1, top_k
        try:
            with self._lock:
                return [self._best(query, top_k) for query in queries]
        except sqlite3.Error as error:
            raise SearchFailed(f"{self.index}: {error}; delete this index to rebuild it") from error

    def close(self) -> None:
        self._connection.close()

    def _best(self, query: str, top_k: int) -> list[str]:
        words = match_expression(query)
        if not words:
            return []
        ranked = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
        numbers = self._connection.execute(ranked, (words, top_k)).fetchall()  # texts of the best only are read
        read = "SELECT contents FROM passages WHERE rowid = ?"
        found = [self._connection.execute(read, number).fetchone() for number in numbers]
        if None in found:
            raise sqlite3.DatabaseError("a passage is missing")
        return [contents for (contents,) in found]


def match_expression(query: str) -> str:
    """Return the FTS5 expression for passages with any word of a query, "" for none. Words are quoted: FTS5's operators
    are words like others. Stop words count where there is nothing else.
    """
    found = _WORD.findall(unicodedata.normalize("NFC", query[:MAX_QUERY_CHARS]))
    words = {word.lower(): word for word in found}
    telling = {key: word for key, word in words.items() if key not in STOP_WORDS} or words
    return " OR ".join(f'"{word}"' for word in list(telling.values())[:MAX_WORDS])


def _state(source: Path) -> str:
    """Return what tells one state of a file from another: format of the index, bytes and time."""
    try:
        found = source.stat()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{source}: not a file")
    return f"{FORMAT} {found.st_size} {found.st_mtime_ns}"


def _places(source: Path) -> tuple[Path, Path]:
    known = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinyrl"
    return source.with_name(f"{source.name}.fts5"), cache / f"{known}-{source.name}.fts5"


def _opened(place: Path, state: str) -> tuple[sqlite3.Connection, int] | None:
    """Open an index for reading; None where there is none of this state of the corpus."""
    if not place.is_file():
        return None
    address = f"{place.absolute().as_uri()}?mode=ro&immutable=1"  # it is only ever replaced as a whole
    connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    with suppress(sqlite3.Error):
        about = connection.execute("SELECT state, passages FROM about").fetchone()
        if about and about[0] == state:
            return connection, about[1]
    connection.close()
    return None


def _write(place: Path, source: Path, state: str) -> None:
    """Write the index of a file beside its place, and move it there. OSError: the folder takes no file."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in place.parent.glob(f"{glob.escape(place.name)}.*.new"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > LEFT_S:
            left.unlink()
    writing = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        writing.unlink(missing_ok=True)
        with closing(sqlite3.connect(writing, isolation_level=None)) as connection:
            for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
                connection.execute(f"PRAGMA {setting}")
            connection.execute(f"CREATE VIRTUAL TABLE passages USING fts5(contents, tokenize = '{TOKENIZER}')")
            connection.execute("CREATE TABLE about (state, passages)")
            connection.execute("BEGIN")
            rows = ((passage,) for passage in watched(read_passages(source)))
            connection.executemany("INSERT INTO passages (contents) VALUES (?)", rows)
            connection.execute("INSERT INTO about SELECT ?, rowid FROM passages ORDER BY rowid DESC LIMIT 1", (state,))
            connection.execute("COMMIT")
        if _state(source) != state:
            raise ValueError(f"{source}: has changed while it was indexed; start again when it is complete")
        os.replace(writing, place)
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            version = sqlite3.sqlite_version
            raise ValueError(f"this Python's SQLite ({version}) has no full-text search (FTS5)") from None
        full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(writing)) from error
    finally:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
