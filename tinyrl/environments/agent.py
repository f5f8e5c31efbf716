"""Agents that only know an address: a user function plays an episode against an OpenAI endpoint.

It gets the row, `base_url`, `api_key` and `model` (those that it takes) and returns a text, or JSON; rewards judge it.
Several run at a time, each in a process of its own; one that raises, hangs or dies fails its episode alone, and
whatever it started, in any session, ends with its process (workers/worker.py).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.data.messages import Prompt, as_completion
from tinyrl.environments import Transcript, worker_service
from tinyrl.environments.environment import Environment
from tinyrl.process.signals import check_stop
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.values import RowFailure, RowResults, is_text

POLL_S = 0.1


class Agents(Environment):
    """The processes of an agent, `environment.max_concurrency` of them, started when needed."""

    noun = "agent"

    def __init__(self, config: EnvironmentConfig, *, call_tokens: int) -> None:
        assert config.agent is not None
        self.call_tokens = call_tokens
        self.max_concurrency = config.max_concurrency
        self.seconds = config.seconds
        self.max_turns = config.max_turns
        source = parse_use(config.agent, setting="environment.agent")
        setting = "environment.agent"
        self.name = source.function
        how = {"setting": setting, "host": f"{worker_service.__name__}:agent", "timeout_s": self.seconds}
        self.workers = [WorkerFunction([source], **how) for _ in range(self.max_concurrency)]

    def describe(self) -> str:
        most = f"at most {self.max_turns} calls of {self.call_tokens} tokens and {self.seconds:g} s"
        return f"agent {self.name}: {self.max_concurrency} at a time, {most}"

    def start(self) -> None:
        self.workers[0].start()  # the others load the same function when they are needed

    def completion(self, transcript: Transcript, prompt: Prompt) -> Any:
        """Return what the agent returned, as text or message by the data's form."""
        return transcript[0]["content"] if isinstance(prompt, str) else transcript

    def as_completion(self, text: str, prompt: Prompt) -> Any:
        return as_completion(text, prompt)

    def play(self, jobs: list[dict[str, Any]], *, ended: Callable[[int], None]) -> RowResults:
        """Play an episode for each job, some at a time: its row, base_url, api_key and model; return the agents' texts.
        `ended` is called with the place of each. Raises Interrupted, with all ended, once a stop was requested.
        """
        free: queue.SimpleQueue[WorkerFunction] = queue.SimpleQueue()
        for worker in self.workers:
            free.put(worker)

        def one(place: int, job: dict[str, Any]) -> RowResults:
            worker = free.get()
            try:
                return worker.rows({name: [value] for name, value in job.items()}, 1, call="run", is_valid=is_text)
            finally:
                ended(place)  # before the process plays another, which may have kept this one's key
                free.put(worker)

        pool = ThreadPoolExecutor(self.max_concurrency, thread_name_prefix="agent")
        futures = [pool.submit(one, place, job) for place, job in enumerate(jobs)]
        try:
            while not all(future.done() for future in futures):
                check_stop()
                wait(futures, timeout=POLL_S)
            played = [future.result() for future in futures]
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        failures = list[RowFailure]()
        for place, results in enumerate(played):
            failures += [RowFailure(place, each.reason) for each in results.failures]
        return RowResults([one.values[0] for one in played], failures)
