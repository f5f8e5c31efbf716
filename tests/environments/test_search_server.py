"""The client of a retrieval server, against servers that answer, never end, fail and talk nonsense."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tinyrl.environments import search
from tinyrl.environments.search import SearchFailed, SearchServer

PATIENCE_S = 120.0  # after which a test says that something never happened


class Server:
    """A server with an answer for each request (the last one for all that follow): status, and JSON or bytes; a
    redirect is (307, address), and None never ends.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any] | None] = []
        self.requests: list[tuple[str, str | None, Any]] = []
        self.asked = threading.Event()
        self.ended = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, self.headers["Authorization"], json.loads(body)))
                server.asked.set()
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                status, value = answer or (200, b"")
                raw = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", str(value))
                if answer is not None:
                    self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
                while answer is None and not server.ended.wait(0.02):
                    self.wfile.write(b" ")
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/retrieve"


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


def documents(*contents: str) -> list[Any]:
    return [{"document": {"id": "1", "contents": text}, "score": 0.5} for text in contents]


def test_a_batch_is_one_request_in_search_r1s_protocol(server: Server):
    titled = {"document": {"title": "A", "text": "a"}}
    found = {"result": [documents('"A"\na', '"B"\nb'), [], [titled, *documents("b", "c")]]}
    server.answers = [(500, {}), (503, {}), (200, found)]
    passages = SearchServer(server.url).search(["who?", "wo ist «é»", "q"], top_k=2)
    assert passages == [['"A"\na', '"B"\nb'], [], ['"A"\na', "b"]]
    body = {"queries": ["who?", "wo ist «é»", "q"], "topk": 2, "return_scores": True}
    assert server.requests == [("/retrieve", None, body)] * 3


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        ((500, {}), "answered 500 Internal Server Error", 3),
        ((404, {}), "answered 404 Not Found", 1),
        ((200, b""), "no list of documents for each query: ''", 1),
        ((200, {"result": []}), "no list of documents.*result", 1),
        ((200, {"result": [[{"contents": "a"}]]}), "no list of documents.*document", 1),
        ((200, {"result": [[{"document": {"contents": 1}}]]}), "not one with the columns contents", 1),
        (None, r"did not answer within 0.3 s \(environment.timeout_s\)", 1),
    ],
    ids=range(7),
)
def test_every_other_answer_is_a_failure_with_its_reason(server: Server, answer: Any, reason: str, requests: int):
    server.answers = [answer]
    with pytest.raises(SearchFailed, match=f"^the search server {server.url}.*{reason}"):
        SearchServer(server.url, timeout_s=30.0 if answer else 0.3).search(["q"], top_k=1)
    assert server.asked.wait(PATIENCE_S)  # which may be later than the client's time
    assert len(server.requests) == requests


def test_login_and_query_of_the_address_are_sent_and_neither_repeated_nor_redirected(server: Server):
    address = server.url.replace("http://", "http://me:hunt%40er2@") + "?api_key=a%20b"
    redirect = server.url.replace("127.0.0.1", "localhost")
    server.answers = [(200, {"result": [[]]}), (404, {}), (307, redirect)]
    SearchServer(address).search(["q"], top_k=1)
    path, login, _ = server.requests[0]
    assert (path, login) == ("/retrieve?api_key=a%20b", "Basic " + base64.b64encode(b"me:hunt@er2").decode())
    for reason in ("404", "307"):
        with pytest.raises(SearchFailed, match=reason) as caught:
            SearchServer(address).search(["q"], top_k=1)
        assert "hunt" not in str(caught.value)
        assert "a%20b" not in str(caught.value)
    assert len(server.requests) == 3
