"""An HTTP client for vLLM's server and search servers: requests side by side, each under one deadline, all cancelled on
a signal.

Requests run in an event loop in a thread of its own; the caller's thread only waits for them and for signals.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, TypeVar

import httpx2

from tinyrl.runs.signals import check_stop
from tinyrl.text import truncate

POLL_S = 0.2  # between two checks for a signal

Result = TypeVar("Result")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # below that it logs whole addresses


class NoAnswer(Exception):
    """A server did not answer: the end of a sentence that begins with its name."""


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
        self.address, self.timeout_s, self.waits_s, self.try_again = httpx2.URL(url), timeout_s, waits_s, try_again
        self.setting = f" ({setting})" if setting else ""
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(timeout=None, trust_env=proxies, limits=limits)  # closed with the process

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
        sent, free = {"Content-Type": "application/json", **(headers or {})}, asyncio.Semaphore(most)

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
                        if (answer := await self._client.send(request)).status_code not in self.try_again:
                            return answer
                    await asyncio.sleep(pause)
                return await self._client.send(request)
        except TimeoutError:
            raise NoAnswer(f"did not answer within {self.timeout_s:g} s{self.setting}") from None
        except (httpx2.HTTPError, OSError) as error:
            raise NoAnswer(f"did not answer ({truncate(str(error) or type(error).__name__)})") from None


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
