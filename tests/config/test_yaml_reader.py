"""YAML as plain settings: what is read, what is refused with its line, and that what is written is read back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyrl.config.yaml_reader import Source, dump_plain, parse_plain


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
        ("!!str 5", None),
        ("e5", "e5"),
        ("5e", "5e"),
        ("a.jsonl", "a.jsonl"),
        ("openai/gsm8k:main@train", "openai/gsm8k:main@train"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("{1a: b}", {"1a": "b"}),
        ('"caf\\u00e9 \\U0001F600"', "caf\u00e9 \U0001f600"),
    ],
)
def test_scalars_are_read_as_people_mean_them(text: str, value: Any):
    if text == "!!str 5":
        assert "marked as 'str'" in refused(text)
    else:
        assert parse(text) == value
        assert type(parse(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: [1, 2\n", "f.yaml:3: broken YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "a:\n\tb: 1\n",
            "f.yaml:2: broken YAML: found character '\\t' that cannot start any token; "
            "indent with spaces, not with tabs, near 'b: 1'",
        ),
        (
            "a: b: c\n",
            "f.yaml:1: broken YAML: mapping values are not allowed here; "
            "put text with a colon in quotes, near 'a: b: c'",
        ),
        ("a: 1\n b: 2\n", "f.yaml:2: broken YAML: mapping values are not allowed here; put text with a colon in"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: broken YAML: but found another document, near '---'"),
        ("a: 1\nb: \x00\n", "f.yaml:2: broken YAML: unacceptable character #x0000: special characters"),
        ("a: 1\na: 2\n", "f.yaml:2: `a` stands twice (first at f.yaml:1)"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "f.yaml:4: `a.b` stands twice (first at f.yaml:2)"),
        ("a: [{b: 1, b: 2}]", "f.yaml:1: `a.0.b` stands twice (first at f.yaml:1)"),
        ("a: &x [1]\nb: *x\n", "f.yaml:2: broken YAML: *x: a recipe has no aliases, write the value itself, near"),
        ("a: &x [*x]\n", "f.yaml:1: broken YAML: *x: a recipe has no aliases"),
        ("<<: {a: 1}\n", "f.yaml:1: a key is a name, and '<<' is read as merge; put it in quotes"),
        ("a: 2024-01-01\n", "f.yaml:1: '2024-01-01' is a date; put text in quotes"),
        ("a: 2024-99-99\n", "f.yaml:1: '2024-99-99' is a date; put text in quotes"),
        ("a: =\n", "f.yaml:1: '=' is a YAML sign; put text in quotes"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml:1: the tag python/object/apply:os.system is marked as"),
        ("a: !thing x\n", "f.yaml:1: 'x' is marked as '!thing'; put text in quotes"),
        ("a: !!bool maybe\n", "f.yaml:1: 'maybe' is marked as 'bool'; put text in quotes"),
        ('a: !!int ""\n', "f.yaml:1: '' is marked as 'int'; put text in quotes"),
        ("a: !!set {b}\n", "f.yaml:1: the tag set is marked as 'set'"),
        ("1: a\n", "f.yaml:1: a key is a name, and '1' is read as int; put it in quotes"),
        ("null: a\n", "f.yaml:1: a key is a name, and 'null' is read as null; put it in quotes"),
        ("a:\n  on: 1\n", "f.yaml:2: a key is a name, and 'on' is read as bool; put it in quotes"),
        ("? [a, b]\n: c\n", "f.yaml:1: a key is a name, and this one is read as seq; put it in quotes"),
        (f"a: {'9' * 5000}\n", f"f.yaml:1: the number {'9' * 77}... has more than 18 digits"),
        ("a: 1000000000000000000\n", "f.yaml:1: the number 1000000000000000000 has more than 18 digits"),
        ("a: 0xfffffffffffffff\n", "f.yaml:1: the number 0xfffffffffffffff has more than 18 digits"),
        ("a: 0b_\n", "f.yaml: broken YAML: invalid literal for int() with base 2: ''"),
        ('a: "\\ud800"\n', "f.yaml:1: invalid Unicode (lone surrogate) in '\\ud800'"),
        ("a: " + "[" * 20 + "]" * 20, "f.yaml:1: nested too deep"),
        ("[" * 5000, "f.yaml: broken YAML: nested too deep"),
    ],
)
def test_what_is_refused_names_its_line(text: str, sentence: str):
    assert refused(text).startswith(sentence)


def test_aliases_that_would_fill_the_memory_are_answered_at_once():
    lines = ["l0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert refused("\n".join(lines)).startswith("f.yaml:2: broken YAML: *l0: a recipe has no aliases")


def test_every_key_knows_its_line():
    places = parse_plain("a: 1\nb:\n  c: 2\n  d:\n    - e: 3\n    - 4\n", where)[1]
    assert {key: int(place.split(":")[1]) for key, place in places.items()} == {
        "a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d.0": 5, "b.d.0.e": 5, "b.d.1": 6,
    }  # fmt: skip


def test_a_source_knows_where_and_what():
    source = Source("f.yaml", {"a": {"b": [{"c": 1}]}}, {"a": "f.yaml:1", "a.b.0": "f.yaml:3", "x.y": "f.yaml:9"})
    assert source.place(("a", "b", 0, "c")) == "f.yaml:3"
    assert source.place(("a", "z")) == "f.yaml:1"
    assert source.place(("x",)) == "f.yaml:9"  # nobody wrote x itself
    assert source.place(("nothing",)) == "f.yaml"
    assert source.value(("a", "b", 0, "c")) == 1
    assert source.value(("a", "b", 7, "c")) is None
    assert source.value(("a", "b", "c")) is None


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


def test_the_same_list_twice_is_written_twice():
    shared = ["a"]
    assert parse(dump_plain({"x": shared, "y": shared})) == {"x": ["a"], "y": ["a"]}
