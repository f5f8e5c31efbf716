"""A Python interpreter as an environment: the code of each turn is run in the sandbox and answered with its output.

A turn calls it with a ```python block (the last one counts), or with
`<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>` (again the last one); a turn with neither ends
the episode. As in a notebook, names stay from turn to turn, and the value of a trailing expression is shown; an error
is its last line with the line of the cell. There is the standard library and no installed package.

The interpreter of an episode stays from turn to turn, frozen while the policy writes. It is only a cache: where it is
gone (a cell had to be stopped, there were too many, a run was resumed), the earlier cells are run again in another.
To reach the same state, `random` is seeded with the episode's seed; the clock and os.urandom are not. A cell that was
stopped (its answer is one of the sentences STOPPED) is not run again.
"""

from __future__ import annotations

import math
import os
import re
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.data.thoughts import without_thoughts
from tinyrl.environments import BuiltIn, Reply, Transcript, last_turn
from tinyrl.environments.tool_calls import CLOSE, calls_of
from tinyrl.process.signals import check_stop
from tinyrl.text import excerpt
from tinyrl.workers.process import memory_limit
from tinyrl.workers.sandbox import Limits, Session, python_block, why_not_isolated

PROGRAM = Path(__file__).with_name("cells.py").read_text(encoding="utf-8")
MEMORY_GB = 0.5
CELL_SECONDS = 5.0  # where environment.timeout_s is null
CHARS_A_TOKEN = 2  # of an output: more of it are numbers than words
MOST_LIVE = 1024  # interpreters that wait for their next cell
FILES_A_PROCESS = 8  # of those that we may open; 3 are needed
LIVE_SHARE = 0.25  # of the memory that a worker may use, for all that wait
OUTPUT_BYTES = 8 << 20  # that a cell may print before it is stopped

STOPPED = {  # sentences, by the sandbox's reason
    reason: f"{what} Nothing of it was kept."
    for reason, what in {
        "timed out": "Timed out: the code ran too long and was stopped.",
        "out of CPU time": "Timed out: the code ran too long and was stopped.",
        "out of memory": "Out of memory: the code was stopped.",
        "output too long": "Too much output: the code was stopped.",
        "": "Crashed: the code ended the Python process.",
    }.items()
}
KNOWN_BY = 24  # characters at the start of each, which remain when an answer is cut to a number of tokens
NO_OUTPUT = "(no output)"
UNREADABLE = 'The call could not be read. It has to be JSON: {"name": "python", "arguments": {"code": "..."}}'

Cells = tuple[int | str, ...]  # an episode's seed, and the cells that its interpreter has run


class Python(BuiltIn):
    """Interpreters of the episodes in flight. State: those that wait for a cell, the oldest first."""

    asks = "```python\nprint(1 + 1)\n```\n"

    def __init__(self, config: EnvironmentConfig, *, length: Callable[[str], int] = len) -> None:
        """Start no process yet; length: not read, since output is limited by characters. Raises ValueError where
        programs cannot be isolated.
        """
        del length
        why_not = why_not_isolated()
        if why_not:
            raise ValueError(
                f"The environment `python` runs the policy's code in a sandbox, which this system does not allow: "
                f"{why_not}. It takes Linux 5.13 or later with Landlock and seccomp, on x86_64 or aarch64."
            )
        self.timeout_s = config.timeout_s or CELL_SECONDS  # of a cell
        self._max_turns = config.max_turns
        self._max_chars = CHARS_A_TOKEN * config.max_observation_tokens
        self._most_live = min(MOST_LIVE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_A_PROCESS)
        self._limits = Limits(
            cpu_s=(config.max_turns + 1) * math.ceil(self.timeout_s + 1),  # together; a cell's are limited in there
            memory_bytes=int(MEMORY_GB * (1 << 30)),
            output_bytes=OUTPUT_BYTES,
            threads=Limits.threads + (self._most_live if os.geteuid() else 0),  # are counted by user
        )
        self._most_bytes = int(LIVE_SHARE * memory_limit())
        self._live: dict[Cells, tuple[Session, int]] = {}  # by seed and cells, with their bytes
        self._lock = threading.Lock()
        # The kernel ends a program with the thread that started it, so the threads stay.
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="python")
        self.about = f"in the sandbox, {self.timeout_s:g} s and {MEMORY_GB:g} GB a cell"

    def close(self) -> None:
        self._pool.shutdown()
        for session, _ in self._live.values():
            session.end()
        self._live.clear()

    def respond(
        self, prompts: Sequence[Any], transcripts: Sequence[Transcript], *, seed: Sequence[int] | None = None, **_: Any
    ) -> list[Reply | None]:
        """Answer the last turn of each transcript; None where it calls nothing. One cell per core at a time: a batch of
        endless ones takes timeout_s * episodes / cores.
        """

        def answer(place: int) -> Reply | None:
            check_stop()
            prompt = prompts[place]
            transcript = transcripts[place]
            call = call_in(last_turn(transcript))
            if call is not None and call[0] is None:
                return Reply(UNREADABLE, invalid=True)
            before: Cells = (int(seed[place] if seed else 0), *kept_cells(transcript))
            if call is None:
                if waiting := self._take(before):
                    waiting.end()
                return None
            code, in_block = call
            turns = sum(message["role"] == "assistant" for message in transcript)
            output = self._run(before, str(code), last=turns >= self._max_turns)
            if not in_block:
                return Reply(output)
            line_is_open = isinstance(prompt, str) and not last_turn(transcript).endswith("\n")
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", output)), default=0))  # longer than any in it
            return Reply("\n" * line_is_open + f"{fence}output\n{output}\n{fence}\n")

        return list(self._pool.map(answer, range(len(transcripts))))

    def _run(self, before: Cells, code: str, *, last: bool) -> str:
        """Run a cell after others; keep the interpreter unless it is the last one."""
        session = self._take(before)
        missed = ()
        if session is None:
            session = Session(f"{PROGRAM}\nanswer({before[0]})\n", self._limits)
            missed = before[1:]
        outcome = None
        for cell in (*missed, code):
            # As a literal in ASCII: text of any kind arrives, and json need not be imported over there.
            outcome = session.ask(ascii((cell, float(self.timeout_s))).encode(), wall_s=self.timeout_s)
            if not outcome.ok:
                return STOPPED.get(outcome.reason, STOPPED[""])  # whole, since it marks the cell
        assert outcome is not None
        if last:
            session.end()
        else:
            self._keep((*before, code), session)
        parts = outcome.stdout.replace("\r\n", "\n").removesuffix("\n"), outcome.stderr
        output = "\n".join(filter(None, parts))
        part = excerpt(output if output.strip() else NO_OUTPUT, self._max_chars, lines=self._max_chars)
        return f"{part.head}\n[{part.omitted:,} characters left out]\n{part.tail}" if part.omitted else part.head

    def _take(self, cells: Cells) -> Session | None:
        with self._lock:
            return self._live.pop(cells, (None, 0))[0]

    def _keep(self, cells: Cells, session: Session) -> None:
        """Keep an interpreter for the next cell; end the oldest ones where there are too many, or too large ones."""
        over = []
        with self._lock:
            if cells in self._live:  # that of an identical episode, in the same state
                over.append(self._live.pop(cells)[0])
            self._live[cells] = session, session.memory_bytes()
            while len(self._live) > self._most_live or sum(size for _, size in self._live.values()) > self._most_bytes:
                over.append(self._live.pop(next(iter(self._live)))[0])
        for one in over:
            one.end()


def call_in(turn: str) -> tuple[str | None, bool] | None:
    """Return the code of a turn's last tool call (None: it could not be parsed), or else that of its last complete
    ```python block, and whether it is a block; None if the turn calls nothing.
    """
    calls = calls_of({"content": turn + CLOSE})  # also of a turn that ended before its call was closed
    if not calls:
        block = python_block(without_thoughts(turn))
        return None if block is None else (block, True)
    code = calls[-1].arguments.get("code") if calls[-1].name == "python" else None
    return code if isinstance(code, str) else None, False


def kept_cells(transcript: Transcript) -> list[str]:
    """Return the cells before the last turn that were not stopped: they make an episode's state. A cell that prints one
    of the sentences STOPPED only forgets itself.
    """
    cells = []
    known = tuple(sentence[:KNOWN_BY] for sentence in STOPPED.values())
    for turn, answer in pairwise(transcript):
        call = call_in(turn["content"]) if turn["role"] == "assistant" else None
        stopped = answer["content"].strip().removeprefix("```output").lstrip().startswith(known)
        if call and call[0] is not None and not stopped:
            cells.append(call[0])
    return cells
