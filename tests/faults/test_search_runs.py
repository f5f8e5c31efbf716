"""Runs that search while their corpus is damaged, replaced or removed, and while their server goes away."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.environments.test_search_server import Server, documents, says
from tests.faults.children import Child, command
from tests.faults.lookup_runs import lookup, said_by_environment
from tests.trainers.test_resume import assert_same
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.environments import search
from tinyrl.environments.corpus import Corpus
from tinyrl.starter.text import NAMES

PASSAGES = [f"{name}\nfound {name} ;" for name in NAMES]
CODE = "def length(completions, **columns):\n    return [float(len(c[0]['content'])) for c in completions]\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(search, "_between", lookup_query)


def lookup_query(turn: str, tag: str) -> str | None:
    """What the lookup model writes as `search Ada Stone job ;` and `answer baker .`, in the place of tags."""
    words = turn.split()
    return " ".join(words[words.index(tag) + 1 :]) if tag in words else None


def write_corpus(path: Path, passages: list[str]) -> None:
    path.write_text("".join(json.dumps({"contents": passage}) + "\n" for passage in passages))


def searching(folder: Path, corpus: str | None = None, *, num_steps: int = 3) -> Config:
    """The lookup model, with a corpus that has a passage for each name where none is named."""
    if corpus is None:
        corpus = str(folder / "corpus.jsonl")
        write_corpus(folder / "corpus.jsonl", PASSAGES)
    (folder / "rewards.py").write_text(CODE)
    return lookup(
        reward={"functions": [{"use": f"{folder / 'rewards.py'}:length"}]},
        environment={"use": "search", "corpus": corpus, "max_observation_tokens": 24, "top_k": 1},
        run={"num_steps": num_steps},
    )


def on_search(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[Corpus], object]) -> None:
    """Have the number-th search of a corpus begin with `do`."""
    plain, calls = Corpus.search, 0

    def counting(self: Corpus, queries: list[str], *, top_k: int) -> list[list[str]]:
        nonlocal calls
        calls += 1
        if calls == number:
            do(self)
        return plain(self, queries, top_k=top_k)

    monkeypatch.setattr(Corpus, "search", counting)


def test_a_damaged_corpus_is_refused_before_the_run(tmp_path: Path) -> None:
    settings = searching(tmp_path)
    (tmp_path / "corpus.jsonl").write_bytes(b'{"contents": "a"}\n{"contents": \n')
    (tmp_path / "recipe.yaml").write_text(dump_config(settings))
    words = ("train", "grpo", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path), "--name", "run")
    child = Child(command, *words, output=tmp_path / "said.txt")
    assert child.end() == 2, child.said
    assert "corpus.jsonl:2" in child.said
    assert "Traceback" not in child.said
    assert not (tmp_path / "run").exists()


def replaced(corpus: Corpus) -> None:
    write_corpus(corpus.source, ["nothing of the kind"])


def test_a_corpus_changed_during_a_run_changes_nothing_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    code, whole, _ = running.train(searching(tmp_path / "whole"), tmp_path / "whole")
    assert code == 0
    assert len([said for said in said_by_environment(whole) if "Doc 1(Title:" in said]) > 3
    on_search(monkeypatch, 4, replaced)
    code, run, _ = running.train(searching(tmp_path), tmp_path)
    assert code == 0
    assert_same(whole, run, 3)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def found_for_each(handler: Any, body: bytes) -> None:
    queries = json.loads(body)["queries"]
    says({"result": [documents("Amy\nfound Amy ;") for _ in queries]})(handler, body)


@pytest.mark.slow
def test_a_server_that_goes_away_costs_the_episodes_that_asked_and_stops_the_run(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = says({"error": "gone"}, status=503)
    server.answers = [*[found_for_each] * 7, *[gone] * 9, *[found_for_each] * 3, gone]
    code, run, _ = running.train(searching(tmp_path, server.url, num_steps=12), tmp_path)
    said = capsys.readouterr().err
    assert code == 3, said
    assert "3 batches in a row" in said
    assert "`search` gave no answer: the search server http://127.0.0.1" in said
    assert "answered 503" in said
    failed = [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]
    assert all("search" in row["episode"][-1]["content"] for row in failed)
    shown = said_by_environment(run)
    assert any("found Amy" in text for text in shown)
