"""An HTTP client for judges, teachers and search servers: requests side by side, each under one deadline, answers of a
limited size, all cancelled on a signal.

Requests run in an event loop in a thread of its own; the caller's thread only looks for signals.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from tinyrl.runs.signals import check_stop
from tinyrl.text import masked, shortened

MAX_BYTES = 1 << 26  # of one answer
POLL_S = 0.2  # between two looks at whether a signal has come

Read = TypeVar("Read")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # below that it logs whole addresses


class NoAnswer(Exception):
    """A server did not answer: the end of a sentence that begins with its name."""


@dataclass(frozen=True)
class HttpAnswer:
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
            address = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"'{shortened(masked(url))}' is not the address of a server: {error}") from None
        login = (address.username, address.password) if address.userinfo else None
        self.address = address.copy_with(username=None, password=None, fragment=None)
        self.timeout_s, self.setting = timeout_s, setting
        self.waits_s, self.try_again = tuple(waits_s), try_again
        self._client = httpx2.AsyncClient(  # closed with the process: it holds no connection for long
            auth=login, timeout=None, trust_env=proxies, limits=httpx2.Limits(max_connections=None)
        )

    def ask(
        self,
        method: str,
        path: str,
        bodies: Sequence[Any],
        *,
        read: Callable[[HttpAnswer], Read],
        most: int = 1,
        headers: dict[str, str] | None = None,
        once_s: float | None = None,
        failed: Callable[[NoAnswer], Read] | None = None,
        each: Callable[[int, Read], None] | None = None,
    ) -> list[Read]:
        """Send requests (a body is JSON, or None), `most` at a time; return `read(answer)` of each, in their order.

        once_s: seconds of a single try, in place of the deadline; failed: the result of a request without an answer;
        each: called with every result and its place as it comes, in the thread of the requests. Raises NoAnswer
        (without `failed`), or the error of `read`, with the first that fails, and Interrupted once a stop was asked
        for; the others are cancelled.
        """
        url = self.address.copy_with(path=self.address.path.rstrip("/") + path) if path else self.address
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        free = asyncio.Semaphore(max(1, most))

        async def one(place: int, body: Any) -> Read:
            content = None if body is None else json.dumps(body).encode()
            async with free:
                request = httpx2.Request(method, url, content=content, headers=sent)
                try:
                    result = read(await self._answer(request, once_s))
                except NoAnswer as error:
                    if failed is None:
                        raise
                    result = failed(error)
                if each is not None:
                    each(place, result)
                return result

        async def all_of_them() -> list[Read]:
            try:
                async with asyncio.TaskGroup() as tasks:
                    calls = [tasks.create_task(one(place, body)) for place, body in enumerate(bodies)]
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return [call.result() for call in calls]

        return until_done(all_of_them())

    async def _answer(self, request: httpx2.Request, once_s: float | None) -> HttpAnswer:
        """Return the answer of the first try whose status needs no other, or of the last."""
        timeout_s, waits_s = (self.timeout_s, self.waits_s) if once_s is None else (once_s, ())
        until = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for pause in (*waits_s, None):
                    last = pause is None or time.monotonic() + pause >= until
                    try:
                        answer = await self._once(request)
                        if last or answer.status not in self.try_again:
                            return answer
                    except (httpx2.TransportError, OSError) as error:
                        if last:
                            raise NoAnswer(f"did not answer ({_cause(error)})") from None
                    await asyncio.sleep(pause or 0.0)
        except TimeoutError:
            setting = f" ({self.setting})" if self.setting else ""
            raise NoAnswer(f"did not answer within {timeout_s:g} s{setting}") from None
        raise AssertionError("unreachable")

    async def _once(self, request: httpx2.Request) -> HttpAnswer:
        """Send a request. Raises NoAnswer for a huge answer, and a redirect: what is sent is for this server only."""
        response = await self._client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                where = shortened(masked(response.headers["Location"]))
                raise NoAnswer(f"redirects to {where}; give the address that answers")
            body = bytearray()
            async for block in response.aiter_raw():  # nothing is unpacked
                body += block
                if len(body) > MAX_BYTES:
                    raise NoAnswer(f"answered with more than {MAX_BYTES >> 20} MB")
            return HttpAnswer(response.status_code, response.reason_phrase, bytes(body))
        finally:
            await response.aclose()


def _cause(error: BaseException) -> str:
    """Return the first error below those that libraries wrap it in."""
    while isinstance(error.__cause__ or error.__context__, Exception):
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return shortened(str(error) or type(error).__name__)


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
