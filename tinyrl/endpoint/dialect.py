"""What a protocol reads and writes: a request becomes one for chat completions; an answer, whole or as it comes, JSON.

    completions.py    OpenAI's chat completions, and its completions of text
    responses.py      OpenAI's Responses
    messages_api.py   Anthropic's Messages

Nothing here samples, and nothing knows of HTTP but for the lines of a stream.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tinyrl.text import truncate

JSON = dict[str, Any]

STATE = {  # of a conversation, a stored prompt or a job that a server would have to keep
    "background": (False,), "container": (), "conversation": (), "conversation_id": (), "mcp_servers": ([],),
    "previous_response_id": (), "thread": (), "thread_id": (),
}  # fmt: skip
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # at which clients split lines, unescaped


class Refused(Exception):
    """A request that is answered with an error of this status. code: what clients look for, if they do; param: the
    field at fault, where a client may set it otherwise.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class BadField(Refused):
    """A request with a field whose value cannot be taken; `field` as the client's protocol names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(400, f"{truncate(field)}: {problem}", param=truncate(field))


class ContextOverflow(Refused):
    """A request that does not fit into the model's positions, in the words that clients of both vendors look for."""

    def __init__(self, what: str, *, positions: int) -> None:
        sentence = f"prompt is too long: {what}, and this model's maximum context length is {positions} tokens"
        super().__init__(400, sentence, code="context_length_exceeded")


class TooManyTokens(Refused):
    """A request whose prompt fits, and not the new tokens that a field asks for. In Anthropic's words, from which
    Claude Code reads the numbers and asks for fewer; in none by which a client would shorten its prompt.
    """

    def __init__(self, field: str, asked: int, *, prompt: int, positions: int) -> None:
        sum_of = f"{prompt} + {asked} > {positions}"
        advice = f"ask for `{field}` of at most {positions - prompt}"
        sentence = f"input length and `{field}` exceed context limit: {sum_of}; {advice}"
        super().__init__(400, sentence, code="invalid_value", param=field)


@dataclass(frozen=True)
class ListedToken:
    """A token with its log-probability (None: the first of a prompt), and the likeliest in its place. encoded: its
    bytes, which may be part of a character; offset: characters of the text before it.
    """

    text: str
    logprob: float | None
    encoded: bytes
    top: list[ListedToken] = field(default_factory=list)
    offset: int = 0


@dataclass(frozen=True)
class EndedChoice:
    """A choice of an answer that has ended.

    calls: of tools, as chat completions write them; stop: the stop string that ended it; logprobs: of the tokens that
    are not written yet (None: not asked for); fields: further ones of the choice.
    """

    content: str | None
    calls: list[JSON]
    reason: Literal["stop", "length", "tool_calls"]
    stop: str | None = None
    logprobs: list[ListedToken] | None = None
    fields: JSON = field(default_factory=dict)

    @property
    def message(self) -> JSON:
        """Return the assistant's message, as the next request has it."""
        return {"content": self.content, **({"tool_calls": self.calls} if self.calls else {})}


@dataclass(frozen=True)
class Usage:
    prompt: int  # tokens
    completion: int


class Dialect:
    """Writes the answer to one request (`asked`, as it came) in one protocol.

    A stream calls `begin`; for each choice `piece` for each piece of text, and `end`; then `finish`, or `failed`. Each
    returns the events to be sent.
    """

    prefix: str  # of the answer's id
    foreign: frozenset[str] = frozenset()  # fields that are read of other requests, and that this protocol has not
    names: ClassVar[dict[str, str]] = {}  # of fields that chat completions name otherwise
    closing = ""  # the last line of a stream

    def __init__(self, asked: JSON) -> None:
        self.asked = asked
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())

    @classmethod
    def name_of(cls, field: str) -> str:
        """Return the name in this protocol of a field of chat completions."""
        return cls.names.get(field, field)

    @staticmethod
    def chat_request(asked: JSON) -> JSON:
        """Return the request in the words of chat completions. Raises Refused."""
        return asked

    def whole(self, choices: list[EndedChoice], usage: Usage) -> JSON:
        """Return an answer that is sent at once."""
        raise NotImplementedError

    def begin(self, count: int, usage: Usage) -> Iterator[JSON]:
        """Open a stream of `count` choices."""
        raise NotImplementedError

    def piece(self, index: int, text: str, logprobs: list[ListedToken] | None) -> Iterator[JSON]:
        """Add text to a choice, with the log-probabilities of its tokens (None: not asked for)."""
        raise NotImplementedError

    def end(self, index: int, ended: EndedChoice) -> Iterator[JSON]:
        """Close a choice, whose text has been written."""
        raise NotImplementedError

    def finish(self, usage: Usage) -> Iterator[JSON]:
        """Close a stream whose choices have ended."""
        raise NotImplementedError

    @staticmethod
    def error(refused: Refused) -> JSON:
        """Return the body of an error; OpenAI's, if a protocol has no own."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        code = refused.code or refused.status
        return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": code}}

    def failed(self, refused: Refused) -> Iterator[JSON]:
        """Yield what ends a stream that fails."""
        yield self.error(refused)

    def line(self, event: JSON) -> str:
        """Return an event as it is sent; one that has a type is named by it."""
        named = f"event: {event['type']}\n" if "type" in event else ""
        return f"{named}data: {json.dumps(event, ensure_ascii=False).translate(LINE_ENDS)}\n\n"


def refuse_state(asked: JSON) -> None:
    """Raise Refused for a field that refers to something that the server would have kept."""
    for name, neutral in STATE.items():
        value = asked.get(name)
        if value is not None and value not in neutral:
            raise BadField(name, "not supported, as nothing is kept between two requests; send all messages")


def refuse_several(asked: JSON) -> None:
    """Raise Refused for several choices, which a protocol's answer has no place for."""
    if asked.get("n") not in (None, 1):
        raise BadField("n", f"an answer of this protocol is a single one, not {truncate(repr(asked['n']), 60)}")


def logprob_entries(logprobs: list[ListedToken]) -> list[JSON]:
    """Return log-probabilities as OpenAI's chats and responses list them."""
    return [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in logprobs]


def _entry(one: ListedToken) -> JSON:
    return {"token": one.text, "logprob": one.logprob, "bytes": [*one.encoded]}
