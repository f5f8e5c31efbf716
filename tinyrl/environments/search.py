"""Search in the middle of an episode, in Search-R1's form (Jin et al. 2025, arXiv 2503.09516).

    policy  <search>query</search>  ->  environment  <information>Doc 1(Title: ...) text ...</information>

The last complete <search> of a turn is answered. A turn with <answer>...</answer> ends the episode, and one with
neither is told what there is. Differs from the paper's code in that passages are shortened until they fit, each to the
same length, where it cuts the end off, </information> with it; and in that a tag inside a passage is written with
square brackets, so that no passage can end the quotation or give an answer.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.data.http_client import HttpClient, NoAnswer
from tinyrl.environments import Reply, Transcript, last_turn
from tinyrl.environments.corpus import MAX_QUERY_CHARS, Corpus, SearchFailed, passage_of
from tinyrl.environments.tool_calls import encodable
from tinyrl.text import is_address, masked, shortened, whole_address

STOP = ("</search>", "</answer>")  # texts that end a turn
WAITS_S = (0.5, 1.0)  # before the second and the third try
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class SearchServer:
    """Search-R1's retrieval server behind an http address. `timeout_s` is for one search, however often it is tried.

        POST url {"queries": [...], "topk": k, "return_scores": true}
        -> {"result": [[{"document": {"contents": "\"Title\"\ntext"}, "score": ...}, ...], ...]}   a list for each query

    Raises ValueError for an address that is none, or lacks its password, which is in the environment.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        if not is_address(url):
            raise ValueError(f"'{shortened(masked(url))}' is not the address of a server: http://HOST:PORT/retrieve")
        self._name = f"the search server {shortened(masked(url))}"
        self.http = HttpClient(
            whole_address(url, setting="environment.corpus"),
            timeout_s=timeout_s,
            setting="environment.timeout_s",
            waits_s=WAITS_S,
            try_again=TRY_AGAIN,
            proxies=True,
        )

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """Return at most `top_k` passages for each query, by one request. Raises SearchFailed."""
        body = {"queries": queries, "topk": top_k, "return_scores": True}
        try:
            [answer] = self.http.ask("POST", "", [body], read=lambda answer: answer)
        except NoAnswer as error:
            raise SearchFailed(f"{self._name} {error}") from None
        if answer.status != 200:
            raise SearchFailed(f"{self._name} answered {answer.status} {shortened(answer.reason)}")
        try:
            rows = [[found["document"] for found in of_query] for of_query in json.loads(answer.body)["result"]]
            passages = [[passage_of(dict(row), self._name) for row in of_query] for of_query in rows]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            why = f"{shortened(repr(answer.body[:60]))} ({type(error).__name__}: {shortened(str(error), 200)})"
            raise SearchFailed(f"{self._name} answered something else than lists of documents: {why}") from error
        if len(passages) != len(queries):
            raise SearchFailed(f"{self._name} answered {len(queries)} queries with {len(passages)} lists")
        return [[passage for passage in of_query if passage.strip()][:top_k] for of_query in passages]


OPENING, CLOSING = "\n\n<information>", "</information>\n\n"
NOTHING_FOUND = f"{OPENING}No passage matches this query.{CLOSING}"
INVALID = (
    "\n\nThat turn neither searched nor answered. To search, write the query between <search> and </search>. "
    "To give the final answer, write it between <answer> and </answer>.\n\n"
)
MAX_PASSAGE_CHARS = 20_000
CUT = " ..."
_TAG = re.compile(r"<(\s{0,3}/?\s{0,3}(?:information|answer|search|think)\s{0,3})>", re.IGNORECASE)


def opened(config: EnvironmentConfig, *, length: Callable[[str], int]) -> tuple[Callable[..., Any], str]:
    """What answers under a configuration, and what it is in words."""
    if config.corpus is None:
        raise ValueError("environment.corpus is missing: a .jsonl or .parquet file, or a retrieval server's URL")
    say = functools.partial(print, file=sys.stderr, flush=True)  # indexing a large corpus takes minutes
    retriever = open_retriever(config.corpus, timeout_s=config.seconds, say=say)
    most = config.max_observation_tokens
    size = f" (passages: {len(retriever):,})" if isinstance(retriever, Corpus) else ""
    said = f"of {masked(config.corpus)}{size}, {config.top_k} a query"
    return functools.partial(respond, retriever=retriever, top_k=config.top_k, max_length=most, length=length), said


def asking_turn(words: str) -> str:
    """A turn that is answered, for trials without a model."""
    return f"<search>{words}</search>"


def open_retriever(
    corpus: str, *, timeout_s: float = 30.0, say: Callable[[str], None] = lambda text: None
) -> Corpus | SearchServer:
    """What `corpus` names: a file of passages, or the http address of a server, which must answer a question first."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", corpus) is None:
        return Corpus.open(corpus, say=say)
    server = SearchServer(corpus, timeout_s=timeout_s)
    try:
        server.search(["test"], top_k=1)
    except SearchFailed as error:
        raise ValueError(f"{error}. Is it running, and is this its address?") from error
    return server


def respond(
    prompts: list[Any],
    transcripts: list[Transcript],
    *,
    retriever: Corpus | SearchServer,
    top_k: int = 3,
    max_length: int | None = None,
    length: Callable[[str], int] = len,
    **columns: Any,
) -> list[Reply | SearchFailed | None]:
    """Answer every episode's last turn, with one search for the batch; None where the turn gave its answer.

    Passages are shortened until a reply has `max_length` by `length`: characters, or tokens where that counts them.
    Only the tags around them are never cut. Where the search failed, that stands in the place of a reply: nothing is to
    be learnt from an episode whose search was out of order.
    """
    turns = [last_turn(transcript) for transcript in transcripts]
    over = [_between(turn, "answer") is not None for turn in turns]
    queries = [None if done else _between(turn, "search") for turn, done in zip(turns, over, strict=True)]
    asked = list(dict.fromkeys(query for query in queries if query))  # a group often asks the same
    answers: dict[str, Reply | SearchFailed] = {}
    try:
        found = retriever.search(asked, top_k=top_k) if asked else []
        for asking, passages in zip(asked, found, strict=True):
            answers[asking] = Reply(_quoted(passages, max_length, length))
    except SearchFailed as error:
        answers = dict.fromkeys(asked, error)
    invalid = Reply(INVALID, invalid=True)
    return [
        None if done else invalid if query is None else answers.get(query, Reply(NOTHING_FOUND))
        for query, done in zip(queries, over, strict=True)
    ]


def _between(turn: str, tag: str) -> str | None:
    """What the last <tag>...</tag> of a turn holds, cut to what a query may have; None where there is none."""
    start = turn.rfind(f"<{tag}>", 0, max(turn.rfind(f"</{tag}>"), 0))
    if start < 0:
        return None
    held = turn[start + len(tag) + 2 : turn.find(f"</{tag}>", start)]
    return encodable(held.strip()[:MAX_QUERY_CHARS])


def _quoted(passages: list[str], max_length: int | None, length: Callable[[str], int]) -> str:
    """Passages as the policy reads them, all cut to the same number of characters where they are too long."""
    if not passages:
        return NOTHING_FOUND
    documents = [_document(passage, number) for number, passage in enumerate(passages, start=1)]
    limit = max(map(len, documents))
    while True:
        shown = filter(None, (_cut(document, limit) for document in documents))
        text = f"{OPENING}{chr(10).join(shown)}{CLOSING}"
        size = length(text)
        if max_length is None or size <= max_length or limit == 0:
            return text
        limit = min(limit - 1, limit * max_length // size)


def _document(passage: str, number: int) -> str:
    title, _, text = encodable(passage[:MAX_PASSAGE_CHARS]).partition("\n")
    document = f"Doc {number}(Title: {title}) {text}{CUT if len(passage) > MAX_PASSAGE_CHARS else ''}".strip()
    return _TAG.sub(r"[\1]", document)


def _cut(document: str, limit: int) -> str:
    if len(document) <= limit:
        return document
    start = document[: max(limit - len(CUT), 0)]
    start = start.rpartition(" ")[0] or start  # half a name reads like a whole one
    return start and start + CUT
