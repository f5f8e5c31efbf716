"""A judge for tests: a real HTTP server that answers as it is told, and the reward that asks it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.rewards.judge import JudgeReward

ANSWER = re.compile(r"<answer-(?:(\d+)-)?\w+>\n(.*?)\n</answer", re.S)


def text_of(content: Any) -> str:
    """The text of a message whose content may be parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Judge:
    """A server that answers as `reply(system, answers)` says: text, a status, bytes for all of it, None to hang up."""

    def __init__(self, reply: Callable[[str, list[str]], str | bytes | int | None]) -> None:
        self.reply, self.asked, self.headers = reply, list[dict[str, Any]](), list[dict[str, str]]()
        self.now = self.most = 0
        self.refuses: dict[str, str] = {}  # parameters, each with what a question that has it is told
        self.echo: tuple[int, bytes] | None = None  # the answer to everything
        self.packed: bytes | None = None  # the same, by gzip
        judge, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    judge.now += 1
                    judge.most = max(judge.most, judge.now)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.asked.append(body)
                refused = [why for name, why in judge.refuses.items() if name in body]
                judge.headers.append({name.lower(): value for name, value in self.headers.items()})
                system, user = (text_of(message["content"]) for message in body["messages"])
                said = judge.reply(system, [text for _, text in ANSWER.findall(user)])
                with lock:
                    judge.now -= 1
                if said is None:
                    self.close_connection = True
                    return
                message = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 7}}
                content = said if isinstance(said, bytes) else json.dumps(message).encode()
                status = said if isinstance(said, int) else 200
                if refused:
                    status, content = 400, json.dumps({"error": {"message": refused[0]}}).encode()
                if judge.echo is not None:
                    status, content = judge.echo
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if judge.packed is not None:
                    content = judge.packed
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def reward(url: str, folder: Path, *, timeout_s: float = 20.0, **fields: Any) -> JudgeReward:
    (folder / "rubric.md").write_text(fields.pop("rubric", "Longer is better."), encoding="utf-8")
    values = {"use": "judge", "url": url, "model": "m", "rubric": str(folder / "rubric.md")}
    values |= {"cache": str(folder / "cache.sqlite"), **fields}
    return JudgeReward(RewardFunctionConfig.model_validate(values), timeout_s=timeout_s)
