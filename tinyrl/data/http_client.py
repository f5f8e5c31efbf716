"""An HTTP client for vLLM's server and search servers: requests side by side, each under one deadline, answers of a
limited size, no redirects, all cancelled on a signal.

Requests run in an event loop in a thread of its own; the caller's thread only waits for them and for signals.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import httpx2

from tinyrl.runs.signals import check_stop
from tinyrl.text import mask_url, truncate

MAX_BYTES = 1 << 26  # of one answer
POLL_S = 0.2  # between two checks for a signal

Read = TypeVar("Read")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # below that it logs whole addresses


class NoAnswer(Exception):
    """A server did not answer: the end of a sentence that begins with its name."""


class HttpAnswer(NamedTuple):
    """A server's answer; `reason` is the text beside the status."""

    status: int
    reason: str
    body: bytes


class HttpClient:
    """A server at an http address, whose userinfo and query go along with every request.

    timeout_s: for one request with all its tries; setting: named in the message if it passes; waits_s: before the
    second try and those after it; try_again: statuses after which there is one; proxies: whether those of the
    environment are used. Raises ValueError for a malformed address.
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
        try:
            self.address = httpx2.URL(url).copy_with(fragment=None)
        except httpx2.InvalidURL as error:
            raise ValueError(f"'{truncate(mask_url(url))}' is not the address of a server: {error}") from None
        self.timeout_s, self.waits_s, self.try_again = timeout_s, waits_s, try_again
        self.setting = f" ({setting})" if setting else ""
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(timeout=None, trust_env=proxies, limits=limits)  # closed with the process

    def ask(
        self,
        method: str,
        path: str,
        bodies: Sequence[Any],
        *,
        read: Callable[[HttpAnswer], Read],
        most: int = 1,
        headers: dict[str, str] | None = None,
    ) -> list[Read]:
        """Send requests (a body is JSON, or None), `most` at a time; return `read(answer)` of each, in their order.

        Raises NoAnswer, or the error of `read`, with the first that fails, and Interrupted once a stop was requested;
        the others are cancelled.
        """
        url = self.address.copy_with(path=self.address.path.rstrip("/") + path) if path else self.address
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        free = asyncio.Semaphore(most)

        async def one(body: Any) -> Read:
            content = None if body is None else json.dumps(body).encode()
            async with free:
                return read(await self._answer(httpx2.Request(method, url, content=content, headers=sent)))

        async def all_of_them() -> list[Read]:
            try:
                async with asyncio.TaskGroup() as tasks:
                    calls = [tasks.create_task(one(body)) for body in bodies]
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return [call.result() for call in calls]

        return until_done(all_of_them())

    async def _answer(self, request: httpx2.Request) -> HttpAnswer:
        """Return the answer of the first try whose status needs no other, or of the last."""
        try:
            async with asyncio.timeout(self.timeout_s):
                for pause in self.waits_s:
                    with suppress(httpx2.TransportError, OSError):
                        if (answer := await self._once(request)).status not in self.try_again:
                            return answer
                    await asyncio.sleep(pause)
                return await self._once(request)
        except TimeoutError:
            raise NoAnswer(f"did not answer within {self.timeout_s:g} s{self.setting}") from None
        except (httpx2.TransportError, OSError) as error:
            raise NoAnswer(f"did not answer ({truncate(str(error) or type(error).__name__)})") from None

    async def _once(self, request: httpx2.Request) -> HttpAnswer:
        """Send a request. Raises NoAnswer for a huge answer, and a redirect: what is sent is for this server only."""
        response, body = await self._client.send(request, stream=True), bytearray()
        try:
            if response.has_redirect_location:
                where = truncate(mask_url(response.headers["Location"]))
                raise NoAnswer(f"redirects to {where}; give the address that answers")
            async for block in response.aiter_raw():  # nothing is unpacked
                body += block
                if len(body) > MAX_BYTES:
                    raise NoAnswer(f"answered with more than {MAX_BYTES >> 20} MB")
            return HttpAnswer(response.status_code, response.reason_phrase, bytes(body))
        finally:
            await response.aclose()


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def until_done(work: Coroutine[Any, Any, Read]) -> Read:
    """Return the result of work in the loop's thread; a signal cancels it and raises Interrupted."""
    result = asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))  # a fork has no threads
    try:
        while not wait([result], timeout=POLL_S).done:
            check_stop()
        return result.result()
    finally:
        result.cancel()
