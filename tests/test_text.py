"""Text from a model: escaped, named where invisible, cut in the middle."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tinyrl.report.markup import text_html
from tinyrl.text import Excerpt, did_you_mean, excerpt, first_line, last_line, listed, number, one_line, shortened


def test_excerpt_keeps_both_ends() -> None:
    assert excerpt("short", 10) == Excerpt("short")
    assert excerpt("abcdefghijkl", 9) == Excerpt("abcdef", 3, "jkl")
    assert excerpt("1\n2\n3\n4\n5\n6\nend", 48, lines=6) == Excerpt("1\n2\n3\n4", 3, "6\nend")
    assert excerpt("1\n2\n3\n4\n5\n6\n7", 100, lines=6) == Excerpt("1\n2\n3\n4", 3, "6\n7")


@given(text=st.text(), limit=st.integers(3, 40))
def test_excerpt_and_text_html_hold_for_any_text(text: str, limit: int) -> None:
    cut = excerpt(text, limit, lines=6)
    assert len(cut.head) + cut.omitted + len(cut.tail) == len(text)
    assert cut.omitted >= 0
    assert text.startswith(cut.head)
    assert text.endswith(cut.tail)
    html = text_html(text)
    bare = re.sub(r'<span class="unseen">(ESC|U\+[0-9A-F]{4,6})(×\d+)?</span>', "", html)
    assert not set(bare) & set("<>\"'")
    assert "\u202e" not in html
    html.encode("utf-8")
    assert len(one_line(text, limit)) <= limit


def test_text_html_keeps_languages_and_joiners() -> None:
    assert text_html("سلام\u200cها 👩\u200d👧 日本\n\tx") == "سلام\u200cها 👩\u200d👧 日本\n\tx"
    assert text_html("a\r\nb\x1b\x1b\x1bc") == 'a\nb<span class="unseen">ESC×3</span>c'


def test_one_line_is_short_and_harmless() -> None:
    assert one_line("a\n  b\tc", 80) == "a b c"
    assert one_line("\x1b[31mred\u202e\ud800", 80) == "[ESC][31mred[U+202E][U+D800]"
    assert one_line("x" * 1_000_000, 10) == "xxxxxxxxx…"
    assert one_line("x" * 10, 10) == "x" * 10


def test_what_a_person_wrote_is_quoted_short_and_without_line_breaks() -> None:
    assert shortened("a\nb\x1b") == "a\\nb\\x1b"
    assert shortened("x" * 100) == "x" * 77 + "..."
    assert shortened("x" * 80) == "x" * 80


def test_an_error_of_a_library_is_one_line_of_it() -> None:
    error = RuntimeError("Error(s) in loading:\n\tsize mismatch for a  \n")
    assert first_line(error) == "Error(s) in loading:"
    assert last_line(error) == "size mismatch for a"
    assert first_line(KeyError()) == last_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("y" * 5000))) == 300


def test_the_nearest_name_is_meant_or_none() -> None:
    assert did_you_mean("learnin_rate", ["learning_rate", "seed"]) == " Did you mean `learning_rate`?"
    assert did_you_mean("zzz", ["learning_rate", "seed"]) == ""


def test_small_numbers_keep_the_digits_that_count():
    shown = {0.0: "0.000", 0.00012345: "0.000123", -0.0456: "-0.0456", 0.1: "0.100", 2.0: "2.000", -1234.5: "-1234.500"}
    assert {value: number(value) for value in shown} == shown
    assert number(0.75, decimals=4) == "0.7500"
    assert number(0.000123456, decimals=4) == "0.0001235"
    assert number(float("nan")) == "nan"


def test_a_list_of_names_from_a_file_is_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert listed(map(str, range(2000)), most=3) == "0, 1, 2 and 1,997 more"
    assert listed(["x" * 500, "\x1b"]) == f"{'x' * 37}..., \\x1b"
