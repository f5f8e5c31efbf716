"""An HTTP client of a serving engine: requests side by side, tried again with a limit, given up at once on a signal.

The standard library's connections are enough for it, and go past any proxy: the server is on this machine, since it
reads adapters from a folder of it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from tinyrl.runs.signals import check_stop
from tinyrl.text import redact, shortened

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
MOST_SAID = 300  # characters of a refusal
TELL_S = 5.0
POLL_S = 0.2  # between two looks at whether a signal has come
PORTS = {"http": 80, "https": 443}
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key


class ServerError(Exception):
    """What a server did instead of answering, in words; `status`: of a refusal (None: there was no answer)."""

    def __init__(self, said: str, *, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status


class ServerClient:
    """A server at an http address. `timeout_s` is for one request, however often it is tried."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/").removesuffix("/v1"))
        assert parts.scheme in ("http", "https"), "the configuration has checked it"
        assert parts.hostname
        self.url = parts.geturl()
        self.host, self.port, self.path = parts.hostname, parts.port or PORTS[parts.scheme], parts.path
        self.timeout_s = timeout_s
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._open: set[http.client.HTTPConnection] = set()
        self._given_up = threading.Event()

    @property
    def name(self) -> str:
        """For messages, without a password that the address may hold."""
        return f"the server at {shortened(redact(self.url))}"

    def get(self, path: str) -> Any:
        """What is at a path. Raises ServerError."""
        return self._all("GET", path, [None], most=1)[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to one request. Raises ServerError."""
        return self._all("POST", path, [body], most=1)[0]

    def post_all(self, path: str, bodies: list[dict[str, Any]], *, most: int) -> list[Any]:
        """The answers to some requests, in their order, `most` of them under way at a time.

        Raises ServerError with the first that fails, and Interrupted once a stop was asked for; the others
        are given up.
        """
        return self._all("POST", path, bodies, most=most)

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a request of which nothing depends: one try, whatever comes of it."""
        self._given_up.clear()
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._once("POST", path, body, until=time.monotonic() + TELL_S)

    def _all(self, method: str, path: str, bodies: list[Any], *, most: int) -> list[Any]:
        self._given_up.clear()
        with ThreadPoolExecutor(max(1, min(most, len(bodies)))) as pool:
            calls = [pool.submit(self._asked, method, path, body) for body in bodies]
            try:
                while True:
                    left = wait(calls, timeout=POLL_S, return_when=FIRST_EXCEPTION).not_done
                    for call in calls:
                        if call.done() and call.exception() is not None:
                            call.result()
                    if not left:
                        return [call.result() for call in calls]
                    check_stop()
            finally:
                self._give_up(calls)

    def _give_up(self, calls: list[Future[Any]]) -> None:
        """Let go of what is still under way; the server then stops working on it."""
        for call in calls:
            call.cancel()
        self._given_up.set()
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _asked(self, method: str, path: str, body: Any) -> Any:
        """The server's answer, from the first try that gets one; what another try cannot mend ends it."""
        until, reason = time.monotonic() + self.timeout_s, ""
        for pause in (*WAITS_S, None):
            try:
                status, raw = self._once(method, path, body, until=until)
            except TimeoutError:
                late = f"{self.name} did not answer within {self.timeout_s:g} s (generation.timeout_s)"
                raise ServerError(late) from None
            except (OSError, http.client.HTTPException) as error:
                reason = f"did not answer ({shortened(str(error) or type(error).__name__)})"
            else:
                if status not in TRY_AGAIN:
                    return self._read(path, status, raw)
                reason = f"answered {path} with {status}"
            if pause is None or time.monotonic() + pause >= until or self._given_up.wait(pause):
                break
        raise ServerError(f"{self.name} {reason}")

    def _once(self, method: str, path: str, body: Any, *, until: float) -> tuple[int, bytes]:
        key = os.environ.get(API_KEY)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection = self._connect(self.host, self.port, timeout=max(until - time.monotonic(), 0.001))
        self._open.add(connection)
        try:
            connection.connect()
            if self._given_up.is_set():
                raise ConnectionAbortedError("given up")
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, self.path + path, body=sent, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            self._open.discard(connection)
            connection.close()

    def _read(self, path: str, status: int, raw: bytes) -> Any:
        """An answer's JSON; as text where it is none, such as after a load. Raises ServerError for a refusal."""
        text = raw.decode(errors="replace")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = text
        if status >= 400:
            said = shortened(_said(answer), MOST_SAID)
            raise ServerError(f"{self.name} answered {path} with {status}: {said}", status=status)
        return answer


def _said(answer: Any) -> str:
    """The message of a refusal, which is in one of several places."""
    if isinstance(answer, dict):
        inner = answer.get("error") if isinstance(answer.get("error"), dict) else answer
        return str(inner.get("message") or inner.get("detail") or answer)  # pyright: ignore[reportOptionalMemberAccess]
    return str(answer) or "no message"
