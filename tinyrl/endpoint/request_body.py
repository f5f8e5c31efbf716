"""A request for completions: its JSON, the fields that are read, those that change nothing, and those that are refused.

A field that is not known is refused, since it may be to change the answer (a penalty, a misspelt name), unless it is
null, asks for what is done anyway, or is known to change nothing. As vLLM has them: `top_k`, `chat_template_kwargs`,
`return_token_ids`, `include_stop_str_in_output`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest

from tinyrl.data.readers import finite, json_of
from tinyrl.endpoint.dialect import JSON, BadField, Dialect, Refused
from tinyrl.endpoint.request_tools import is_function, left_out
from tinyrl.text import truncate

MAX_BODY = 1 << 25  # bytes of a request
MOST_VALUES = 1 << 20  # of its JSON: parsing keeps all other requests waiting
SLOW_S = 60.0  # in which a request has to be sent: its headers, and its body
# Fields that change no answer, whatever they hold: for a provider's accounts, caches and queues; what an answer is to
# have besides; and how hard a provider's model is to think, or what of its earlier thoughts it is to forget.
HARMLESS = {
    "client_metadata", "context_management", "include", "metadata", "moderation", "parallel_tool_calls", "prediction",
    "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_effort",
    "request_id", "safety_identifier", "service_tier", "speed", "store", "user", "verbosity",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are not supported, each with the values that change nothing
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "typical_p": (1,), "length_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,), "early_stopping": (False,),
    "use_beam_search": (False,), "do_sample": (True,), "stop_token_ids": ([],), "bad_words": ([],), "best_of": (1,),
    "suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],), "functions": ([],),
    "function_call": ("auto", "none"), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "tool_choice": ("auto", "none"), "background": (False,),
    "truncation": ("disabled",), "thinking": ({"type": "disabled"},),
    "echo": (False,), "logprobs": (False,), "return_token_ids": (False,), "top_logprobs": (0,), "stop": ([],),
    "tools": ([],), "chat_template_kwargs": ({},),
}  # fmt: skip
Likeliest = Annotated[int, Field(ge=0, le=20)]  # tokens that a client may have listed at each place
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


async def read_json(request: HttpRequest) -> JSON:
    """Read a request's JSON, of any dialect. Raises Refused for what is none, too long, or too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "a request is JSON: Content-Type: application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(SLOW_S):
            async for block in request.stream():
                raw += block
                if len(raw) > MAX_BODY:
                    raise Refused(413, f"a request has at most {MAX_BODY >> 20} MB")
    except TimeoutError:
        raise Refused(408, f"a request is sent within {SLOW_S:g} s") from None
    if sum(raw.count(mark) for mark in b",[{") > MOST_VALUES:
        raise Refused(413, f"a request has at most {MOST_VALUES:,} values, lists and objects")
    try:
        asked = await run_sync(parsed_body, bytes(raw))
    except ValueError as error:
        raise Refused(400, f"the request is not JSON that can be read: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the request is JSON that is not an object")
    return asked


def parsed_body(raw: bytes) -> Any:
    """Parse the JSON of a request. Raises ValueError for what is none, is too deep, or has half a character or an
    endless number; and for what the first parser lets pass: a key given twice, and a number larger than any.
    """
    found = from_json(raw, allow_inf_nan=False)
    json_of(raw.decode(), parse_float=finite)
    return found


class Body(BaseModel):
    """A request for completions of `messages` (chat) or of a `prompt`. Others are HARMLESS, NEUTRAL or refused."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str
    messages: list[Any] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | Likeliest | None = None  # chat: whether; of a prompt: how many besides (False: none at all)
    top_logprobs: Likeliest | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None

    @classmethod
    def of(cls, asked: JSON, dialect: type[Dialect]) -> Body:
        """Parse a request of a dialect. Raises Refused with its first fault, but for the fields in `wishes`."""
        own = {name: value for name, value in asked.items() if name not in dialect.foreign}
        try:
            return cls.model_validate(dialect.chat_request(own))
        except ValidationError as error:
            first = error.errors()[0]
            raise BadField(dialect.name_of(str(first["loc"][0])), first["msg"]) from None

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, each a text or tokens; none for a chat."""
        if not self.prompt:
            return []
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_sequences(self) -> int:
        return max(1, len(self.prompts)) * (self.n or 1)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def functions(self) -> list[JSON]:
        """Return the tools that the client runs."""
        return [tool for tool in self.tools or [] if is_function(tool)]

    @property
    def left_out(self) -> dict[str, str]:
        """Return the other tools: how to name each to people, by what it would be called."""
        return left_out(self.tools)

    @property
    def goes_on(self) -> bool:
        """Return whether a chat ends with a message of the assistant's, which the answer continues."""
        last = self.messages[-1] if self.messages else None
        return isinstance(last, dict) and last.get("role") == "assistant"

    def wishes(self, asked: JSON, dialect: type[Dialect]) -> dict[str, str]:
        """Return the fields that are to change the answer and do not, each with `name=value`, by name. asked: the
        request as its client sent it, which may have fields of other protocols too.
        """
        done = {"add_generation_prompt": not self.goes_on, "continue_final_message": self.goes_on}
        foreign = {name: value for name, value in asked.items() if name in dialect.foreign}
        translated = {**(self.model_extra or {}), "tool_choice": self.tool_choice}
        given = [(name, dialect.name_of(name), value) for name, value in translated.items()]
        given += [(name, name, value) for name, value in foreign.items()]
        found = dict[str, str]()
        for name, shown, value in given:
            if value is None or name in HARMLESS:
                continue
            neutral = (done[name],) if name in done else NEUTRAL.get(name, ())
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                found[shown] = f"{truncate(shown)}={truncate(json.dumps(_value_of(asked, shown)))}"
        if self.top_logprobs and not self.logprobs:
            found["top_logprobs"] = f"top_logprobs={self.top_logprobs} without log-probabilities"
        return found


def _value_of(asked: JSON, field: str) -> Any:
    """Return the value of a field, or of OUTER.INNER within an object."""
    outer, _, inner = field.partition(".")
    within = asked.get(outer)
    return within.get(inner) if field not in asked and isinstance(within, dict) else asked.get(field)
