"""Listen for an endpoint's clients: connections that end where a client keeps them waiting; a server in a thread."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tinyrl.endpoint.endpoint import Endpoint
from tinyrl.endpoint.request_body import SLOW_S

LOCAL = ["127.0.0.1", "localhost", "[::1]"]
MOST_HEADERS = 1 << 20  # bytes that are received before a request's headers are whole
LEAST_TAKEN = 1 << 16  # bytes of a waiting answer that a client has to take within SLOW_S


class Connection(AutoHTTPProtocol):
    """uvicorn's connection, which ends where a client does not send the headers of a request within SLOW_S and
    MOST_HEADERS, or takes fewer than LEAST_TAKEN bytes of an answer that waits for it.
    """

    transport: Any
    cycle: Any  # the request that was read last, and its answer

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ends: asyncio.TimerHandle | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._received = 0  # bytes of headers that are not whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received = self._received + len(data) if self._reads_headers() else 0
        if self._received > MOST_HEADERS:
            self.transport.close()
        self._await_headers(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._ends, self._looks):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _await_reading(self) -> None:
        """Look again later how much of the answer still waits, unless writing has been resumed by then."""
        waiting: int = self.transport.get_write_buffer_size()
        self._looks = asyncio.get_running_loop().call_later(SLOW_S, self._end_unread, waiting)

    def _end_unread(self, waited: int) -> None:
        """Cut the connection off where its client has taken too little of what `waited` for it; `close` would wait for
        the client. What comes to wait meanwhile is nothing: no more is written while writing is paused.
        """
        if waited - self.transport.get_write_buffer_size() < LEAST_TAKEN:
            self.transport.abort()
        else:
            self._await_reading()

    def _reads_headers(self) -> bool:
        """Return whether the headers of the next request are read, and not the body of one, be it answered already."""
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _await_headers(self, transport: asyncio.BaseTransport) -> None:
        """End the connection later, unless a request is being answered."""
        is_answered = self.cycle is not None and not self.cycle.response_complete
        if is_answered and self._ends is not None:
            self._ends.cancel()
            self._ends = None
        elif not is_answered and self._ends is None:
            self._ends = asyncio.get_running_loop().call_later(SLOW_S, transport.close)


def is_no_cancel(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's log is not about answers that were cut off at the end of the server."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


def server_config(endpoint: Endpoint, *, log_level: str, grace_s: int) -> uvicorn.Config:
    """Configure uvicorn's server of an endpoint; grace_s: for answers under way at its end."""
    config = uvicorn.Config(
        endpoint.app, http=Connection, log_level=log_level, ws="none", timeout_graceful_shutdown=grace_s
    )
    logging.getLogger("uvicorn.error").addFilter(is_no_cancel)
    return config


class Listening:
    """A thread in which an endpoint listens at `url`, on a free port of this machine, until `stop`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(server_config(endpoint, log_level="error", grace_s=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the endpoint at {self.url} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
