"""Environments of several sources in one run (task.sources): a row is answered by its own source's, or by none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinyrl.data.readers import Row
from tinyrl.data.rows import SOURCE, by_kind
from tinyrl.environments import Reply, Transcript
from tinyrl.environments.environment import Answers, Environment
from tinyrl.workers.calls import RowFailure, Rows, WorkerFunction

Call = Callable[[Environment, list[int], dict[str, list[Any]]], tuple[list[Any], list[RowFailure]]]


class SourceEnvironments:
    """As one `Environment`; None: rows of that source have one turn. Texts that end a turn are those of all."""

    by_agents = False
    schemas: list[dict[str, Any]] | None = None  # tools would be in every row's prompt

    def __init__(self, environments: dict[str, Environment | None]) -> None:
        self.environments = environments
        self._all = [each for each in environments.values() if each is not None]
        self.max_turns = max(each.max_turns for each in self._all)
        self.max_observation_tokens = max(each.max_observation_tokens for each in self._all)
        self.name = "task.sources"
        self.stop = tuple(dict.fromkeys(text for each in self._all for text in each.stop))
        self.rewards = self.has_openings = False
        self.needed_columns = [SOURCE]

    def of(self, row: Row) -> Environment | None:
        """What answers a row."""
        return self.environments[row[SOURCE]]

    @property
    def retried(self) -> dict[str, str]:
        """By name, why a batch had to be tried row by row, at first."""
        return {name: why for each in self._all for name, why in each.retried.items()}

    @property
    def workers(self) -> list[WorkerFunction]:
        """The worker processes."""
        return [worker for each in self._all for worker in each.workers]

    def describe(self) -> str:
        """What answers each source."""
        return "; ".join(f"{label}: {each.describe() if each else 'none'}" for label, each in self.environments.items())

    def start(self) -> None:
        """Load people's code now. ValueError if some does not load."""
        for each in self._all:
            each.start()
        self.rewards = any(each.rewards for each in self._all)
        self.has_openings = any(each.has_openings for each in self._all)

    def close(self) -> None:
        """End the workers."""
        for each in self._all:
            each.close()

    def openings(self, prompts: list[Any], columns: dict[str, list[Any]]) -> list[str | None]:
        """What each row's environment says before the first turn; None: nothing."""
        columns = {"seed": list(range(len(prompts))), **columns}
        return self._each(columns, None, lambda e, at, own: (e.openings([prompts[i] for i in at], own), [])).values

    def respond(self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]) -> Answers:
        """As Environment.respond; an episode without an environment is over."""

        def ask(environment: Environment, at: list[int], own: dict[str, list[Any]]):
            found = environment.respond([prompts[i] for i in at], [transcripts[i] for i in at], own)
            return found.replies, found.failures

        rows = self._each(columns, None, ask)
        replies: list[Reply | None] = rows.values
        return Answers(replies, rows.failures)

    def final_rewards(self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]) -> Rows:
        """As Environment.final_rewards; 0 where there is none."""

        def ask(environment: Environment, at: list[int], own: dict[str, list[Any]]):
            found = environment.final_rewards([prompts[i] for i in at], [transcripts[i] for i in at], own)
            return found.values, found.failures

        return self._each(columns, 0.0, ask)

    def _each(self, columns: dict[str, list[Any]], default: Any, call: Call) -> Rows:
        """What each environment says of its own rows, in the order of all."""
        values, failures = [default] * len(columns[SOURCE]), list[RowFailure]()
        for label, places, own in by_kind(columns[SOURCE], columns):
            environment = self.environments[label]
            if environment is None:
                continue
            found, failed = call(environment, places, own)
            for place, value in zip(places, found, strict=True):
                values[place] = value
            failures += [RowFailure(places[failure.row], failure.reason) for failure in failed]
        return Rows(values, sorted(failures, key=lambda failure: failure.row))
