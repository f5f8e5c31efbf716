"""The policy behind OpenAI's protocol: /v1/chat/completions, /v1/completions, /v1/models.

Requests (openai_requests.py) are decoded as they come, in one batch (live.py).

Log-probabilities are those of softmax(logits / temperature) before top-p and top-k (at temperature 0 of the plain
softmax), of every sampled token, the one that ended the answer too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tinyrl.data.messages import messages_of, tools_of
from tinyrl.generation.engine import Completion, Request, SampledRole
from tinyrl.generation.live import Draw, LiveSampler, Scored, Spelling, Wanted
from tinyrl.generation.openai_requests import Asked, ChatRequest, Choice, Refused, Said, Sampled, TextRequest
from tinyrl.tasks.call_forms import CallForm, call_form
from tinyrl.tasks.prompts import render_prompt

MAX_BODY = 1 << 25
LOCAL = ["127.0.0.1", "localhost", "[::1]"]
LEFT = 499  # a status for nobody, as nginx has it: the client has gone
LEAST_TEMPERATURE = 0.01  # below it the likeliest token is taken
Body = TypeVar("Body", bound=Sampled)


class Endpoint:
    """A sampler's HTTP side. models: which role each name asks for; key: what clients must bring (None: nothing);
    defaults: how tokens are drawn, and how many at most, where a request does not say; positions: of the model;
    variables: of the chat template.
    """

    def __init__(
        self,
        sampler: LiveSampler,
        models: dict[str, SampledRole],
        *,
        defaults: Draw,
        max_new_tokens: int,
        positions: int,
        variables: dict[str, Any],
        key: str | None = None,
        hosts: list[str] | None = None,
    ) -> None:
        self.sampler, self.models, self.defaults, self.key = sampler, models, defaults, key
        self.tokenizer, self.max_new_tokens, self.positions = sampler.tokenizer, max_new_tokens, positions
        self.variables = variables
        self.started = int(time.time())
        self._numbers, self._said_unseen = itertools.count(1), False
        self.form, self._no_form = self._call_form()
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._guarded(self._list)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
        ]
        # A page in a browser may send here under a name of its own that leads to this machine.
        trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"])]
        self.app = Starlette(routes=routes, middleware=trusted)

    # ---- requests ----

    def _guarded(self, answer: Any) -> Any:
        async def guarded(request: HttpRequest) -> Response:
            try:
                return await answer(
                    request, self._who(request.headers.get("authorization", "").removeprefix("Bearer "))
                )
            except Refused as refused:
                return JSONResponse(error_of(refused), refused.status)
            except ClientDisconnect:
                return Response(status_code=LEFT)

        return guarded

    def _who(self, key: str) -> Any:
        """Whoever brings this key, for `_start`; None: nobody in particular. Raises Refused for another key."""
        if self.key is not None and not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refused(401, "the key is missing or another one: Authorization: Bearer KEY")

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _list(self, request: HttpRequest, who: Any) -> Response:
        entries = [{"id": name, "object": "model", "created": self.started, "owned_by": "tinyrl",
                    "max_model_len": self.positions} for name in self.models]  # fmt: skip
        return JSONResponse({"object": "list", "data": entries})

    async def _body(self, request: HttpRequest, kind: type[Body]) -> Body:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "a request is JSON: Content-Type: application/json")
        body = bytearray()
        async for block in request.stream():
            body += block
            if len(body) > MAX_BODY:
                raise Refused(413, f"a request has at most {MAX_BODY >> 20} MB")
        try:
            values = json.loads(bytes(body))
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(400, "the request has invalid Unicode (a lone surrogate)") from None
        except (ValueError, RecursionError):
            raise Refused(400, "the request is no JSON") from None
        try:
            asked = kind.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[")))
            raise Refused(400, f"{where or 'the request'}: {first['msg']}", param=where or None) from None
        if asked.model not in self.models:
            there = ", ".join(self.models)
            raise Refused(404, f"there is no model {asked.model[:100]!r}; there is {there}", param="model")
        return asked

    def _start(
        self,
        body: Sampled,
        prompts: list[list[int]],
        *,
        who: Any,
        said: Said,
        limit: int | None,
        opened: str = "",
        marker: str | None = None,
    ) -> Asked:
        """Queue the completions of a request. Raises Refused where there is no room for them."""
        draw, stop = self._draw(body), body.stops
        hidden = [] if body.include_stop_str_in_output else stop
        seed = secrets.randbits(62) if body.seed is None else body.seed
        asked = Asked(body, [], id=f"{next(self._numbers)}-{secrets.token_hex(8)}")
        for prompt in prompts:
            self._check(prompt)
            room = self.positions - len(prompt)
            most = min(limit or self.max_new_tokens, room) if limit is None else limit
            if most > room:
                raise Refused(400, f"{len(prompt)} tokens of the prompt and {most} new ones are more than the model's "
                                   f"{self.positions} positions", param="max_tokens")  # fmt: skip
            for sample in range(body.n or 1):
                choice = Choice(len(asked.choices), prompt, Spelling(self.tokenizer), hidden, marker, text=opened)
                ask = Request(prompt, prompt_row=seed, first_sample=sample, max_new_tokens=most)
                choice.wanted = Wanted(
                    ask,
                    draw,
                    stop,
                    on_tokens=lambda tokens, choice=choice: asked.tell(choice, tokens),
                    on_end=lambda said, choice=choice: asked.tell(choice, said),
                )
                asked.choices.append(choice)
        if not self.sampler.ask([choice.wanted for choice in asked.choices if choice.wanted is not None]):
            raise Refused(429, "too many requests wait; try again later")
        return asked

    def _draw(self, body: Sampled) -> Draw:
        defaults = self.defaults
        temperature = defaults.temperature if body.temperature is None else body.temperature
        return Draw(
            role=self.models[body.model],
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        )

    def _check(self, prompt: list[int]) -> None:
        size = self.sampler.vocabulary
        if not prompt:
            raise Refused(400, "the prompt is empty")
        if not all(0 <= token < size for token in prompt):
            raise Refused(400, f"the prompt has tokens that are none of the model's 0 to {size - 1}", param="prompt")
        if len(prompt) >= self.positions:
            raise Refused(400, f"the prompt has {len(prompt)} tokens, and the model {self.positions} positions",
                          param="messages")  # fmt: skip

    # ---- /v1/chat/completions ----

    async def _chat(self, request: HttpRequest, who: Any) -> Response:
        body = await self._body(request, ChatRequest)
        if not self.tokenizer.chat_template:
            raise Refused(400, "this model has no chat template; it continues text: /v1/completions")
        try:
            tools = tools_of(body.tools) if body.tool_choice != "none" else None
            if tools and self.form is None:
                self._unseen_tools(self._no_form)
                tools = None
            variables = {**self.variables, **(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
            messages = messages_of(body.messages, "messages")
            rendered = await run_in_threadpool(render_prompt, self.tokenizer, messages, chat=True, variables=variables)
        except ValueError as error:
            raise Refused(400, str(error), param="messages") from None
        limit = body.max_completion_tokens or body.max_tokens
        marker, said = self.form.begins if tools and self.form else None, Said(messages, variables)
        asked = self._start(
            body, [rendered.tokens], who=who, said=said, limit=limit, opened=rendered.opened, marker=marker
        )
        asked.id = f"chatcmpl-{asked.id}"
        if body.stream:
            return self._streamed(asked, self._chat_chunk)
        await asked.finished(request)
        await self._read_likeliest(asked)
        choices = [self._chat_choice(choice, body) for choice in asked.choices]
        return JSONResponse(self._whole(asked, "chat.completion", choices))

    def _call_form(self) -> tuple[CallForm | None, str]:
        """How the model writes calls of tools, and why it writes none that can be read."""
        if "tools" not in str(self.tokenizer.chat_template):
            return None, "the model's chat template shows it no tools"
        try:
            return call_form(self.tokenizer, self.variables), ""
        except ValueError as error:
            return None, str(error)

    def _unseen_tools(self, why: str) -> None:
        """Tools were sent that the model is not shown, or whose calls cannot be read: it answers without calling any,
        as it may. Chat pages send some with every message.
        """
        if not self._said_unseen:
            self._said_unseen = True
            print(f"a client sent tools, and the model answers without them: {why}", flush=True)

    def _chat_choice(self, choice: Choice, body: ChatRequest) -> dict[str, Any]:
        message, reason = self._message(choice, body)
        said = {"index": choice.index, "message": {"role": "assistant", **message}, "finish_reason": reason}
        return {**said, "logprobs": self._chat_logprobs(choice, body), **_token_ids(choice, body)}

    def _message(self, choice: Choice, body: ChatRequest) -> tuple[dict[str, Any], str]:
        """Content and calls of an answer, and why it ended. A call that cannot be read stays text."""
        content, calls = choice.text, []
        if choice.marker is not None and self.form is not None and choice.completion is not None:
            tokens = choice.completion.tokens
            content, calls = self.form.read(choice.text, tokens, before=choice.prompt, tools=body.tools)
        if not calls or any(call.problem for call in calls):
            choice.on_message({"content": choice.text})
            return {"content": choice.text}, choice.finish_reason
        made = [
            {"id": f"call_{secrets.token_hex(8)}", "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
            for call in calls
        ]  # fmt: skip
        message = {"content": content.rstrip() or None, "tool_calls": made}
        choice.on_message(message)
        return message, "tool_calls"

    def _chat_logprobs(self, choice: Choice, body: ChatRequest) -> dict[str, Any] | None:
        if not body.logprobs or choice.completion is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._spelt(token)
            return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

        tokens, logprobs = choice.completion.tokens, choice.completion.logprobs
        tops = choice.likeliest or [[] for _ in tokens]
        content = [
            {**entry(token, logprob), "top_logprobs": [entry(*one) for one in top]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _chat_chunk(self, asked: Asked, choice: Choice, piece: str) -> list[dict[str, Any]]:
        assert isinstance(asked.body, ChatRequest)
        deltas: list[dict[str, Any]] = [{"content": piece}] if piece else []
        if choice.completion is None:
            return [_delta(asked, choice, delta) for delta in deltas]
        message, reason = self._message(choice, asked.body)
        if held_back := (message["content"] or "")[choice.shown :]:
            deltas.append({"content": held_back})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        chunks = [_delta(asked, choice, delta) for delta in deltas]
        last = _delta(asked, choice, {}, finish_reason=reason)
        last["choices"][0] |= {"logprobs": self._chat_logprobs(choice, asked.body), **_token_ids(choice, asked.body)}
        return [*chunks, last]

    # ---- /v1/completions ----

    async def _complete(self, request: HttpRequest, who: Any) -> Response:
        body = await self._body(request, TextRequest)
        prompts = [await run_in_threadpool(self._tokens, prompt) for prompt in _several(body.prompt)]
        for prompt in prompts:
            self._check(prompt)
        limit = 16 if body.max_tokens is None else body.max_tokens
        scored = [await self._scored(prompt, body) for prompt in prompts] if body.echo else []
        if limit == 0 and not body.echo:
            raise Refused(400, "max_tokens=0 is for echo=true, which reads the prompt", param="max_tokens")
        if limit == 0:
            asked = Asked(body, [])
            for prompt in prompts:
                choice = Choice(len(asked.choices), prompt, Spelling(self.tokenizer), [], None)
                choice.completion = Completion([], [], "length")
                asked.choices.append(choice)
        else:
            said = Said(text=body.prompt if isinstance(body.prompt, str) else None)
            asked = self._start(body, prompts, who=who, said=said, limit=limit)
        asked.id = f"cmpl-{asked.id or secrets.token_hex(8)}"
        if body.stream and limit:
            if body.echo:
                raise Refused(400, "echo is not streamed", param="echo")
            return self._streamed(asked, self._text_chunk)
        await asked.finished(request)
        await self._read_likeliest(asked)
        each = body.n or 1 if limit else 1
        choices = [
            self._text_choice(choice, body, scored[choice.index // each] if scored else None)
            for choice in asked.choices
        ]
        return JSONResponse(self._whole(asked, "text_completion", choices))

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            return render_prompt(self.tokenizer, prompt, chat=False).tokens
        except ValueError as error:
            raise Refused(400, str(error), param="prompt") from None

    async def _scored(self, tokens: list[int], body: TextRequest) -> Scored | None:
        if body.logprobs is None:
            return None
        return await self._score(tokens, Draw(self.models[body.model]), likeliest=max(1, body.logprobs))

    async def _score(self, tokens: list[int], draw: Draw, *, likeliest: int) -> Scored:
        loop, found = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def told(result: Scored | Exception) -> None:
            loop.call_soon_threadsafe(lambda: found.cancelled() or found.set_result(result))

        if not self.sampler.score(tokens, draw, told, likeliest=likeliest):
            raise Refused(429, "too many requests wait; try again later")
        result = await found
        if isinstance(result, Exception):
            raise Refused(500, f"scoring failed: {type(result).__name__}: {result}")
        return result

    async def _read_likeliest(self, asked: Asked) -> None:
        """Score the answers that have ended, where their likeliest tokens were asked for."""
        body = asked.body
        count = body.top_logprobs if isinstance(body, ChatRequest) and body.logprobs else 0
        count = body.logprobs if isinstance(body, TextRequest) else count
        for choice in asked.choices:
            if count and choice.completion is not None and choice.wanted is not None and not choice.likeliest:
                whole, draw = [*choice.prompt, *choice.completion.tokens], choice.wanted.draw
                scored = await self._score(whole, draw, likeliest=count)
                choice.likeliest = scored.likeliest[len(choice.prompt) :]

    def _text_choice(self, choice: Choice, body: TextRequest, scored: Scored | None = None) -> dict[str, Any]:
        text = (str(self.tokenizer.decode(choice.prompt)) if body.echo else "") + choice.text
        said = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason}
        return {**said, "logprobs": self._text_logprobs(choice, body, scored), **_token_ids(choice, body)}

    def _text_logprobs(self, choice: Choice, body: TextRequest, scored: Scored | None) -> dict[str, Any] | None:
        if body.logprobs is None or choice.completion is None:
            return None
        tokens, logprobs = [*choice.completion.tokens], list[float | None](choice.completion.logprobs)
        tops = choice.likeliest or [[one] for one in zip(tokens, choice.completion.logprobs, strict=True)]
        if scored is not None:
            tokens, logprobs = [*choice.prompt, *tokens], [*scored.logprobs, *logprobs]
            tops = [*scored.likeliest, *tops]
        spelt = [self._spelt(token) for token in tokens]
        shown: list[dict[str, float | None] | None] = [
            {self._spelt(one): its for one, its in reversed(top)} if top else None for top in tops
        ]  # of two tokens with one spelling the likelier stays
        if choice.likeliest:  # with the one that was drawn, as the protocol has it
            first = len(tokens) - len(choice.likeliest)
            for place in range(first, len(tokens)):
                shown[place] = {spelt[place]: logprobs[place], **(shown[place] or {})}
        offsets = [0, *itertools.accumulate(map(len, spelt))][: len(spelt)]
        return {"tokens": spelt, "token_logprobs": logprobs, "top_logprobs": shown, "text_offset": offsets}

    def _spelt(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _text_chunk(self, asked: Asked, choice: Choice, piece: str) -> list[dict[str, Any]]:
        assert isinstance(asked.body, TextRequest)
        ended = choice.completion is not None
        said: dict[str, Any] = {"index": choice.index, "text": piece, "logprobs": None, "finish_reason": None}
        if ended:
            logprobs = self._text_logprobs(choice, asked.body, None)
            said |= {"finish_reason": choice.finish_reason, "logprobs": logprobs, **_token_ids(choice, asked.body)}
        return [_head(asked, "text_completion") | {"choices": [said]}] if piece or ended else []

    # ---- answers ----

    def _whole(self, asked: Asked, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**_head(asked, kind), "choices": choices, "usage": asked.usage}

    def _streamed(self, asked: Asked, chunks: Callable[[Asked, Choice, str], list[dict[str, Any]]]) -> Response:
        async def events() -> AsyncIterator[str]:
            if isinstance(asked.body, ChatRequest):
                for choice in asked.choices:
                    yield _event(_delta(asked, choice, {"role": "assistant", "content": choice.text}))
                    choice.shown = len(choice.text)
            try:
                async for choice, piece in asked.pieces():
                    await self._read_likeliest(asked)
                    for chunk in chunks(asked, choice, piece):
                        yield _event(chunk)
            except Refused as refused:
                yield _event(error_of(refused))
                return
            options = asked.body.stream_options
            if options is not None and options.include_usage:
                kind = "chat.completion.chunk" if isinstance(asked.body, ChatRequest) else "text_completion"
                yield _event({**_head(asked, kind), "choices": [], "usage": asked.usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def error_of(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.status}}


def _several(prompt: Any) -> list[Any]:
    """The prompts of a request: one text, one list of tokens, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise Refused(400, "the prompt is empty", param="prompt")
    return prompt


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.body.model}


def _delta(asked: Asked, choice: Choice, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
    said = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**_head(asked, "chat.completion.chunk"), "choices": [said]}


def _token_ids(choice: Choice, body: Sampled) -> dict[str, Any]:
    if not body.return_token_ids or choice.completion is None:
        return {}
    return {"prompt_token_ids": choice.prompt, "token_ids": choice.completion.tokens}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class Server(uvicorn.Server):
    """uvicorn's, for which a signal is an ordinary end: it is not raised once more behind it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
