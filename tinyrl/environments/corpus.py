"""A corpus searched by BM25 (Robertson and Zaragoza 2009): an SQLite FTS5 index, built once and kept beside the file.

The index holds the passages too, so nothing reads the corpus once the index is open. It is rebuilt when the corpus's
size or modification time has changed. A new index replaces the old one by a rename: a process that has the old one open
goes on reading it, and a kill leaves no half-written index under its name.

Differs from Lucene's BM25 with English analysis in small ways: the same k1 = 1.2 and b = 0.75, Porter's stemmer and
stop words (of a query only), but a word found in half the passages or more weighs next to nothing. Words are what
stands between spaces and punctuation, so languages written without spaces are not searched well.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from tinyrl.data.readers import Row, reader_of
from tinyrl.runs.signals import watched
from tinyrl.text import listed

FORMAT = 3  # of the index; one of another format is rebuilt
TOKENIZER = "porter unicode61 remove_diacritics 2"
MAX_QUERY_CHARS = 1000  # a policy may ask anything
MAX_WORDS = 64
# Lucene's English list, and what the apostrophes of "it's" and "don't" leave behind
STOPPED = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with s t"""
STOP_WORDS = frozenset(STOPPED.split())
_WORD = re.compile(r"[^\W_]+")


class SearchFailed(Exception):
    """A search that gave no passages for a reason outside the query: a damaged index, a server that did not answer."""


def passage_of(row: Row, place: str) -> str:
    """Return the text of a row: Search-R1's `{"contents": "\\"Title\\"\\ntext"}`, or a `title` and a `text`.

    ValueError, with `place`, where it has none.
    """
    contents, title, text = (row.get(name) for name in ("contents", "title", "text"))
    if contents is None and isinstance(title, str) and isinstance(text, str):
        contents = f'"{" ".join(title.split())}"\n{text}'
    if not isinstance(contents, str):
        found = f"one with the columns {listed(row)}" if contents is None else f"the contents {repr(contents)[:60]}"
        raise ValueError(
            f"{place}: a passage is a row with a text 'contents', or texts 'title' and 'text'; not {found}"
        )
    return contents


class Corpus:
    """A file of passages that can be searched, from any thread; each process opens it for itself."""

    def __init__(self, index: Path, connection: sqlite3.Connection, num_passages: int) -> None:
        self.index, self._connection, self._num_passages = index, connection, num_passages
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, *, say: Callable[[str], None] = lambda text: None) -> Corpus:
        """Open a .jsonl or .parquet file of passages; make its index first where there is none, which `say` is told.

        The index is beside the file, or in the user's cache where that folder takes no file.
        ValueError: the file cannot be used. OSError: no index can be written.
        """
        source = Path(path).expanduser()
        if source.suffix.lower() not in (".jsonl", ".parquet"):
            raise ValueError(f"{source}: a corpus is a file ending in .jsonl or .parquet")
        if not source.is_file():
            raise ValueError(f"{source}: cannot be read: no such file")
        state = f"{FORMAT} {source.stat().st_size} {source.stat().st_mtime_ns}"
        known = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinyrl"
        places = (source.with_name(f"{source.name}.fts5"), cache / f"{known}-{source.name}.fts5")
        for place in places:
            if found := _opened(place, state):
                return cls(place, *found)
        refused = []
        for place in places:
            say(f"{source}: {source.stat().st_size / 1e6:,.0f} MB of passages are indexed, once; the index is {place}")
            try:
                _write(place, source, state)
                found = _opened(place, state)
            except (OSError, sqlite3.OperationalError) as error:
                refused.append(f"{place}: {error}")
                continue
            assert found, place
            return cls(place, *found)
        raise OSError(f"{source}: no place for the index of this corpus ({'; '.join(refused)})")

    def __len__(self) -> int:
        return self._num_passages

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """Return at most `top_k` passages for each query, the best first; of two that are as good, the earlier in the
        file. A query without a word finds nothing. SearchFailed: the index was damaged since it was opened.
        """
        assert top_k >= 1, top_k
        ranked = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
        read = "SELECT contents FROM passages WHERE rowid = ?"  # texts of the best only
        found = []
        try:
            with self._lock:
                for query in queries:
                    words = match_expression(query)
                    numbers = self._connection.execute(ranked, (words, top_k)).fetchall() if words else []
                    found.append([self._connection.execute(read, number).fetchone()[0] for number in numbers])
        except (sqlite3.Error, TypeError) as error:  # the latter: a passage is missing
            raise SearchFailed(f"{self.index}: {error}; delete this index to rebuild it") from error
        return found

    def close(self) -> None:
        self._connection.close()


def match_expression(query: str) -> str:
    """Return the FTS5 expression for passages with any word of a query, "" for none. Words are quoted: FTS5's operators
    are words like others. Stop words count where there is nothing else.
    """
    found = _WORD.findall(unicodedata.normalize("NFC", query[:MAX_QUERY_CHARS]))
    words = {word.lower(): word for word in found}
    telling = {key: word for key, word in words.items() if key not in STOP_WORDS} or words
    return " OR ".join(f'"{word}"' for word in list(telling.values())[:MAX_WORDS])


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
    """Write the index of a file beside its place, and move it there."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    writing = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.new")

    def passages() -> Iterator[tuple[str]]:
        for where, row in watched(reader_of(str(source))()):
            passage = passage_of(row, where)
            if not passage.strip():
                raise ValueError(f"{where}: an empty passage")
            yield (passage,)

    try:
        writing.unlink(missing_ok=True)
        with closing(sqlite3.connect(writing, isolation_level=None)) as connection:
            for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
                connection.execute(f"PRAGMA {setting}")
            connection.execute(f"CREATE VIRTUAL TABLE passages USING fts5(contents, tokenize = '{TOKENIZER}')")
            connection.execute("CREATE TABLE about (state, passages)")
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO passages (contents) VALUES (?)", passages())
            count = connection.execute("SELECT max(rowid) FROM passages").fetchone()[0]
            if not count:
                raise ValueError(f"{source}: no passages in it")
            connection.execute("INSERT INTO about VALUES (?, ?)", (state, count))
            connection.execute("COMMIT")
        os.replace(writing, place)
    finally:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
