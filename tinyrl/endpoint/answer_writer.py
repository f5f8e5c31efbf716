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
from tokenizers.decoders import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tinyrl.data.images import without_images
from tinyrl.endpoint.dialect import JSON, EndedChoice, ListedToken, Refused
from tinyrl.endpoint.live_answer import SLICE, Choice, LiveAnswer
from tinyrl.environments.tool_calls import ToolCall
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.request import SampledRole
from tinyrl.generation.scoring import logprobs_of_text
from tinyrl.models.detokenizer import IncrementalDetokenizer
from tinyrl.models.image_inputs import ImageExpander
from tinyrl.tasks.call_forms import CallForm

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level BPE writes them


class AnswerWriter:
    """Sends answers of a scheduler. models: the role behind each name; form: how the model writes calls of tools;
    expander: of images.
    """

    def __init__(
        self,
        scheduler: LiveScheduler,
        models: dict[str, SampledRole],
        form: CallForm | None,
        expander: ImageExpander | None,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = scheduler.tokenizer
        self.models = models
        self.form = form
        self.expander = expander
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.is_byte_level = isinstance(getattr(backend, "decoder", None), ByteLevel)

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
        """Return what an answer that has ended says. A call stays text if it cannot be parsed, or names a tool that the
        prompt has left out.
        """
        sequence = choice.sequence
        logprobs = await self._logprobs(answer, choice) if answer.lists_logprobs else None
        content = choice.text
        if answer.echoes:
            content = str(self.tokenizer.decode(sequence.request.prompt)) + content
        fields = JSON()
        if answer.body.return_token_ids:
            fields = {"prompt_token_ids": self._as_read(sequence.request.prompt), "token_ids": sequence.tokens}
        if answer.reads_calls and self.form is not None:
            begun = answer.begun
            said, calls = self.form.read(begun + content, tools=answer.body.functions)
            left_out = answer.body.left_out
            if calls and not any(call.problem or call.name in left_out for call in calls):
                return EndedChoice(
                    content=said[len(begun) :].rstrip() or None,
                    calls=call_entries(calls, of=[*sequence.request.prompt, *sequence.tokens]),
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

    def _as_read(self, prompt: list[int]) -> list[int]:
        """Return the tokens of a prompt as the model's embedding reads them: with its placeholder in images."""
        return prompt if self.expander is None else without_images(prompt, self.expander.placeholder)

    async def _logprobs(self, answer: LiveAnswer, choice: Choice) -> list[ListedToken]:
        """Return the log-probabilities of the tokens of an answer, of its prompt's where it is echoed, that were not
        streamed yet; with the likeliest in each place if they are asked for.
        """
        if not answer.likeliest and not answer.echoes:
            return self._sampled(choice)
        sequence = choice.sequence
        prompt = sequence.request.prompt
        tokens = [*prompt, *sequence.tokens]
        job = partial(
            logprobs_of_text,
            self.scheduler.engine.policy,
            tokens,
            role=self.models[answer.body.model],
            temperature=sequence.request.temperature,
            likeliest=max(1, answer.likeliest),
        )
        try:
            before, tops = await run_sync(partial(self.scheduler.run, job), abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 the client gets it
            raise Refused(500, f"scoring failed: {type(error).__name__}: {error}") from None
        logprobs = [*before[: len(prompt)], *sequence.logprobs]
        offsets, length = self._offsets(prompt) if answer.echoes else ([0] * len(prompt), 0)
        offsets += [length + offset for offset in choice.offsets]
        listed = list[ListedToken]()
        for place in range(0 if answer.echoes else len(prompt), len(tokens)):
            top = [self._listed(other, logprob) for other, logprob in tops[place][: answer.likeliest]]
            listed.append(self._listed(tokens[place], logprobs[place], top=top, offset=offsets[place]))
        return listed

    def _offsets(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the characters before each token of a prompt that is echoed, and those of all."""
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=False)
        offsets = list[int]()
        length = 0
        for token in prompt:
            offsets.append(length)
            length += len(detokenizer.add([token]))
        return offsets, length + len(detokenizer.end())

    def _sampled(self, choice: Choice) -> list[ListedToken]:
        """Take the log-probabilities of the sampled tokens that were not listed yet."""
        start = choice.listed
        choice.listed = len(choice.tokens)
        new = zip(choice.tokens[start:], choice.logprobs[start:], choice.offsets[start:], strict=True)
        return [self._listed(token, logprob, offset=offset) for token, logprob, offset in new]

    def _listed(
        self, token: int, logprob: float | None, *, top: list[ListedToken] | None = None, offset: int = 0
    ) -> ListedToken:
        text = str(self.tokenizer.decode([token]))
        return ListedToken(text, logprob, encoded=self._encoded(token, text), top=top or [], offset=offset)

    def _encoded(self, token: int, text: str) -> bytes:
        """Return the bytes of a token: its own where the tokenizer is a byte-level one, or those of its text."""
        piece = self.tokenizer.convert_ids_to_tokens(token) if self.is_byte_level else None
        if piece is None or token in self.tokenizer.added_tokens_decoder:
            return text.encode()
        return bytes(BYTES[character] for character in piece)


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
