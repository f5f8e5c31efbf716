"""A client of a serving engine: vLLM's protocol over our HTTP client, with refusals in words.

It goes past any proxy: the server is on this machine, since it reads adapters from a folder of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.parse
from typing import Any

from tinyrl.http_client import Answer, HttpClient, NoAnswer
from tinyrl.text import masked, shortened, whole_address

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
MOST_SAID = 300  # characters of a refusal
TELL_S = 5.0
PORTS = {"http": 80, "https": 443}
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key


class ServerError(Exception):
    """What a server did instead of answering, in words; `status`: of a refusal (None: there was no answer)."""

    def __init__(self, said: str, *, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status


class ServerClient:
    """A server at an http address, that of `generation.url`. `timeout_s` is for one request, however often it is tried.

    Raises ValueError where the address lacks its password, which is in the environment.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(whole_address(url, setting="generation.url"))
        assert parts.scheme in ("http", "https"), "the configuration has checked it"
        assert parts.hostname
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = parts._replace(path=path, fragment="").geturl()
        self.host, self.port = parts.hostname, parts.port or PORTS[parts.scheme]
        self.http = HttpClient(
            self.url,
            timeout_s=timeout_s,
            setting="generation.timeout_s",
            waits_s=WAITS_S,
            try_again=TRY_AGAIN,
            proxies=False,
        )

    @property
    def name(self) -> str:
        """For messages, without a password that the address may hold."""
        return f"the server at {shortened(masked(self.url))}"

    def get(self, path: str) -> Any:
        return self._all("GET", path, [None], most=1)[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._all("POST", path, [body], most=1)[0]

    def post_all(self, path: str, bodies: list[dict[str, Any]], *, most: int) -> list[Any]:
        """The answers to some requests, in their order, `most` of them under way at a time.

        Raises ServerError with the first that fails, and Interrupted once a stop was asked for; the others
        are given up.
        """
        return self._all("POST", path, bodies, most=most)

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a request of which nothing depends: one try, whatever comes of it."""
        with contextlib.suppress(NoAnswer):
            self.http.ask("POST", path, [body], read=lambda answer: None, headers=_key(), once_s=TELL_S)

    def _all(self, method: str, path: str, bodies: list[Any], *, most: int) -> list[Any]:
        def read(answer: Answer) -> Any:
            return self._read(path, answer)

        try:
            return self.http.ask(method, path, bodies, read=read, most=most, headers=_key())
        except NoAnswer as error:
            raise ServerError(f"{self.name} {error}") from None

    def _read(self, path: str, answer: Answer) -> Any:
        """An answer's JSON; as text where it is none, such as after a load. Raises ServerError for a refusal."""
        text = answer.body.decode(errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if answer.status >= 300:
            said = shortened(_said(value), MOST_SAID)
            raise ServerError(f"{self.name} answered {path} with {answer.status}: {said}", status=answer.status)
        return value


def _key() -> dict[str, str]:
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(answer: Any) -> str:
    if isinstance(answer, dict):
        inner = answer.get("error") if isinstance(answer.get("error"), dict) else answer
        return str(inner.get("message") or inner.get("detail") or answer)  # pyright: ignore[reportOptionalMemberAccess]
    return str(answer) or "no message"
