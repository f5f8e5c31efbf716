"""YAML as plain settings: what is read, what is refused with its line, and that what is written is read back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyrl.config.yaml_reader import dump_plain, parse_plain


def where(line: int | None) -> str:
    return f"f.yaml:{line}" if line else "f.yaml"


def parse(text: str) -> Any:
    return parse_plain(text, where)[0]


def refused(text: str) -> str:
    with pytest.raises(ValueError, match=r"f\.yaml") as caught:
        parse(text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5),
        ("1E3", 1000.0),
        ("-2.e+1", -20.0),
        ("5.0e-05", 5e-5),
        ("3", 3),
        ("-999999999999999999", 1 - 10**18),
        ("0xffffffffffffff", 2**56 - 1),
        ("1_000", 1000),
        ("yes", True),
        ("null", None),
        ("", None),
        ("# nothing", None),
        ("'5e-5'", "5e-5"),
        ("e5", "e5"),
        ("5e", "5e"),
        ("2024-01-01", "2024-01-01"),
        ("openai/gsm8k:main@train", "openai/gsm8k:main@train"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("{1a: b}", {"1a": "b"}),
        ('"caf\\u00e9 \\U0001F600"', "caf\u00e9 \U0001f600"),
    ],
)
def test_scalars_are_read_as_people_mean_them(text: str, value: Any):
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb: [1, 2\n", 3, "broken YAML"),
        ("a:\n\tb: 1\n", 2, "cannot start"),
        ("a: b: c\n", 1, "not allowed here"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: 1\nb: \x00\n", None, "broken YAML"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, "`a.b`"),
        ("a: [{b: 1, b: 2}]", 1, "`a.0.b`"),
        ("a: &x [1]\nb: *x\n", 2, "no aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "python/object/apply:os.system"),
        (f"a: {'9' * 5000}\n", 1, "18 digits"),
        ("a: 0b_\n", None, "broken YAML"),
        ("[" * 5000, None, "nested too deep"),
    ],
)
def test_what_is_refused_names_its_line(text: str, line: int | None, part: str):
    found = refused(text)
    assert found.startswith(f"{where(line)}: ")
    assert part in found


def test_aliases_that_would_fill_the_memory_are_answered_at_once():
    lines = ["l0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert refused("\n".join(lines)).startswith("f.yaml:2: broken YAML: *l0: a recipe has no aliases")


def test_every_key_knows_its_line():
    places = parse_plain("a: 1\nb:\n  c: 2\n  d:\n    - e: 3\n    - 4\n", where)[1]
    assert {key: int(place.split(":")[1]) for key, place in places.items()} == {
        "a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d.0": 5, "b.d.0.e": 5, "b.d.1": 6,
    }  # fmt: skip


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**15), 10**15)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | TEXT
    | st.sampled_from(["5e-5", "null", "=", "<<", "1:30", "2024-01-01", "~"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, PLAIN, max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_back(values: dict[str, Any]):
    text = dump_plain(values).encode("utf-8").decode("utf-8")
    assert parse(text) == values
    assert parse(dump_plain({"x": values, "y": values})) == {"x": values, "y": values}  # no alias
