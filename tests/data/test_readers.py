"""Readers of rows: what good files give, and where a broken one is broken."""

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinyrl.data.readers import plain_row
from tinyrl.data.sources import placed_rows


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", '{"q": "1", "n": 2}\n\n  \n{"q": "\u2028two\x85", "n": [true, null]}\r\n',
         [(":1", {"q": "1", "n": 2}), (":4", {"q": "\u2028two\x85", "n": [True, None]})]),
        ("a.json", '\n[{"q": "[,{"},\n\n {"q":\n"b"}\n]\n', [(" row 1", {"q": "[,{"}), (" row 2", {"q": "b"})]),
        ("a.csv", 'q,answer\n"two\nlines, ""quoted""",1\n\nlast,\n',
         [(":3", {"q": 'two\nlines, "quoted"', "answer": "1"}), (":5", {"q": "last", "answer": None})]),
        ("a.csv", f"q\r\n{'x' * 1_000_000}\r\n", [(":2", {"q": "x" * 1_000_000})]),
        *[(name, b"\xef\xbb\xbf" + text.encode(), [(place, {"q": "é"})]) for name, text, place in
          [("a.jsonl", '{"q": "é"}', ":1"), ("a.json", '[{"q": "é"}]', " row 1"), ("a.csv", "q\né", ":2")]],
    ],
)  # fmt: skip
def test_rows_of_a_text_file_and_their_places(tmp_path: Path, name: str, content: str | bytes, rows: list) -> None:
    source = written(tmp_path, name, content)
    assert placed_rows(source) == [(source + place, row) for place, row in rows]


def test_the_first_rows_of_every_format_are_those_of_the_whole(tmp_path: Path) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    rows = [{"q": text, "names": [text]} for text in ("one", 'two\n"lines', "", "four")]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "both"))
    parquet.write_table(data.data.table, str(tmp_path / "a[1].parquet"))
    written(tmp_path, "a.json", json.dumps(rows))
    written(tmp_path, "a.jsonl", "\n\n".join(map(json.dumps, rows)))
    for name in ("saved", "both", "a[1].parquet", "a.json", "a.jsonl"):
        placed = placed_rows(str(tmp_path / name))
        assert [row for _, row in placed] == rows
        for most in (1, 3, 9):
            assert placed_rows(str(tmp_path / name), most=most) == placed[:most]
    assert placed_rows(str(tmp_path / "a[1].parquet"))[1][0] == f"{tmp_path}/a[1].parquet row 2"
    assert [row for _, row in placed_rows(str(tmp_path / "both" / "test"))] == rows[:1]


def test_no_line_behind_the_first_rows_is_decoded(tmp_path: Path) -> None:
    source = written(tmp_path, "a.csv", b"q\n1\n" + b"\xff" * 10)
    assert placed_rows(source, most=1)[0][1] == {"q": "1"}
    with pytest.raises(ValueError, match=r"a\.csv:3: not UTF-8"):
        placed_rows(source)


CHAT = '[{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize("column", ["prompt", "completion", "chosen", "rejected"])
@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (CHAT, [{"role": "user", "content": "hi"}]),
        (' [{"from": "human", "value": "hi"}]\n', [{"from": "human", "value": "hi"}]),
        ('[{"role": "assistant", "tool_calls": []}]', [{"role": "assistant", "tool_calls": []}]),
        *[(text, text) for text in ("hi", "[1, 2]", "[]", '["hi"]', '[{"role": "user"}]', '{"role": 1, "content": 2}')],
        *[(text, text) for text in (f"{CHAT} {CHAT}", f"Read {CHAT}", CHAT[:-1], '[{"name": "x", "value": 1}]', "7")],
    ],
)
def test_a_chat_in_a_cell_of_a_csv_is_read_as_messages(tmp_path: Path, column: str, cell: str, value: Any) -> None:
    cells = cell.replace('"', '""')
    ((_, row),) = placed_rows(written(tmp_path, "a.csv", f'{column},other\n"{cells}","{cells}"\n'))
    assert row == {column: value, "other": cell}
    ((_, row),) = placed_rows(written(tmp_path, "b.CSV", f'old\n"{cells}"\n'), columns={column: "old"})
    assert row == {column: value}
    ((_, row),) = placed_rows(written(tmp_path, "a.jsonl", json.dumps({column: cell})))
    assert row == {column: cell}


def test_half_of_a_character_in_a_chat_of_a_csv_is_refused(tmp_path: Path) -> None:
    cell = CHAT.replace("hi", "\\ud83d").replace('"', '""')
    with pytest.raises(ValueError, match=r"a\.csv:3.*'prompt'.*surrogate"):
        placed_rows(written(tmp_path, "a.csv", f'prompt\nhi\n"{cell}"\n'))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": "cut o', ["a.jsonl:2", "broken JSON at column 7"]),
        ("a.jsonl", '{"q": 1}\n[1, 2]\n', ["a.jsonl:2", "[1, 2]"]),
        ("a.jsonl", '{"q": 1}\n{"q": NaN}\n', ["a.jsonl:2", "NaN"]),
        ("a.jsonl", '{"q": 1e308}\n{"q": 1e999}\n', ["a.jsonl:2", "1e999"]),
        ("a.jsonl", '{"q": [-1e999]}\n', ["a.jsonl:1", "-1e999"]),
        ("a.json", '[{"q": Infinity}]', ["a.json:1", "Infinity"]),
        ("a.jsonl", '{"q": ' + "9" * 5000 + "}\n", ["a.jsonl:1", "digits"]),
        ("a.jsonl", '{"q": 1}\n' + "[" * 200_000 + "\n", ["a.jsonl:2", "recursion"]),
        ("a.jsonl", '{"q": 1}\n{"q": 1, "a": 2, "q": 1}\n', ["a.jsonl:2", "'q'", "twice"]),
        ("a.jsonl", '{"q": [{"role": "user", "content": "a", "content": "b"}]}', ["a.jsonl:1", "'content'", "twice"]),
        ("a.json", '[{"q": {"a": 1, "a": 2}}]', ["a.json:1", "'a'", "twice"]),
        ("a.csv", 'prompt\n"[{""role"": ""user"", ""content"": ""a"", ""content"": ""b""}]"\n',
         ["a.csv:2", "'prompt'", "'content'", "twice"]),
        ("a.jsonl", '{"q": 1}'.encode("utf-16"), ["a.jsonl:1", "UTF-8"]),
        ("a.jsonl", " \n\n", ["a.jsonl", "empty"]),
        ("a.json", '[\n{"q": 1},\n{"q": }\n]', ["a.json:3", "broken JSON at column 7"]),
        ("a.json", '[\n{"q": 1},\n7]', ["a.json row 2"]),
        ("a.json", '{"q": 1}\n{"q": 2}', ["a.json:2"]),
        ("a.csv", "q,a\n1,2\n3,4,5\n", ["a.csv:3", "2 values"]),
        ("a.csv", 'q,a\n1,2\n"open,4\n5,6\n', ["a.csv:4", "broken CSV"]),
        ("a.csv", "q,answer,answer\n1,2,3\n", ["a.csv:1", "'answer'"]),
        ("a.jsonl", '{"q": "fine \\ud83d\\ude00"}\n{"q": ["half \\ud83d"]}\n', ["a.jsonl:2", "'q'", "surrogate"]),
        ("a.json", '[{"q": {"\\udc00": 1}}]', ["a.json row 1", "'q'", "surrogate"]),
        ("a.parquet", "q,a\n1,2\n", ["a.parquet", "not a parquet file"]),
        ("a.txt", "hello", ["a.txt", ".jsonl, .json, .csv, .parquet"]),
    ],
)  # fmt: skip
def test_an_error_in_a_file_names_its_place(tmp_path: Path, name: str, content: str | bytes, wanted: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        placed_rows(written(tmp_path, name, content))
    assert [part for part in wanted if part not in str(caught.value)] == []
    assert len(str(caught.value)) < 400


def test_values_of_a_table_become_json(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    day, noon = datetime.date(2026, 11, 28), datetime.datetime(2026, 11, 28, 12, 30)
    row = {
        "day": day,
        "noon": noon,
        "in_zone": noon.replace(tzinfo=datetime.UTC),
        "at": datetime.time(12, 30),
        "price": decimal.Decimal("1.50"),
        "count": decimal.Decimal("7.00"),
        "spent": [{"on": day}],
        "no": None,
        "missing": math.nan,
        "scores": [0.5, math.nan],
        "least": -math.inf,
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), str(tmp_path / "a.parquet"))
    [(_, read)] = placed_rows(str(tmp_path / "a.parquet"))
    assert read == {
        "day": "2026-11-28",
        "noon": "2026-11-28T12:30:00",
        "in_zone": "2026-11-28T12:30:00+00:00",
        "at": "12:30:00",
        "price": 1.5,
        "count": 7,
        "spent": [{"on": "2026-11-28"}],
        "no": None,
        "missing": None,
        "scores": [0.5, None],
        "least": -math.inf,
    }
    assert plain_row(row, "row 1") == read
    assert json.loads(json.dumps(read)) == read
    assert plain_row({"missing": decimal.Decimal("NaN")}, "row 1") == {"missing": None}


@pytest.mark.parametrize("value", [b"x", {"bytes": b"x", "path": None}, [bytearray(b"x")]])
def test_bytes_are_refused_by_the_name_of_their_column(tmp_path: Path, value: Any) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with pytest.raises(ValueError, match="row 1: column 'picture' holds bytes"):
        plain_row({"q": "x", "picture": value}, "row 1")
    if isinstance(value, bytes):
        parquet.write_table(pyarrow.Table.from_pylist([{"picture": value}]), str(tmp_path / "a.parquet"))
        with pytest.raises(ValueError, match=r"a\.parquet row 1: column 'picture' holds bytes"):
            placed_rows(str(tmp_path / "a.parquet"))


def test_sources_that_do_not_exist(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", '{"q": 1}')
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"train\.jsonl`"):
        placed_rows(f"{tmp_path}/trian.jsonl")
    for source in (f"{tmp_path}", f"{tmp_path}/folder.json", "gsm8k", ""):
        with pytest.raises(ValueError, match=r"no such file|hub name"):
            placed_rows(source)


def test_a_hub_name_has_a_config_and_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, *, split, revision):
        calls.append((name, config, split, revision))
        if name == "no/where":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/where' doesn't exist\nmore")
        return datasets.Dataset.from_list([{"q": "x", "n": [1]}, {"q": "y", "n": []}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    name = "openai/gsm8k:main@test"
    assert placed_rows(name) == [(f"{name} row 1", {"q": "x", "n": [1]}), (f"{name} row 2", {"q": "y", "n": []})]
    assert len(placed_rows("a-1/b.c@dev", revision="1f0c")) == len(placed_rows("a/b")) == 2
    assert calls == [
        ("openai/gsm8k", "main", "test", None),
        ("a-1/b.c", None, "dev", "1f0c"),
        ("a/b", None, "train", None),
    ]
    with pytest.raises(ValueError, match=r"doesn't exist.*task\.data=FILE"):
        placed_rows("no/where")


@pytest.mark.parametrize(
    ("row", "columns", "wanted"),
    [
        ({"p": "p", "answer": "long", "final": "7"}, {"q": "p", "answer": "final"}, {"q": "p", "answer": "7"}),
        ({"a": 1, "b": 2, "c": 3}, {"a": "b", "b": "a"}, {"a": 2, "b": 1, "c": 3}),
        ({"r": {"truth": {"x": "7"}}, "a.b": 1}, {"answer": "r.truth.x", "n": "a.b"},
         {"r": {"truth": {"x": "7"}}, "answer": "7", "n": 1}),
        ({"problme": "p"}, {"q": "problem"}, "a.jsonl:1: no column 'problem'.*Did you mean `problme`.*: problme"),
        ({"r": {"truth": {"x": "7"}}}, {"a": "r.truth.x.y"}, "a.jsonl:1: no column"),
    ],
)  # fmt: skip
def test_columns_are_renamed_also_keys_inside_one(tmp_path: Path, row: dict, columns: dict, wanted: dict | str) -> None:
    source = written(tmp_path, "a.jsonl", json.dumps(row))
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            placed_rows(source, columns=columns)
    else:
        assert placed_rows(source, columns=columns) == [(f"{source}:1", wanted)]
