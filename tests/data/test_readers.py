"""Readers of rows: every broken file is a ValueError that says what and where; good files are read."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyrl.data.readers import placed_rows


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refused(source: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        placed_rows(source)
    message = str(caught.value)
    assert len(message.splitlines()) <= 6
    assert max(map(len, message.splitlines())) < 400
    return message


def test_a_folder_of_save_to_disk_gives_its_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2"}, {"prompt": [], "answer": None}]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(str(tmp_path / "one"))
    assert [row for _, row in placed_rows(str(tmp_path / "one"))] == rows
    both = datasets.DatasetDict(train=one, test=one.select([0]))
    both.save_to_disk(str(tmp_path / "both"))
    assert [row for _, row in placed_rows(str(tmp_path / "both"))] == rows
    assert [row for _, row in placed_rows(str(tmp_path / "both" / "test"))] == rows[:1]
    datasets.DatasetDict(dev=one).save_to_disk(str(tmp_path / "dev"))
    assert "splits: dev" in refused(str(tmp_path / "dev"))
    for file in (tmp_path / "one").glob("*.arrow"):
        file.write_bytes(b"no arrow")
    assert "one: a folder of save_to_disk that cannot be read" in refused(str(tmp_path / "one"))


def test_jsonl_gives_rows_with_their_lines_and_skips_blank_ones(tmp_path):
    source = written(tmp_path, "a.jsonl", '{"q": "1", "n": 2}\n\n  \n{"q": "\u2028two\x85", "n": [true, null]}\r\n')
    assert placed_rows(source) == [
        (f"{source}:1", {"q": "1", "n": 2}),
        (f"{source}:4", {"q": "\u2028two\x85", "n": [True, None]}),
    ]


def test_json_gives_rows_with_their_numbers(tmp_path):
    source = written(tmp_path, "a.json", '\n[{"q": "[,{"},\n\n {"q":\n"b"}, {"q": "c"}\n]\n')
    assert placed_rows(source) == [
        (f"{source} row 1", {"q": "[,{"}),
        (f"{source} row 2", {"q": "b"}),
        (f"{source} row 3", {"q": "c"}),
    ]


def test_csv_gives_rows_with_the_lines_they_start_on(tmp_path):
    source = written(tmp_path, "a.csv", 'q,answer\n"two\nlines, ""quoted""",1\n\nlast,\n')
    assert placed_rows(source) == [
        (f"{source}:2", {"q": 'two\nlines, "quoted"', "answer": "1"}),
        (f"{source}:5", {"q": "last", "answer": ""}),
    ]


def test_parquet_gives_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"q": ["x", "y"], "names": [["a"], []]}), source)
    assert placed_rows(source) == [
        (f"{source} row 1", {"q": "x", "names": ["a"]}),
        (f"{source} row 2", {"q": "y", "names": []}),
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_the_first_rows_are_those_of_the_whole(tmp_path: Path, most: int) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    rows = [{"q": text} for text in ("one", 'two\n"lines', "", "four")]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "saved"))
    parquet.write_table(data.data.table, str(tmp_path / "a.parquet"))
    sources = [
        str(tmp_path / "saved"),
        str(tmp_path / "a.parquet"),
        written(tmp_path, "a.json", json.dumps(rows)),
        written(tmp_path, "a.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, rows))),
        written(tmp_path, "a.csv", '\n"q"\none\n"two\n""lines"\n\n""\nfour\n'),
    ]
    for source in sources:
        assert [row for _, row in placed_rows(source)] == rows
        assert placed_rows(source, most=most) == placed_rows(source)[:most]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_what_stands_behind_the_first_rows_is_not_read(tmp_path: Path, name: str) -> None:
    text = {"a.jsonl": b'{"q": "1"}\n', "a.csv": b"q\n1\n"}[name]
    source = written(tmp_path, name, text + b"\xff" * 10)
    assert placed_rows(source, most=1)[0][1] == {"q": "1"}
    assert "not UTF-8" in refused(source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, name):
    text = {"a.jsonl": '{"q": "é"}', "a.json": '[{"q": "é"}]', "a.csv": "q\né"}[name]
    source = written(tmp_path, name, b"\xef\xbb\xbf" + text.encode())
    assert [row for _, row in placed_rows(source)] == [{"q": "é"}]


def test_a_megabyte_in_one_field_is_read(tmp_path):
    long = "x" * 1_000_000
    assert placed_rows(written(tmp_path, "a.csv", f"q,a\n{long},1\n"))[0][1] == {"q": long, "a": "1"}
    assert placed_rows(written(tmp_path, "a.jsonl", json.dumps({"q": long})))[0][1] == {"q": long}


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": "cut o', ["a.jsonl:2", "broken JSON at column 7", "cut o"]),
        ("a.jsonl", '{"q": 1}\n{"q": 1} x\n', ["a.jsonl:2", "Extra data"]),
        ("a.jsonl", '{"q": 1}\n[1, 2]\n', ["a.jsonl:2", "a row is an object", "a list: [1, 2]"]),
        ("a.jsonl", '{"q": 1}\n"hi"\n', ["a.jsonl:2", "a text: 'hi'"]),
        ("a.jsonl", "{}\n", ["a.jsonl:1", "without columns"]),
        ("a.jsonl", '{"q": 1, "q": 2}\n', ["a.jsonl:1", "duplicate key 'q'"]),
        ("a.jsonl", '{"q": 1}\n{"q": NaN}\n', ["a.jsonl:2", "NaN is not JSON", "null"]),
        ("a.jsonl", '{"q": -Infinity}\n', ["a.jsonl:1", "-Infinity is not JSON"]),
        ("a.jsonl", '{"q": 1e999}\n', ["a.jsonl:1", "1e999 is too large"]),
        ("a.jsonl", '{"q": ' + "9" * 5000 + "}\n", ["a.jsonl:1", "digits"]),
        ("a.jsonl", '{"q": "\\ud800"}\n', ["a.jsonl:1", "lone surrogate", "\\ud800"]),
        ("a.jsonl", '{"q": 1}\n' + "[" * 200_000 + "\n", ["a.jsonl:2", "nested too deep"]),
        ("a.jsonl", '{"q": 1}\n{"q": "\xe9"}\n'.encode("latin-1"), ["a.jsonl:2", "not UTF-8", "0xe9 at offset 16"]),
        ("a.jsonl", b'\xef\xbb\xbf{"q": 1}\n\xe9', ["a.jsonl:2", "0xe9 at offset 12"]),
        ("a.jsonl", '{"q": 1}'.encode("utf-16"), ["a.jsonl", "UTF-16", "save it as UTF-8"]),
        ("a.csv", b"PK\x03\x04\x00", ["a.csv", "zipped"]),
        ("a.jsonl", "", ["a.jsonl", "empty"]),
        ("a.jsonl", " \n\n", ["a.jsonl", "empty"]),
        ("a.json", '[\n{"q": 1},\n{"q": }\n]', ["a.json:3", "broken JSON at column 7"]),
        ("a.json", '[\n{"q": 1},\n7]', ["a.json row 2", "a row is an object", "a number: 7"]),
        ("a.json", '[\n{"q": 1},\n{"q": "\\udc00x"}]', ["a.json row 2", "lone surrogate"]),
        ("a.json", '{"q": 1}', ["a.json", "a list of objects", "an object"]),
        ("a.json", '{"q": 1}\n{"q": 2}', ["a.json:2", "one object a line is called .jsonl"]),
        ("a.json", "[]", ["a.json", "no rows"]),
        ("a.csv", "q,a,q\n1,2,3\n", ["a.csv:1", "duplicate column 'q'"]),
        ("a.csv", "q,\n1,2\n", ["a.csv:1", "column 2 of the header has no name"]),
        ("a.csv", "q,a\n1,2\n3,4,5\n", ["a.csv:3", "3 values for 2 columns (q, a)"]),
        ("a.csv", "q,a\n1,2\n3\n", ["a.csv:3", "1 values for 2 columns"]),
        ("a.csv", 'q,a\n1,2\n"open,4\n5,6\n', ["a.csv:3", "broken CSV"]),
        ("a.csv", "q;a\n1;2\n", ["a.csv:1", "separated by commas"]),
        ("a.csv", "q,a\n", ["a.csv", "no rows"]),
        ("a.parquet", "q,a\n1,2\n", ["a.parquet", "not a parquet file"]),
        ("a.txt", "hello", ["a.txt", "'.txt'", ".jsonl, .json, .csv, .parquet"]),
    ],
)
def test_a_broken_file_is_answered_with_what_and_where(tmp_path, name, content, wanted):
    message = refused(written(tmp_path, name, content))
    for part in wanted:
        assert part in message


def test_a_missing_file_names_the_one_that_was_meant(tmp_path):
    written(tmp_path, "train.jsonl", '{"q": 1}')
    assert "Did you mean `train.jsonl`?" in refused(str(tmp_path / "trian.jsonl"))
    assert "no such file" in refused(str(tmp_path / "trian.parquet"))
    assert "there is no folder" in refused(str(tmp_path / "nowhere" / "train.jsonl"))


def test_folders_and_words_are_no_sources(tmp_path):
    assert "is a folder" in refused(str(tmp_path))
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read: Is a directory" in refused(str(tmp_path / "folder.json"))
    assert "neither a file" in refused("gsm8k")
    assert "neither a file" in refused("a/b/c")
    assert "neither a file" in refused("")


def test_a_hub_name_has_a_config_and_a_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, *, split, revision):
        calls.append((name, config, split, revision))
        if name == "no/where":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/where' doesn't exist\nmore")
        if name == "off/line":
            raise ConnectionError("Couldn't reach it")
        return datasets.Dataset.from_list([{"q": "x", "n": [1]}, {"q": "y", "n": []}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    wanted = [
        ("openai/gsm8k:main@test row 1", {"q": "x", "n": [1]}),
        ("openai/gsm8k:main@test row 2", {"q": "y", "n": []}),
    ]
    assert placed_rows("openai/gsm8k:main@test") == wanted
    assert [len(placed_rows(name)) for name in ("a/b", "a/b@dev", "a-1/b.c:d")] == [2, 2, 2]
    assert len(placed_rows("a/b", revision="1f0c")) == 2
    assert calls == [
        ("openai/gsm8k", "main", "test", None),
        ("a/b", None, "train", None),
        ("a/b", None, "dev", None),
        ("a-1/b.c", "d", "train", None),
        ("a/b", None, "train", "1f0c"),
    ]
    assert "doesn't exist" in refused("no/where")
    assert "task.data=FILE" in refused("off/line")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["fuzz.jsonl", "fuzz.json", "fuzz.csv"]),
    content=st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.text(alphabet='{}[]",:\\ud8\n\r\t 01eE-+.nulltrueNaN', max_size=60).map(str.encode),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_any_bytes_give_rows_or_a_value_error(tmp_path, name, content):
    source = written(tmp_path, name, content)
    try:
        placed = placed_rows(source)
    except ValueError as error:
        message = str(error)
    else:
        message = source
        assert placed
        for place, row in placed:
            assert place.startswith(source)
            assert row
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    assert source in message
    assert len(message.splitlines()) <= 6
