"""A corpus: which passages are found in which order, and an index that is damaged, replaced or half made."""

import json
import math
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tinyrl.environments.search import Corpus, match_expression
from tinyrl.process import signals
from tinyrl.process.errors import Interrupted
from tinyrl.process.signals import StopFlag

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


def test_a_corpus_is_indexed_once_beside_the_file(towns: Path, capsys: pytest.CaptureFixture[str]):
    first, again = Corpus(towns), Corpus(str(towns))
    assert len(capsys.readouterr().err.splitlines()) == 1
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
    path = write(tmp_path / "a.jsonl", texts)
    assert found(path, " ".join(query), 60) == [texts[i] for i in best]
    assert found(path, " ".join(query), 5) == [texts[i] for i in best[:5]]


def test_words_are_found_in_other_forms_and_operators_of_the_index_are_words(tmp_path: Path):
    passages = ["Les cités de l’Élysée", "Cities, rivers", "z amber", "a amber", "amber contents of it"]
    corpus = Corpus(write(tmp_path / "a.jsonl", passages))
    for query, wanted in [
        ("city", [1]),
        ("E\u0301LYSEE", [0]),
        ("AMBER", [2, 3, 4]),  # equally good ones in their order
        ('") OR 1=1; DROP TABLE passages; --', []),
        ("riv\0ers \ud800cities\udfff", [1]),
        ("city " * 100_000, [1]),
        ("of", [4]),
        ("", []),
    ]:
        assert corpus.search([query], top_k=3) == [[passages[i] for i in wanted]], query[:40]
    assert match_expression("What is England's capital, the CAPITAL?") == '"what" OR "england" OR "capital"'
    assert match_expression(" ".join(f"w{i}" for i in range(100))).count("OR") == 63


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"contents": "fine"}\n{"id": "1", "con', "a.jsonl:2: broken JSON"),
        ("a.jsonl", b'{"id": "1", "text": "no title"}', "a.jsonl:1: a passage is .*columns id, text"),
        ("a.jsonl", b'{"contents": 7}', "a.jsonl:1: .*columns contents"),
        ("a.txt", b"x", r"a\.txt"),
        ("a.jsonl", None, r"a\.jsonl"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        Corpus(tmp_path / name)
    assert beside(tmp_path / name) == [name] * (content is not None)


def test_a_corpus_replaced_during_a_run_changes_nothing_for_it_and_a_damaged_index_is_made_again(
    towns: Path, tmp_path: Path
):
    """Also by one of the same size."""
    running, new = Corpus(towns), TOWNS[0].replace("faience", "pottery")
    os.replace(write(tmp_path / "other.jsonl", [new, *TOWNS[1:]]), towns)
    assert running.search(["quimper"], top_k=1) == [[TOWNS[0]]]
    assert found(towns, "quimper") == [new]  # another run
    assert running.search(["ramparts"], top_k=1) == [[TOWNS[2]]]
    whole = running.index.read_bytes()
    running.index.write_bytes(whole[: len(whole) // 2])
    assert found(towns, "harbour") == [TOWNS[1]]


def test_a_stop_leaves_no_half_index(towns: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "LOOK_EVERY_S", -1.0)
    with StopFlag() as flag:
        flag.by = "SIGTERM"
        with pytest.raises(Interrupted):
            Corpus(towns)
    assert beside(towns) == ["towns.jsonl"]
