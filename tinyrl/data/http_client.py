"""An HTTP client for vLLM's server and search servers: requests side by side, each under one deadline, all cancelled on
a signal.

Requests run in an event loop in a thread of its own; the caller's thread only waits for them and for signals.

What others answer is not trusted: a body ends at a limit, in bytes that are never unpacked, and secrets that a server
echoes are masked before anybody reads them.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import httpx2

from tinyrl.process.signals import check_stop
from tinyrl.text import truncate
from tinyrl.urls import MASK

POLL_S = 0.2  # between two checks for a signal
MOST_BODY = 1 << 25  # bytes of an answer
LEAST_SECRET = 4  # characters of a password or key that is masked: a shorter one would mask pieces of words
LEAST_VALUE = 8  # of a value in an address, which may not be a secret at all

Result = TypeVar("Result")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # below that it logs whole addresses


class NoAnswer(Exception):
    """A server did not answer: the end of a sentence that begins with its name."""


class LimitedStream(httpx2.AsyncByteStream):
    """A body that ends after `most` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self.stream = stream
        self.left = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for block in self.stream:
            yield block[: self.left]
            self.left -= len(block)
            if self.left <= 0:
                return

    async def aclose(self) -> None:
        await self.stream.aclose()


def limiting_hooks(most: int) -> dict[str, list[Any]]:
    """Return event hooks of a client whose answers have at most `most` bytes. They are asked for as they are and never
    unpacked, as some kilobytes may unpack to gigabytes.
    """

    async def ask_plainly(request: httpx2.Request) -> None:
        request.headers["Accept-Encoding"] = "identity"

    async def limit(response: httpx2.Response) -> None:
        response.headers.pop("Content-Encoding", None)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = LimitedStream(response.stream, most)

    return {"request": [ask_plainly], "response": [limit]}


last_try: ContextVar[str] = ContextVar("last_try")  # how the last try of a task's request ended


class NotingClient(httpx2.AsyncClient):
    """A client for a library that tries again by itself: it notes in `last_try` how each try ended, so that whoever
    gives up can say it. Redirects are not followed, and answers have at most `most` bytes.
    """

    def __init__(self, *, timeout: float, most: int) -> None:
        super().__init__(
            timeout=timeout,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=None),
            event_hooks=limiting_hooks(most),
        )

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            answer = await super().send(request, **options)
        except httpx2.TransportError as error:
            last_try.set(f"{type(error).__name__}: {error}".removesuffix(": "))
            raise
        last_try.set(f"{answer.status_code}: {answer.text}" if answer.is_stream_consumed else f"{answer.status_code}")
        return answer


def without_secrets(text: str, secrets: Iterable[str | None]) -> str:
    """Mask secrets in a text of a server, longer ones first, also as a header spells them."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        if len(secret) >= LEAST_SECRET:
            for spelt in (secret, base64.b64encode(secret.encode()).decode()):
                text = text.replace(spelt, MASK)
    return text


def secrets_in(url: str) -> list[str]:
    """Return what may be secret in an address: its userinfo, its password, long values of its query."""
    parts = httpx2.URL(url)
    values = [value for _, value in parts.params.multi_items() if len(value) >= LEAST_VALUE]
    return [parts.userinfo.decode(), parts.password, *values]


class HttpClient:
    """A server at an http address, whose userinfo and query go along with every request. Redirects are not followed.

    timeout_s: for one request with all its tries; setting: named in the message if it passes; waits_s: before the
    second try and those after it; try_again: statuses after which there is one; proxies: whether those of the
    environment are used.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        setting: str | None = None,
        waits_s: Sequence[float],
        try_again: Sequence[int],
        proxies: bool,
    ) -> None:
        self.address = httpx2.URL(url)
        self.timeout_s = timeout_s
        self.waits_s = waits_s
        self.try_again = try_again
        self.setting = f" ({setting})" if setting else ""
        self._client = httpx2.AsyncClient(  # closed with the process
            timeout=None,
            trust_env=proxies,
            limits=httpx2.Limits(max_connections=None),
            event_hooks=limiting_hooks(MOST_BODY),
        )

    def ask(
        self,
        method: str,
        path: str,
        bodies: Sequence[Any],
        *,
        most: int = 1,
        headers: dict[str, str] | None = None,
    ) -> list[httpx2.Response]:
        """Send requests (a body is JSON, or None), `most` at a time; return their answers, in their order.

        Raises NoAnswer with the first that fails, and Interrupted once a stop was requested; the others are cancelled.
        """
        url = self.address.copy_with(path=self.address.path.rstrip("/") + path) if path else self.address
        sent = {"Content-Type": "application/json", **(headers or {})}
        free = asyncio.Semaphore(most)

        async def one(body: Any) -> httpx2.Response:
            content = None if body is None else json.dumps(body).encode()
            async with free:
                return await self._answer(httpx2.Request(method, url, content=content, headers=sent))

        async def all_of_them() -> list[httpx2.Response]:
            try:
                async with asyncio.TaskGroup() as tasks:
                    calls = [tasks.create_task(one(body)) for body in bodies]
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return [call.result() for call in calls]

        return until_done(all_of_them())

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer of the first try whose status needs no other, or of the last."""
        try:
            async with asyncio.timeout(self.timeout_s):
                for pause in self.waits_s:
                    with suppress(httpx2.TransportError, OSError):
                        answer = await self._client.send(request)
                        if answer.status_code not in self.try_again:
                            return received(answer)
                    await asyncio.sleep(pause)
                return received(await self._client.send(request))
        except TimeoutError:
            raise NoAnswer(f"did not answer within {self.timeout_s:g} s{self.setting}") from None
        except (httpx2.HTTPError, OSError) as error:
            raise NoAnswer(f"did not answer ({truncate(str(error) or type(error).__name__)})") from None


def received(answer: httpx2.Response) -> httpx2.Response:
    """Return an answer without the secrets of its request. Raises NoAnswer for one that was cut off at MOST_BODY."""
    if len(answer.content) >= MOST_BODY:
        raise NoAnswer(f"answered with more than {MOST_BODY >> 20} MB")
    _, _, key = answer.request.headers.get("Authorization", "").rpartition(" ")
    secrets = [key, *secrets_in(str(answer.request.url))]
    masked = without_secrets(answer.text, secrets)
    reason = without_secrets(answer.reason_phrase, secrets)
    if (masked, reason) == (answer.text, answer.reason_phrase):
        return answer
    return httpx2.Response(answer.status_code, text=masked, extensions={"reason_phrase": reason.encode()})


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def until_done(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of work in the loop's thread; a signal cancels it and raises Interrupted."""
    result = asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))  # a fork has no threads
    try:
        while not wait([result], timeout=POLL_S).done:
            check_stop()
        return result.result()
    finally:
        result.cancel()
