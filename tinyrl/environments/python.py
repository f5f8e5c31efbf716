"""A Python interpreter as an environment: the code of each turn is run in the sandbox, and what it says is answered.

A turn calls it with a ```python block (the last one counts), or with
`<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>` (again the last one); a turn with neither ends
the episode. As in a notebook, names stay from turn to turn, what is printed is shown and so is the value of a trailing
expression; an error is its last line with the line of the cell. There is the standard library and no installed package.

Nothing lives between two turns: each answer comes from a fresh sandbox in which the episode's earlier cells are run
again, their output discarded, before the new one. So that this leads to the same state, `random` is seeded with the
episode's seed; the clock and os.urandom are not. A cell that had to be stopped is not run again, and it is known by its
answer: one of the sentences STOPPED.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
STOP = ()  # texts that end a turn
MEMORY_GB = 0.5
CHARS_A_TOKEN = 2  # of what a cell prints: more are numbers than words
MAX_WORKERS = 32
OUTPUT_BYTES = 8 << 20  # that a cell may print before it is stopped; what is shown of it is a matter of characters

TIMED_OUT = "Timed out: the code ran too long and was stopped. Nothing of it was kept."
OUT_OF_MEMORY = "Out of memory: the code was stopped. Nothing of it was kept."
TOO_MUCH_OUTPUT = "Too much output: the code was stopped. Nothing of it was kept."
CRASHED = "Crashed: the code ended the Python process. Nothing of it was kept."
STOPPED = (TIMED_OUT, OUT_OF_MEMORY, TOO_MUCH_OUTPUT, CRASHED)
KNOWN_BY = 24  # characters at the start of each, which remain when an answer is cut to a number of tokens
SENTENCES = {
    "timed out": TIMED_OUT,
    "out of CPU time": TIMED_OUT,
    "out of memory": OUT_OF_MEMORY,
    "output too long": TOO_MUCH_OUTPUT,
}
NO_OUTPUT = "(no output)"
UNREADABLE = 'The call could not be read. It has to be JSON: {"name": "python", "arguments": {"code": "..."}}'


@dataclass(frozen=True)
class CellCall:
    """What a turn wants run; code None: that could not be read."""

    code: str | None
    fenced: bool = False


def opened(config: EnvironmentConfig, *, length: Callable[[str], int]) -> tuple[Callable[..., Any], str]:
    """What answers under a configuration, and what it is in words."""
    check_available()
    most = CHARS_A_TOKEN * config.max_observation_tokens
    said = f"in the sandbox, {config.seconds:g} s and {MEMORY_GB:g} GB a cell"
    return functools.partial(respond, timeout_s=config.seconds, max_output_chars=most), said


def asking_turn(words: str) -> str:
    """A turn that is answered, for trials without a model."""
    return "```python\nprint(1 + 1)\n```\n"


def check_available() -> None:
    """Raises ValueError where programs cannot be isolated, with the reason; it is found out once, in a moment."""
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
    memory_gb: float = 0.5,
    max_output_chars: int = 1000,
    **columns: Any,
) -> list[Reply | None]:
    """Answer the last turn of each transcript; None where it calls nothing. A process for each, one per core at a time.

    timeout_s is for the new cell, and as much again for each cell that is run before it; memory_gb for the process; of
    an output, max_output_chars remain, from its head and its tail. A batch of endless first cells takes
    timeout_s * episodes / cores. ValueError: a limit that cannot be kept, or a system without the sandbox.
    """
    calls = [call_in(last_turn(transcript)) for transcript in transcripts]
    if any(call and call.code is not None for call in calls):
        check_available()

    def answer(prompt: Any, transcript: Transcript, call: CellCall | None, episode_seed: int) -> Reply | None:
        check_stop()
        if call is None:
            return None
        if call.code is None:
            return Reply(UNREADABLE, invalid=True)
        cells = [*kept_cells(transcript), call.code]
        output = _run(cells, seed=episode_seed, timeout_s=timeout_s, memory_gb=memory_gb)
        if output not in STOPPED:  # whole, for the cell is known by it
            output = cut(output, max_output_chars)
        if not call.fenced:
            return Reply(output)
        line_is_open = isinstance(prompt, str) and not last_turn(transcript).endswith("\n")
        return Reply("\n" * line_is_open + fenced(output))

    with ThreadPoolExecutor(max_workers=_workers()) as pool:
        return list(pool.map(answer, prompts, transcripts, calls, seed or [0] * len(calls)))


def call_in(turn: str) -> CellCall | None:
    """What a turn wants run: its last tool call, or else its last complete ```python block."""
    calls = calls_of({"content": turn + CLOSE})  # also of a turn that ended before its call was closed
    if not calls:
        block = python_block(turn)
        return None if block is None else CellCall(block, fenced=True)
    last = calls[-1]
    code = last.arguments.get("code") if last.name == "python" else None
    return CellCall(code if isinstance(code, str) else None)


def kept_cells(transcript: Transcript) -> list[str]:
    """The cells before the last turn that are part of an episode's state: not those that had to be stopped."""
    cells = []
    for turn, answer in pairwise(transcript):
        call = call_in(turn["content"]) if turn["role"] == "assistant" else None
        if call and call.code is not None and not was_stopped(answer["content"]):
            cells.append(call.code)
    return cells


def was_stopped(answer: str) -> bool:
    """Whether an answer says that its cell was stopped. A cell that prints such a sentence only forgets itself."""
    said = answer.strip().removeprefix("```output").lstrip()
    return said[:KNOWN_BY] in {sentence[:KNOWN_BY] for sentence in STOPPED}


def fenced(output: str) -> str:
    """An output as a block of Markdown whose fence is longer than any in it."""
    fence = "```"
    while fence in output:
        fence += "`"
    return f"{fence}output\n{output}\n{fence}\n"


def cut(output: str, limit: int) -> str:
    """The head and the tail of an output, with what was left out said, and a sign for what cannot be seen."""
    part = excerpt(output, limit, lines=limit)
    head, tail = ("".join("\ufffd" if name_unseen(c) else c for c in piece) for piece in (part.head, part.tail))
    return f"{head}\n[{part.omitted:,} characters left out]\n{tail}" if part.omitted else head


def _run(cells: list[str], *, seed: int, timeout_s: float, memory_gb: float) -> str:
    """What the last of the cells says, or the sentence for how it was stopped."""
    wall_s = timeout_s * len(cells)
    limits = Limits(wall_s, math.ceil(wall_s), memory_bytes=int(memory_gb * (1 << 30)), output_bytes=OUTPUT_BYTES)
    # As a literal in ASCII: text of any kind arrives, and json need not be imported over there.
    call = f"run({cells!a}, seed={int(seed)}, timeout_s={float(timeout_s)})"
    outcome = run_program(f"{PROGRAM}\n{call}\n", limits=limits)
    if not (outcome.ok and outcome.stderr.startswith(FINISHED)):
        return SENTENCES.get(outcome.reason, CRASHED)
    printed, said = outcome.stdout.replace("\r\n", "\n"), outcome.stderr.removeprefix(FINISHED)
    output = "\n".join(text for text in (printed.removesuffix("\n"), said) if text)
    return output if output.strip() else NO_OUTPUT


def _workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)
