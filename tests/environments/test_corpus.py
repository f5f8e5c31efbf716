"""A corpus: what is found and in which order, and what becomes of it when files are damaged, replaced or half made."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tinyrl.environments.search import Corpus, SearchFailed, match_expression
from tinyrl.errors import Interrupted
from tinyrl.runs import signals
from tinyrl.runs.signals import StopFlag

TOWNS = ['"Quimper"\nQuimper makes faience.', '"Brest"\nBrest has a harbour.', '"Vannes"\nVannes has ramparts.']


def write(path: Path, passages: list[str]) -> Path:
    rows = ({"id": str(i), "contents": passage} for i, passage in enumerate(passages))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def towns(tmp_path: Path) -> Path:
    return write(tmp_path / "towns.jsonl", TOWNS)


def found(path: Path, query: str, top_k: int = 3) -> list[str]:
    return Corpus(path).search([query], top_k=top_k)[0]


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_a_corpus_is_indexed_once_and_kept_beside_the_file(towns: Path, capsys: pytest.CaptureFixture[str]):
    first, again = Corpus(towns), Corpus(str(towns))
    assert [str(towns) in line for line in capsys.readouterr().err.splitlines()] == [True]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]
    assert first.num_passages == again.num_passages == 3
    assert first.search(["harbour", "nowhere", "who makes faience?"], top_k=3) == [[TOWNS[1]], [], [TOWNS[0]]]
    # titles and texts in columns of their own
    rows = [{"title": passage.split("\n")[0].strip('"'), "text": passage.split("\n")[1], "v": 0} for passage in TOWNS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), towns.with_name("a.parquet"))
    assert found(towns.with_name("a.parquet"), "ramparts") == [TOWNS[2]]


def test_the_order_is_that_of_bm25(tmp_path: Path):
    """A second implementation: k1 = 1.2, b = 0.75, idf = log((N - n + 0.5) / (n + 0.5)), at least 1e-6."""
    words = ["amber", "birch", "cobalt", "delta", "ember", "flint", "grove"]
    texts = [" ".join(words[(i * i + 3 * j) % (2 + i % 6)] for j in range(1 + i % 11)) for i in range(60)]
    query = ["cobalt", "flint", "birch"]
    lengths = [len(text.split()) for text in texts]
    mean = sum(lengths) / len(texts)
    scores = []
    for text, length in zip(texts, lengths, strict=True):
        score = 0.0
        for word in query:
            n = sum(word in other.split() for other in texts)
            idf = max(math.log((len(texts) - n + 0.5) / (n + 0.5)), 1e-6)
            tf = text.split().count(word)
            score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * length / mean))
        scores.append(score)
    best = sorted((i for i in range(60) if scores[i] > 0), key=lambda i: (-round(scores[i], 9), i))
    assert len({round(scores[i], 9) for i in best}) > 10
    assert found(write(tmp_path / "a.jsonl", texts), " ".join(query), 60) == [texts[i] for i in best]


WOODS = ["amber birch", "amber cobalt", "ambergris", "birch delta", "contents of it", "near"]


def test_operators_of_the_index_are_words_like_others(tmp_path: Path):
    woods = Corpus(write(tmp_path / "a.jsonl", WOODS))
    for query, passages in [
        ("amber AND birch", [0, 1, 3]),
        ('"amber cobalt" delta" OR "birch', [0, 1, 3]),
        ('") OR 1=1; DROP TABLE passages; --', []),
        ("am\0ber \ud800cobalt\udfff", [1]),
        ("cobalt " * 100_000, [1]),
        ("", []),
        ("of", [4]),
        ("the contents of it", [4]),
    ]:
        assert sorted(woods.search([query], top_k=6)[0]) == sorted(WOODS[i] for i in passages), query[:40]


def test_words_are_found_in_other_forms_and_equally_good_passages_in_their_order(tmp_path: Path):
    passages = ["Les cités de l’Élysée", "Cities, rivers", "z amber", "a amber", "m amber", *"bcde"]
    path = write(tmp_path / "a.jsonl", passages)
    assert found(path, "city") == passages[1:2]
    assert found(path, "E\u0301LYSEE") == passages[:1]
    assert found(path, "AMBER", 2) == passages[2:4]
    assert match_expression("What is England's capital, the CAPITAL?") == '"What" OR "England" OR "CAPITAL"'
    assert match_expression("It is") == '"It" OR "is"'
    assert match_expression(" ".join(f"w{i}" for i in range(100))).count("OR") == 63


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"contents": "fine"}\n{"id": "1", "con', "a.jsonl:2: broken JSON at column 13"),
        ("a.jsonl", b'{"id": "1", "text": "no title"}', "a.jsonl:1: a passage is .*columns id, text"),
        ("a.jsonl", b'{"contents": 7}', "a.jsonl:1: .*columns contents"),
        ("a.jsonl", b'{"contents": " "}', "a.jsonl:1: an empty passage"),
        ("a.txt", b"x", r"a\.txt: a corpus is a file ending in \.jsonl or \.parquet"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no passages in it"),
        ("a.jsonl", None, r"a\.jsonl: a corpus is a file"),
        ("a.parquet", b"no parquet", r"a\.parquet: not a parquet file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        Corpus(tmp_path / name)
    assert beside(tmp_path / name) == [name] * (content is not None)


def test_a_corpus_replaced_during_a_run_changes_nothing_for_it(towns: Path, tmp_path: Path):
    """Also by one of the same size."""
    running, new = Corpus(towns), TOWNS[0].replace("faience", "pottery")
    os.replace(write(tmp_path / "other.jsonl", [new, *TOWNS[1:]]), towns)
    assert running.search(["quimper"], top_k=1) == [[TOWNS[0]]]
    assert found(towns, "quimper") == [new]  # another run
    assert running.search(["ramparts"], top_k=1) == [[TOWNS[2]]]


@pytest.mark.parametrize("damage", ["empty", "half", "no pages", "another database"])
def test_a_damaged_index_is_made_again(towns: Path, damage: str):
    index = Corpus(towns).index
    whole = index.read_bytes()
    damaged = {"empty": b"", "half": whole[: len(whole) // 2], "no pages": whole[:4096] + b"\xff" * (len(whole) - 4096)}
    if damage in damaged:
        index.write_bytes(damaged[damage])
    else:
        index.unlink()
        with closing(sqlite3.connect(index)) as connection:
            connection.execute("CREATE TABLE about (name, value)")
    assert found(towns, "harbour") == [TOWNS[1]]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]


def test_an_index_damaged_while_it_is_in_use_fails_the_search(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [f"{'filler ' * 60} needle{i}" for i in range(300)])
    running = Corpus(path)
    with running.index.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (running.index.stat().st_size - 8192))
    with pytest.raises(SearchFailed, match=r"a.jsonl.fts5: .*delete this index"):
        running.search(["needle250"], top_k=1)


KILLED = """
import os, sys
from tinyrl.environments import search

def read():
    for i in range(20000):
        yield "here", {"contents": f"passage {i} {'word ' * 50}"}
    os.kill(os.getpid(), 9)

search.reader_of = lambda source: read
search.Corpus(sys.argv[1])
"""


def test_a_kill_in_the_middle_leaves_no_half_index(towns: Path):
    child = subprocess.run([sys.executable, "-c", KILLED, str(towns)], check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL
    assert "towns.jsonl.fts5" not in beside(towns)
    assert found(towns, "harbour") == [TOWNS[1]]


def test_a_stop_ends_the_indexing(towns: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "LOOK_EVERY_S", -1.0)
    with StopFlag() as flag:
        flag.by = "SIGTERM"
        with pytest.raises(Interrupted):
            Corpus(towns)
    assert beside(towns) == ["towns.jsonl"]


def test_a_folder_that_cannot_be_written_is_named(towns: Path):
    (towns.parent / "towns.jsonl.fts5").mkdir()
    with pytest.raises(OSError, match=r"towns\.jsonl\.fts5: cannot be written"):
        Corpus(towns)
