"""The client of a retrieval server, against servers that answer, never end, fail and talk nonsense."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tinyrl.environments import search
from tinyrl.environments.search import SearchFailed, SearchServer

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


class Server:
    """A server with a function for each request (the last one for all that follow)."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str | None, Any]] = []
        self.logins: list[str | None] = []
        self.ended = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
                server.logins.append(self.headers["Authorization"])
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                answer(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/retrieve"

    def drip(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """A valid answer, a byte at a time, that never ends."""
        handler.send_response(200)
        handler.end_headers()
        while not self.ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(search, "WAITS_S", (0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.ended.set()
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def says(value: Any, status: int = 200) -> Answer:
    """Answer with a JSON value, or with bytes as they are."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return answer


def documents(*contents: str) -> list[Any]:
    return [{"document": {"id": "1", "contents": text}, "score": 0.5} for text in contents]


def test_a_batch_is_one_request_in_search_r1s_protocol(server: Server):
    titled = {"document": {"title": "A", "text": "a"}}
    found = says({"result": [documents('"A"\na', '"B"\nb'), [], [titled, *documents(" ", "b", "c")]]})
    server.answers = [says({}, 500), says({}, 503), found]
    passages = SearchServer(server.url).search(["who?", "wo ist «é»", "q"], top_k=2)
    assert passages == [['"A"\na', '"B"\nb'], [], ['"A"\na', "b"]]
    body = {"queries": ["who?", "wo ist «é»", "q"], "topk": 2, "return_scores": True}
    assert server.requests == [("/retrieve", "application/json", body)] * 3


def cut_short(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"result": [')


def test_every_other_answer_is_a_failure_with_its_reason(server: Server):
    for answer, reason, requests in [
        (says({}, 500), "answered 500 Internal Server Error", 3),
        (says({}, 404), "answered 404 Not Found", 1),
        (cut_short, r"did not answer \(peer closed connection", 3),
        (says(b""), "lists of documents: b''", 1),
        (says(b"[" * 100_000), "lists of documents", 1),
        (says({"results": []}), "lists of documents.*result", 1),
        (says({"result": []}), "answered 1 queries with 0 lists", 1),
        (says({"result": [[{"contents": "a"}]]}), "lists of documents.*document", 1),
        (says({"result": [[{"document": {"contents": 1}}]]}), "not one with the columns contents", 1),
    ]:
        server.answers, before = [answer], len(server.requests)
        with pytest.raises(SearchFailed, match=f"^the search server {server.url}.*{reason}"):
            SearchServer(server.url).search(["q"], top_k=1)
        assert len(server.requests) - before == requests


def test_a_server_that_does_not_come_to_an_end_is_given_up(server: Server):
    server.answers = [server.drip]
    with pytest.raises(SearchFailed, match=r"did not answer within 0.3 s \(environment.timeout_s\)"):
        SearchServer(server.url, timeout_s=0.3).search(["q"], top_k=1)
    assert len(server.requests) == 1


def redirects(location: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(307)
        handler.send_header("Location", location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_login_and_query_of_the_address_are_sent_and_neither_repeated_nor_redirected(server: Server):
    address = server.url.replace("http://", "http://me:hunt%40er2@") + "?api_key=a%20b"
    locations = [server.url.replace("127.0.0.1", "localhost"), "file:///etc/passwd", "http://u:hunter2@example.com/"]
    server.answers = [says({"result": [[]]}), says({}, 404), *map(redirects, locations)]
    SearchServer(address).search(["q"], top_k=1)
    assert server.requests[0][0] == "/retrieve?api_key=a%20b"
    assert server.logins == ["Basic " + base64.b64encode(b"me:hunt@er2").decode()]
    for reason in ("404", *["redirects to"] * 3):
        with pytest.raises(SearchFailed, match=reason) as caught:
            SearchServer(address).search(["q"], top_k=1)
        assert "hunt" not in str(caught.value)
        assert "a%20b" not in str(caught.value)
    assert len(server.requests) == 5
