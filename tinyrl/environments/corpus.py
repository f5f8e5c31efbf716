"""A corpus searched by BM25 (Robertson and Zaragoza 2009): an SQLite FTS5 index, made once and kept beside the file.

The index holds the passages too, so nothing reads the corpus after it was opened, and an index that is in use is never
written to: a new one takes its name, and who has the old one open goes on reading that. A corpus that is replaced
during a run therefore changes nothing for the process that has it open.

Differs from Lucene's BM25 with English analysis in small ways: the same k1 = 1.2 and b = 0.75, Porter's stemmer and
stop words (of a query only), but a word found in half the passages or more weighs next to nothing. Words are what
stands between spaces and punctuation, so languages written without spaces are not searched well.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import sqlite3
import stat
import tempfile
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tinyrl.data.readers import Row, parse_row
from tinyrl.runs.signals import check_stop, watched
from tinyrl.text import first_line, listed

# ---- The file of an index ----
# An index stands beside its corpus, or in the user's cache where that folder takes no file, or with the temporary
# files. It is written by one process at a time under another name, which it loses when it is complete: a kill leaves no
# half index behind, only a file that the next writer uses. It ends with its own checksum, which SQLite does not look
# at.


ENDING = ".fts5"
WAIT_S = 0.1
_CHECKED = b"sha256 "  # begins the last 71 bytes of an index
_BLOCK = 1 << 20

State = tuple[int, int, int]


def state_of(source: Path) -> State:
    """Bytes, time of change and time of change of its entry: a copy that keeps the first two has another third one."""
    try:
        found = source.stat()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{source}: not a file")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_hash(source: Path) -> str:
    """SHA-256 of a file, about a second for each gigabyte."""
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def seal(index: Path) -> None:
    """Add the checksum to the end of a new index, and have it all on the disk."""
    with index.open("r+b") as file:
        file.write(_checksum(file, index.stat().st_size))
        file.flush()
        os.fsync(file.fileno())


def is_sealed(index: Path) -> bool:
    """Whether an index is, byte for byte, what was written; about a second for each gigabyte."""
    try:
        with index.open("rb") as file:
            size = index.stat().st_size - len(_CHECKED) - 64
            return size >= 0 and _checksum(file, size) == file.read()
    except OSError:
        return False


def _checksum(file: BinaryIO, size: int) -> bytes:
    """What stands at the end of an index, after `size` bytes, which are read."""
    digest = hashlib.sha256()
    for start in watched(range(0, size, _BLOCK)):
        digest.update(file.read(min(_BLOCK, size - start)))
    return _CHECKED + digest.hexdigest().encode()


def index_places(source: Path) -> list[Path]:
    """Where the index of a corpus may be, in order of preference."""
    known = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinyrl"
    temporary = Path(tempfile.gettempdir()) / f"tinyrl-{os.getuid()}"
    folders = [cache, temporary] if _is_own(temporary) else [cache]
    name = f"{source.name}{ENDING}"
    return [source.with_name(name), *(folder / f"{known}-{name}" for folder in folders)]


def _is_own(folder: Path) -> bool:
    """False for a folder that somebody else has put where everybody may."""
    try:
        found = folder.lstat()
    except OSError:
        return True
    return found.st_uid == os.getuid()


@contextmanager
def written_alone(place: Path) -> Iterator[Path]:
    """A file for this process to write, and then to move to `place`; others who want to write it wait.

    The lock is the system's, which takes it back when a process ends, however it ends. Raises OSError where the folder
    takes no file, or has no locks.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock, writing = (place.with_name(place.name + ending) for ending in (".lock", ".writing"))
    descriptor = _locked(lock)
    try:
        writing.unlink(missing_ok=True)  # of a process that was killed
        yield writing
    finally:
        with suppress(OSError):  # a folder that is gone by now
            writing.unlink(missing_ok=True)
            lock.unlink()  # while it is held: nobody can hold a deleted one
        os.close(descriptor)


def _locked(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(lock.stat(), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):  # another process has it, or had it and deleted it
            check_stop()
            time.sleep(WAIT_S)
        finally:
            if not held:
                os.close(descriptor)
        if held:
            return descriptor


# ---- Passages of a corpus, one text each ----
# Rows are Search-R1's, `{"id": ..., "contents": "\"Title\"\ntext"}`, or have a `title` and a `text`. A file is read
# row by row: Search-R1's own corpus has 21 million passages in 14 GB.


COLUMNS = ("contents", "title", "text")


class SearchFailed(Exception):
    """What finds passages could not this time: its index is gone, its server did not answer; the message says, for
    people.
    """


def read_passages(source: Path) -> Iterator[str]:
    """The passages of a .jsonl or .parquet file, in its order. Raises ValueError, with file and line, for a bad one."""
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
    """The text of a row. Raises ValueError, with `place`, where it has none."""
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


# ---- A corpus searched by BM25 (Robertson and Zaragoza 2009) ----


FORMAT = "tinyrl passages 2"
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
    def open(cls, path: str | Path, *, say: Callable[[str], None] = lambda text: None) -> Corpus:
        """Open a .jsonl or .parquet file of passages, or make its index first, which `say` is told.

        Raises ValueError for a file that cannot be used, OSError where no index can be kept.
        """
        source = Path(path).expanduser()
        return cls(source, _open_index(source, say))

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
                if file_hash(self.source) != self._index.fingerprint:
                    why = "not the passages that were opened before, and their index is gone"
                    raise ValueError(f"{self.source}: {why}")
                self._index = _open_index(self.source)
                return [self._best(query, top_k) for query in queries]
            except (ValueError, OSError, sqlite3.DatabaseError) as error:
                raise SearchFailed(str(error)) from error

    def close(self) -> None:
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


def _open_index(source: Path, say: Callable[[str], None] = lambda text: None) -> _Index:
    """The index of a file, from where it is kept or newly made."""
    places, refused = index_places(source), list[OSError]()
    for place in places:
        if index := _index_of(source, place, say):
            return index
    for place in places:
        try:
            return _made_index(source, place, say)
        except OSError as error:
            refused.append(error)
    reasons = "; ".join(f"{error.filename}: {error.strerror}" for error in refused)
    raise OSError(refused[0].errno, f"no place for the index of this corpus ({reasons})", str(source))


def _index_of(source: Path, place: Path, say: Callable[[str], None]) -> _Index | None:
    """The index at a place, if it is complete, undamaged and that of the file as it is."""
    index = _opened(place)
    if index is None:
        return None
    state = state_of(source)
    # moved, copied or touched: the content decides
    same = index.state == state or (index.state[0] == state[0] and index.fingerprint == file_hash(source))
    if same and is_sealed(place):
        return index
    if same:
        say(f"warning: {place} is damaged: it is not what was written, so it is made again")
    index.connection.close()
    return None


def _opened(place: Path, file: Path | None = None) -> _Index | None:
    """The index at a place (as yet in `file`) open for reading; None where there is no complete one."""
    address = f"{(file or place).absolute().as_uri()}?mode=ro&immutable=1"  # it is only ever replaced as a whole
    try:
        connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    except sqlite3.OperationalError:
        return None
    try:
        about = dict(connection.execute("SELECT name, value FROM about"))
        if about["format"] == FORMAT:
            size, modified, changed, count = (int(about[name]) for name in (*STATE, "passages"))
            return _Index(place, connection, about["fingerprint"], (size, modified, changed), count)
    except (sqlite3.DatabaseError, KeyError, ValueError, TypeError):
        pass  # damaged: it is made again
    connection.close()
    return None


def _made_index(source: Path, place: Path, say: Callable[[str], None]) -> _Index:
    with written_alone(place) as writing:
        if index := _index_of(source, place, lambda text: None):
            return index  # another process made it while this one waited
        state = state_of(source)
        about = {"format": FORMAT, "fingerprint": file_hash(source)}
        say(f"{source}: {state[0] / 1e6:,.0f} MB of passages are indexed, once; the index is {place}")
        _write(writing, source, about=about, state=state)
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
