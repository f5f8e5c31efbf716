"""Reward functions: a user's in its worker process, a task's own verifier in ours.

A function gets the whole batch. When that fails, the rows are tried one by one in a fresh worker, so that only those
at fault are dropped; the cost of that is bounded, in workers lost and in time.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from tinyrl.rewards import worker
from tinyrl.rewards.loading import parse_use
from tinyrl.rewards.printed import Printed
from tinyrl.rewards.process import CallFailed, LoadFailed, Worker, memory_limit, quoted, said
from tinyrl.text import did_you_mean

LOAD_TIMEOUT_S = 120.0  # at least; imports do not count as the function's time
MAX_WORKERS_LOST = 8  # by rows of one batch; each costs a timeout or a start
ROWS_TIMEOUTS = 3  # trying the rows of one batch may take this many times timeout_s
MIN_ROW_TIMEOUT_S = 1.0


class Limits(TypedDict):
    """What a function may use: seconds a call, and memory of each process of it."""

    timeout_s: float
    memory_gb: Literal["auto"] | float


@dataclass(frozen=True)
class RewardFailure:
    """A row without a score because something went wrong, and what."""

    row: int
    reason: str


@dataclass
class RewardCall:
    """One score for each row. NaN: the function said None ("does not apply"), or the row is among the failures."""

    scores: list[float]
    failures: list[RewardFailure] = field(default_factory=list)
    retried: str | None = None  # why the rows were tried one by one; set also when all of them then succeeded


class FunctionReward:
    """A user's reward function in a worker process, started when first needed. Close it, or use it in a `with`.

    timeout_s: for a call; memory_gb: for each process of it. `printed` is what it prints; `chat_hint` a sentence once
    it has taken a completion that is a list of messages for text.
    """

    def __init__(
        self,
        use: str,
        *,
        weight: float = 1.0,
        timeout_s: float = 60.0,
        memory_gb: Literal["auto"] | float = "auto",
        base_dir: Path | str | None = None,
    ) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"reward.timeout_s: must be a number of seconds above 0, not {timeout_s}.")
        self._source = parse_use(use, base_dir=base_dir)
        self.name = self._source.function
        self.weight = weight
        self.printed = Printed(self.name)
        self.chat_hint: str | None = None
        self._timeout_s = timeout_s
        self._memory_bytes = memory_limit(memory_gb)
        self._worker: Worker | None = None
        self._facts: dict[str, Any] | None = None  # what the function takes, as its worker found it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Load the function now. ValueError if its code does not load, which before training the user can fix."""
        if self._facts is None:
            try:
                self._live_worker()
            except CallFailed as failure:
                raise ValueError(f"reward.functions: use '{self._source.use}' {failure}.") from failure

    def close(self) -> None:
        """End the worker; a later call starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]) -> RewardCall:
        """Score a batch. ValueError: a column that the function needs is missing, or one cannot be sent to it.

        Raises Interrupted soon after a stop was asked for.
        """
        arguments = _arguments(prompts, completions, columns)
        if not prompts:
            return RewardCall([])
        self.start()
        assert self._facts is not None
        for name in self._facts["required"]:
            if name not in arguments:
                raise ValueError(
                    f"reward.functions: use '{self._source.use}' takes a column '{name}', which the data does not have."
                    f"{did_you_mean(name, list(arguments))} There are: {', '.join(arguments)}."
                )
        if self._facts["parameters"] is not None:  # it has no **columns
            arguments = {name: arguments[name] for name in self._facts["parameters"] if name in arguments}
        try:
            return self._ask(arguments, len(prompts), timeout_s=self._timeout_s)
        except LoadFailed as failure:  # of which no row is guilty
            return _all_failed(len(prompts), f"`{self.name}` {failure}")
        except CallFailed as failure:
            reason = str(failure)
        self.close()  # whatever state the failure left behind must not reach another row
        if self._facts["whole_batch"]:
            return _all_failed(len(prompts), f"`{self.name}` {reason}")
        return self._row_by_row(arguments, len(prompts), why=reason)

    def _row_by_row(self, arguments: dict[str, list[Any]], num_rows: int, *, why: str) -> RewardCall:
        call = RewardCall([math.nan] * num_rows, retried=why)
        row_timeout_s = min(self._timeout_s, max(MIN_ROW_TIMEOUT_S, self._timeout_s / MAX_WORKERS_LOST))
        deadline = time.monotonic() + ROWS_TIMEOUTS * self._timeout_s
        workers_lost = 0
        for row in range(num_rows):
            given_up = ""
            if workers_lost == MAX_WORKERS_LOST:
                given_up = f"was not tried again alone: {workers_lost} rows had hung or crashed by then"
            elif time.monotonic() > deadline:
                given_up = f"was not tried again alone: {ROWS_TIMEOUTS} x timeout_s had gone into the rows before"
            if given_up:
                call.failures.append(RewardFailure(row, f"`{self.name}` {given_up}; with the whole batch it {why}"))
                continue
            try:
                one_row = {name: [values[row]] for name, values in arguments.items()}
                alone = self._ask(one_row, 1, timeout_s=row_timeout_s)
            except CallFailed as failure:
                workers_lost += failure.worker_lost
                call.failures.append(RewardFailure(row, f"`{self.name}` {failure}"))
                continue
            call.scores[row] = alone.scores[0]
            call.failures += [RewardFailure(row, failure.reason) for failure in alone.failures]
        return call

    def _ask(self, arguments: dict[str, list[Any]], num_rows: int, *, timeout_s: float) -> RewardCall:
        request = f'{{"arguments": {_json(arguments)}, "num_rows": {num_rows}, "timeout_s": {timeout_s!r}}}'
        try:
            reply = self._live_worker().ask(request, timeout_s=timeout_s)
        finally:
            self.printed.end_call()
        if reply["read_as_text"]:
            self.chat_hint = f"`{self.name}` compares a completion with text, but {worker.CHAT_HINT}"
        if len(reply["scores"]) != num_rows:
            raise CallFailed(f"had {len(reply['scores'])} scores for {num_rows} rows", worker_lost=False)
        return _reward_call(self.name, reply)

    def _live_worker(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self.close()
            self._worker = Worker(self._source, memory_bytes=self._memory_bytes, heard=self.printed.add)
            load_timeout_s = max(self._timeout_s, LOAD_TIMEOUT_S)
            try:
                self._facts = self._worker.load(timeout_s=load_timeout_s)
            except CallFailed as failure:
                self.close()
                raise LoadFailed(f"could not be loaded: it {failure}", worker_lost=True) from failure
        return self._worker


def call_in_process(
    function: Callable[..., Any],
    name: str,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: dict[str, list[Any]],
) -> RewardCall:
    """Score a batch with trusted code, here and without a time limit; an exception fails all rows."""
    arguments = _arguments(prompts, completions, columns)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    reply = worker.call(function, arguments, num_rows=len(prompts), file=file)
    if "error" in reply:
        return _all_failed(len(prompts), f"`{name}` {said(reply)}")
    return _reward_call(name, reply)


def _arguments(
    prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    arguments = {"prompts": list(prompts), "completions": list(completions), **columns}
    assert all(len(values) == len(prompts) for values in arguments.values()), {k: len(v) for k, v in arguments.items()}
    assert len(arguments) == len(columns) + 2, "a column is called prompts or completions; tasks refuse those"
    return arguments


def _reward_call(name: str, reply: dict[str, Any]) -> RewardCall:
    scores = [math.nan if score is None else score for score in reply["scores"]]
    failures = [(row, quoted(reason)) for row, reason in reply["failures"]]
    return RewardCall(scores, [RewardFailure(row, f"`{name}` {reason}") for row, reason in failures])


def _all_failed(num_rows: int, reason: str) -> RewardCall:
    return RewardCall([math.nan] * num_rows, [RewardFailure(row, reason) for row in range(num_rows)])


def _json(arguments: dict[str, list[Any]]) -> str:
    """The arguments as a JSON object; in ASCII, so that lone surrogates survive. ValueError: a column is not JSON."""
    members = [f"{json.dumps(name)}: {_json_column(name, values)}" for name, values in arguments.items()]
    return "{" + ", ".join(members) + "}"


def _json_column(name: str, values: list[Any]) -> str:
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Column '{name}' cannot be handed to a reward function: {error}. "
            "Columns may hold text, numbers, true, false, null, and lists and objects of these."
        ) from error
