"""Send an answer that is being sampled: whole or as a stream, in the words of its request's dialect."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tinyrl.environments.tool_calls import ToolCall
from tinyrl.generation.dialect import JSON, EndedChoice, ListedToken, Refused
from tinyrl.generation.engine import SampledRole
from tinyrl.generation.live_answer import SLICE, Choice, LiveAnswer
from tinyrl.generation.scheduler import LiveScheduler
from tinyrl.generation.scoring import score
from tinyrl.tasks.call_forms import CallForm


class AnswerWriter:
    """Sends answers of a scheduler. models: the role behind each name; form: how the model writes calls of tools."""

    def __init__(self, scheduler: LiveScheduler, models: dict[str, SampledRole], form: CallForm | None) -> None:
        self.scheduler = scheduler
        self.tokenizer = scheduler.tokenizer
        self.models = models
        self.form = form

    async def whole(self, answer: LiveAnswer, request: HttpRequest) -> Response:
        """Answer all at once. A client that hangs up before, or a failure, gives the answer up."""
        watcher = asyncio.create_task(answer.watch(request))
        try:
            async for _ in answer.pieces():
                pass
            choices = list[EndedChoice]()
            for choice in answer.choices:
                if choice.index % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
                choices.append(await self._end(answer, choice))
            response = JSONResponse(answer.dialect.whole(choices, answer.usage))
            if answer.client_has_gone:
                raise ClientDisconnect
            for choice, ended in zip(answer.choices, choices, strict=True):
                answer.record(choice, ended)
            return response
        finally:
            watcher.cancel()

    async def lines(self, answer: LiveAnswer) -> AsyncIterator[str]:
        """Yield the lines of a stream. Text is held back where calls are read from it, and where the likeliest tokens
        at its places are listed, which are known when it has ended.
        """
        dialect = answer.dialect
        holds = answer.reads_calls or answer.likeliest > 0
        try:
            for event in dialect.begin(len(answer.choices), answer.usage):
                yield dialect.line(event)
            async for choice, piece in answer.pieces():
                if piece and holds:
                    choice.held.append((piece, len(choice.tokens)))
                elif piece:
                    logprobs = self._sampled(choice) if answer.lists_logprobs else None
                    for event in dialect.piece(choice.index, piece, logprobs):
                        yield dialect.line(event)
                if choice.ended:
                    ended = await self._end(answer, choice)
                    answer.record(choice, ended)
                    for event in self._last_events(answer, choice, ended):
                        yield dialect.line(event)
            for event in dialect.finish(answer.usage):
                yield dialect.line(event)
            yield dialect.closing
        except Refused as refused:
            for event in dialect.failed(refused):
                yield dialect.line(event)

    def _last_events(self, answer: LiveAnswer, choice: Choice, ended: EndedChoice) -> Iterator[JSON]:
        """Yield the events of a choice that has ended: text that was held back, and its end."""
        dialect = answer.dialect
        held = choice.held
        if answer.reads_calls:
            held = [(ended.content, len(choice.tokens))] if ended.content else []
        left = ended.logprobs
        done = 0
        for text, count in held:
            own = None if left is None else left[: count - done]
            left = None if left is None else left[count - done :]
            done = count
            yield from dialect.piece(choice.index, text, own)
        yield from dialect.end(choice.index, replace(ended, logprobs=left))

    async def _end(self, answer: LiveAnswer, choice: Choice) -> EndedChoice:
        """Return what an answer that has ended says. A call that cannot be parsed stays text."""
        sequence = choice.sequence
        logprobs = await self._logprobs(answer, choice) if answer.lists_logprobs else None
        content = choice.text
        if answer.echoes:
            content = str(self.tokenizer.decode(sequence.prompt)) + content
        fields = JSON()
        if answer.body.return_token_ids:
            fields = {"prompt_token_ids": sequence.prompt, "token_ids": sequence.tokens}
        if answer.reads_calls and self.form is not None:
            before, calls = self.form.read(content, sequence.tokens, tools=answer.body.tools, opened=answer.text)
            if calls and not any(call.problem for call in calls):
                return EndedChoice(
                    content=before.rstrip() or None,
                    calls=call_entries(calls, of=[*sequence.prompt, *sequence.tokens]),
                    reason="tool_calls",
                    logprobs=logprobs,
                    fields=fields,
                )
        is_stopped = choice.stopped_by is not None  # where no text follows a stop string, nothing was cut off
        return EndedChoice(
            content=content,
            calls=[],
            reason="length" if sequence.finish_reason == "length" and not is_stopped else "stop",
            stop=choice.stopped_by,
            logprobs=logprobs,
            fields=fields,
        )

    async def _logprobs(self, answer: LiveAnswer, choice: Choice) -> list[ListedToken]:
        """Return the log-probabilities of the tokens of an answer, of its prompt's where it is echoed, that were not
        streamed yet; with the likeliest in each place if they are asked for.
        """
        if not answer.likeliest and not answer.echoes:
            return self._sampled(choice)
        sequence = choice.sequence
        prompt = sequence.prompt
        tokens = [*prompt, *sequence.tokens]
        job = partial(
            score,
            self.scheduler.engine.policy,
            tokens,
            role=self.models[answer.body.model],
            temperature=sequence.params.temperature,
            likeliest=max(1, answer.likeliest),
        )
        try:
            before, tops = await run_sync(partial(self.scheduler.run, job), abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 the client gets it
            raise Refused(500, f"scoring failed: {type(error).__name__}: {error}") from None
        logprobs = [*before[: len(prompt)], *sequence.logprobs]
        start = 0 if answer.echoes else len(prompt)
        return [
            ListedToken(self._spelt(token), logprob, [(self._spelt(other), p) for other, p in top[: answer.likeliest]])
            for token, logprob, top in zip(tokens[start:], logprobs[start:], tops[start:], strict=True)
        ]

    def _sampled(self, choice: Choice) -> list[ListedToken]:
        """Take the log-probabilities of the sampled tokens that were not listed yet."""
        start = choice.listed
        choice.listed = len(choice.tokens)
        new = zip(choice.tokens[start:], choice.logprobs[start:], strict=True)
        return [ListedToken(self._spelt(token), logprob, []) for token, logprob in new]

    def _spelt(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def call_entries(calls: list[ToolCall], *, of: list[int]) -> list[JSON]:
    """Return the calls of a turn as chat completions write them; of: the tokens up to its end. An id follows from these
    and the call's place, so that a harness that writes ids into its next prompt sends the same one in a repeated run.
    """
    digest = hashlib.sha256(json.dumps(of).encode()).hexdigest()
    entries = list[JSON]()
    for place, call in enumerate(calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        entries.append({"id": f"call_{digest[:16]}{place}", "type": "function", "function": function})
    return entries
