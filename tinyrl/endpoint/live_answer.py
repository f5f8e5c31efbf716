"""An answer that is being sampled: its choices, and what of their text and tokens can be sent already."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tinyrl.endpoint.agent_episode import Call, ClientInput
from tinyrl.endpoint.dialect import Dialect, EndedChoice, Refused, Usage
from tinyrl.endpoint.request_body import Body
from tinyrl.generation.request import DecodedSequence
from tinyrl.tasks.turn_text import TurnDetokenizer

SLICE = 64  # prompts, sequences or pieces of text between two looks at other requests


@dataclass(frozen=True)
class NewTokens:
    tokens: list[int]
    logprobs: list[float]


Event = NewTokens | Exception | None  # None: the end


@dataclass
class Choice:
    """One completion on its way: its text so far, how much of it is certain, and how it ended.

    stop: strings that end it; shows_stop: they are shown; text: at first what the template wrote of the answer, which
    no stop string is looked for in; call: that of an agent's episode; logprobs: of its tokens so far, of which `listed`
    were taken; places_tokens: `offsets` are the characters of the text before each; held: pieces of text that are not
    sent yet, each with the number of tokens up to it; ended: its last tokens have come.
    """

    index: int
    sequence: DecodedSequence
    detokenizer: TurnDetokenizer
    stop: list[str] = field(default_factory=list)
    shows_stop: bool = False
    text: str = ""
    call: Call | None = None
    shown: int = 0
    stopped_by: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    listed: int = 0
    places_tokens: bool = False
    offsets: list[int] = field(default_factory=list)
    held: list[tuple[str, int]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.opened = len(self.text)

    def add(self, tokens: list[int]) -> str:
        """Add tokens; return the text that is certain now: none that may become a stop string, or follow one."""
        self.tokens += tokens
        is_cut = self.stopped_by is not None and not self.shows_stop
        parts = [[token] for token in tokens] if self.places_tokens and tokens else [tokens]
        for part in parts:
            self.offsets += [len(self.text)] * len(part)
            if not is_cut:
                self.text += self.detokenizer.add(part, at_end=self.ended)
        sampled = self.text[self.opened :]
        places = {sampled.find(stop): stop for stop in self.stop if stop in sampled}
        if places:
            first = min(places)
            self.stopped_by = places[first]
            if not self.shows_stop:
                self.text = self.text[: self.opened + first]
        certain = len(self.text)
        may_be_cut = not self.ended and self.stopped_by is None and not self.shows_stop
        if may_be_cut:
            certain -= max((_begun(stop, sampled) for stop in self.stop), default=0)
        piece = self.text[self.shown : max(certain, self.shown)]
        self.shown = max(certain, self.shown)
        return piece


def _begun(stop: str, text: str) -> int:
    """Return the length of the longest beginning of a stop string that a text ends with, short of all of it."""
    return max((size for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


class LiveAnswer:
    """The answer to a request: its choices, and a queue of what the scheduler's thread makes of them.

    given: what it continues; begun: the end of that, where it is the beginning of a message; text: the choices begin
    with it; reads_calls: of tools, in whole answers; lists_logprobs: of each sampled token; likeliest: how many tokens
    are listed at each place.
    """

    def __init__(self, body: Body, dialect: Dialect, *, is_chat: bool) -> None:
        self.body = body
        self.dialect = dialect
        self.is_chat = is_chat
        self.given = ClientInput()
        self.text = ""
        self.begun = ""
        self.reads_calls = False
        if is_chat:
            self.lists_logprobs = bool(body.logprobs)
            self.likeliest = (body.top_logprobs or 0) if self.lists_logprobs else 0
        else:
            self.lists_logprobs = body.logprobs is not None and body.logprobs is not False
            self.likeliest = int(body.logprobs or 0)
        self.choices = list[Choice]()
        self.loop = asyncio.get_running_loop()
        self.events = asyncio.Queue[tuple[int, Event] | None]()  # None: no client
        self.client_has_gone = False

    @property
    def limit(self) -> int | None:
        """Return the most tokens that the request asks for; a completion of text has 16, as in the protocol."""
        return self.body.max_completion_tokens or self.body.max_tokens or (None if self.is_chat else 16)

    @property
    def limit_field(self) -> str:
        """Return the field of the request that `limit` is set by."""
        return self.dialect.name_of("max_completion_tokens" if self.body.max_completion_tokens else "max_tokens")

    @property
    def echoes(self) -> bool:
        return bool(self.body.echo) and not self.is_chat

    @property
    def usage(self) -> Usage:
        one_of_each_prompt = self.choices[:: self.body.n or 1]
        read = sum(len(choice.sequence.request.prompt) for choice in one_of_each_prompt)
        written = sum(len(choice.sequence.tokens) for choice in self.choices if choice.ended)
        return Usage(prompt=read, completion=written)

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        """Queue new tokens of a choice, the last of its sequence; called by the scheduler's thread."""
        logprobs = self.choices[index].sequence.logprobs[-len(tokens) :]
        self.put(index, NewTokens(tokens, logprobs))

    def put(self, index: int, event: Event) -> None:
        self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

    async def watch(self, request: HttpRequest) -> None:
        """Wait until the client hangs up; `pieces` ends then."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.client_has_gone = True
        self.events.put_nowait(None)

    async def pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """Yield the text of all choices as it comes; the last piece of a choice comes with its end. Raises
        Refused if one failed, and ClientDisconnect if the client is watched and has gone.
        """
        running = len(self.choices)
        for number in itertools.count(1):
            if not running:
                break
            if number % SLICE == 0:  # events may be there already, and getting them lets nobody else run
                await asyncio.sleep(0)
            event = await self.events.get()
            if event is None:
                raise ClientDisconnect
            index, result = event
            choice = self.choices[index]
            if isinstance(result, Exception):
                raise Refused(500, f"sampling failed: {type(result).__name__}: {result}")
            if isinstance(result, NewTokens):
                choice.logprobs += result.logprobs
                yield choice, choice.add(result.tokens)
            else:
                choice.ended = True
                running -= 1
                yield choice, choice.add([])

    def record(self, choice: Choice, ended: EndedChoice) -> None:
        """Record in an agent's episode that a completion is sent."""
        if choice.call is not None:
            choice.call.answered(ended.message if self.is_chat else {"content": choice.text})

    def give_up(self) -> None:
        """End what is still sampled, and the calls of an agent whose answers were not sent."""
        for choice in self.choices:
            choice.sequence.cancel()
            if choice.call is not None:
                choice.call.give_up()


class Stream(StreamingResponse):
    """An answer in pieces. `close` is called at its end, also where its client hangs up before the first."""

    def __init__(self, lines: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
