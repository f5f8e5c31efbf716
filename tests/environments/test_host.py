"""The host of a person's environment: what it answers is cut before it travels."""

from typing import Any

from tinyrl.environments.host import MAX_TEXT_CHARS, environment


class Talks:
    """Says megabytes before the first turn."""

    def reset(self, **row: Any) -> str:
        return "x" * (3 * MAX_TEXT_CHARS)

    def look(self) -> str:
        """Look."""
        return "nothing"


def test_an_opening_text_is_cut_in_the_worker():
    texts, problems = environment([Talks]).calls["opening"]({"prompts": ["p"], "seed": [0]}, 1)
    assert [len(text) for text in texts] == [MAX_TEXT_CHARS]
    assert not problems
