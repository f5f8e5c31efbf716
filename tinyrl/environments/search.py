"""Search in the middle of an episode, in Search-R1's form (Jin et al. 2025, arXiv 2503.09516).

    policy  <search>query</search>  ->  environment  <information>Doc 1(Title: ...) text ...</information>

The last complete <search> of a turn is answered; <answer>...</answer> ends the episode. Differs from the paper's code
in that passages are shortened to the same length until they fit (it cuts the end off, </information> with it), and in
that a tag inside a passage is written with square brackets, so that no passage can end the quotation or give an answer.

A corpus is ranked by BM25 (Robertson and Zaragoza 2009) in an SQLite FTS5 index beside the file, which holds the
passages too and is rebuilt when the file's size or time has changed. Words are split at spaces and punctuation and
stemmed (Porter); Lucene's stop words are left out of a query.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.data.http_client import HttpClient, NoAnswer
from tinyrl.data.readers import Row, reader_of
from tinyrl.data.thoughts import without_thoughts
from tinyrl.environments import BuiltIn, Reply, Transcript, last_turn
from tinyrl.environments.tool_calls import encodable
from tinyrl.process.signals import watched
from tinyrl.text import join_truncated, truncate
from tinyrl.urls import mask_url, resolve_url

OPENING = "\n\n<information>"
CLOSING = "</information>\n\n"
CUT = " ..."
NOTHING_FOUND = f"{OPENING}No passage matches this query.{CLOSING}"
INVALID = (
    "\n\nThat turn neither searched nor answered. To search, write the query between <search> and </search>. "
    "To give the final answer, write it between <answer> and </answer>.\n\n"
)
MAX_PASSAGE_CHARS = 20_000
MAX_QUERY_CHARS = 1000
MAX_WORDS = 64  # a policy may ask anything
WAITS_S = (0.5, 1.0)
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # before the second and the third try of a server
TOKENIZER = "porter unicode61 remove_diacritics 2"
# The texts of the best only, since sorting copies what it sorts.
RANKED = """SELECT contents FROM passages JOIN (
    SELECT rowid AS number, bm25(passages) AS score FROM passages WHERE passages MATCH ? ORDER BY score, number LIMIT ?
) ON passages.rowid = number ORDER BY score, number"""
# Lucene's English list, and what the apostrophes of "it's" and "don't" leave behind
STOP_WORDS = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with s t"""
_WORD = re.compile(r"[^\W_]+")
_TAG = re.compile(r"<(\s{0,3}/?\s{0,3}(?:information|answer|search|think)\s{0,3})>", re.IGNORECASE)


class SearchFailed(Exception):
    """A search failed for a reason outside the query: a server that did not answer."""


def passage_of(row: Row, place: str) -> str:
    """Return the text of a row: Search-R1's `{"contents": "\\"Title\\"\\ntext"}`, or a `title` and a `text`."""
    contents, title, text = (row.get(name) for name in ("contents", "title", "text"))
    if contents is None and isinstance(title, str) and isinstance(text, str):
        contents = f'"{" ".join(title.split())}"\n{text}'
    if not isinstance(contents, str):
        wanted = "a passage is a row with a text 'contents', or texts 'title' and 'text'"
        raise ValueError(f"{place}: {wanted}; not one with the columns {join_truncated(row)}")
    return contents


class Corpus:
    """A file of passages, searched from any thread. Raises ValueError for a file that cannot be used, and OSError if
    the index cannot be written beside it.
    """

    def __init__(self, path: str | Path) -> None:
        source = Path(path).expanduser()
        read = reader_of(str(source))
        size = source.stat().st_size
        self._lock = threading.Lock()
        self.index = source.with_name(f"{source.name}.fts5")
        state = f"{TOKENIZER} {size} {source.stat().st_mtime_ns}"
        if not self._open(state):
            where = f"once, in {self.index}"  # a large corpus takes minutes
            print(f"{source}: {size / 1e6:,.0f} MB of passages are indexed, {where}", file=sys.stderr, flush=True)
            _write(self.index, read(), state)
            assert self._open(state), self.index

    def _open(self, state: str) -> bool:
        """Open the index for reading; return whether there is one of this state of the corpus."""
        address = f"{self.index.absolute().as_uri()}?mode=ro&immutable=1"  # it is only ever replaced as a whole
        with suppress(sqlite3.Error, TypeError):
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            found, self.num_passages = self._connection.execute("SELECT state, passages FROM about").fetchone()
            return found == state
        return False

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """Return at most `top_k` passages for each query, the best first; of equal ones the earlier in the file."""
        found = []
        with self._lock:
            for query in queries:
                words = match_expression(query)
                rows = self._connection.execute(RANKED, (words, top_k)).fetchall() if words else []
                found.append([passage for (passage,) in rows])
        return found


def match_expression(query: str) -> str:
    """Return the FTS5 expression for passages with any word of a query; "" for none. Quoted, FTS5's operators are words
    like others. Stop words count if there are no others.
    """
    words = dict.fromkeys(_WORD.findall(unicodedata.normalize("NFC", query[:MAX_QUERY_CHARS]).lower()))
    telling = [word for word in words if word not in STOP_WORDS.split()] or words
    return " OR ".join(f'"{word}"' for word in [*telling][:MAX_WORDS])


def _write(place: Path, rows: Iterator[tuple[str, Row]], state: str) -> None:
    """Write an index beside its place and move it there, so that a kill leaves no half of one."""
    with tempfile.TemporaryDirectory(prefix=f"{place.name}.", dir=place.parent) as folder:
        new = Path(folder, place.name)
        count = 0
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE;"
                f"CREATE VIRTUAL TABLE passages USING fts5(contents, tokenize = '{TOKENIZER}');"
                "CREATE TABLE about (state, passages); BEGIN"
            )
            try:
                for where, row in watched(rows):
                    connection.execute("INSERT INTO passages (contents) VALUES (?)", (passage_of(row, where),))
                    count += 1
                connection.execute("INSERT INTO about VALUES (?, ?)", (state, count))
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:  # such as a full disk
                raise OSError(f"{place}: {error}") from error
        os.replace(new, place)


class SearchServer:
    """Search-R1's retrieval server. `timeout_s` is for one search, however often it is tried.

        POST url {"queries": [...], "topk": k, "return_scores": true}
        -> {"result": [[{"document": {"contents": "\"Title\"\ntext"}, "score": ...}, ...], ...]}   a list for each query

    Raises ValueError for an invalid address, or one whose password is missing in the environment.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self._name = f"the search server {truncate(mask_url(url))}"
        address = resolve_url(url, setting="environment.corpus")
        how = {"waits_s": WAITS_S, "try_again": TRY_AGAIN}
        self.http = HttpClient(address, timeout_s=timeout_s, setting="environment.timeout_s", proxies=True, **how)

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """Return at most `top_k` passages for each query, by one request. Raises SearchFailed."""
        body = {"queries": queries, "topk": top_k, "return_scores": True}
        try:
            [answer] = self.http.ask("POST", "", [body])
        except NoAnswer as error:
            raise SearchFailed(f"{self._name} {error}") from None
        if answer.status_code != 200:
            raise SearchFailed(f"{self._name} answered {answer.status_code} {truncate(answer.reason_phrase)}")
        try:
            pairs = zip(answer.json()["result"], queries, strict=True)
            rows = [[dict(found["document"]) for found in of_query[:top_k]] for of_query, _ in pairs]
            return [[passage_of(row, self._name) for row in of_query] for of_query in rows]
        except (ValueError, TypeError, KeyError) as error:
            why = f"{truncate(repr(answer.text[:60]))} ({type(error).__name__}: {truncate(str(error), 200)})"
            raise SearchFailed(f"{self._name} answered no list of documents for each query: {why}") from error


class Search(BuiltIn):
    """Search of environment.corpus, which is opened; a server must answer a first question."""

    stop = ("</search>", "</answer>")
    asks = "<search>{words}</search>"

    def __init__(self, config: EnvironmentConfig, *, length: Callable[[str], int]) -> None:
        if config.corpus is None:
            raise ValueError("environment.corpus is missing: a .jsonl or .parquet file, or a retrieval server's URL")
        size = ""
        if "://" in config.corpus:
            self.retriever = SearchServer(config.corpus, timeout_s=config.seconds)
            try:
                self.retriever.search(["test"], top_k=1)
            except SearchFailed as error:
                raise ValueError(f"{error}. Is it running, and is this its address?") from error
        else:
            self.retriever = Corpus(config.corpus)
            size = f" (passages: {self.retriever.num_passages:,})"
        self.top_k = config.top_k
        self.max_length = config.max_observation_tokens
        self.length = length
        self.about = f"of {mask_url(config.corpus)}{size}, {config.top_k} a query"

    def respond(self, prompts: list[Any], transcripts: list[Transcript], **columns: Any) -> list[Any]:
        """Answer every episode's last turn (`respond` below)."""
        return respond(
            prompts,
            transcripts,
            retriever=self.retriever,
            top_k=self.top_k,
            max_length=self.max_length,
            length=self.length,
            **columns,
        )


def respond(
    prompts: list[Any],
    transcripts: list[Transcript],
    *,
    retriever: Corpus | SearchServer,
    top_k: int,
    max_length: int,
    length: Callable[[str], int],
    **columns: Any,
) -> list[Reply | SearchFailed | None]:
    """Answer every episode's last turn, with one search for the batch; None if the turn gave its answer.

    Passages are shortened until a reply has `max_length` by `length` (characters, or tokens); the tags around them are
    never cut. A failed search is returned in the place of its replies: nothing can be learnt from such an episode.
    """
    turns = [without_thoughts(last_turn(transcript)) for transcript in transcripts]
    over = [_between(turn, "answer") is not None for turn in turns]
    queries = [None if done else _between(turn, "search") for turn, done in zip(turns, over, strict=True)]
    asked = list(dict.fromkeys(query for query in queries if query))  # a group often asks the same
    answers: dict[str | None, Reply | SearchFailed] = {None: Reply(INVALID, invalid=True), "": Reply(NOTHING_FOUND)}
    try:
        found = retriever.search(asked, top_k=top_k) if asked else []
        answers |= {q: Reply(_quoted(p, max_length, length)) for q, p in zip(asked, found, strict=True)}
    except SearchFailed as error:
        answers |= dict.fromkeys(asked, error)
    return [None if done else answers[query] for query, done in zip(queries, over, strict=True)]


def _between(turn: str, tag: str) -> str | None:
    """Return the inside of the last <tag>...</tag> of a turn, cut to the length of a query."""
    start = turn.rfind(f"<{tag}>", 0, max(turn.rfind(f"</{tag}>"), 0))
    if start < 0:
        return None
    inside = turn[start + len(tag) + 2 : turn.find(f"</{tag}>", start)]
    return encodable(inside.strip()[:MAX_QUERY_CHARS])


def _quoted(passages: list[str], max_length: int, length: Callable[[str], int]) -> str:
    """Quote passages, all cut to the same number of characters if they are too long, between words."""
    if not passages:
        return NOTHING_FOUND
    documents = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = encodable(passage[:MAX_PASSAGE_CHARS]).partition("\n")
        documents.append(_TAG.sub(r"[\1]", f"Doc {number}(Title: {title}) {text}".strip()))

    def cut(document: str) -> str:
        if len(document) <= limit:
            return document
        start = document[: max(limit - len(CUT), 0)]
        start = start.rpartition(" ")[0] or start  # half a name reads like a whole one
        return start and start + CUT

    limit = max(map(len, documents))
    while True:
        text = f"{OPENING}{chr(10).join(filter(None, map(cut, documents)))}{CLOSING}"
        size = length(text)
        if size <= max_length or limit == 0:
            return text
        limit = min(limit - 1, limit * max_length // size)
