"""The policy behind OpenAI's protocol, for `serve` and for agents: /v1/chat/completions, /v1/completions, /v1/models.

Requests are decoded together as they come (scheduler.py). Their settings say how a completion is drawn; one that would
change the distribution otherwise (penalties, logit_bias, a response format) is refused and not ignored, unless it is
null or asks for what is done anyway. Besides, as vLLM has them: `top_k`, `chat_template_kwargs`, `return_token_ids`,
`include_stop_str_in_output`.

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
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tinyrl.data.messages import messages_of, tools_of
from tinyrl.generation.agents import AgentEpisode, Conversation, Given, Refused
from tinyrl.generation.engine import Completion, SampledRole, SamplingParams, Sequence, sample_keys
from tinyrl.generation.scheduler import LIVE_STEP, IncrementalDetokenizer, LiveScheduler, TokenScores, score
from tinyrl.tasks.call_forms import CallForm, call_form
from tinyrl.tasks.prompts import render_prompt
from tinyrl.text import shortened

MAX_BODY = 1 << 25
LOCAL = ["127.0.0.1", "localhost", "[::1]"]
LEFT = 499  # a status for nobody, as nginx has it: the client has gone
LEAST_TEMPERATURE = 0.01  # below it the likeliest token is taken
# Settings that are refused, each with the values at which it changes nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "typical_p": (1,), "min_tokens": (0,), "ignore_eos": (False,), "use_beam_search": (False,), "stop_token_ids": ([],),
    "bad_words": ([],), "allowed_token_ids": (), "truncate_prompt_tokens": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structured_outputs": (), "best_of": (1,), "suffix": ("",),
    "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("auto", "none"),
    "reasoning_effort": (), "chat_template": (),
}  # fmt: skip
Likeliest = Annotated[int, Field(ge=0, le=20)]  # tokens for which a client may ask at each place
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Body = TypeVar("Body", bound="SampledBody")


class SampledBody(BaseModel):
    """What both kinds of requests may ask for. Other fields of the protocol change nothing and are ignored."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None


class ChatBody(SampledBody):
    messages: list[Any]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBody(SampledBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Likeliest | None = None
    echo: bool | None = None


@dataclass
class Choice:
    """One completion on its way: its text so far, what of it was handed out, and how it ended. marker: what begins a
    part that is held back until the end; "": anything may. conversation: the agent's that it belongs to.
    """

    index: int
    sequence: Sequence
    detokenizer: IncrementalDetokenizer
    stop: list[str] = field(default_factory=list)
    marker: str | None = None
    text: str = ""
    conversation: Conversation | None = None
    shown: int = 0
    cut: bool = False
    completion: Completion | None = None

    def add(self, tokens: list[int], *, ended: bool = False) -> str:
        """The text that these tokens make certain: none that may turn out to be a stop string, or follow one."""
        if not self.cut:
            self.text += self.detokenizer.add(tokens, at_end=ended)
        ends = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text, self.cut = self.text[: min(ends)], True
        certain = self.text.find(self.marker) if self.marker is not None else -1
        if certain < 0:
            certain = len(self.text)
            if not ended and not self.cut:  # the longest beginning of a stop string or the marker that it ends with
                held = (s[:size] for s in [*self.stop, self.marker or ""] for size in range(1, len(s)))
                certain -= max((len(begun) for begun in held if self.text.endswith(begun)), default=0)
        piece, self.shown = self.text[self.shown : max(certain, self.shown)], max(certain, self.shown)
        return piece


class LiveRequest:
    """A request that is being answered: its choices, and the queue of what the scheduler makes of them. likeliest: how
    many tokens are listed at each place; scored: prompts whose log-probabilities are shown, too (echo).
    """

    def __init__(self, body: SampledBody, given: Given, *, likeliest: int) -> None:
        self.body, self.given, self.likeliest, self.created = body, given, likeliest, int(time.time())
        self.is_chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.choices, self.scored = list[Choice](), list[TokenScores]()
        self.loop = asyncio.get_running_loop()
        self.events = asyncio.Queue[tuple[Choice, list[int] | Completion | Exception]]()

    def put(self, choice: Choice, event: list[int] | Completion | Exception) -> None:
        """Called in the scheduler's thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (choice, event))

    async def pieces(self, request: HttpRequest | None = None) -> AsyncIterator[tuple[Choice, str]]:
        """The text of all choices as it comes; the last piece of a choice comes with its completion. Raises Refused
        where one failed, and ClientDisconnect where the client of `request` has gone (None: whoever writes to it finds
        out).
        """
        going = sum(choice.completion is None for choice in self.choices)
        try:
            while going:
                try:
                    choice, event = await asyncio.wait_for(self.events.get(), timeout=1.0)
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        raise ClientDisconnect from None
                    continue
                if isinstance(event, Exception):
                    raise Refused(500, f"sampling failed: {type(event).__name__}: {event}")
                if isinstance(event, Completion):
                    choice.completion, going = event, going - 1
                    yield choice, choice.add([], ended=True)
                else:
                    yield choice, choice.add(event)
        finally:
            for choice in self.choices:
                choice.sequence.cancelled = True

    def payload(self, choices: list[dict[str, Any]], *, chunk: bool = False, usage: bool = False) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        whole = {"id": self.id, "object": kind, "created": self.created, "model": self.body.model, "choices": choices}
        if usage:
            prompts = sum(map(len, {tuple(choice.sequence.prompt) for choice in self.choices}))
            written = sum(len(choice.completion.tokens) for choice in self.choices if choice.completion is not None)
            counts = {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}
            whole["usage"] = counts
        return whole

    def part(self, choice: Choice, content: dict[str, Any], ended: Any = None, *, delta: bool = True) -> dict[str, Any]:
        """A choice of an answer or (delta) of a piece of one; ended: its last fields."""
        said = {"delta" if delta else "message": content} if self.is_chat else {"text": content.get("content") or ""}
        return {"index": choice.index, **said, **(ended or {"logprobs": None, "finish_reason": None})}


class Endpoint:
    """A scheduler's HTTP side. models: which role each name asks for; key: what clients must bring (None: nothing);
    defaults: how tokens are drawn, and how many at most, where a request does not say; positions: of the model;
    variables: of the chat template; episodes: those of agents, by the key that they bring (None: no agents).
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
        self.scheduler, self.models, self.defaults, self.key = scheduler, models, defaults, key
        self.tokenizer, self.max_new_tokens, self.positions = scheduler.tokenizer, max_new_tokens, positions
        self.variables, self.episodes, self._warned = variables, episodes, False
        self.started = int(time.time())
        self.form: CallForm | None = None
        self._no_form = "the model's chat template shows it no tools"
        if "tools" in str(self.tokenizer.chat_template):
            try:
                self.form = call_form(self.tokenizer, variables)
            except ValueError as error:
                self._no_form = str(error)

        async def health(request: HttpRequest) -> Response:
            return JSONResponse({"status": "ok"})

        async def refuse(request: HttpRequest, refused: Any) -> Response:
            return JSONResponse(error_of(refused), refused.status)

        async def leave(request: HttpRequest, gone: Exception) -> Response:
            return Response(status_code=LEFT)

        self.app = Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/models", self._list),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            # A page in a browser may send here under a name of its own that leads to this machine.
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"])],
            exception_handlers={Refused: refuse, ClientDisconnect: leave},
        )

    # ---- requests ----

    def _authorized(self, request: HttpRequest) -> AgentEpisode | None:
        """The episode that a request belongs to. Raises Refused where it brings the wrong key."""
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

    async def _body(self, request: HttpRequest, kind: type[Body]) -> Body:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "a request is JSON: Content-Type: application/json")
        raw = bytearray()
        async for block in request.stream():
            raw += block
            if len(raw) > MAX_BODY:
                raise Refused(413, f"a request has at most {MAX_BODY >> 20} MB")
        try:
            body = kind.model_validate_json(bytes(raw))
        except ValidationError as error:
            first = error.errors()[0]
            where = str(first["loc"][0]) if first["loc"] else None
            raise Refused(400, f"{where or 'the request'}: {first['msg']}", param=where) from None
        for name, value in (body.model_extra or {}).items():
            if value is not None and value not in UNSUPPORTED.get(name, (value,)):
                raise Refused(400, f"{name}={shortened(json.dumps(value))} is not supported", param=name)
        if body.model not in self.models:
            there = ", ".join(self.models)
            raise Refused(404, f"there is no model {body.model[:100]!r}; there is {there}", param="model")
        return body

    def _submit(
        self,
        answer: LiveRequest,
        prompts: list[list[int]],
        *,
        episode: AgentEpisode | None,
        limit: int | None,
        opened: str = "",
        marker: str | None = None,
    ) -> None:
        """Queue the completions of a request. Raises Refused where there is no room for them."""
        body, stops = answer.body, [answer.body.stop] if isinstance(answer.body.stop, str) else answer.body.stop or []
        if episode is not None and ((body.n or 1) > 1 or len(prompts) > 1):
            raise Refused(400, "in an episode a call is one completion: n=1, one prompt", param="n")
        defaults, seed = self.defaults, secrets.randbits(62) if body.seed is None else body.seed
        temperature = defaults.temperature if body.temperature is None else body.temperature
        greedy = temperature < LEAST_TEMPERATURE
        top_p = defaults.top_p if body.top_p is None else body.top_p
        top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
        params = SamplingParams(1.0 if greedy else temperature, top_p, top_k, greedy)
        for prompt, sample in itertools.product(prompts, range(body.n or 1)):
            conversation = None
            if episode is None or limit == 0:
                room = self.positions - len(prompt)
                most = min(self.max_new_tokens, room) if limit is None else limit
                if most > room:
                    raise Refused(400, f"{len(prompt)} tokens of the prompt and {most} new ones are more than the "
                                       f"model's {self.positions} positions", param="max_tokens")  # fmt: skip
                [key] = sample_keys(0, LIVE_STEP, prompts=np.array([seed]), samples=np.array([sample]))
                sequence = Sequence(prompt, params, key, most, stops, "cached", self.models[body.model])
            else:
                sequence, conversation = episode.call(prompt, answer.given, limit=limit, stop=stops)
            hidden = [] if body.include_stop_str_in_output else stops
            detokenizer = IncrementalDetokenizer(self.tokenizer)
            choice = Choice(len(answer.choices), sequence, detokenizer, hidden, marker, opened, conversation)
            answer.choices.append(choice)
            if limit == 0:
                choice.completion = Completion([], [], "length")
                continue

            def end(result: Completion | Exception, record: Any = sequence.on_end, choice: Choice = choice) -> None:
                record(result)
                answer.put(choice, result)

            sequence.on_tokens, sequence.on_end = partial(answer.put, choice), end
        if not self.scheduler.submit(c.sequence for c in answer.choices if c.completion is None):
            for choice in answer.choices:
                choice.sequence.cancelled = True
            raise Refused(429, "too many requests wait; try again later")

    def _check(self, prompt: list[int], param: str) -> None:
        size = self.scheduler.vocabulary
        if not prompt:
            raise Refused(400, "the prompt is empty", param=param)
        if not all(0 <= token < size for token in prompt):
            raise Refused(400, f"the prompt has tokens that are none of the model's 0 to {size - 1}", param=param)
        if len(prompt) >= self.positions:
            raise Refused(
                400, f"the prompt has {len(prompt)} tokens, and the model {self.positions} positions", param=param
            )

    async def _score(self, tokens: list[int], body: SampledBody, *, temperature: float, likeliest: int) -> TokenScores:
        engine, role = self.scheduler.engine, self.models[body.model]
        call = partial(score, engine, tokens, role=role, temperature=temperature, likeliest=likeliest)
        try:
            return await run_in_threadpool(self.scheduler.run, call)
        except Exception as error:  # noqa: BLE001 the client gets it
            raise Refused(500, f"scoring failed: {type(error).__name__}: {error}") from None

    async def _chat(self, request: HttpRequest) -> Response:
        episode = self._authorized(request)
        body = await self._body(request, ChatBody)
        if not self.tokenizer.chat_template:
            raise Refused(400, "this model has no chat template; it continues text: /v1/completions")
        try:
            tools = tools_of(body.tools) if body.tool_choice != "none" else None
            if tools and self.form is None:  # chat pages send some with every message
                if episode is not None:
                    raise Refused(400, self._no_form, param="tools")
                if not self._warned:
                    print(f"a client sent tools, and the model answers without them: {self._no_form}", flush=True)
                self._warned, tools = True, None
            variables = {**self.variables, **(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
            messages = messages_of(body.messages, "messages")
            rendered = await run_in_threadpool(render_prompt, self.tokenizer, messages, chat=True, variables=variables)
        except ValueError as error:
            raise Refused(400, str(error), param="messages") from None
        self._check(rendered.tokens, "messages")
        likeliest = body.top_logprobs or 0 if body.logprobs else 0
        answer = LiveRequest(body, Given(messages, variables), likeliest=likeliest)
        self._submit(
            answer,
            [rendered.tokens],
            episode=episode,
            limit=body.max_completion_tokens or body.max_tokens,
            opened=rendered.opened,
            marker=self.form.begins if tools and self.form else None,
        )
        return await self._answered(request, answer)

    async def _complete(self, request: HttpRequest) -> Response:
        episode = self._authorized(request)
        body = await self._body(request, TextBody)
        given, limit = body.prompt, 16 if body.max_tokens is None else body.max_tokens
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given  # pyright: ignore
        prompts = list[list[int]]()
        for one in several or [[]]:
            try:
                if isinstance(one, str):
                    one = (await run_in_threadpool(render_prompt, self.tokenizer, one, chat=False)).tokens
            except ValueError as error:
                raise Refused(400, str(error), param="prompt") from None
            self._check(one, "prompt")
            prompts.append(one)
        if body.echo and body.stream:
            raise Refused(400, "echo is not streamed", param="echo")
        if not limit and not body.echo:
            raise Refused(400, "max_tokens=0 is for echo=true, which scores the prompt", param="max_tokens")
        text = Given(text=given if isinstance(given, str) else None)
        answer = LiveRequest(body, text, likeliest=body.logprobs or 0)
        if body.echo and body.logprobs is not None:
            most = max(1, body.logprobs)
            answer.scored = [await self._score(p, body, temperature=1.0, likeliest=most) for p in prompts]
        self._submit(answer, prompts, episode=episode, limit=limit)
        return await self._answered(request, answer)

    # ---- answers ----

    async def _answered(self, request: HttpRequest, answer: LiveRequest) -> Response:
        if answer.body.stream:
            return StreamingResponse(self._lines(answer), media_type="text/event-stream")
        async for _ in answer.pieces(request):
            pass
        choices = []
        for choice in answer.choices:
            message, ended = await self._end(answer, choice)
            choices.append(answer.part(choice, {"role": "assistant", **message}, ended, delta=False))
        return JSONResponse(answer.payload(choices, usage=True))

    async def _lines(self, answer: LiveRequest) -> AsyncIterator[str]:
        def line(value: Any) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        def chunk(choice: Choice, content: dict[str, Any], ended: dict[str, Any] | None = None) -> str:
            return line(answer.payload([answer.part(choice, content, ended)], chunk=True))

        try:
            for choice in answer.choices if answer.is_chat else []:
                yield chunk(choice, {"role": "assistant", "content": choice.text})
                choice.shown = len(choice.text)
            async for choice, piece in answer.pieces():
                if piece:
                    yield chunk(choice, {"content": piece})
                if choice.completion is not None:
                    message, ended = await self._end(answer, choice)
                    if held_back := (message["content"] or "")[choice.shown :]:
                        yield chunk(choice, {"content": held_back})
                    if calls := message.get("tool_calls"):
                        yield chunk(choice, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
                    yield chunk(choice, {}, ended)
            if (answer.body.stream_options or {}).get("include_usage"):
                yield line(answer.payload([], chunk=True, usage=True))
            yield "data: [DONE]\n\n"
        except Refused as refused:
            yield line(error_of(refused))

    async def _end(self, answer: LiveRequest, choice: Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Content and calls of an answer that has ended; why it did, its log-probabilities and its tokens. A call that
        cannot be parsed stays text.
        """
        completion, body, prompt = choice.completion, answer.body, choice.sequence.prompt
        assert completion is not None
        message: dict[str, Any] = {"content": choice.text}
        reason = "length" if completion.finish_reason == "length" else "stop"
        tops = list[list[tuple[int, float]]]([[] for _ in completion.tokens])
        if answer.likeliest:
            whole, temperature = [*prompt, *completion.tokens], choice.sequence.params.temperature
            scored = await self._score(whole, body, temperature=temperature, likeliest=answer.likeliest)
            tops = scored.likeliest[len(prompt) :]
        if isinstance(body, TextBody):
            shown = None if body.logprobs is None else self._text_logprobs(answer, choice, tops)
            if body.echo:
                message["content"] = str(self.tokenizer.decode(prompt)) + choice.text
        else:
            assert isinstance(body, ChatBody)
            if choice.marker is not None and self.form is not None:
                content, calls = self.form.read(choice.text, completion.tokens, before=prompt, tools=body.tools)
                if calls and not any(call.problem for call in calls):
                    called = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in calls]
                    made = [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": f} for f in called]
                    message, reason = {"content": content.rstrip() or None, "tool_calls": made}, "tool_calls"
            if choice.conversation is not None:
                choice.conversation.answer(answer.given, message)

            def entry(token: int, logprob: float) -> dict[str, Any]:
                text = self._spelt(token)
                return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

            each = zip(completion.tokens, completion.logprobs, tops, strict=True) if body.logprobs else ()
            entries = [{**entry(t, p), "top_logprobs": [entry(*one) for one in top]} for t, p, top in each]
            shown = {"content": entries, "refusal": None} if body.logprobs else None
        ids = {"prompt_token_ids": prompt, "token_ids": completion.tokens} if body.return_token_ids else {}
        return message, {"finish_reason": reason, "logprobs": shown, **ids}

    def _text_logprobs(
        self, answer: LiveRequest, choice: Choice, tops: list[list[tuple[int, float]]]
    ) -> dict[str, Any]:
        """Of a completion, behind its prompt where that was scored."""
        assert choice.completion is not None
        tokens, logprobs = choice.completion.tokens, list[float | None](choice.completion.logprobs)
        if answer.scored:
            scored = answer.scored[choice.index * len(answer.scored) // len(answer.choices)]
            tokens, logprobs = [*choice.sequence.prompt, *tokens], [*scored.logprobs, *logprobs]
            tops = [*scored.likeliest, *tops]
        spelt = [self._spelt(token) for token in tokens]
        shown = [  # of two tokens with one spelling the likelier stays
            None if logprob is None else {text: logprob, **{self._spelt(one): its for one, its in reversed(top)}}
            for text, logprob, top in zip(spelt, logprobs, tops, strict=True)
        ]
        offsets = [0, *itertools.accumulate(map(len, spelt))][: len(spelt)]
        return {"tokens": spelt, "token_logprobs": logprobs, "top_logprobs": shown, "text_offset": offsets}

    def _spelt(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def error_of(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.status}}


class Listening:
    """A thread in which an endpoint listens at `url`, on a free port of this machine, until `stop`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self._socket = endpoint, socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
