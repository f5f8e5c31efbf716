"""Text from a model: escaped, named where invisible, cut in the middle."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyrl.data.thoughts import answer_in, ends_in_thought, without_thoughts
from tinyrl.formatting import format_bytes, format_clock, format_number, format_seconds, format_short, typeset_number
from tinyrl.text import Excerpt, excerpt, hang, one_line
from tinyrl.tools.report import text_html
from tinyrl.urls import mask_url, resolve_url


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("<think>so far", True),
        ("<think>a</think>b", False),
        ("<think>a</think>b\n <think>c", True),
        ("a</think>b", False),
        ("I write <think> here", False),
        ("b", False),
    ],
)
def test_a_turn_ends_in_a_thought_that_is_not_closed(text: str, *, ends: bool) -> None:
    assert ends_in_thought(text) == ends
    assert without_thoughts(text + "x").endswith("x") == (not ends)


def test_a_text_is_broken_between_words_behind_its_indent() -> None:
    assert hang("one two three", 10, start="name  ", indent="      ") == "name  one\n      two\n      three"
    assert hang("one two three", 13) == "one two three"
    assert hang("one two three", 12) == "one two\n  three"


def test_a_text_without_a_width_stays_one_line() -> None:
    assert hang("one two three", None, start="name  ") == "name  one two three"


def test_excerpt_keeps_both_ends() -> None:
    assert excerpt("short", 10) == Excerpt("short")
    assert excerpt("abcdefghijkl", 9) == Excerpt("abcdef", 3, "jkl")
    assert excerpt("1\n2\n3\n4\n5\n6\nend", 48, lines=6) == Excerpt("1\n2\n3\n4", 3, "6\nend")
    assert excerpt("1\n2\n3\n4\n5\n6\n7", 100, lines=6) == Excerpt("1\n2\n3\n4", 3, "6\n7")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>maybe 42, no", ""),  # cut off
        ("<think>a</think>7", "7"),
        ("maybe 42, no</think>7", "7"),  # the prompt has opened it
        ("x 42 <think>hm</think> y", "x 42                   y"),
        ("<think>a</think>\n\n<think>b", ""),
        ("ok\n <think>\nmaybe", "ok"),
        ("<think>a<think>b</think>c", "c"),
        # words of an answer
        ("use <think> please", "use <think> please"),
        ("<think>a</think>x</think>y", "x</think>y"),
        (" 7 ", " 7 "),
    ],
)
def test_an_answer_is_what_is_said_outside_of_thoughts(text: str, shown: str) -> None:
    assert answer_in(text) == shown
    assert len(without_thoughts(text)) == len(text)


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


def test_one_line_is_short_and_harmless() -> None:
    assert one_line("a\n  b\tc", 80) == "a b c"
    assert one_line("\x1b[31mred\u202e\ud800", 80) == "[ESC][31mred[U+202E][U+D800]"
    assert one_line("x" * 1_000_000, 10) == "xxxxxxxxx…"
    assert one_line("x" * 10, 10) == "x" * 10


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://me:hunter2@host/x", "http://***@host/x"),
        ("http://hunter2@host", "http://***@host"),
        ("http://me:hunt@er2@host:1/x@y", "http://***@host:1/x@y"),
        ("http://host/@me/x", "http://host/@me/x"),
        ("https://host/x?api_key=hunter2&k=hunter2", "https://host/x?api_key=***&k=***"),
        ("https://host/x?hunter2", "https://host/x?***"),
        ("https://host/x?a=hunter2?hunter2", "https://host/x?a=***"),
        ("corpus.jsonl?a=b", "corpus.jsonl?a=b"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str):
    assert mask_url(url) == mask_url(shown) == shown
    assert mask_url(f"({url}) at '{url}', sorry") == f"({shown}) at '{shown}', sorry"


def test_what_was_taken_from_a_url_is_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    name, shown = "TINYRL_GENERATION_URL", "http://***@host/v1?key=***"
    assert resolve_url("http://me:a@host", setting="generation.url") == "http://me:a@host"
    monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=name):
        resolve_url(shown, setting="generation.url")
    for wrong in ("http://me:hunter2@other/v1?key=b", "http://me:hunter2@host/v1", shown):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ValueError, match=name) as caught:
            resolve_url(shown, setting="generation.url")
        assert "hunter2" not in str(caught.value)
    monkeypatch.setenv(name, "http://me:a@host/v1?key=b")
    assert resolve_url(shown, setting="generation.url") == "http://me:a@host/v1?key=b"


# ---- numbers ----


def test_numbers_are_typeset_as_people_read_them() -> None:
    shown = {
        0.0: "0", 1.0: "1", 0.0314: "0.0314", 0.9996: "1.00", 9.996: "10.0", -1.284: "\u22121.28", 99.96: "100",
        4215.4: "4,215", 0.00071: "7.1e\u22124", 5e-5: "5e\u22125", -4.4e-17: "0", 2.5e12: "2.5e12", math.nan: "–",
    }  # fmt: skip
    assert {value: typeset_number(value) for value in shown} == shown


def test_a_share_has_one_decimal_of_a_per_cent() -> None:
    shown = {0.0: "0 %", 0.0004: "< 0.1 %", 0.0312: "3.1 %", 0.5: "50 %", 1.0: "100 %"}
    assert {value: typeset_number(value, share=True) for value in shown} == shown


def test_a_result_has_fixed_decimals_but_for_small_ones_and_counts() -> None:
    shown = {0.75: "0.750", 1.0: "1.000", 0.000456: "0.000456", -2.34567: "-2.346", 0.0: "0.000", math.nan: "-"}
    assert {value: format_number(value) for value in shown} == shown
    assert format_number(512) == "512"
    assert format_number(None, missing="unknown") == "unknown"


def test_only_a_difference_has_a_plus_sign() -> None:
    assert [format_number(value, signed=True) for value in (0.5, 0.0, -0.5)] == ["+0.500", "+0.000", "-0.500"]


def test_short_numbers_have_three_digits() -> None:
    shown = {0.01234: "0.0123", 0.5: "0.5", 3.0: "3", 999.4: "999", 1234.5: "1,234", math.nan: "-"}
    assert {value: format_short(value) for value in shown} == shown


def test_durations_grow_from_seconds_to_hours() -> None:
    shown = {8.4: "8.40 s", 59.94: "59.9 s", 92.0: "1 min 32 s", 7500.0: "2 h 05 min"}
    assert {value: format_seconds(value) for value in shown} == shown
    assert [format_clock(seconds) for seconds in (5, 125, 3725)] == ["00:05", "02:05", "1:02:05"]


def test_bytes_are_decimal() -> None:
    assert [format_bytes(count) for count in (300_000, 1_500_000_000)] == ["0.3 MB", "1.50 GB"]
