"""A corpus: what is found and in which order, and what becomes of it when files are damaged, replaced or half made."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyrl.environments import corpus as index_file
from tinyrl.environments import corpus as module
from tinyrl.environments.corpus import Corpus, SearchFailed, match_expression, written_alone
from tinyrl.errors import Interrupted
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
    return Corpus.open(path).search([query], top_k=top_k)[0]


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_a_corpus_is_indexed_once_and_kept_beside_the_file(towns: Path):
    said: list[str] = []
    first = Corpus.open(towns, say=said.append)
    again = Corpus.open(str(towns), say=said.append)
    assert len(said) == 1
    assert str(towns) in said[0]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]
    assert len(first) == len(again) == 3
    assert first.search(["harbour", "nowhere", "who makes faience?"], top_k=3) == [[TOWNS[1]], [], [TOWNS[0]]]
    assert again.search(["harbour"], top_k=1) == [[TOWNS[1]]]


def test_titles_and_texts_in_columns_of_their_own_and_parquet_are_the_same_corpus(tmp_path: Path):
    rows = [{"title": passage.split("\n")[0].strip('"'), "text": passage.split("\n")[1]} for passage in TOWNS]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    vectors = [{**row, "vector": [0.0]} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(vectors), tmp_path / "a.parquet")
    assert found(tmp_path / "a.jsonl", "ramparts") == found(tmp_path / "a.parquet", "ramparts") == [TOWNS[2]]


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


def test_of_equally_good_passages_the_earlier_in_the_file_comes_first(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ["second amber", "first amber", "third amber", "nothing", "else", "here", "now"])
    assert found(path, "amber", 2) == ["second amber", "first amber"]
    assert found(path, "AMBER", 9) == ["second amber", "first amber", "third amber"]


WOODS = ["amber birch", "amber cobalt", "ambergris", "birch delta", "contents of it", "near"]


@pytest.mark.parametrize(
    ("query", "passages"),
    [
        ("amber AND birch", {0, 1, 3}),
        ("amber NOT birch", {0, 1, 3}),
        ('"amber cobalt"', {0, 1}),
        ("amber*", {0, 1}),
        ("contents : delta", {3, 4}),
        ("{contents} : delta", {3, 4}),
        ("- contents : delta", {3, 4}),
        ("NEAR(amber birch, 2)", {0, 1, 3, 5}),
        ("^birch", {0, 3}),
        ("amber + cobalt", {0, 1}),
        ('delta" OR "birch', {0, 3}),
        ('") OR 1=1; DROP TABLE passages; --', set()),
        ("am\0ber cobalt", {1}),
        ("\ud800cobalt\udfff", {1}),
        ("cobalt " * 100_000, {1}),
        ("_cobalt_", {1}),
        ("", set()),
        (" \n\t", set()),
        ('"*^()-+:', set()),
        ("¿?…", set()),
        ("of", {4}),
        ("AND NOT OR", set()),
        ("the contents of it", {4}),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_operators_of_the_index_are_words_like_others(tmp_path: Path, query: str, passages: set[int]):
    path = write(tmp_path / "a.jsonl", WOODS)
    assert set(found(path, query, 6)) == {WOODS[i] for i in passages}


def test_words_are_found_in_other_forms_and_without_their_accents(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ["Les cités de l’Élysée", "Cities, rivers", "x", "y", "z"])
    assert found(path, "city") == ["Cities, rivers"]
    assert found(path, "E\u0301LYSEE") == ["Les cités de l’Élysée"]


def test_the_words_of_a_query():
    assert match_expression("What is England's capital, the CAPITAL?") == '"What" OR "England" OR "CAPITAL"'
    assert match_expression("It is") == '"It" OR "is"'
    assert match_expression(" ".join(f"w{i}" for i in range(100))).count("OR") == 63


@pytest.fixture(scope="module")
def woods(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.open(write(tmp_path_factory.mktemp("woods") / "a.jsonl", WOODS))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(), max_size=60))
def test_no_query_is_an_error(woods: Corpus, query: str):
    assert len(woods.search([query], top_k=2)[0]) <= 2


def test_one_corpus_serves_many_threads(woods: Corpus):
    results: list[list[list[str]]] = []

    def search() -> None:
        for _ in range(50):
            results.append(woods.search(["cobalt", "delta"], top_k=1))

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[["amber cobalt"], ["birch delta"]]] * 200


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"id": "1", "contents": "cut o', "a.jsonl:2: broken JSON at column 25"),
        (b'{"id": "1", "text": "no title"}', "a.jsonl:2: a passage is a row with a text 'contents'.*columns id, text"),
        (b'{"contents": 7}', "a.jsonl:2: .*not the contents 7"),
        (b'{"title": "a", "text": ["a", "b"]}', "a.jsonl:2: a passage is a row"),
        (b'{"contents": " "}', "a.jsonl:2: an empty passage"),
        (b'["contents"]', "a.jsonl:2: a row is an object"),
        (b'{"contents": "\\ud800"}', "a.jsonl:2: half a character"),
        (b'{"contents": "\xe9"}', "a.jsonl:2: not UTF-8: byte 0xe9"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, wanted: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"contents": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=wanted):
        Corpus.open(path)
    assert beside(path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", b"x", r"a\.txt: a corpus is a file ending in \.jsonl or \.parquet"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no passages in it"),
        ("a.jsonl", None, r"a\.jsonl: cannot be read: No such file"),
        ("a.parquet", b"no parquet", r"a\.parquet: not a parquet file"),
        (".", None, "not a file"),
    ],
)
def test_a_file_that_is_no_corpus(tmp_path: Path, name: str, content: bytes | None, wanted: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=wanted):
        Corpus.open(tmp_path / name)


def test_a_corpus_replaced_during_a_run_changes_nothing_for_it(towns: Path, tmp_path: Path):
    running = Corpus.open(towns)
    os.replace(write(tmp_path / "other.jsonl", ['"Quimper"\nQuimper has fallen.']), towns)
    assert running.search(["quimper"], top_k=1) == [[TOWNS[0]]]
    assert found(towns, "quimper") == ['"Quimper"\nQuimper has fallen.']  # another run
    assert running.search(["ramparts"], top_k=1) == [[TOWNS[2]]]


def test_a_change_that_keeps_size_and_time_is_noticed(towns: Path):
    Corpus.open(towns).close()
    before = towns.stat()
    write(towns, [TOWNS[0].replace("faience", "pottery"), *TOWNS[1:]])
    os.utime(towns, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (towns.stat().st_size, towns.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert found(towns, "pottery") == ['"Quimper"\nQuimper makes pottery.']


def test_a_file_that_was_only_touched_keeps_its_index(towns: Path):
    Corpus.open(towns).close()
    before = (towns.parent / "towns.jsonl.fts5").stat()
    os.utime(towns, ns=(1, 1))
    assert found(towns, "harbour") == [TOWNS[1]]
    assert os.path.samestat((towns.parent / "towns.jsonl.fts5").stat(), before)


def test_a_file_that_changes_while_it_is_indexed_is_refused(towns: Path, monkeypatch: pytest.MonkeyPatch):
    def read(source: Path):
        yield "a"
        with source.open("a") as file:
            file.write('{"contents": "more"}\n')
        yield "b"

    monkeypatch.setattr(module, "read_passages", read)
    with pytest.raises(ValueError, match="has changed while it was indexed"):
        Corpus.open(towns)
    assert beside(towns) == ["towns.jsonl"]


def other_database(index: Path) -> None:
    index.unlink()
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('CREATE TABLE about (name, value)')"
    subprocess.run([sys.executable, "-c", f"{code}; c.commit()", str(index)], check=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index.write_bytes(b""),
        lambda index: index.write_bytes(os.urandom(5000)),
        lambda index: index.write_bytes(index.read_bytes()[: index.stat().st_size // 2]),
        lambda index: index.write_bytes(index.read_bytes() + bytes(4096)),
        lambda index: index.write_bytes(bytes(4096) + index.read_bytes()[4096:]),
        lambda index: index.write_bytes(index.read_bytes()[:4096] + b"\xff" * (index.stat().st_size - 4096)),
        lambda index: index.write_bytes(index.read_bytes().replace(b"tinyrl passages", b"tinyrl sausages")),
        other_database,
    ],
    ids=["empty", "noise", "half", "longer", "no header", "no pages", "another version", "another database"],
)
def test_a_damaged_index_is_made_again(towns: Path, damage):
    Corpus.open(towns).close()
    damage(towns.parent / "towns.jsonl.fts5")
    assert found(towns, "harbour") == [TOWNS[1]]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]


def changed(index: Path, old: bytes, new: bytes) -> None:
    before = index.stat()
    content = index.read_bytes()
    assert old in content
    index.write_bytes(content.replace(old, new))
    os.utime(index, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "damage", [(b"makes faience", b"makes pottery"), (b"harbour", b"harvest"), (b"rampart", b"rambart")]
)
def test_damage_inside_the_text_or_the_words_of_an_index_is_found_and_said(towns: Path, damage: tuple[bytes, bytes]):
    Corpus.open(towns).close()
    index = towns.parent / "towns.jsonl.fts5"
    written = index.read_bytes()
    changed(index, *damage)
    said: list[str] = []
    corpus = Corpus.open(towns, say=said.append)
    assert corpus.search(["faience", "harbour", "ramparts"], top_k=1) == [[TOWNS[0]], [TOWNS[1]], [TOWNS[2]]]
    assert [line.startswith(f"warning: {index} is damaged") for line in said] == [True, False]  # and made again
    assert index.read_bytes() == written


def test_an_index_of_another_format_is_made_again(towns: Path):
    Corpus.open(towns).close()
    index = towns.parent / "towns.jsonl.fts5"
    written = index.read_bytes()
    index.write_bytes(written[:-71].replace(b"tinyrl passages 2", b"tinyrl passages 1"))
    assert Corpus.open(towns).search(["harbour"], top_k=1) == [[TOWNS[1]]]
    assert b"tinyrl passages 2" in index.read_bytes()


def pages_of(index: Path, word: bytes) -> tuple[bytearray, list[int]]:
    data = bytearray(index.read_bytes())
    return data, [at for at in range(0, len(data), 4096) if word in data[at : at + 4096]]


def test_an_index_damaged_while_it_is_in_use_is_made_again(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [f"{'filler ' * 60} needle{i}" for i in range(300)])
    running = Corpus.open(path)
    index = tmp_path / "a.jsonl.fts5"
    data, pages = pages_of(index, b"filler filler")
    assert len(pages) > 10
    for at in pages:
        data[at : at + 4096] = b"\xff" * 4096
    with index.open("r+b") as file:
        file.write(data)
    assert [p.split()[-1] for p in running.search(["needle250"], top_k=1)[0]] == ["needle250"]
    assert len(pages_of(index, b"filler filler")[1]) == len(pages)


def test_an_index_damaged_after_the_corpus_was_replaced_is_said(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [f"{'filler ' * 60} needle{i}" for i in range(300)])
    running = Corpus.open(path)
    index = tmp_path / "a.jsonl.fts5"
    with index.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (index.stat().st_size - 8192))
    write(path, ["other"])
    with pytest.raises(SearchFailed, match="not the passages that were opened before, and their index is gone"):
        running.search(["needle250"], top_k=1)


KILLED = """
import sys, time
from tinyrl.environments import corpus

def read(source):
    for i in range(20000):
        yield f"passage {i} {'word ' * 50}"
    print("in the middle", flush=True)
    time.sleep(600)

corpus.read_passages = read
corpus.Corpus.open(sys.argv[1])
"""


def test_a_kill_in_the_middle_leaves_no_half_index(towns: Path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(towns)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in the middle\n"
    assert (towns.parent / "towns.jsonl.fts5.writing").stat().st_size > 1_000_000
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert "towns.jsonl.fts5" not in beside(towns)
    assert found(towns, "harbour") == [TOWNS[1]]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]


def test_two_who_index_at_once_make_one_index(towns: Path, monkeypatch: pytest.MonkeyPatch):
    read, begun, go_on, calls = module.read_passages, threading.Event(), threading.Event(), []

    def slow(source: Path):
        calls.append(source)
        begun.set()
        assert go_on.wait(60)
        yield from read(source)

    monkeypatch.setattr(module, "read_passages", slow)
    monkeypatch.setattr(index_file, "WAIT_S", 0.01)
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(found(towns, "harbour"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert results == [[TOWNS[1]]] * 3
    assert calls == [towns]
    assert beside(towns) == ["towns.jsonl", "towns.jsonl.fts5"]


def test_who_waits_for_another_can_be_stopped(towns: Path):
    with StopFlag() as flag, written_alone(towns.with_name("towns.jsonl.fts5")):
        flag.by = "SIGTERM"
        with pytest.raises(Interrupted):
            Corpus.open(towns)
    assert beside(towns) == ["towns.jsonl"]


def test_an_index_that_cannot_stand_beside_the_file_is_kept_in_the_cache(
    towns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "towns.jsonl.fts5.lock").mkdir()
    said: list[str] = []
    for _ in range(2):
        assert Corpus.open(towns, say=said.append).search(["harbour"], top_k=1) == [[TOWNS[1]]]
    kept = list((tmp_path / "cache" / "tinyrl").iterdir())
    assert [path.name.partition("-")[2] for path in kept] == ["towns.jsonl.fts5"]
    assert len(said) == 1
    assert str(kept[0]) in said[0]


def test_an_index_that_can_be_kept_nowhere_is_said(towns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(index_file.tempfile, "tempdir", str(tmp_path / "file"))
    (tmp_path / "towns.jsonl.fts5.lock").mkdir()
    with pytest.raises(OSError, match=r"no place for the index.*fts5\.lock: Is a directory.*Not a directory"):
        Corpus.open(towns)


FULL = """
import resource, sys
from tinyrl.environments.corpus import Corpus
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    Corpus.open(sys.argv[1])
except OSError as error:
    print("refused", error)
"""


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [f"{'filler ' * 60} needle{i}" for i in range(300)])
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("refused"), done.stderr
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["a.jsonl"]
