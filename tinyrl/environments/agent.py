"""Agents that know only an address: a person's function or program plays an episode against an OpenAI endpoint.

A function gets the row, `base_url`, `api_key` and `model` (those of these that it takes) and returns a text, or what
JSON can hold; rewards judge it. A program gets the row as JSON on its standard input, OPENAI_BASE_URL, OPENAI_API_KEY
and OPENAI_MODEL in its environment, and prints. Each works in a process of its own, some at once; one that raises,
hangs or dies fails its episode alone, and whatever it started, in any session, ends with it (workers/supervisor.py).
"""

from __future__ import annotations

import json
import os
import queue
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.data.readers import Row
from tinyrl.environments import worker_service
from tinyrl.runs.signals import check_stop
from tinyrl.text import last_line, shortened, visible
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.process import end_supervised, ending, memory_limit, supervised

POLL_S = 0.1
MOST_OUTPUT = 1 << 20  # bytes of what an agent returns or prints


@dataclass(frozen=True)
class Job:
    """An episode to be played: the row, and where its endpoint is."""

    row: Row
    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class Played:
    """What an agent came to: a text, or why there is none."""

    text: str | None
    failure: str | None = None


class Agents:
    """The processes of an agent, `environment.at_once` of them. State: workers of a function, started when needed.

    What a run asks of any environment stands first; an agent is answered by tools of its own.
    """

    by_agents, built_in, stop, rewards, has_openings, schemas = True, None, (), False, False, None

    def __init__(self, config: EnvironmentConfig) -> None:
        assert config.agent is not None
        self.at_once, self.seconds, self.max_turns = config.at_once, config.seconds, config.max_turns
        self.retried, self.needed_columns = dict[str, str](), list[str]()
        self.command = config.agent if isinstance(config.agent, list) else None
        self.workers: list[WorkerFunction] = []
        if isinstance(config.agent, str):
            source = parse_use(config.agent, setting="environment.agent")
            self.workers = [
                WorkerFunction(
                    [source],
                    setting="environment.agent",
                    host=f"{worker_service.__name__}:agent",
                    timeout_s=self.seconds,
                )
                for _ in range(self.at_once)
            ]
        self.name = self.workers[0].name if self.workers else os.path.basename((self.command or ["agent"])[0])
        self._memory_bytes = memory_limit()
        self._programs: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def describe(self) -> str:
        return f"agent {self.name}: {self.at_once} at a time, at most {self.max_turns} calls and {self.seconds:g} s"

    def start(self) -> None:
        """Load the function once. ValueError where it does not load."""
        for worker in self.workers[:1]:
            worker.start()

    def close(self) -> None:
        self._stopped = True
        for program in [*self._programs]:
            end_supervised(program)
        for worker in self.workers:
            worker.close()

    def play(self, jobs: list[Job], *, ended: Callable[[int], None]) -> list[Played]:
        """Play them, some at once; `ended` is told of each. Raises Interrupted, with all ended, once a stop was asked
        for.
        """
        self._stopped = False
        free: queue.SimpleQueue[WorkerFunction | None] = queue.SimpleQueue()
        for worker in self.workers or [None] * self.at_once:
            free.put(worker)

        def one(place: int, job: Job) -> Played:
            worker = free.get()
            try:
                if worker is None:
                    return self._run(job)
                rows = worker.rows({name: [value] for name, value in vars(job).items()}, 1, call="run")
                return Played(None, rows.failures[0].reason) if rows.failures else Played(rows.values[0])
            finally:
                ended(place)  # before the process plays another, which may have kept this one's key
                free.put(worker)

        pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="agent")
        futures: list[Future[Played]] = [pool.submit(one, place, job) for place, job in enumerate(jobs)]
        try:
            while not all(future.done() for future in futures):
                check_stop()
                wait(futures, timeout=POLL_S)
            return [future.result() for future in futures]
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job) -> Played:
        """A program's episode."""
        assert self.command is not None
        if self._stopped:
            return Played(None, "was not begun")
        found = shutil.which(self.command[0])
        if found is None:
            return Played(None, f"`{self.name}` could not be started: there is no such program")
        told = {"OPENAI_BASE_URL": job.base_url, "OPENAI_API_KEY": job.api_key, "OPENAI_MODEL": job.model}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
            given.write(json.dumps(job.row).encode())
            given.seek(0)
            program = subprocess.Popen(
                supervised([found, *self.command[1:]], memory_bytes=self._memory_bytes),
                stdin=given,
                stdout=out,
                stderr=errors,
                env={**os.environ, **told},
                start_new_session=True,  # Ctrl-C is ours to handle
                # What it prints is a file.
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MOST_OUTPUT, 64 * MOST_OUTPUT)),
            )
            self._programs.add(program)
            try:
                code = program.wait(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_supervised(program)
                self._programs.discard(program)
            out.seek(0)
            errors.seek(0)
            text, said = (file.read(MOST_OUTPUT).decode(errors="replace") for file in (out, errors))
        if code is None:
            return Played(None, f"`{self.name}` took longer than {self.seconds:g} s (environment.timeout_s)")
        if code:
            why = f": {visible(shortened(last_line(ValueError(said.strip())), 200))}" if said.strip() else ""
            return Played(None, f"`{self.name}` {ending(code)}{why}")
        return Played(text.strip())
