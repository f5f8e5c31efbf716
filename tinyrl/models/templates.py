"""Chat templates, which come with a model and are programs: rendered within limits of time and size.

The library's environment for them is a sandbox (they reach no file and no attribute of Python's own), but one that
lets them loop and multiply texts for ever. Memory is not limited: a limit holds for the whole process, its other
threads and the children that these start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import date
from functools import lru_cache, partial
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
    """`messages` through the tokenizer's chat template, with stand-ins for the markers that their contents hold
    (tokens.py). Raises ValueError where the template refuses them, does not end, renders nothing or more than there is
    room for, or has not one of the `variables`.
    """
    if variables:
        _check_variables(tokenizer.get_chat_template(), tuple(variables))
    template, roles = tokenizer.chat_template, ", ".join(message["role"] for message in messages[:8])
    longest = sum(len(str(message.get("content") or "")) for message in messages) * 4 + MOST_CHARACTERS
    if DATE in variables:
        options["chat_template"] = _clock(variables[DATE]) + tokenizer.get_chat_template(tools=variables.get("tools"))
        variables = {name: value for name, value in variables.items() if name != DATE}
    owner = repr(tokenizer.name_or_path) if tokenizer.name_or_path else "the model"
    with reading(f"the chat template of {owner} refuses messages with the roles {roles}"):
        if isinstance(template, str) and len(template) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(template):,} characters; at most {MOST_CHARACTERS:,} are read")
        messages, variables = disguised(tokenizer, messages), disguised(tokenizer, variables)
        text = _limited(partial(tokenizer.apply_chat_template, messages, tokenize=False, **options, **variables))
        if not isinstance(text, str) or not text.strip():
            raise ValueError("it renders nothing")
        if len(text) > longest:
            raise ValueError(f"it makes {len(text):,} characters of them")
    return text


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


@lru_cache(maxsize=4)
def _check_variables(template: str, names: tuple[str, ...]) -> None:
    """ValueError for a variable that the template does not mention: giving it would change nothing."""
    mentioned = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in names:
        if name not in mentioned:
            unknown = f"this model's chat template has no variable `{shortened(name)}`"
            raise ValueError(f"task.chat_template: {unknown}.{did_you_mean(name, sorted(mentioned))}")


class _OutOfTime(BaseException):
    """Raised after SECONDS; not an Exception, since the template engine swallows those while it folds constants."""


def _limited(render: Callable[[], object]) -> object:
    """Return `render()`. Raises ValueError when it takes longer than SECONDS, or more memory than there is."""
    try:  # around the limit: the time may be up while an error of `render` leaves it
        with _alarm() if threading.current_thread() is threading.main_thread() else _timer():
            return render()
    except _OutOfTime:
        raise ValueError(f"it does not end within {SECONDS:.0f} s") from None
    except MemoryError:
        raise ValueError("it takes more memory than there is") from None


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Raise _OutOfTime by a signal, which ends a long computation of the interpreter's own too (main thread only)."""

    def ring(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _timer() -> Iterator[None]:
    """Raise _OutOfTime in the calling thread, between two of its steps."""
    caller, ended, lock = threading.get_ident(), threading.Event(), threading.Lock()

    def ring() -> None:
        with lock:
            if not ended.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(caller), ctypes.py_object(_OutOfTime))

    timer = threading.Timer(SECONDS, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended.set()
        timer.cancel()
