"""Chat templates, which come with a model and are programs: rendered within limits of time and size.

The library's environment for them is a sandbox (they reach no file and no attribute of Python's own), but one that
lets them loop and multiply texts for ever. Memory is not limited, since a limit would hold for the whole process; time
only in the main thread, which renders every template first.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinyrl.models.reading import reading
from tinyrl.models.tokens import disguised
from tinyrl.text import did_you_mean, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # for one rendering; an ordinary one takes 0.1 ms
MOST_CHARACTERS = 1_000_000  # of a template (the longest in use have 20,000), and of what it adds to the messages
DATE = "strftime_now"  # the clock that a template may ask; as a variable of task.chat_template, the day it shows


def template_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, variables: dict[str, Any], **options: Any
) -> str:
    """Render messages through the tokenizer's chat template, with stand-ins for the markers that their contents hold
    (tokens.py). Raises ValueError where the template refuses them, does not end, renders nothing or too much, or does
    not mention one of the `variables`.
    """
    template, roles = tokenizer.chat_template, ", ".join(message["role"] for message in messages[:8])
    for name in variables:  # giving one that is not mentioned would change nothing
        if name not in (mentioned := _names_in(tokenizer.get_chat_template())):
            unknown = f"this model's chat template has no variable `{shortened(name)}`"
            raise ValueError(f"task.chat_template: {unknown}.{did_you_mean(name, sorted(mentioned))}")
    if DATE in variables:
        options["chat_template"] = _clock(variables[DATE]) + tokenizer.get_chat_template(tools=variables.get("tools"))
        variables = {name: value for name, value in variables.items() if name != DATE}
    longest = sum(len(str(message.get("content") or "")) for message in messages) * 4 + MOST_CHARACTERS
    owner = repr(tokenizer.name_or_path) if tokenizer.name_or_path else "the model"
    with reading(f"the chat template of {owner} refuses messages with the roles {roles}"):
        if isinstance(template, str) and len(template) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(template):,} characters; at most {MOST_CHARACTERS:,} are read")
        messages, variables = disguised(tokenizer, messages), disguised(tokenizer, variables)
        try:  # around the limit: the time may be up while an error of the rendering leaves it
            with _time_limit():
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options, **variables)
        except _OutOfTime:
            raise ValueError(f"it does not end within {SECONDS:.0f} s") from None
        except MemoryError:
            raise ValueError("it takes more memory than there is") from None
        if not isinstance(text, str) or not text.strip():
            raise ValueError("it renders nothing")
        if len(text) > longest:
            raise ValueError(f"it makes {len(text):,} characters of them")
    return text


@lru_cache(maxsize=4)
def _names_in(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", template))


def asks_for_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template asks for today's date."""
    return DATE in str(tokenizer.chat_template)


def _clock(day: Any) -> str:
    """Return the start of a template in which strftime_now shows this day (written as 2026-11-25), at midnight; the
    library passes a template no function. Raises ValueError for anything else.
    """
    try:
        shown = date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f"task.chat_template: {DATE}={shortened(str(day))} is no date such as 2026-11-25") from None
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdeDFHIjmMpSTuUVwWxXyY"]
    filters = "".join(f"|replace('{code}', {json.dumps(shown.strftime(code))})" for code in codes)
    return f"{{% macro {DATE}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"


class _OutOfTime(BaseException):
    """Raised after SECONDS; not an Exception, since the template engine swallows those while it folds constants."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _OutOfTime after SECONDS, by a signal: it ends a long computation of the interpreter's own too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
