"""The policy behind OpenAI's protocol, for `serve` and for agents: /v1/chat/completions, /v1/completions, /v1/models.

Requests are decoded together as they come (live.py). Their settings say how a completion is drawn; one that would
change the distribution otherwise (penalties, logit_bias, a response format) is refused and not ignored, unless it is
null or asks for what is done anyway. Besides, as vLLM has them: `top_k`, `chat_template_kwargs`, `return_token_ids`,
`include_stop_str_in_output`.

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
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tinyrl.data.messages import messages_of, tools_of
from tinyrl.generation.agents import AgentEpisode, Given, Refused
from tinyrl.generation.draws import SamplingParams, sample_keys
from tinyrl.generation.engine import Completion, SampledRole, Sequence
from tinyrl.generation.live import LIVE_STEP, IncrementalDetokenizer, Job, LiveScheduler, TokenScores, score
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
    "tool_choice": ("auto", "none"), "reasoning_effort": (), "chat_template": (),
}  # fmt: skip
Likeliest = Annotated[int, Field(ge=0, le=20)]  # tokens for which a client may ask at each place
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Body = TypeVar("Body", bound="SampledBody")


class StreamOptions(BaseModel):
    include_usage: bool = False


class SampledBody(BaseModel):
    """What both kinds of requests may ask for. Other fields of the protocol change nothing and are ignored."""

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

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


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
    part that is held back until the end; "": anything may. on_message: called with the whole answer before it is sent.
    """

    index: int
    prompt: list[int]
    detokenizer: IncrementalDetokenizer
    stop: list[str] = field(default_factory=list)
    marker: str | None = None
    on_message: Callable[[dict[str, Any]], None] = lambda message: None
    sequence: Sequence | None = None
    text: str = ""
    shown: int = 0
    cut: bool = False
    completion: Completion | None = None
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)  # of each token, where that was asked for

    def add(self, tokens: list[int], *, ended: bool = False) -> str:
        """The text that these tokens make certain: none that may turn out to be a stop string, or follow one."""
        if not self.cut:
            self.text += self.detokenizer.add(tokens) + (self.detokenizer.end() if ended else "")
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


class LiveRequest:
    """A request that is being answered: its choices, and the queue of what the scheduler makes of them."""

    def __init__(self, body: SampledBody, kind: str) -> None:
        self.body, self.kind, self.id, self.created = body, kind, secrets.token_hex(12), int(time.time())
        self.choices: list[Choice] = []
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
                if choice.sequence is not None:
                    choice.sequence.cancelled = True

    def payload(self, choices: list[dict[str, Any]], *, chunk: str = "") -> dict[str, Any]:
        head = {"id": self.id, "object": self.kind + chunk, "created": self.created, "model": self.body.model}
        return {**head, "choices": choices}

    @property
    def usage(self) -> dict[str, int]:
        prompts = sum(map(len, {tuple(choice.prompt) for choice in self.choices}))
        written = sum(len(choice.completion.tokens) for choice in self.choices if choice.completion is not None)
        return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


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
        self.variables, self.episodes, self.started = variables, episodes, int(time.time())
        self._warned = False
        self.form: CallForm | None = None
        self._no_form = "the model's chat template shows it no tools"
        if "tools" in str(self.tokenizer.chat_template):
            try:
                self.form = call_form(self.tokenizer, variables)
            except ValueError as error:
                self._no_form = str(error)
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
                key = request.headers.get("authorization", "").removeprefix("Bearer ")
                episode = None
                if self.episodes is not None:
                    episode = self.episodes.get(key)
                    if episode is None or episode.over:
                        raise Refused(401, "no episode under way has this key")
                elif self.key is not None and not hmac.compare_digest(key.encode(), self.key.encode()):
                    raise Refused(401, "the key is missing or another one: Authorization: Bearer KEY")
                return await answer(request, episode)
            except Refused as refused:
                return JSONResponse(error_of(refused), refused.status)
            except ClientDisconnect:
                return Response(status_code=LEFT)

        return guarded

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _list(self, request: HttpRequest, episode: AgentEpisode | None) -> Response:
        entries = [{"id": name, "object": "model", "created": self.started, "owned_by": "tinyrl",
                    "max_model_len": self.positions} for name in self.models]  # fmt: skip
        return JSONResponse({"object": "list", "data": entries})

    async def _body(self, request: HttpRequest, kind: type[Body]) -> Body:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "a request is JSON: Content-Type: application/json")
        raw = bytearray()
        async for block in request.stream():
            raw += block
            if len(raw) > MAX_BODY:
                raise Refused(413, f"a request has at most {MAX_BODY >> 20} MB")
        try:
            values = json.loads(bytes(raw))
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(400, "the request has invalid Unicode (a lone surrogate)") from None
        except (ValueError, RecursionError):
            raise Refused(400, "the request is no JSON") from None
        for name, neutral in UNSUPPORTED.items() if isinstance(values, dict) else ():
            if (value := values.get(name)) is not None and value not in neutral:
                raise Refused(400, f"{name}={shortened(json.dumps(value))} is not supported", param=name)
        try:
            body = kind.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[")))
            raise Refused(400, f"{where or 'the request'}: {first['msg']}", param=where or None) from None
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
        given: Given,
        limit: int | None,
        opened: str = "",
        marker: str | None = None,
    ) -> None:
        """Queue the completions of a request. Raises Refused where there is no room for them."""
        body = answer.body
        if episode is not None and ((body.n or 1) > 1 or len(prompts) > 1):
            raise Refused(400, "in an episode a call is one completion: n=1, one prompt", param="n")
        hidden = [] if body.include_stop_str_in_output else body.stops
        seed = secrets.randbits(62) if body.seed is None else body.seed
        for prompt, sample in itertools.product(prompts, range(body.n or 1)):
            self._check(prompt)
            choice = Choice(
                len(answer.choices), prompt, IncrementalDetokenizer(self.tokenizer), hidden, marker, text=opened
            )
            if episode is None:
                room = self.positions - len(prompt)
                most = min(self.max_new_tokens, room) if limit is None else limit
                if most > room:
                    raise Refused(400, f"{len(prompt)} tokens of the prompt and {most} new ones are more than the "
                                       f"model's {self.positions} positions", param="max_tokens")  # fmt: skip
                [key] = sample_keys(0, LIVE_STEP, prompts=np.array([seed]), samples=np.array([sample]))
                role = self.models[body.model]
                sequence = Sequence(prompt, self._params(body), key, most, body.stops, "cached", role)
            else:
                sequence, conversation = episode.call(prompt, given, limit=limit, stop=body.stops)
                choice.prompt = sequence.prompt

                def sent(message: dict[str, Any], conversation: Any = conversation) -> None:
                    message = {"role": "assistant", **message}
                    messages = [*(given.messages or []), *messages_of([message], "messages")]  # as it will come back
                    conversation.given = Given(messages, given.variables)

                choice.on_message = sent

            def end(result: Completion | Exception, record: Any = sequence.on_end, choice: Choice = choice) -> None:
                record(result)
                answer.put(choice, result)

            sequence.on_tokens = lambda tokens, choice=choice: answer.put(choice, tokens)
            sequence.on_end, choice.sequence = end, sequence
            answer.choices.append(choice)
        if not self.scheduler.submit(choice.sequence for choice in answer.choices if choice.sequence is not None):
            for choice in answer.choices:
                assert choice.sequence is not None
                choice.sequence.cancelled = True
            raise Refused(429, "too many requests wait; try again later")

    def _params(self, body: SampledBody) -> SamplingParams:
        defaults = self.defaults
        temperature = defaults.temperature if body.temperature is None else body.temperature
        greedy = temperature < LEAST_TEMPERATURE
        top_p = defaults.top_p if body.top_p is None else body.top_p
        top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
        return SamplingParams(1.0 if greedy else temperature, top_p, top_k, greedy)

    def _check(self, prompt: list[int]) -> None:
        size = self.scheduler.vocabulary
        if not prompt:
            raise Refused(400, "the prompt is empty")
        if not all(0 <= token < size for token in prompt):
            raise Refused(400, f"the prompt has tokens that are none of the model's 0 to {size - 1}", param="prompt")
        if len(prompt) >= self.positions:
            raise Refused(400, f"the prompt has {len(prompt)} tokens, and the model {self.positions} positions",
                          param="messages")  # fmt: skip

    async def _score(self, tokens: list[int], body: SampledBody, *, temperature: float, likeliest: int) -> TokenScores:
        loop, found = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        engine, role = self.scheduler.engine, self.models[body.model]

        def end(result: TokenScores | Exception) -> None:
            loop.call_soon_threadsafe(lambda: found.cancelled() or found.set_result(result))

        call = Job(lambda: score(engine, tokens, role=role, temperature=temperature, likeliest=likeliest), end)
        if not self.scheduler.submit([call]):
            raise Refused(429, "too many requests wait; try again later")
        if isinstance(result := await found, Exception):
            raise Refused(500, f"scoring failed: {type(result).__name__}: {result}")
        return result

    async def _score_likeliest(self, answer: LiveRequest, count: int) -> None:
        """Score the answers that have ended, where their likeliest tokens were asked for."""
        for choice in answer.choices:
            if count and choice.completion is not None and choice.sequence is not None and not choice.likeliest:
                whole, temperature = [*choice.prompt, *choice.completion.tokens], choice.sequence.params.temperature
                scored = await self._score(whole, answer.body, temperature=temperature, likeliest=count)
                choice.likeliest = scored.likeliest[len(choice.prompt) :]

    # ---- /v1/chat/completions ----

    async def _chat(self, request: HttpRequest, episode: AgentEpisode | None) -> Response:
        body = await self._body(request, ChatBody)
        if not self.tokenizer.chat_template:
            raise Refused(400, "this model has no chat template; it continues text: /v1/completions")
        try:
            tools = tools_of(body.tools) if body.tool_choice != "none" else None
            if tools and self.form is None:
                self._ignore_tools(episode)
                tools = None
            variables = {**self.variables, **(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
            messages = messages_of(body.messages, "messages")
            rendered = await run_in_threadpool(render_prompt, self.tokenizer, messages, chat=True, variables=variables)
        except ValueError as error:
            raise Refused(400, str(error), param="messages") from None
        answer = LiveRequest(body, "chat.completion")
        answer.id = f"chatcmpl-{answer.id}"
        self._submit(
            answer,
            [rendered.tokens],
            episode=episode,
            given=Given(messages, variables),
            limit=body.max_completion_tokens or body.max_tokens,
            opened=rendered.opened,
            marker=self.form.begins if tools and self.form else None,
        )
        likeliest = body.top_logprobs or 0 if body.logprobs else 0
        if body.stream:
            return self._streamed(answer, likeliest)
        async for _ in answer.pieces(request):
            pass
        await self._score_likeliest(answer, likeliest)
        choices = []
        for choice in answer.choices:
            message, ended = self._message(choice, body)
            message = {"role": "assistant", **message}
            choices.append({"index": choice.index, "message": message, **ended, **_token_ids(choice, body)})
        return JSONResponse({**answer.payload(choices), "usage": answer.usage})

    def _ignore_tools(self, episode: AgentEpisode | None) -> None:
        """Tools were sent that the model is not shown, or whose calls cannot be parsed: it answers without calling any,
        as it may (chat pages send some with every message); an agent is refused.
        """
        if episode is not None:
            raise Refused(400, self._no_form, param="tools")
        if not self._warned:
            self._warned = True
            print(f"a client sent tools, and the model answers without them: {self._no_form}", flush=True)

    def _message(self, choice: Choice, body: ChatBody) -> tuple[dict[str, Any], dict[str, Any]]:
        """Content and calls of an answer; why it ended, and log-probabilities. A call that cannot be parsed stays
        text.
        """
        assert choice.completion is not None
        tokens, content, calls = choice.completion.tokens, choice.text, []
        if choice.marker is not None and self.form is not None:
            content, calls = self.form.read(choice.text, tokens, before=choice.prompt, tools=body.tools)
        message: dict[str, Any] = {"content": choice.text}
        reason = choice.finish_reason
        if calls and not any(call.problem for call in calls):
            functions = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in calls]
            made = [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": f} for f in functions]
            message, reason = {"content": content.rstrip() or None, "tool_calls": made}, "tool_calls"
        choice.on_message(message)
        logprobs = None
        if body.logprobs:

            def entry(token: int, logprob: float) -> dict[str, Any]:
                text = self._spelt(token)
                return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

            tops = choice.likeliest or [[] for _ in tokens]
            each = zip(tokens, choice.completion.logprobs, tops, strict=True)
            content = [{**entry(t, p), "top_logprobs": [entry(*one) for one in top]} for t, p, top in each]
            logprobs = {"content": content, "refusal": None}
        return message, {"finish_reason": reason, "logprobs": logprobs}

    def _chat_chunks(self, answer: LiveRequest, choice: Choice, piece: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": piece}] if piece else []
        last = []
        if choice.completion is not None:
            body = answer.body
            assert isinstance(body, ChatBody)
            message, ended = self._message(choice, body)
            if held_back := (message["content"] or "")[choice.shown :]:
                deltas.append({"content": held_back})
            if calls := message.get("tool_calls"):
                deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            last = [{"index": choice.index, "delta": {}, **ended, **_token_ids(choice, body)}]
        going = {"index": choice.index, "logprobs": None, "finish_reason": None}
        return [*({**going, "delta": delta} for delta in deltas), *last]

    # ---- /v1/completions ----

    async def _complete(self, request: HttpRequest, episode: AgentEpisode | None) -> Response:
        body = await self._body(request, TextBody)
        given = body.prompt
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given  # pyright: ignore
        prompts = [await run_in_threadpool(self._tokens, prompt) for prompt in several]
        if not prompts:
            raise Refused(400, "the prompt is empty", param="prompt")
        for prompt in prompts:
            self._check(prompt)
        limit = 16 if body.max_tokens is None else body.max_tokens
        answer, scored = LiveRequest(body, "text_completion"), list[TokenScores]()
        answer.id = f"cmpl-{answer.id}"
        if body.echo and body.stream:
            raise Refused(400, "echo is not streamed", param="echo")
        if body.echo and body.logprobs is not None:
            most = max(1, body.logprobs)
            scored = [await self._score(prompt, body, temperature=1.0, likeliest=most) for prompt in prompts]
        if limit:
            text = Given(text=given if isinstance(given, str) else None)
            self._submit(answer, prompts, episode=episode, given=text, limit=limit)
        elif body.echo:
            for prompt in prompts:
                choice = Choice(len(answer.choices), prompt, IncrementalDetokenizer(self.tokenizer))
                choice.completion = Completion([], [], "length")
                answer.choices.append(choice)
        else:
            raise Refused(400, "max_tokens=0 is for echo=true, which scores the prompt", param="max_tokens")
        if body.stream:
            return self._streamed(answer, body.logprobs or 0)
        async for _ in answer.pieces(request):
            pass
        await self._score_likeliest(answer, body.logprobs or 0)
        choices, each = [], len(answer.choices) // len(prompts)
        for choice in answer.choices:
            text = (str(self.tokenizer.decode(choice.prompt)) if body.echo else "") + choice.text
            ended = self._text_end(choice, body, scored[choice.index // each] if scored else None)
            choices.append({"index": choice.index, "text": text, **ended})
        return JSONResponse({**answer.payload(choices), "usage": answer.usage})

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            return render_prompt(self.tokenizer, prompt, chat=False).tokens
        except ValueError as error:
            raise Refused(400, str(error), param="prompt") from None

    def _text_end(self, choice: Choice, body: TextBody, scored: TokenScores | None = None) -> dict[str, Any]:
        """Why a completion ended, and its log-probabilities; scored: of its prompt, for echo."""
        assert choice.completion is not None
        ended = {"finish_reason": choice.finish_reason, "logprobs": None, **_token_ids(choice, body)}
        if body.logprobs is None:
            return ended
        tokens, logprobs = [*choice.completion.tokens], list[float | None](choice.completion.logprobs)
        tops = choice.likeliest or [[one] for one in zip(tokens, choice.completion.logprobs, strict=True)]
        if scored is not None:
            tokens, logprobs = [*choice.prompt, *tokens], [*scored.logprobs, *logprobs]
            tops = [*scored.likeliest, *tops]
        spelt = [self._spelt(token) for token in tokens]
        shown: list[dict[str, float | None] | None] = [
            {self._spelt(one): its for one, its in reversed(top)} if top else None for top in tops
        ]  # of two tokens with one spelling the likelier stays
        for place in range(len(tokens) - len(choice.likeliest), len(tokens)):  # with the one that was drawn
            shown[place] = {spelt[place]: logprobs[place], **(shown[place] or {})}
        offsets = [0, *itertools.accumulate(map(len, spelt))][: len(spelt)]
        said = {"tokens": spelt, "token_logprobs": logprobs, "top_logprobs": shown, "text_offset": offsets}
        return {**ended, "logprobs": said}

    def _spelt(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    # ---- streams ----

    def _streamed(self, answer: LiveRequest, likeliest: int) -> Response:
        body, chunk = answer.body, ".chunk" if isinstance(answer.body, ChatBody) else ""

        async def events() -> AsyncIterator[dict[str, Any]]:
            for choice in answer.choices if isinstance(body, ChatBody) else []:
                delta = {"role": "assistant", "content": choice.text}
                going = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield answer.payload([going], chunk=chunk)
                choice.shown = len(choice.text)
            async for choice, piece in answer.pieces():
                await self._score_likeliest(answer, likeliest)
                if isinstance(body, TextBody):
                    ended = None if choice.completion is None else self._text_end(choice, body)
                    going = {"index": choice.index, "text": piece, "logprobs": None, "finish_reason": None}
                    chunks = [{**going, **(ended or {})}] if piece or ended else []
                else:
                    chunks = self._chat_chunks(answer, choice, piece)
                for one in chunks:
                    yield answer.payload([one], chunk=chunk)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield {**answer.payload([], chunk=chunk), "usage": answer.usage}

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events():
                    yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
                yield "data: [DONE]\n\n"
            except Refused as refused:
                yield f"data: {json.dumps(error_of(refused), ensure_ascii=False)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


def error_of(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.status}}


def _token_ids(choice: Choice, body: SampledBody) -> dict[str, Any]:
    if not body.return_token_ids or choice.completion is None:
        return {}
    return {"prompt_token_ids": choice.prompt, "token_ids": choice.completion.tokens}


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


class Listening:
    """A thread in which an endpoint listens at `url`, on a free port of this machine, until `stop`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = Server(uvicorn.Config(endpoint.app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
