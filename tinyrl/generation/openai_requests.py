"""OpenAI's requests: what they may ask for, and their completions on the way to the client.

Of the protocol's settings those are kept that say how a completion is drawn; one that would have to change the
distribution otherwise (penalties, logit_bias, a response format, and what vLLM has of the kind) is refused and not
ignored, unless it is null or asks for what is done anyway. Besides, as vLLM has them:
`top_k`, `chat_template_kwargs`, `return_token_ids`, `include_stop_str_in_output`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from tinyrl.data.messages import Message
from tinyrl.generation.engine import Completion
from tinyrl.generation.live import Spelling, Wanted

MOST_LIKELIEST = 20  # tokens for which a client may ask at each place
Likeliest = Annotated[int, Field(ge=0, le=MOST_LIKELIEST)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Refused(Exception):
    """An answer with an error: its status, and what is said."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class StreamOptions(BaseModel):
    include_usage: bool = False


class Sampled(BaseModel):
    """What both kinds of requests may ask for. Fields of the protocol that are not here change nothing and are left."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    min_p: Literal[0] | None = None
    typical_p: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    stop_token_ids: Nothing | None = None
    bad_words: Nothing | None = None
    allowed_token_ids: None = None
    truncate_prompt_tokens: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ResponseFormat(BaseModel):
    type: Literal["text"] = "text"


class ChatRequest(Sampled):
    messages: list[Any]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    functions: Nothing | None = None
    function_call: Literal["auto", "none"] | None = None
    reasoning_effort: None = None
    chat_template: None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Likeliest | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


@dataclass
class Choice:
    """One completion on its way: its text so far, what of it was handed out, and how it ended."""

    index: int
    prompt: list[int]
    spelling: Spelling
    stop: list[str]
    marker: str | None  # what begins a part that is held back until the end; "": anything may
    on_message: Callable[[dict[str, Any]], None] = lambda message: None  # told of the whole answer before it is sent
    wanted: Wanted | None = None
    text: str = ""
    shown: int = 0
    cut: bool = False
    completion: Completion | None = None
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)  # of each token, where that was asked for

    def add(self, tokens: list[int], *, ended: bool = False) -> str:
        """The text that these tokens make certain: none that may turn out to be a stop string, or follow one."""
        if not self.cut:
            self.text += "".join(self.spelling.add(token) for token in tokens) + (self.spelling.end() if ended else "")
        ends = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text, self.cut = self.text[: min(ends)], True
        marked = self.text.find(self.marker) if self.marker is not None else -1
        certain = len(self.text)
        if marked >= 0:
            certain = marked
        elif not ended and not self.cut:
            certain -= max(_begun(self.text, end) for end in [*self.stop, self.marker or ""])
        piece, self.shown = self.text[self.shown : max(certain, self.shown)], max(certain, self.shown)
        return piece

    @property
    def finish_reason(self) -> str:
        assert self.completion is not None
        return "length" if self.completion.finish_reason == "length" else "stop"


def _begun(text: str, end: str) -> int:
    """How many characters at the end of a text may be the beginning of `end`."""
    return next((size for size in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:size])), 0)


@dataclass(frozen=True)
class Said:
    """What a client has sent before the answer: messages and how they are rendered, or text, or tokens."""

    messages: list[Message] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    text: str | None = None


@dataclass
class Asked:
    """A request that is being answered: its choices, and the queue of what the sampler says of them."""

    body: Sampled
    choices: list[Choice]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[tuple[Choice, list[int] | Completion | Exception]] = field(default_factory=asyncio.Queue)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def tell(self, choice: Choice, said: list[int] | Completion | Exception) -> None:
        """Called in the sampler's thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (choice, said))

    def give_up(self) -> None:
        for choice in self.choices:
            if choice.wanted is not None:
                choice.wanted.given_up = True

    async def pieces(self, request: HttpRequest | None = None) -> AsyncIterator[tuple[Choice, str]]:
        """The text of all choices as it comes; the last piece of a choice comes with its completion. Raises Refused
        where one failed; ends early where the client of `request` has gone (None: whoever writes to it finds out).
        """
        going = sum(choice.completion is None for choice in self.choices)
        try:
            while going:
                try:
                    choice, said = await asyncio.wait_for(self.events.get(), timeout=1.0)
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        return
                    continue
                if isinstance(said, Exception):
                    raise Refused(500, f"sampling failed: {type(said).__name__}: {said}")
                if isinstance(said, Completion):
                    choice.completion = said
                    going -= 1
                    yield choice, choice.add([], ended=True)
                else:
                    yield choice, choice.add(said)
        finally:
            self.give_up()

    async def finished(self, request: HttpRequest) -> None:
        """Wait for all of it. Raises what `pieces` does, and ClientDisconnect where the client has gone."""
        async for _ in self.pieces(request):
            pass
        if any(choice.completion is None for choice in self.choices):
            raise ClientDisconnect

    @property
    def usage(self) -> dict[str, int]:
        prompts = {tuple(choice.prompt) for choice in self.choices}
        read = sum(map(len, prompts))
        written = sum(len(choice.completion.tokens) for choice in self.choices if choice.completion is not None)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
