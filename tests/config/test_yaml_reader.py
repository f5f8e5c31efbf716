"""YAML as plain settings: values, refusals with their line, and that dumps are read back."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyrl.config.recipe import read_recipe
from tinyrl.config.yaml_reader import dump_plain, parse_plain, parse_with_lines


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5),
        ("1E3", 1000.0),
        ("-999999999999999999", 1 - 10**18),
        ("010", 10),
        ("-08", -8),
        ("0o17", 15),
        ("0x1f", 31),
        ("1.", 1.0),
        (".5", 0.5),
        (".inf", math.inf),
        ("true", True),
        ("FALSE", False),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("yes", "yes"),
        ("off", "off"),
        ("", None),
        ("a: ", {"a": None}),
        ("# nothing", None),
        ("e5", "e5"),
        ("2024-01-01", "2024-01-01"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
    ],
)
def test_scalars_are_parsed_as_people_mean_them(text: str, value: Any):
    assert parse_plain(text, "f.yaml") == value
    assert type(parse_plain(text, "f.yaml")) is type(value)


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("a: 1\nb: [1, 2\n", "f.yaml:3: ", "broken YAML"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: ", "another document"),
        ("a: [{b: 1, b: 2}]", "f.yaml:1: ", "`b`"),
        ("a: 1\nb: 2\nc: 3\nb: 4\n", "f.yaml:4: ", "`b` .* line 2"),
        ("a: &x [1]\nb: *x\n", "f.yaml:2: ", "no aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml:1: ", "python/object/apply:os.system"),
        (f"a: {'9' * 5000}\n", "f.yaml: ", "digits"),
        ("[" * 5000, "f.yaml: ", "nested too deep"),
    ],
)
def test_other_documents_are_refused_with_their_line(text: str, place: str, part: str):
    with pytest.raises(ValueError, match=part) as caught:
        parse_plain(text, "f.yaml")
    assert str(caught.value).startswith(place)
    assert "\n" not in str(caught.value)


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**15), 10**15)
ODD = st.sampled_from(["5e-5", "null", "=", "<<", "1:30", "2024-01-01", "~", "010", "0o17", "1_000", "yes", "x\x85y"])
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, PLAIN, max_size=4))
@settings(max_examples=75, deadline=None)
def test_a_dump_is_read_back(values: dict[str, Any]):
    whole = {"x": values, "y": values}  # no alias
    assert parse_plain(dump_plain(whole).encode().decode(), "f.yaml") == whole


def test_every_key_has_its_line():
    text = "a: 1\nb:\n  c: 2\n  d:\n    - {e: 3}\n    - f: 4\n"
    value, lines = parse_with_lines(text, "f.yaml")
    assert value == {"a": 1, "b": {"c": 2, "d": [{"e": 3}, {"f": 4}]}}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d[0]": 5, "b.d[0].e": 5, "b.d[1]": 6, "b.d[1].f": 6}


def test_a_file_is_read_as_it_is_now_whatever_became_of_earlier_values(tmp_path: Path):
    file = tmp_path / "f.yaml"
    file.write_text("a: {b: [1]}")
    read_recipe(file)["a"]["b"].append(2)
    assert read_recipe(file) == {"a": {"b": [1]}}
    file.write_text("a: {b: [3]}")
    assert read_recipe(file) == {"a": {"b": [3]}}
