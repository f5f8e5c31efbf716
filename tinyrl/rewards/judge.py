"""Rewards from a judge: another model behind an OpenAI endpoint, asked by a rubric.

    score   each answer alone: a number on the rubric's scale, as a reward from 0 to 1; by several criteria, their mean
    rank    the answers to one prompt together (RULER): the judge orders them, the best gets 1 and the worst 0

Replies are cached on disk by a hash of the request (endpoint, model, every word), so a resume or a second run asks
nothing and is equal to the bit, also without a network. question.py has what is asked, verdict.py how a reply is read.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.data.http_client import NotingClient, last_try, secrets_in, until_done, without_secrets
from tinyrl.data.messages import as_completion, asked_of
from tinyrl.data.readers import Row
from tinyrl.environments.environment import NONSENSE
from tinyrl.nan import mean
from tinyrl.process.errors import ExplainedByCheck, GuardStop, Interrupted
from tinyrl.rewards.budget import JUDGED_ANSWERS
from tinyrl.rewards.question import JudgeQuestion, question_of, sha256
from tinyrl.rewards.rubric import Rubric, read_rubric
from tinyrl.rewards.verdict import MOST_SHOWN, only_verdict, order_of, score_within, scores_within
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import row_columns
from tinyrl.text import truncate
from tinyrl.urls import mask_url
from tinyrl.workers.process import Printed
from tinyrl.workers.values import RowFailure, RowResults

MAX_RETRIES = 5  # by the openai client: after 0.5, 1, 2, 4 and 8 s, or as the server asks
TEMPORARY = (408, 409, 429)  # statuses, and all from 500 on, after which the client tries again
OF_ENDPOINT = (401, 402, 403, 404, 405)  # statuses that say nothing about the question
MOST_REPLY = 1 << 22  # bytes of a reply with all around it
UNSUPPORTED = re.compile(
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|deprecated|no longer", re.I
)
LEAST_AUC = 0.6


class EndpointRefusal(ValueError):
    """An answer that judges nothing and would be the same if the question were sent again. of_endpoint: to any
    question, as where the key or the address is wrong.
    """

    def __init__(self, why: str, *, of_endpoint: bool = False) -> None:
        super().__init__(why)
        self.of_endpoint = of_endpoint


class BudgetSpent(GuardStop):
    """The run would ask its judge more often than max_requests allows."""


class JudgeGone(Interrupted):
    """The judge does not answer. Its replies so far are cached, so the run can go on when it is back."""


@dataclass(frozen=True)
class JudgedAnswer:
    """What an answer is worth, from 0 to 1, NaN where there is nothing to compare it with; parts: by criterion."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)


class JudgeReward:
    """A judge as a reward function (functions.py). State: its cache of replies; `usage` since it was last read:
    requests sent, replies from the cache, tokens, seconds of waiting; `asked`: questions in all; `refused`: parameters
    that the endpoint does not take; `notes`: lines for the log. Raises ValueError where the rubric or the cache cannot
    be read.
    """

    retried = None

    def __init__(self, config: RewardFunctionConfig, *, timeout_s: float, weight: float = 1.0) -> None:
        assert config.url is not None
        self.config = config
        self.weight = weight
        self.timeout_s = timeout_s
        self.name = "judge"
        self.printed = Printed(self.name)
        self.usage: dict[str, float] = {"requests": 0, "cached": 0, "tokens": 0, "seconds": 0.0}
        self.rubric = read_rubric(config)
        self.address = config.url.rstrip("/").removesuffix("/v1") + "/v1"
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.cache_file = Path(config.cache or f"{folder}/tinyrl/judge.sqlite").expanduser()
        self.asked = 0
        self.refused = set[str]()
        self.notes = list[str]()
        try:
            self.cache_file.parent.mkdir(parents=True, exist_ok=True)
            self.cache = self._opened()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"reward.functions: cache {self.cache_file}: {error}; name another file") from None

    def _opened(self) -> sqlite3.Connection:
        """Open the cache, or set a damaged one aside and begin another."""
        for first in (True, False):
            # written in the thread of the requests, as replies come; several runs may share the file
            cache = sqlite3.connect(self.cache_file, timeout=60.0, check_same_thread=False, isolation_level=None)
            try:
                cache.execute("PRAGMA journal_mode=WAL")
                cache.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
                cache.execute("SELECT key, reply FROM replies LIMIT 1").fetchall()
                return cache
            except sqlite3.Error as error:
                cache.close()
                if not (first and is_damage(error)):
                    raise
                self._set_aside(error)
        raise AssertionError("the second try returns or raises")

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Rename a damaged cache with what belongs to it, and note that."""
        aside = Path(f"{self.cache_file}.damaged-{time.time_ns()}")
        for ending in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{self.cache_file}{ending}", f"{aside}{ending}")
        note = f"warning: the judge's cache {self.cache_file} is damaged ({error}): it is set aside as {aside}"
        self.notes.append(note)
        self.printed.add(f"{note}\n".encode(errors="replace"))

    @property
    def _secrets(self) -> list[str | None]:
        return [os.environ.get(self.config.key_env or ""), *secrets_in(self.address)]

    @cached_property
    def _client(self) -> Any:
        import openai

        return openai.AsyncOpenAI(
            base_url=self.address,
            api_key=os.environ.get(self.config.key_env or "") or "none",  # else OPENAI_API_KEY goes to any server
            max_retries=MAX_RETRIES,
            timeout=self.timeout_s,
            http_client=NotingClient(timeout=self.timeout_s, most=MOST_REPLY),
        ).chat.completions

    def start(self) -> None:
        """Check the key. Whether the endpoint answers shows with the first question that is not in the cache."""
        if self.config.key_env is not None and not os.environ.get(self.config.key_env):
            raise ValueError(f"reward.functions: key_env={self.config.key_env}: no such variable in the environment")

    def close(self) -> None:
        self.cache.close()

    @property
    def parts(self) -> list[str]:
        """Return the names of the run's criteria; a row's own have none that another row knows."""
        return [one.name for one in self.rubric.criteria]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, list[Any]],
        *,
        group_size: int | None = None,
    ) -> RowResults:
        """Score a batch from 0 to 1: answer by answer, or in `rank` mode each `group_size` answers to one prompt (None:
        all) together. Rows whose reply is missing or cannot be read are among the failures. Raises JudgeGone where a
        question was not answered at all, or every one was refused because of the key or the address.
        """
        ranks = self.config.mode == "rank"
        size = (group_size or len(prompts) or 1) if ranks else 1
        call = RowResults([math.nan] * len(prompts), comments=[""] * len(prompts))
        call.parts = {name: [math.nan] * len(prompts) for name in self.parts}
        questions = list[JudgeQuestion]()
        for start in range(0, len(prompts), size):
            rows = range(start, min(start + size, len(prompts)))
            row = {name: values[start] for name, values in columns.items()}
            try:
                rubric = self.rubric.of_row(row)
            except ValueError as error:
                call.failures += [RowFailure(i, f"`{self.name}` was not asked: {error}") for i in rows]
                continue
            question = question_of(
                self.config,
                rubric,
                rows,
                prompt=prompts[start],
                completions=[completions[i] for i in rows],
                columns=row,
            )
            questions.append(question)
        for question, reply in zip(questions, self._ask(questions), strict=True):
            shown = question.order
            try:
                for row, verdict in zip(shown, self.read_scores(reply, question.rubric, len(shown)), strict=True):
                    call.values[row] = verdict.score
                    call.comments[row] = str(reply).strip()
                    for name, scores in call.parts.items():
                        scores[row] = verdict.parts[name]
            except ValueError as error:
                call.failures += [RowFailure(row, f"`{self.name}` {error}") for row in shown]
        return call

    def _ask(self, questions: list[JudgeQuestion]) -> list[str | EndpointRefusal]:
        """Return the reply to each question. Equal ones are asked once."""
        keys = [sha256(json.dumps([self.address, question.body], sort_keys=True)) for question in questions]
        replies: dict[str, str | EndpointRefusal] = {**self._cached(keys)}
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in replies}
        most = self.config.max_requests
        if most is not None and self.asked + len(missing) > most:
            spent = f"the judge was asked {self.asked:,} times, and {len(missing):,} more"
            raise BudgetSpent(f"reward.functions: {spent} would be above max_requests={most}")
        self.asked += len(missing)
        free = asyncio.Semaphore(self.config.max_concurrency)
        begun = time.perf_counter()

        async def ask(key: str, question: JudgeQuestion) -> str:
            async with free:
                reply = await self._reply(question)
            with suppress(sqlite3.Error):  # a full disk costs the question once more, not the run
                self.cache.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
            return reply

        async def ask_all() -> list[str | BaseException]:
            return await asyncio.gather(*(ask(*one) for one in missing.items()), return_exceptions=True)

        answers = until_done(ask_all()) if missing else []
        spent = {
            "cached": len(questions) - len(missing),
            "requests": len(missing),
            "seconds": time.perf_counter() - begun,
        }
        self.usage |= {name: self.usage[name] + more for name, more in spent.items()}
        for key, answer in zip(missing, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EndpointRefusal):
                raise answer
            replies[key] = answer
        if answers and all(isinstance(answer, EndpointRefusal) and answer.of_endpoint for answer in answers):
            raise self._gone(str(answers[0]))
        return [replies[key] for key in keys]

    def _cached(self, keys: list[str]) -> dict[str, str]:
        """Return the cached replies by key; none of a cache that turns out to be damaged."""
        found = dict[str, Any]()
        try:
            for key in keys:
                found |= self.cache.execute("SELECT key, reply FROM replies WHERE key = ?", (key,)).fetchall()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise ValueError(f"reward.functions: cache {self.cache_file}: {error}") from None
            self.cache.close()
            self._set_aside(error)
            self.cache = self._opened()
            return {}
        return {key: reply for key, reply in found.items() if isinstance(reply, str)}

    async def _reply(self, question: JudgeQuestion) -> str:
        """Send one question with its images, in the thread of the requests; again without a parameter that the endpoint
        does not take, which is left out from then on, once a question without it is answered. Raises EndpointRefusal or
        JudgeGone.
        """
        import openai

        try:
            body = question.sent_body()
        except ValueError as error:
            raise EndpointRefusal(f"was not asked: {error}") from None
        left_out = {*self.refused}
        while True:
            taken = self._taken(body, left_out)
            try:
                reply = await self._send(taken)
                self.refused |= left_out
                return reply
            except openai.APIStatusError as error:
                said = without_secrets(error.response.text, self._secrets)
                refused = self._unsupported(taken, said) if error.status_code in (400, 422) else set[str]()
                if refused:
                    left_out |= refused
                    continue
                if error.response.is_redirect:
                    raise self._gone(self._redirects(error.response)) from None
                what = f"answered with {error.status_code}: {truncate(said, MOST_SHOWN)}"
                if error.status_code in TEMPORARY or error.status_code >= 500:
                    raise self._gone(what) from None
                raise EndpointRefusal(what, of_endpoint=error.status_code in OF_ENDPOINT) from None

    def _redirects(self, answer: Any) -> str:
        """Describe a redirect, which is not followed: the key would go to an address that nobody has given."""
        there = mask_url(without_secrets(answer.headers.get("Location", ""), self._secrets))
        return f"redirects ({answer.status_code}) to {truncate(there, MOST_SHOWN)}, and redirects are not followed"

    def _taken(self, body: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
        """Return a question without the parameters that are left out. Newer endpoints have max_completion_tokens."""
        taken = {name: value for name, value in body.items() if name not in left_out}
        if "max_tokens" in left_out and "max_completion_tokens" not in left_out:
            taken["max_completion_tokens"] = body["max_tokens"]
        return taken

    def _unsupported(self, taken: dict[str, Any], said: str) -> set[str]:
        """Return the parameters of a question that a refusal names as not supported. One that names `temperature` means
        its value, 0, whatever its words are; a limit of tokens may also be too large.
        """
        of_limits = ("max_tokens", "max_completion_tokens") if UNSUPPORTED.search(said) else ()
        optional = [name for name in (*of_limits, "temperature") if name in taken]
        return {name for name in optional if re.search(rf"\b{name}\b", said)}

    async def _send(self, body: dict[str, Any]) -> str:
        """Return the text of an answer. Raises EndpointRefusal, JudgeGone, or the client's error for a status."""
        import openai

        headers = {} if self.config.key_env else {"Authorization": openai.Omit()}
        last_try.set("")
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._client.create(**body, extra_headers=headers)
            self.usage["tokens"] += answer.usage.total_tokens if answer.usage else 0
            content = answer.choices[0].message.content
            if not isinstance(content, str):
                raise TypeError("its message has no text")
            content.encode()  # raises for lone surrogates
            return without_secrets(content, self._secrets)
        except (TimeoutError, openai.APIConnectionError) as error:
            limit = f"reward.timeout_s={self.timeout_s:g}"
            if isinstance(error, TimeoutError):
                limit = f"within {limit}"
            last = truncate(without_secrets(last_try.get(), self._secrets), MOST_SHOWN)
            why = f"the last try ended with {last}; {limit}" if last else limit
            raise self._gone(f"did not answer ({why})") from None
        except openai.APIStatusError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            why = truncate(without_secrets(str(error), self._secrets), MOST_SHOWN)
            raise EndpointRefusal(f"answered with what is not a chat completion ({why})") from None

    def _gone(self, why: str) -> JudgeGone:
        return JudgeGone(f"reward.functions: judge at {mask_url(self.config.url or '')} {why}")

    def take_usage(self) -> dict[str, float]:
        """Return `usage`, which begins anew."""
        taken = self.usage
        self.usage = {name: 0 for name in taken}
        return taken

    def read_scores(self, reply: str | EndpointRefusal, rubric: Rubric, count: int) -> list[JudgedAnswer]:
        """Return the scores of each of `count` answers as shown. Raises ValueError for a reply without a score, that of
        each criterion if there are several, or with different ones.
        """
        if isinstance(reply, EndpointRefusal):
            raise reply
        if self.config.mode == "rank":
            order = only_verdict(reply, "order", partial(order_of, count=count), what=f"order of the {count} answers")
            return [
                JudgedAnswer(1.0 - order.index(i) / (count - 1) if count > 1 else math.nan) for i in range(1, count + 1)
            ]
        if rubric.criteria:
            names = ", ".join(rubric.scales)
            parse = partial(scores_within, scales=rubric.scales)
            scores = only_verdict(
                reply, "scores", parse, what=f"object `scores` with all criteria ({names}) on their scales"
            )
            parts = {one.name: one.reward(scores[one.name]) for one in rubric.criteria}
            return [JudgedAnswer(rubric.reward(parts), parts)]
        low, high = self.config.scale
        within = partial(score_within, low=low, high=high)
        score = only_verdict(reply, "score", within, what=f"score from {low:g} to {high:g}")
        return [JudgedAnswer((score - low) / (high - low))]

    def ask_once(self, task: Task, row: Row) -> RowResults:
        """Ask one question: about a row's reference answer, or an empty one; in `rank` mode beside nonsense."""
        answers = [str(task.gold(row) or "")]
        if self.config.mode == "rank":
            answers.append(NONSENSE)
        prompt = asked_of(task.prompt(row))
        texts = [as_completion(answer, prompt) for answer in answers]
        return self([prompt] * len(texts), texts, row_columns([row] * len(texts)))

    def check(self, task: Task, rows: list[Row]) -> str:
        """Ask about each row's reference answer, another row's, nothing and nonsense; return how often the reference
        answer got more, ties half. Raises ExplainedByCheck where that is seldom, unless allow_weak.
        """
        golds = [str(task.gold(row)) for row in rows]
        answers = np.array([[gold, golds[i - 1], "", NONSENSE] for i, gold in enumerate(golds)], object)
        each = [row for row in rows for _ in range(JUDGED_ANSWERS)]
        prompts = [asked_of(task.prompt(row)) for row in each]
        texts = [as_completion(text, prompt) for text, prompt in zip(answers.ravel(), prompts, strict=True)]
        call = self(prompts, texts, row_columns(each), group_size=JUDGED_ANSWERS)
        scores = np.reshape(call.values, answers.shape)
        rivals = answers != answers[:, :1]
        auc = mean((0.5 + np.sign(scores[:, :1] - scores) / 2)[rivals].tolist())
        verdict = f"the judge prefers the reference answer to another one in {auc:.0%} of {len(rows)} rows' pairs (AUC)"
        if math.isnan(auc):
            verdict = "no reply of the judge could be read" + "".join(f": {one.reason}" for one in call.failures[:1])
        if not auc >= LEAST_AUC and not self.config.allow_weak:
            asked = f"{verdict}, and a run asks for {LEAST_AUC:.0%}"
            raise ExplainedByCheck(f"{asked}; another rubric or model, or say allow_weak: true")
        return verdict


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether a file is no longer a database; locks and full disks have classes of their own."""
    return type(error) is sqlite3.DatabaseError
