"""Answers of other people's servers: their size, what they unpack to, and secrets that they echo."""

from __future__ import annotations

import base64
import gzip
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tinyrl.data import http_client
from tinyrl.data.http_client import HttpClient, NoAnswer, secrets_in, without_secrets


class Server:
    """Answers everything with `body` and `headers`, after replacing {login} by the authorization that it was sent."""

    def __init__(self) -> None:
        self.body, self.headers, self.encodings = b"{}", dict[str, str](), list[str | None]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.encodings.append(self.headers["Accept-Encoding"])
                content = server.body.replace(b"{login}", (self.headers["Authorization"] or "").encode())
                self.send_response(200)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.host = f"127.0.0.1:{self.http.server_port}"

    def ask(self, address: str | None = None, **options: Any) -> Any:
        url = address or f"http://{self.host}"
        client = HttpClient(url, timeout_s=30, waits_s=(), try_again=(), proxies=False)
        [answer] = client.ask("GET", "", [None], **options)
        return answer


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_an_answer_has_a_size_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_BODY", 1000)
    server.body = b"x" * 999
    assert len(server.ask().content) == 999
    server.body = b"x" * 100_000
    with pytest.raises(NoAnswer):
        server.ask()


def test_what_a_server_packs_unasked_is_not_unpacked(server: Server) -> None:
    server.body, server.headers = gzip.compress(b" " * (64 << 20)), {"Content-Encoding": "gzip"}
    tracemalloc.start()
    try:
        content = server.ask().content
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert server.encodings == ["identity"]
    assert content == server.body
    assert peak < 16 << 20


def test_secrets_that_a_server_echoes_are_masked(server: Server) -> None:
    """Of the address (user, password, a long value) and of the header, plain and as a header spells them; short values
    and all else stay, so that what was JSON still is.
    """
    server.body = b'{"said": ["{login}", "hunter2", "long-api-key", "true"], "raw": true}'
    answer = server.ask(f"http://me:hunter2@{server.host}/?key=long-api-key&raw=true")
    assert answer.json() == {"said": ["Basic ***", "***", "***", "true"], "raw": True}
    assert base64.b64encode(b"me:hunter2") not in answer.content
    answer = server.ask(headers={"Authorization": "Bearer sk-planted"})
    assert answer.json()["said"] == ["Bearer ***", "hunter2", "long-api-key", "true"]


def test_a_secret_of_four_characters_is_masked_and_one_of_three_would_mask_pieces_of_words() -> None:
    assert without_secrets("abc, wxyz", ["abc", "wxyz", None]) == "abc, ***"


def test_values_of_an_address_are_secret_from_eight_characters_on() -> None:
    assert {"12345678"} == {*secrets_in("http://h/?key=12345678&raw=1234567")} - {""}
