"""The policy behind OpenAI's protocol, for `serve` and for agents: /v1/chat/completions, /v1/completions, /v1/models.

Requests are decoded together as they come (scheduler.py). A field that is not known here is refused, since it may be to
change the answer (a penalty, a response format, a misspelt name), unless it is null, asks for what is done anyway, or
is known to change nothing. In an agent's episode such wishes are for the policy to learn, and are ignored. As vLLM has
them: `top_k`, `chat_template_kwargs`, `return_token_ids`, `include_stop_str_in_output`.

Nothing here keeps other requests waiting: the number of sequences and of characters is limited before anything is
tokenised, and that runs in a thread.

Log-probabilities are those of softmax(logits / temperature) before top-p and top-k (at temperature 0 of the plain
softmax), of every sampled token, the one that ended the answer too.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import uvicorn
from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinyrl.data.messages import Message, messages_of, tools_of
from tinyrl.generation.agent_episode import AgentEpisode, Call, Given, Refused
from tinyrl.generation.engine import SampledRole, SamplingParams, Sequence, sample_keys
from tinyrl.generation.scheduler import LIVE_STEP, LiveScheduler
from tinyrl.generation.scoring import score
from tinyrl.tasks.answers import hidden_ids
from tinyrl.tasks.call_forms import CallForm, call_form
from tinyrl.tasks.prompts import Rendered, render_prompt
from tinyrl.text import IncrementalDetokenizer, truncate

MAX_BODY = 1 << 25  # bytes of a request
LOCAL = ["127.0.0.1", "localhost", "[::1]"]
CLIENT_GONE = 499  # nginx's status; nobody receives it
LEAST_TEMPERATURE = 0.01  # below it the likeliest token is taken
MOST_SEQUENCES = 4096  # of all requests together
SLICE = 64  # prompts, sequences or pieces of text between two looks at other requests
HARMLESS = {  # fields that change no answer, whatever they hold: for a provider's accounts, caches and queues
    "metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are not supported, each with the values that change nothing
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "typical_p": (1,), "length_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,), "early_stopping": (False,),
    "use_beam_search": (False,), "do_sample": (True,), "stop_token_ids": ([],), "bad_words": ([],), "best_of": (1,),
    "suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],), "functions": ([],),
    "function_call": ("auto", "none"), "parallel_tool_calls": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
}  # fmt: skip
OWN_VARIABLES = {  # of a chat template, which are given here
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tokenize", "tools",
}  # fmt: skip
Likeliest = Annotated[int, Field(ge=0, le=20)]  # tokens that a client may have listed at each place
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


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
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | Likeliest | None = None  # chat: whether; of a prompt: how many besides
    top_logprobs: Likeliest | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, each a text or tokens; none for a chat."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt or []) if several else [self.prompt] if self.prompt else []

    @property
    def num_sequences(self) -> int:
        return max(1, len(self.prompts)) * (self.n or 1)

    def check_other_fields(self) -> None:
        """Raise Refused for a field that may be to change the answer."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS:
                continue
            neutral = NEUTRAL.get(name, ())
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                raise Refused(400, f"{truncate(name)}={truncate(json.dumps(value))} is not supported")


@dataclass
class Choice:
    """One completion on its way: its text so far, how much of it is certain, and how it ended. stop: strings that are
    not shown; call: that of an agent's episode; ended: its last tokens have come.
    """

    index: int
    sequence: Sequence
    detokenizer: IncrementalDetokenizer
    stop: list[str] = field(default_factory=list)
    text: str = ""
    call: Call | None = None
    shown: int = 0
    cut: bool = False
    ended: bool = False

    def add(self, tokens: list[int]) -> str:
        """Add tokens; return the text that is certain now: none that may become a stop string, or follow one."""
        if not self.cut:
            self.text += self.detokenizer.add(tokens, at_end=self.ended)
        ends = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.cut = True
        certain = len(self.text)
        if not self.ended and not self.cut:  # the longest beginning of a stop string that it ends with
            held = (stop[:size] for stop in self.stop for size in range(1, len(stop)))
            certain -= max((len(begun) for begun in held if self.text.endswith(begun)), default=0)
        piece = self.text[self.shown : max(certain, self.shown)]
        self.shown = max(certain, self.shown)
        return piece

    def record(self, message: Message) -> None:
        """Record in an agent's episode that the completion is sent, as this message."""
        if self.call is not None:
            self.call.answered(message)


class LiveRequest:
    """A request that is being answered: its choices, and a queue of what the scheduler's thread makes of them.

    given: what it continues; text: the choices begin with it; reads_calls: of tools, in whole answers; likeliest: how
    many tokens are listed at each place.
    """

    def __init__(self, body: Body, *, is_chat: bool) -> None:
        self.body = body
        self.is_chat = is_chat
        self.created = int(time.time())
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.given = Given()
        self.text = ""
        self.reads_calls = False
        self.likeliest = int((body.logprobs and body.top_logprobs if is_chat else body.logprobs) or 0)
        self.choices = list[Choice]()
        self.loop = asyncio.get_running_loop()
        self.events = asyncio.Queue[tuple[Choice, list[int] | Exception | None] | None]()  # None: no client
        self.client_has_gone = False

    def put(self, choice: Choice, event: list[int] | Exception | None) -> None:
        """Add new tokens of a choice, its end (None) or the error that ended it."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (choice, event))

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
            choice, result = event
            if isinstance(result, Exception):
                raise Refused(500, f"sampling failed: {type(result).__name__}: {result}")
            if result is None:
                choice.ended = True
                running -= 1
            yield choice, choice.add(result or [])

    def give_up(self) -> None:
        """End what is still sampled, and the calls of an agent whose answers were not sent."""
        for choice in self.choices:
            choice.sequence.cancelled = True
            if choice.call is not None:
                choice.call.give_up()

    def payload(self, choices: list[dict[str, Any]], *, chunk: bool = False, usage: bool = False) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        whole = {"id": self.id, "object": kind, "created": self.created, "model": self.body.model, "choices": choices}
        if usage:
            prompts = sum(map(len, {tuple(choice.sequence.prompt) for choice in self.choices}))
            written = sum(len(choice.sequence.tokens) for choice in self.choices)
            counts = {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}
            whole["usage"] = counts
        return whole

    def part(self, choice: Choice, content: dict[str, Any], ended: Any = None, *, key: str = "delta") -> dict[str, Any]:
        """Return a choice of an answer (key: message) or of a piece of one (delta); ended: its last fields."""
        own = {key: content} if self.is_chat else {"text": content.get("content") or ""}
        return {"index": choice.index, **own, **(ended or {"logprobs": None, "finish_reason": None})}


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


class Endpoint:
    """A scheduler's HTTP side. models: the role behind each name; key: what clients must bring (None: nothing);
    defaults, max_new_tokens: of requests that do not say; positions: of the model; variables: of the chat template;
    episodes: of agents, by the key that they bring (None: no agents). form: how the model writes calls of tools (None:
    its template shows it none, or they cannot be read).
    """

    def __init__(
        self,
        scheduler: LiveScheduler,
        models: dict[str, SampledRole],
        *,
        defaults: SamplingParams,
        max_new_tokens: int,
        positions: int,
        variables: dict[str, Any],
        key: str | None = None,
        hosts: list[str] | None = None,
        episodes: dict[str, AgentEpisode] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.models = models
        self.defaults = defaults
        self.key = key
        self.tokenizer = scheduler.tokenizer
        self.max_new_tokens = max_new_tokens
        self.positions = positions
        self.variables = variables
        self.episodes = episodes
        self.started = int(time.time())
        self.num_sequences = 0  # of all requests that are being answered
        longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.most_characters = positions * longest_token  # no longer text fits into the model's positions
        self.form: CallForm | None = None
        if "tools" in str(self.tokenizer.chat_template):
            with suppress(ValueError):
                self.form = call_form(self.tokenizer, variables)

        handlers: Any = {
            Refused: lambda request, refused: JSONResponse(error_of(refused), refused.status),
            ClientDisconnect: lambda request, gone: Response(status_code=CLIENT_GONE),
        }
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: JSONResponse({"status": "ok"})),
                Route("/v1/models", self._list),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            # A page in a browser may send here under a name of its own that leads to this machine.
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"])],
            exception_handlers=handlers,
        )

    # ---- requests ----

    def _authorized(self, request: HttpRequest) -> AgentEpisode | None:
        """Return the episode that a request belongs to. Raises Refused if it brings the wrong key."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.episodes is not None:
            episode = self.episodes.get(key)
            if episode is None or episode.over:
                raise Refused(401, "no episode under way has this key")
            return episode
        if self.key is not None and not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refused(401, "the key is missing or another one: Authorization: Bearer KEY")
        return None

    async def _list(self, request: HttpRequest) -> Response:
        self._authorized(request)
        entry = {"object": "model", "created": self.started, "owned_by": "tinyrl", "max_model_len": self.positions}
        return JSONResponse({"object": "list", "data": [{"id": name, **entry} for name in self.models]})

    async def _complete(self, request: HttpRequest) -> Response:
        """Answer a request: all at once, or streamed."""
        episode = self._authorized(request)
        body = await self._body(request)
        if episode is None:
            body.check_other_fields()
        count = body.num_sequences
        if self.num_sequences + count > MOST_SEQUENCES:
            here = f"{self.num_sequences} are being sampled" if self.num_sequences else "of one request and of all"
            raise Refused(429, f"{count} completions are too many now: at most {MOST_SEQUENCES} ({here})")
        answer = LiveRequest(body, is_chat=request.url.path.endswith("/chat/completions"))

        def close() -> None:
            self.num_sequences -= count
            answer.give_up()

        self.num_sequences += count
        stream = None
        try:
            await self._submit(answer, await self._prompts(answer, episode), episode, request)
            if body.stream:
                stream = Stream(self._lines(answer), close)
                return stream
            return await self._whole(answer, request)
        finally:
            if stream is None:
                close()

    async def _body(self, request: HttpRequest) -> Body:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "a request is JSON: Content-Type: application/json")
        raw = bytearray()
        async for block in request.stream():
            raw += block
            if len(raw) > MAX_BODY:
                raise Refused(413, f"a request has at most {MAX_BODY >> 20} MB")
        try:
            body = Body.model_validate_json(bytes(raw))
        except ValidationError as error:
            first = error.errors()[0]
            raise Refused(400, f"{first['loc'][0] if first['loc'] else 'the request'}: {first['msg']}") from None
        if body.model not in self.models:
            raise Refused(404, f"there is no model {body.model[:100]!r}; there is {', '.join(self.models)}")
        return body

    async def _prompts(self, answer: LiveRequest, episode: AgentEpisode | None) -> list[list[int]]:
        """Return the tokens of a request's prompts. Raises Refused for those that the model cannot read."""
        body = answer.body
        for given in [body.messages, body.tools] if answer.is_chat else body.prompts:
            characters = count_characters(given)
            if characters > self.most_characters:
                most = f"{self.positions} positions hold at most {self.most_characters:,}"
                raise Refused(400, f"the prompt has {characters:,} characters, and the model's {most}")
        try:
            prompts = await (self._chat(answer, episode) if answer.is_chat else self._text(answer))
        except ValueError as error:
            raise Refused(400, str(error)) from None
        size = self.scheduler.vocabulary
        for prompt in prompts:
            if not prompt or min(prompt) < 0 or max(prompt) >= size:
                raise Refused(400, f"the prompt is empty or has tokens other than the model's 0 to {size - 1}")
            if len(prompt) >= self.positions:
                raise Refused(400, f"the prompt has {len(prompt)} tokens, and the model {self.positions} positions")
        return prompts

    async def _chat(self, answer: LiveRequest, episode: AgentEpisode | None) -> list[list[int]]:
        """Render the prompt of a chat. Raises ValueError if that cannot be done."""
        body = answer.body
        if not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template; it continues text: /v1/completions")
        tools = tools_of(body.tools) if body.tool_choice != "none" else None
        if tools and self.form is None:  # chat pages send some with every message
            if episode is not None:
                raise ValueError("the model's chat template shows it no tools, or its calls of them cannot be read")
            tools = None
        for name in body.chat_template_kwargs or {}:
            if name in OWN_VARIABLES or name.endswith("_token"):
                raise ValueError(f"chat_template_kwargs: {truncate(name)} is the server's own, not a client's")
        variables = {**self.variables, **(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        messages = messages_of(body.messages, "messages")
        [rendered] = await self._rendered([messages], chat=True, variables=variables)
        answer.given = Given(messages, variables)
        answer.text = rendered.opened
        answer.reads_calls = bool(tools)
        return [rendered.tokens]

    async def _text(self, answer: LiveRequest) -> list[list[int]]:
        """Encode the prompts of a request that is no chat. Raises ValueError if that cannot be done."""
        body = answer.body
        if not body.prompts:
            raise ValueError("the prompt is empty")
        if body.echo and body.stream:
            raise ValueError("echo is not streamed")
        if isinstance(body.prompt, str):
            answer.given = Given(text=body.prompt)
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        rendered = iter(await self._rendered(texts, chat=False))
        return [next(rendered).tokens if isinstance(prompt, str) else prompt for prompt in body.prompts]

    async def _rendered(self, prompts: list[Any], **options: Any) -> list[Rendered]:
        """Render and tokenise prompts in a thread, a slice at a time; the end of the server does not wait for it."""

        def render(part: list[Any]) -> list[Rendered]:
            return [render_prompt(self.tokenizer, prompt, **options) for prompt in part]

        found = list[Rendered]()
        for start in range(0, len(prompts), SLICE):
            part = prompts[start : start + SLICE]
            found += await run_sync(partial(render, part), abandon_on_cancel=True)
        return found

    async def _submit(
        self, answer: LiveRequest, prompts: list[list[int]], episode: AgentEpisode | None, request: HttpRequest
    ) -> None:
        """Queue the completions of a request. Raises Refused if there is no room for them, and ClientDisconnect if
        nobody waits for them.
        """
        if await request.is_disconnected():
            raise ClientDisconnect
        body = answer.body
        limit = answer.body.max_completion_tokens or answer.body.max_tokens
        if limit is None and not answer.is_chat:
            limit = 16
        if episode is not None and ((body.n or 1) > 1 or len(prompts) > 1):
            raise Refused(400, "in an episode a call is one completion: n=1, one prompt")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        seed = secrets.randbits(62) if body.seed is None else body.seed
        names = ("temperature", "top_p", "top_k")
        of_body = {name: value for name in names if (value := getattr(body, name)) is not None}
        params = replace(self.defaults, **of_body)
        params = replace(params, top_k=max(0, params.top_k))
        if params.temperature < LEAST_TEMPERATURE:
            params = replace(params, temperature=1.0, greedy=True)
        count = body.n or 1
        keys = sample_keys(0, LIVE_STEP, prompts=np.full(count, seed), samples=np.arange(count))
        for prompt, sample in itertools.product(prompts, range(count)):
            if len(answer.choices) % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            call = None
            if episode is None:
                room = self.positions - len(prompt)
                most = min(self.max_new_tokens, room) if limit is None else limit
                if most > room:
                    sizes = f"{len(prompt)} tokens of the prompt and {most} new ones"
                    raise Refused(400, f"{sizes} are more than the model's {self.positions} positions")
                sequence = Sequence(prompt, params, keys[sample], most, stops, "cached", self.models[body.model])
            else:
                call = episode.call(prompt, answer.given, limit=limit, stop=stops)
                sequence = call.sequence
            choice = Choice(
                index=len(answer.choices),
                sequence=sequence,
                detokenizer=IncrementalDetokenizer(self.tokenizer, hidden=hidden_ids(self.tokenizer)),
                stop=[] if body.include_stop_str_in_output else stops,
                text=answer.text,
                call=call,
            )
            answer.choices.append(choice)
            sequence.on_tokens = partial(answer.put, choice)
            sequence.on_end = partial(answer.put, choice)
        self.scheduler.submit([choice.sequence for choice in answer.choices])

    # ---- answers ----

    async def _whole(self, answer: LiveRequest, request: HttpRequest) -> Response:
        """Answer all at once. A client that hangs up before, or a failure, gives the answer up."""
        watcher = asyncio.create_task(answer.watch(request))
        try:
            async for _ in answer.pieces():
                pass
            parts = list[dict[str, Any]]()
            messages = list[dict[str, Any]]()
            for choice in answer.choices:
                if choice.index % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
                message, ended = await self._end(answer, choice)
                messages.append(message)
                parts.append(answer.part(choice, {"role": "assistant", **message}, ended, key="message"))
            response = JSONResponse(answer.payload(parts, usage=True))
            if answer.client_has_gone:
                raise ClientDisconnect
            for choice, message in zip(answer.choices, messages, strict=True):
                choice.record(message)
            return response
        finally:
            watcher.cancel()

    async def _lines(self, answer: LiveRequest) -> AsyncIterator[str]:
        def line(value: Any) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        def chunk(choice: Choice, content: dict[str, Any], ended: dict[str, Any] | None = None) -> str:
            return line(answer.payload([answer.part(choice, content, ended)], chunk=True))

        try:
            for choice in answer.choices if answer.is_chat else []:
                yield chunk(choice, {"role": "assistant", "content": ""})
            async for choice, piece in answer.pieces():
                if piece and not answer.reads_calls:
                    yield chunk(choice, {"content": piece})
                if choice.ended:
                    message, ended = await self._end(answer, choice)
                    if answer.reads_calls and message["content"]:
                        yield chunk(choice, {"content": message["content"]})
                    if calls := message.get("tool_calls"):
                        yield chunk(choice, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
                    choice.record(message)
                    yield chunk(choice, {}, ended)
            if (answer.body.stream_options or {}).get("include_usage"):
                yield line(answer.payload([], chunk=True, usage=True))
            yield "data: [DONE]\n\n"
        except Refused as refused:
            yield line(error_of(refused))

    async def _end(self, answer: LiveRequest, choice: Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return content and calls of an answer that has ended; why it did, its log-probabilities and its tokens. A
        call that cannot be parsed stays text.
        """
        sequence = choice.sequence
        body = answer.body
        prompt = sequence.prompt
        message = dict[str, Any](content=choice.text)
        shown = None
        reason = "length" if sequence.finish_reason == "length" else "stop"
        tokens = sequence.tokens
        logprobs = list[float | None](sequence.logprobs)
        tops = list[list[tuple[int, float]]]([[] for _ in tokens])
        if answer.reads_calls and self.form is not None:
            content, calls = self.form.read(choice.text, tokens, tools=body.tools, opened=answer.text)
            if calls and not any(call.problem for call in calls):
                called = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in calls]
                made = [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": f} for f in called]
                message = {"content": content.rstrip() or None, "tool_calls": made}
                reason = "tool_calls"
        echoes = body.echo and not answer.is_chat
        if answer.likeliest or (echoes and body.logprobs is not None):
            how: Any = {"temperature": sequence.params.temperature, "likeliest": max(1, answer.likeliest)}
            job = partial(score, self.scheduler.engine.policy, [*prompt, *tokens], role=self.models[body.model], **how)
            try:
                before, tops = await run_sync(partial(self.scheduler.run, job), abandon_on_cancel=True)
            except Exception as error:  # noqa: BLE001 the client gets it
                raise Refused(500, f"scoring failed: {type(error).__name__}: {error}") from None
            if echoes:
                tokens = [*prompt, *tokens]
                logprobs = [*before[: len(prompt)], *logprobs]
            else:
                tops = tops[len(prompt) :]
        if not answer.is_chat:
            if echoes:
                message["content"] = str(self.tokenizer.decode(prompt)) + choice.text
            if body.logprobs is not None:
                spelt = [self._spelt(token) for token in tokens]
                listed = [  # of two tokens with one spelling the likelier stays
                    None if logprob is None else {text: logprob, **{self._spelt(t): p for t, p in reversed(top)}}
                    for text, logprob, top in zip(spelt, logprobs, tops, strict=True)
                ]
                offsets = [0, *itertools.accumulate(map(len, spelt))][: len(spelt)]
                shown = {"tokens": spelt, "token_logprobs": logprobs, "top_logprobs": listed, "text_offset": offsets}
        elif body.logprobs:

            def entry(token: int, logprob: float | None) -> dict[str, Any]:
                text = self._spelt(token)
                return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

            each = zip(tokens, logprobs, tops, strict=True)
            entries = [{**entry(t, p), "top_logprobs": [entry(*one) for one in top]} for t, p, top in each]
            shown = {"content": entries, "refusal": None}
        ids = {"prompt_token_ids": prompt, "token_ids": sequence.tokens} if body.return_token_ids else {}
        return message, {"finish_reason": reason, "logprobs": shown, **ids}

    def _spelt(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def count_characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value."""
    count = 0
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return count


def error_of(refused: Refused) -> dict[str, Any]:
    """Return the body of an error as OpenAI's API has it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.status}}


class Listening:
    """A thread in which an endpoint listens at `url`, on a free port of this machine, until `stop`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the endpoint at {self.url} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
