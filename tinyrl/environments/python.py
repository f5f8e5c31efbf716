"""A Python interpreter as an environment: the code of each turn is run in the sandbox and answered with its output.

A turn calls it with a ```python block (the last one counts), or with
`<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>` (again the last one); a turn with neither ends
the episode. As in a notebook, names stay from turn to turn, and the value of a trailing expression is shown; an error
is its last line with the line of the cell. There is the standard library and no installed package.

Nothing lives between two turns: each answer comes from a fresh sandbox in which the episode's earlier cells are run
again, their output discarded, before the new one. To reach the same state, `random` is seeded with the episode's seed;
the clock and os.urandom are not. A cell that was stopped (its answer is one of the sentences STOPPED) is not run again.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.environments import Reply, Transcript, last_turn
from tinyrl.environments.cells import FINISHED
from tinyrl.environments.tool_calls import CLOSE, calls_of
from tinyrl.runs.signals import check_stop
from tinyrl.text import excerpt, name_unseen
from tinyrl.workers.sandbox import Limits, python_block, run_program, why_not_isolated

PROGRAM = Path(__file__).with_name("cells.py").read_text(encoding="utf-8")
STOP, ASKS = (), "```python\nprint(1 + 1)\n```\n"
MEMORY_GB = 0.5
CHARS_A_TOKEN = 2  # of an output: more of it are numbers than words
MAX_WORKERS = 32
OUTPUT_BYTES = 8 << 20  # that a cell may print before it is stopped

TIMED_OUT = "Timed out: the code ran too long and was stopped. Nothing of it was kept."
OUT_OF_MEMORY = "Out of memory: the code was stopped. Nothing of it was kept."
TOO_MUCH_OUTPUT = "Too much output: the code was stopped. Nothing of it was kept."
CRASHED = "Crashed: the code ended the Python process. Nothing of it was kept."
STOPPED = {  # by the sandbox's reason
    "timed out": TIMED_OUT,
    "out of CPU time": TIMED_OUT,
    "out of memory": OUT_OF_MEMORY,
    "output too long": TOO_MUCH_OUTPUT,
    "": CRASHED,
}
KNOWN_BY = 24  # characters at the start of each, which remain when an answer is cut to a number of tokens
NO_OUTPUT = "(no output)"
UNREADABLE = 'The call could not be read. It has to be JSON: {"name": "python", "arguments": {"code": "..."}}'


def opened(config: EnvironmentConfig, *, length: Callable[[str], int]) -> tuple[Callable[..., Any], str]:
    """Return the function that answers, and its description."""
    check_available()
    most = CHARS_A_TOKEN * config.max_observation_tokens
    about = f"in the sandbox, {config.seconds:g} s and {MEMORY_GB:g} GB a cell"
    return functools.partial(respond, timeout_s=config.seconds, max_output_chars=most), about


def check_available() -> None:
    """Raise ValueError where programs cannot be isolated, with the reason."""
    if why_not := why_not_isolated():
        raise ValueError(
            f"The environment `python` runs the policy's code in a sandbox, which this system does not allow: "
            f"{why_not}. It takes Linux 5.13 or later with Landlock and seccomp, on x86_64 or aarch64."
        )


def respond(
    prompts: Sequence[Any],
    transcripts: Sequence[Transcript],
    *,
    seed: Sequence[int] | None = None,
    timeout_s: float = 5.0,
    memory_gb: float = MEMORY_GB,
    max_output_chars: int = 1000,
    **columns: Any,
) -> list[Reply | None]:
    """Answer the last turn of each transcript; None where it calls nothing. One process each, one per core at a time.

    timeout_s is for the new cell, and as much again for each cell that is run before it; memory_gb for the process; of
    an output, max_output_chars remain, from its head and its tail. A batch of endless first cells takes
    timeout_s * episodes / cores. Raises ValueError for a limit that cannot be kept, and without the sandbox.
    """
    calls = [call_in(last_turn(transcript)) for transcript in transcripts]
    if any(call and call[0] is not None for call in calls):
        check_available()

    def answer(place: int) -> Reply | None:
        check_stop()
        prompt, transcript, call = prompts[place], transcripts[place], calls[place]
        if call is None:
            return None
        code, in_block = call
        if code is None:
            return Reply(UNREADABLE, invalid=True)
        cells, seeded = [*kept_cells(transcript), code], int(seed[place] if seed else 0)
        wall_s = timeout_s * len(cells)
        limits = Limits(wall_s, math.ceil(wall_s), memory_bytes=int(memory_gb * (1 << 30)), output_bytes=OUTPUT_BYTES)
        # As a literal in ASCII: text of any kind arrives, and json need not be imported over there.
        run = f"run({cells!a}, seed={seeded}, timeout_s={float(timeout_s)})"
        outcome = run_program(f"{PROGRAM}\n{run}\n", limits=limits)
        if outcome.ok and outcome.stderr.startswith(FINISHED):
            parts = outcome.stdout.replace("\r\n", "\n").removesuffix("\n"), outcome.stderr.removeprefix(FINISHED)
            output = "\n".join(filter(None, parts))
            output = cut(output if output.strip() else NO_OUTPUT, max_output_chars)
        else:
            output = STOPPED.get(outcome.reason, CRASHED)  # whole, since it marks the cell
        if not in_block:
            return Reply(output)
        line_is_open = isinstance(prompt, str) and not last_turn(transcript).endswith("\n")
        return Reply("\n" * line_is_open + fenced(output))

    with ThreadPoolExecutor(max_workers=_workers()) as pool:
        return list(pool.map(answer, range(len(calls))))


def call_in(turn: str) -> tuple[str | None, bool] | None:
    """Return the code of a turn's last tool call (None: it could not be parsed), or else that of its last complete
    ```python block, and whether it is a block; None if the turn calls nothing.
    """
    calls = calls_of({"content": turn + CLOSE})  # also of a turn that ended before its call was closed
    if not calls:
        block = python_block(turn)
        return None if block is None else (block, True)
    code = calls[-1].arguments.get("code") if calls[-1].name == "python" else None
    return code if isinstance(code, str) else None, False


def kept_cells(transcript: Transcript) -> list[str]:
    """Return the cells before the last turn that were not stopped: they make an episode's state."""
    cells = []
    for turn, answer in pairwise(transcript):
        call = call_in(turn["content"]) if turn["role"] == "assistant" else None
        if call and call[0] is not None and not was_stopped(answer["content"]):
            cells.append(call[0])
    return cells


def was_stopped(answer: str) -> bool:
    """Return whether an answer is that of a stopped cell. A cell that prints such a sentence only forgets itself."""
    start = answer.strip().removeprefix("```output").lstrip()[:KNOWN_BY]
    return start in {sentence[:KNOWN_BY] for sentence in STOPPED.values()}


def fenced(output: str) -> str:
    """Return an output as a block of Markdown whose fence is longer than any in it."""
    fence = "```"
    while fence in output:
        fence += "`"
    return f"{fence}output\n{output}\n{fence}\n"


def cut(output: str, limit: int) -> str:
    """Cut an output in the middle, and replace invisible characters."""
    part = excerpt(output, limit, lines=limit)
    head, tail = ("".join("\ufffd" if name_unseen(c) else c for c in piece) for piece in (part.head, part.tail))
    return f"{head}\n[{part.omitted:,} characters left out]\n{tail}" if part.omitted else head


def _workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)
