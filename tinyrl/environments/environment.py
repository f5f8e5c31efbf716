"""The environment of a run: people's code in a worker process, tinyrl's own in ours, behind one call.

A kind of ours is a module of this room and a name in config.sections.BUILT_IN_ENVIRONMENTS. It has `opened(config,
length=)`, `STOP` and `asking_turn(words)`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS, EnvironmentConfig
from tinyrl.environments import Reply, Transcript, worker_service
from tinyrl.environments.tool_calls import encodable  # no tokenizer takes half a surrogate pair
from tinyrl.workers.calls import RowFailure, Rows, WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.process import quoted

Respond = Callable[..., Sequence[Any]]  # a reply, a text or None a row, or an exception: why there is none


def kind_of_ours(name: str) -> Any:
    return importlib.import_module(f"tinyrl.environments.{name}")


class Environment:
    """What answers the policy between its turns. State: a worker process where the code is a person's.

    name: for messages and metrics; built_in: "search" or "python" where that answers, else None; stop: texts that end a
    turn, beside those of the run; retried: by that name, why a batch had to be tried row by row, at first.
    """

    by_agents = False  # whether it is an agent that calls the policy, instead of being called

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        task: str,
        respond: Respond | None,
        use: str | None,
        stop: tuple[str, ...],
        length: Callable[[str], int],
    ) -> None:
        """`respond`, `stop` and `use` are the task's own, where the configuration names none; `length`: tokens of a
        text.
        """
        self.max_turns, self.max_observation_tokens = config.max_turns, config.max_observation_tokens
        use = config.use or (None if config.tools or respond is not None else use)
        self.built_in = use if use in BUILT_IN_ENVIRONMENTS else None
        self.name = self.built_in or ("tools" if config.tools else task)
        self.stop = stop
        self.retried: dict[str, str] = {}
        self._source = ""  # of the answers, in words
        self._respond = respond
        self.workers: list[WorkerFunction] = []  # one where the code is a person's
        if config.functions:
            setting, served = ("environment.tools", "tools") if config.tools else ("environment.use", "environment")
            worker = WorkerFunction(
                [parse_use(use, setting=setting, classes=True) for _, use in config.functions],
                setting=setting,
                host=f"{worker_service.__name__}:{served}",
                timeout_s=config.seconds,
                name="tools" if config.tools else "",
            )
            self.workers, self.name, self.stop, self._respond = [worker], worker.name, (), None
        elif self.built_in:
            kind = kind_of_ours(self.built_in)
            self.stop, (self._respond, self._source) = kind.STOP, kind.opened(config, length=length)
        assert self.workers or self._respond is not None, "there is nothing that answers"

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Tools as a chat template takes them; None where the environment is not made of tools."""
        return self._fact("schemas")

    @property
    def rewards(self) -> bool:
        """Whether replies may hold rewards."""
        return bool(self._fact("rewards"))

    @property
    def has_openings(self) -> bool:
        """Whether it says something before the first turn. Then all episodes of a prompt have one seed, its row."""
        return bool(self._fact("opening"))

    @property
    def needed_columns(self) -> list[str]:
        """Columns that a task's own answers cannot do without; a person's code says so itself when it is called."""
        parameters = [] if self._respond is None else inspect.signature(self._respond).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

    def describe(self) -> str:
        """What answers, and within which limits, in a line for people."""
        functions = [schema["function"] for schema in self.schemas or []]
        tools = [f"{f['name']}({', '.join(f.get('parameters', {}).get('properties', {}))})" for f in functions]
        what = f"{self.name} {self._source}".strip() + (f": {', '.join(tools)}" if tools else "")
        return f"{what}; at most {self.max_turns} turns, {self.max_observation_tokens} tokens of an answer"

    def start(self) -> None:
        """Load a person's code now. ValueError if it does not load."""
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def openings(self, prompts: list[Any], columns: dict[str, list[Any]]) -> list[str | None]:
        """What an environment says before the first turn, at the end of each prompt; None: nothing."""
        if not self.has_openings:
            return [None] * len(prompts)
        columns = {"seed": list(range(len(prompts))), **columns}
        rows = self.workers[0].rows({**columns, "prompts": prompts}, len(prompts), call="opening")
        if rows.failures:
            first = rows.failures[0]
            raise ValueError(f"environment.use: row {first.row + 1}: {first.reason}")
        return rows.values

    def respond(self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]) -> Rows:
        """The replies to episodes whose last turn has ended; None: it is over, as where it failed. Raises Interrupted
        once a stop was asked for.
        """
        rows = self._rows("respond", prompts, transcripts, columns)
        replies = [None if value is None else Reply(encodable(value[0]), *value[1:]) for value in rows.values]
        return Rows(replies, rows.failures)

    def final_rewards(self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]) -> Rows:
        """The rewards of episodes that were cut off, for an environment that gives one at the end; else zeros."""
        if not self._fact("final_rewards"):
            return Rows([0.0] * len(prompts))
        return self._rows("final_rewards", prompts, transcripts, columns)

    def _rows(
        self, call: str, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]
    ) -> Rows:
        arguments = {**columns, "prompts": prompts, "transcripts": list(transcripts)}
        if self.workers:
            rows = self.workers[0].rows(arguments, len(prompts), call=call)
            if rows.retried:
                self.retried.setdefault(self.name, rows.retried)
            return rows
        assert self._respond is not None
        values, problems = worker_service.checked(self._respond(**arguments), len(prompts))
        return Rows(values, [RowFailure(row, f"`{self.name}` {quoted(problem)}") for row, problem in problems])

    def _fact(self, name: str) -> Any:
        return self.workers[0].facts[name] if self.workers else None


# ---- An episode as it was played ----


@dataclass
class Episode:
    """What was played, all of it counted in tokens of the response, chosen and read.

    transcript      messages, policy and environment by turns
    turn_ends       index of the last token of each turn
    turn_rewards    what the environment gave for each turn
    invalid         turns that asked for what does not exist
    num_actions      tokens that the policy chose, of num_tokens
    finish_reason   of the last turn; "turns": there were no more
    ended_at        the EOS token of the last turn, where it ended at one
    over            because the environment said so
    failure         why the environment gave no answer, which ends an episode
    """

    transcript: Transcript = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    invalid: int = 0
    num_tokens: int = 0
    num_actions: int = 0
    finish_reason: Literal["eos", "stop", "length", "turns"] = "length"
    ended_at: int | None = None
    over: bool = False
    failure: str | None = None

    @property
    def reward(self) -> float:
        """What the environment gave for the whole of it."""
        return sum(self.turn_rewards)


def episode_text(transcript: Transcript) -> str:
    return "".join(message["content"] for message in transcript)
