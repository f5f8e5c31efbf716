"""Text from a model: escaped, named where invisible, cut in the middle."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tinyrl.text import Excerpt, excerpt, one_line, text_html


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
