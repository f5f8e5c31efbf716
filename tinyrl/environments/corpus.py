"""A corpus searched by BM25 (Robertson and Zaragoza 2009): an SQLite FTS5 index, made once and kept beside the file.

The index holds the passages too, so nothing reads the corpus after it was opened, and an index that is in use is never
written to: a new one takes its name, and who has the old one open goes on reading that. A corpus that is replaced
during a run therefore changes nothing for the process that has it open; one that opens it again says which it means by
its fingerprint, and gets those passages or a ValueError.

Differs from Lucene's BM25 with English analysis in small ways: the same k1 = 1.2 and b = 0.75, Porter's stemmer and
stop words (of a query only), but a word found in half the passages or more weighs next to nothing. Words are what
stands between spaces and punctuation, so languages written without spaces are not searched well.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tinyrl.environments.index_file import State, file_hash, index_places, is_sealed, seal, state_of, written_alone
from tinyrl.environments.passages import SearchFailed, read_passages
from tinyrl.runs.signals import watched

FORMAT, UNSEALED = "tinyrl passages 2", "tinyrl passages 1"  # the latter of versions that wrote no checksum
TOKENIZER = "porter unicode61 remove_diacritics 2"
STATE = ("bytes", "modified", "changed")  # names of what state_of gives
MAX_QUERY_CHARS = 1000  # a policy may ask anything
MAX_WORDS = 64
# Lucene's English list, and what the apostrophes of "it's" and "don't" leave behind
STOPPED = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with s t"""
STOP_WORDS = frozenset(STOPPED.split())
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class _Index:
    """An index that is open for reading. fingerprint: of the corpus; state: the file's when it was read."""

    place: Path
    connection: sqlite3.Connection
    format: str
    fingerprint: str
    state: State
    passages: int


class Corpus:
    """A file of passages that can be searched, from any thread; each process opens it for itself."""

    def __init__(self, source: Path, index: _Index) -> None:
        self.source = source
        self._index = index
        self._lock = threading.Lock()
        self._process = os.getpid()

    @classmethod
    def open(
        cls, path: str | Path, *, fingerprint: str | None = None, say: Callable[[str], None] | None = None
    ) -> Corpus:
        """Open a .jsonl or .parquet file of passages, or make its index first, which `say` is told.

        `fingerprint`: that of an earlier `open`, for whom only the same passages will do, wherever the file is by now.
        Raises ValueError where they are gone, or for a file that cannot be used; OSError where no index can be kept.
        """
        source = Path(path).expanduser()
        return cls(source, _open_index(source, fingerprint=fingerprint, say=say))

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the file that was indexed."""
        return self._index.fingerprint

    def __len__(self) -> int:
        return self._index.passages

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """At most `top_k` passages for each query, the best first; the earlier in the file of two that are as good.

        A query without a word finds nothing. An index damaged since it was opened is made again, once; SearchFailed
        where the corpus has changed by then, or that did not mend it.
        """
        assert top_k >= 1, top_k
        assert os.getpid() == self._process, "SQLite must not be carried into another process: open the corpus there"
        with self._lock:
            try:
                return [self._best(query, top_k) for query in queries]
            except sqlite3.DatabaseError:
                self._index.connection.close()
                self._index.place.unlink(missing_ok=True)
            try:
                self._index = _open_index(self.source, fingerprint=self._index.fingerprint, say=None)
                return [self._best(query, top_k) for query in queries]
            except (ValueError, OSError, sqlite3.DatabaseError) as error:
                raise SearchFailed(str(error)) from error

    def close(self) -> None:
        """Let go of the index file."""
        self._index.connection.close()

    def _best(self, query: str, top_k: int) -> list[str]:
        words = match_expression(query)
        if not words:
            return []
        ranked = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
        read = "SELECT contents FROM passages WHERE rowid = ?"
        connection, best = self._index.connection, list[str]()
        for number in connection.execute(ranked, (words, top_k)).fetchall():
            row = connection.execute(read, number).fetchone()
            if row is None:
                raise sqlite3.DatabaseError(f"passage {number[0]} is missing")
            best.append(row[0])
        return best


def match_expression(query: str) -> str:
    """The FTS5 expression for passages with any word of a query, "" for none. Words are quoted: FTS5's operators are
    words like others. Stop words count where there is nothing else.
    """
    found = _WORD.findall(unicodedata.normalize("NFC", query[:MAX_QUERY_CHARS]))
    words = {word.lower(): word for word in found}
    telling = {key: word for key, word in words.items() if key not in STOP_WORDS} or words
    return " OR ".join(f'"{word}"' for word in list(telling.values())[:MAX_WORDS])


def _open_index(source: Path, *, fingerprint: str | None, say: Callable[[str], None] | None) -> _Index:
    """The index of a file, from where it is kept or newly made."""
    places, refused = index_places(source), list[OSError]()
    for place in places:
        if index := _index_of(source, place, fingerprint=fingerprint, say=say):
            return index
    for place in places:
        try:
            return _made_index(source, place, fingerprint=fingerprint, say=say)
        except OSError as error:
            refused.append(error)
    reasons = "; ".join(f"{error.filename}: {error.strerror}" for error in refused)
    raise OSError(refused[0].errno, f"no place for the index of this corpus ({reasons})", str(source))


def _index_of(
    source: Path, place: Path, *, fingerprint: str | None, say: Callable[[str], None] | None
) -> _Index | None:
    """The index at a place, if it is complete, undamaged and that of the file (as it is, or with `fingerprint`)."""
    index = _opened(place)
    if index is None:
        return None
    if fingerprint is not None:
        same = index.fingerprint == fingerprint
    else:
        state = state_of(source)
        # moved, copied or touched: the content decides
        same = index.state == state or (index.state[0] == state[0] and index.fingerprint == file_hash(source))
    problem = None
    if same and index.format == UNSEALED:
        problem = "is of an earlier version and has no checksum, so damage inside it is not seen; delete it to have one"
    elif same and not is_sealed(place):
        same, problem = False, "is damaged: it is not what was written, so it is made again"
    if problem and say is not None:
        say(f"warning: {place} {problem}")
    if not same:
        index.connection.close()
    return index if same else None


def _opened(place: Path, file: Path | None = None) -> _Index | None:
    """The index at a place (as yet in `file`) open for reading; None where there is no complete one."""
    address = f"{(file or place).absolute().as_uri()}?mode=ro&immutable=1"  # it is only ever replaced as a whole
    try:
        connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    except sqlite3.OperationalError:
        return None
    try:
        about = dict(connection.execute("SELECT name, value FROM about"))
        if about["format"] in (FORMAT, UNSEALED):
            size, modified, changed, count = (int(about[name]) for name in (*STATE, "passages"))
            return _Index(place, connection, about["format"], about["fingerprint"], (size, modified, changed), count)
    except (sqlite3.DatabaseError, KeyError, ValueError, TypeError):
        pass  # damaged: it is made again
    connection.close()
    return None


def _made_index(source: Path, place: Path, *, fingerprint: str | None, say: Callable[[str], None] | None) -> _Index:
    with written_alone(place) as writing:
        if index := _index_of(source, place, fingerprint=fingerprint, say=None):
            return index  # another process made it while this one waited
        state, found = state_of(source), file_hash(source)
        if fingerprint not in (None, found):
            raise ValueError(f"{source}: not the passages that were opened before, and their index is gone")
        if say is not None:
            say(f"{source}: {state[0] / 1e6:,.0f} MB of passages are indexed, once; the index is {place}")
        _write(writing, source, about={"format": FORMAT, "fingerprint": found}, state=state)
        if state_of(source) != state:
            raise ValueError(f"{source}: has changed while it was indexed; start again when it is complete")
        index = _opened(place, writing)
        assert index is not None
        os.replace(writing, place)
        return index


def _write(path: Path, source: Path, *, about: dict[str, str], state: State) -> None:
    """Write the index of a file: the passages in its order, and what is known about it."""
    count = itertools.count()
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
                connection.execute(f"PRAGMA {setting}")
            connection.execute(f"CREATE VIRTUAL TABLE passages USING fts5(contents, tokenize = '{TOKENIZER}')")
            connection.execute("CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT)")
            connection.execute("BEGIN")
            rows = ((next(count) + 1, passage) for passage in watched(read_passages(source)))
            connection.executemany("INSERT INTO passages (rowid, contents) VALUES (?, ?)", rows)
            known = {**about, "passages": next(count), **dict(zip(STATE, state, strict=True))}
            connection.executemany("INSERT INTO about VALUES (?, ?)", known.items())
            connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            raise ValueError(
                f"this Python's SQLite ({sqlite3.sqlite_version}) has no full-text search (FTS5)"
            ) from None
        full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
    seal(path)
