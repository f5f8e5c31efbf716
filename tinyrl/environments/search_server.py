"""A client for Search-R1's retrieval server (Jin et al. 2025, arXiv 2503.09516), and for servers with its protocol.

POST url {"queries": [...], "topk": k, "return_scores": true}
-> {"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": ...}, ...], ...]}   a list for each query
"""

from __future__ import annotations

import json
from typing import Any

from tinyrl.environments.passages import SearchFailed, passage_of
from tinyrl.http_client import Answer, HttpClient, NoAnswer
from tinyrl.text import is_address, masked, shortened, whole_address

WAITS_S = (0.5, 1.0)  # before the second and the third try
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class SearchServer:
    """A server behind an http address. `timeout_s` is for one search, however often it is tried.

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

    def check(self) -> None:
        """Raise ValueError, with what is wrong, where the server does not answer a question: to be asked beforehand."""
        try:
            self.search(["test"], top_k=1)
        except SearchFailed as error:
            raise ValueError(f"{error}. Is it running, and is this its address?") from error

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """At most `top_k` passages for each query, in one request. Raises SearchFailed."""
        body = {"queries": queries, "topk": top_k, "return_scores": True}
        try:
            [answer] = self.http.ask("POST", "", [body], read=self._read)
        except NoAnswer as error:
            raise SearchFailed(f"{self._name} {error}") from None
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list) or len(result) != len(queries):
            got = f"a list of {len(result)}" if isinstance(result, list) else _kind(answer)
            raise SearchFailed(f"{self._name} answered {len(queries)} queries without as many lists in 'result': {got}")
        return [self._passages(found)[:top_k] for found in result]

    def _read(self, answer: Answer) -> Any:
        if answer.status != 200:
            raise SearchFailed(f"{self._name} answered {answer.status} {shortened(answer.reason)}")
        return _json(answer.body, self._name)

    def _passages(self, found: Any) -> list[str]:
        if not isinstance(found, list):
            raise SearchFailed(f"{self._name} answered a query with {_kind(found)}, not a list of documents")
        passages = []
        for item in found:
            document = item.get("document") if isinstance(item, dict) else None
            if not isinstance(document, dict):
                raise SearchFailed(f"{self._name} gave {_kind(item)} where an object with a 'document' is due")
            try:
                passages.append(passage_of(document, self._name))
            except ValueError as error:
                raise SearchFailed(str(error)) from error
        return [passage for passage in passages if passage.strip()]


def _json(raw: bytes, name: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise SearchFailed(f"{name} answered {shortened(repr(raw[:60]))}, which is no JSON") from None


def _kind(value: Any) -> str:
    return shortened(repr(value)) if not isinstance(value, dict) else f"an object with {shortened(repr(list(value)))}"
