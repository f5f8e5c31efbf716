"""The environment of a run: user code in a worker process, tinyrl's own in this one, behind one call.

A built-in environment is a class (`BuiltIn`) in a file of this room, and a name in
config.sections.BUILT_IN_ENVIRONMENTS.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS, EnvironmentConfig
from tinyrl.data.messages import Prompt
from tinyrl.environments import BuiltIn, Message, Reply, Rewards, Transcript, worker_service
from tinyrl.environments.tool_calls import encodable  # no tokenizer takes half a surrogate pair
from tinyrl.text import did_you_mean
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.process import quoted
from tinyrl.workers.values import RowFailure, RowResults, check_values, is_score, is_text

OF_EPISODES = ("prompts", "transcripts", "seed")  # arguments that are no columns of rows


class Environment:
    """What an episode is played with: replies between the policy's turns (`Replies`), or agents that call the policy
    (environments/agent.py). State: worker processes of user code.
    """

    noun: str = "environment"  # for messages, before its name
    name: str  # for messages and metrics
    max_turns: int  # of the policy in an episode
    stop: tuple[str, ...] = ()  # texts that end a turn, beside those of the run
    rewards: Rewards = "none"  # which episodes have a reward of the environment
    needed_columns: Sequence[str] = ()  # columns of a row that it cannot do without
    workers: list[WorkerFunction]

    def describe(self) -> str:
        """Describe what answers or plays, and its limits, in a line."""
        raise NotImplementedError

    def start(self) -> None:
        """Load user code now. Raises ValueError if it does not load."""

    def check_columns(self, there: list[str]) -> None:
        """Raise ValueError for a column that it needs and the rows do not have."""
        for name in self.needed_columns:
            if name not in there:
                raise ValueError(
                    f"the {self.noun} {self.name} takes a column '{name}', which the data does not have."
                    f"{did_you_mean(name, there)} Besides the prompt there are: {', '.join(there) or 'none'}"
                )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def completion(self, transcript: Transcript, prompt: Prompt) -> Any:
        """Return an episode as rewards get it: its messages, whatever the data has."""
        return transcript

    def as_completion(self, text: str, prompt: Prompt) -> Any:
        """Return a text that nobody played, such as a reference answer, in the form of `completion`."""
        return [{"role": "assistant", "content": text}]


class Replies(Environment):
    """Answers the policy between its turns. State: a worker process for user code.

    built_in: "search" or "python" where that answers, else None. Known after `start`: schemas, of tools as a chat
    template takes them; rewards; has_openings: whether it writes something before the first turn, and then all
    episodes of a prompt have one seed, its row.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        task: str,
        respond: Callable[..., Sequence[Any]] | None,
        use: str | None,
        stop: tuple[str, ...],
        length: Callable[[str], int],
        worker: WorkerFunction | None = None,
    ) -> None:
        """`respond`, `stop` and `use`: the task's own, for a configuration that names none; `worker`: answers
        in place of `respond`, if the task is user code; `length`: tokens of a text.

        Raises ValueError for code that is not there, and a built-in environment that cannot be opened.
        """
        self.max_turns = config.max_turns
        self.max_observation_tokens = config.max_observation_tokens
        task_answers = respond is not None or worker is not None
        use = config.name or (None if config.tools or task_answers else use)
        self.built_in = use if use in BUILT_IN_ENVIRONMENTS else None
        self.name = self.built_in or task
        self.stop = stop
        self._about = ""
        self._respond = respond
        self.schemas: list[dict[str, Any]] | None = None
        self.has_openings = False
        self.workers = []  # one for user code
        self._opened: BuiltIn | None = None
        own = [config.name] if config.name and config.name not in BUILT_IN_ENVIRONMENTS else []
        functions = config.tools or own
        if functions:
            setting, served = ("environment.tools", "tools") if config.tools else ("environment.name", "environment")
            named = WorkerFunction(
                [parse_use(use, setting=setting) for use in functions],
                setting=setting,
                host=f"{worker_service.__name__}:{served}",
                timeout_s=config.seconds,
                name="tools" if config.tools else "",
            )
            self.workers = [named]
            self.name = named.name
            self.stop = ()
            self._respond = None
        elif self.built_in:
            self._opened = built_in(self.built_in)(config, length=length)
            self.stop = self._opened.stop
            self._respond = self._opened.respond
            self._about = self._opened.about
        elif worker is not None:
            self.workers = [worker]
        if self._respond is not None:  # that of user code is known after `start`
            parameters = inspect.signature(self._respond).parameters.values()
            self.needed_columns = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

    def describe(self) -> str:
        functions = [schema["function"] for schema in self.schemas or []]
        tools = [f"{f['name']}({', '.join(f.get('parameters', {}).get('properties', {}))})" for f in functions]
        what = f"{self.name} {self._about}".strip() + (f": {', '.join(tools)}" if tools else "")
        return f"{what}; at most {self.max_turns} turns, replies of {self.max_observation_tokens} tokens"

    def start(self) -> None:
        for worker in self.workers:
            facts = worker.host_facts(worker_service.EnvironmentFacts)
            self.needed_columns = [name for name in worker.start().required if name not in OF_EPISODES]
            self.schemas = facts.schemas
            self.rewards = facts.rewards
            self.has_openings = facts.opening

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened.close()

    def openings(self, prompts: list[Any], columns: dict[str, list[Any]]) -> list[str | None]:
        """Return what the environment writes at the end of each prompt, before the first turn; None: nothing."""
        if not self.has_openings:
            return [None] * len(prompts)
        columns = {"seed": list(range(len(prompts))), **columns, "prompts": prompts}
        results = self.workers[0].rows(columns, len(prompts), call="opening", is_valid=is_text)
        if results.failures:
            first = results.failures[0]
            raise ValueError(f"environment.name: row {first.row + 1}: {first.reason}")
        return results.values

    def respond(self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]) -> RowResults:
        """Return the replies to episodes whose last turn has ended; None: it is over, or has failed. Raises Interrupted
        once a stop was requested.
        """
        arguments = {**columns, "prompts": prompts, "transcripts": list(transcripts)}
        if self._respond is None:
            results = self.workers[0].rows(arguments, len(prompts), call="respond", is_valid=_is_reply)
        else:
            results = check_values(self._respond(**arguments), len(prompts), check=worker_service.as_reply)
            reasons = [(failure.row, quoted(failure.reason)) for failure in results.failures]
            results.failures = [RowFailure(row, f"`{self.name}` {reason}") for row, reason in reasons]
        return RowResults([None if value is None else _reply(value) for value in results.values], results.failures)

    def final_rewards(
        self, prompts: list[Any], transcripts: list[Transcript], columns: dict[str, list[Any]]
    ) -> RowResults:
        """Return the rewards of episodes that were cut off, of a class that has get_reward; else None for each."""
        if not (self.has_openings and self.rewards == "all"):
            return RowResults([None] * len(prompts))
        arguments = {**columns, "prompts": prompts, "transcripts": list(transcripts)}
        return self.workers[0].rows(arguments, len(prompts), call="final_rewards", is_valid=is_score)


def built_in(name: str) -> type[BuiltIn]:
    """Return the built-in environment of this name, whose file is imported where it is used."""
    match name:
        case "search":
            from tinyrl.environments.search import Search

            return Search
        case "python":
            from tinyrl.environments.python import Python

            return Python
        case _:
            raise AssertionError(f"{name} is not one of {BUILT_IN_ENVIRONMENTS}")


def _is_reply(value: Any) -> bool:
    """Return whether a value of a worker's reply is that of an environment, as `as_reply` makes it."""
    match value:
        case None:
            return True
        case [str(), bool(), float() | None, bool(), list(results), bool()]:
            return all(isinstance(result, str) for result in results)
    return False


def _reply(value: list[Any]) -> Reply:
    """Return a reply from its form in JSON (worker_service.as_reply)."""
    text, done, reward, invalid, results, tool_error = value
    return Reply(encodable(text), done, reward, invalid, tuple(map(encodable, results)), tool_error)


@dataclass
class Dialogue:
    """A conversation of an agent with the policy, for the records: its messages, given and answered, and the tools that
    came with them.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)


@dataclass
class Episode:
    """An episode as it was played; tokens are those of the response, chosen and read.

    transcript      messages, policy and environment by turns
    turn_ends       index of the last token of each turn
    turn_rewards    the environment's rewards, by turn; None: it gave none
    invalid         turns that asked for what does not exist
    tool_errors     turns in which a tool raised an exception of its own
    cut             replies that were longer than environment.max_observation_tokens
    num_actions     tokens that the policy chose, of num_tokens
    finish_reason   of the last turn; "turns": there were no more
    ended_at        the EOS token of the last turn, if it ended at one
    over            because the environment ended it
    failure         why the environment gave no answer, which ends an episode
    dialogues       an agent's conversations; None: nobody but the environment has answered
    """

    transcript: Transcript = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    invalid: int = 0
    tool_errors: int = 0
    cut: int = 0
    num_tokens: int = 0
    num_actions: int = 0
    finish_reason: Literal["eos", "stop", "length", "turns"] = "length"
    ended_at: int | None = None
    over: bool = False
    failure: str | None = None
    dialogues: list[Dialogue] | None = None

    @property
    def reward(self) -> float:
        """Sum the rewards of the turns that have one; NaN if none has."""
        given = [reward for reward in self.turn_rewards if reward is not None]
        return sum(given) if given else math.nan

    @property
    def num_rewarded_turns(self) -> int:
        return len([reward for reward in self.turn_rewards if reward is not None])

    def add_reward(self, reward: float | None) -> None:
        """Add a reward to the last turn's; None: there is none to add."""
        if reward is not None:
            self.turn_rewards[-1] = (self.turn_rewards[-1] or 0.0) + reward


def episode_text(transcript: Transcript) -> str:
    """Join the texts of all messages of an episode, of the policy and of the environment."""
    return "".join(message["content"] for message in transcript)


# ---- scripted turns, to try an environment without a model ----

NONSENSE = "qzx vvk # ~~ jjq"
UNKNOWN_TOOL = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'
NOT_JSON = '<tool_call>\n{"name": "no_such_tool", "arguments": {\n</tool_call>'


def asking_turn(name: str, words: str) -> str:
    """Return a turn that a built-in environment answers: a search for these words, a cell of Python."""
    return built_in(name).asks.format(words=words)
