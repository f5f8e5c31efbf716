"""A client for Search-R1's retrieval server (Jin et al. 2025, arXiv 2503.09516), and for servers with its protocol.

POST url {"queries": [...], "topk": k, "return_scores": true}
-> {"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": ...}, ...], ...]}   a list for each query
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from tinyrl.environments.passages import SearchFailed, passage_of
from tinyrl.runs.signals import check_stop
from tinyrl.text import is_address, redact, shortened

WAITS_S = (0.5, 1.0)  # before the second and the third try
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
MAX_BYTES = 1 << 26  # of one answer
BLOCK = 1 << 16


class SearchServer:
    """A server behind an http address. `timeout_s` is for one search, however often it is tried."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        if not is_address(url):
            raise ValueError(f"'{shortened(redact(url))}' is not the address of a server: http://HOST:PORT/retrieve")
        self.url = url
        self.timeout_s = timeout_s

    def check(self) -> None:
        """Raise ValueError, with what is wrong, where the server does not answer a question: to be asked beforehand."""
        try:
            self.search(["test"], top_k=1)
        except SearchFailed as error:
            raise ValueError(f"{error}. Is it running, and is this its address?") from error

    def search(self, queries: list[str], *, top_k: int) -> list[list[str]]:
        """At most `top_k` passages for each query, in one request. Raises SearchFailed."""
        until = time.monotonic() + self.timeout_s
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        answer = _json(self._asked(body, until=until), self._name)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list) or len(result) != len(queries):
            got = f"a list of {len(result)}" if isinstance(result, list) else _kind(answer)
            raise SearchFailed(f"{self._name} answered {len(queries)} queries without as many lists in 'result': {got}")
        return [self._passages(found)[:top_k] for found in result]

    @property
    def _name(self) -> str:
        return f"the search server {shortened(redact(self.url))}"

    def _asked(self, body: bytes, *, until: float) -> bytes:
        """The server's answer, from the first try that gets one; those that another try cannot mend end it."""
        reason = ""
        for wait in (*WAITS_S, None):
            check_stop()
            try:
                return self._answer(body, until=until)
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"answered {error.code} {error.reason}"
                if error.code not in TRY_AGAIN:
                    break
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                reason = f"did not answer ({shortened(str(cause) or type(cause).__name__)})"
            if wait is None or time.monotonic() + wait >= until:
                break
            time.sleep(wait)
        raise SearchFailed(f"{self._name} {reason}")

    def _answer(self, body: bytes, *, until: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")  # noqa: S310  http, see above
        left = max(until - time.monotonic(), 0.001)
        parts, size = list[bytes](), 0
        with urllib.request.urlopen(request, timeout=left) as response:  # noqa: S310
            while block := response.read1(BLOCK):
                parts.append(block)
                size += len(block)
                if size > MAX_BYTES:
                    raise SearchFailed(f"{self._name} answered with more than {MAX_BYTES >> 20} MB")
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
            if response.length:  # what was announced and has not come
                raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)

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
