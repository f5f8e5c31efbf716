"""The thoughts of a model's turn, from <think> to </think>: found, and left out of what is an answer."""

import re

_THOUGHT = re.compile(r"<think>|</think>")


def without_thoughts(text: str) -> str:
    """Replace the thoughts of a model's turn by spaces: nothing in them is an answer, or a call of a tool.

    A thought reaches from <think> to the next </think>, or from the beginning to a </think> that nothing opens (its
    opening is the prompt's). One that is not closed reaches to the end, if its <think> begins the turn or a line of it,
    as a prompt and a model's own token do; elsewhere it is a word of the answer.
    """
    shown = list[str]()
    at = 0
    start = None
    for tag in _THOUGHT.finditer(text):
        if tag.group() == "<think>":
            start = tag.start() if start is None else start
            continue
        if start is None and at > 0:  # a word: the turn's thoughts have ended
            continue
        begun = 0 if start is None else start
        shown += [text[at:begun], " " * (tag.end() - begun)]
        at = tag.end()
        start = None
    rest = text[at:]
    if start is not None:
        unclosed = re.search(r"(?m)^[ \t]*<think>", rest)
        if unclosed:
            rest = rest[: unclosed.start()] + " " * (len(rest) - unclosed.start())
    return "".join([*shown, rest])


def ends_in_thought(text: str) -> bool:
    """Return whether a model's turn ends in a thought that is not closed, as `without_thoughts` reads it."""
    behind = text.rpartition("</think>")[2]
    return re.search(r"(?m)^[ \t]*<think>", behind) is not None


def answer_in(text: str) -> str:
    """Return what a model's turn says outside of its thoughts; a turn without any as it is."""
    shown = without_thoughts(text)
    return text if shown == text else shown.strip()
