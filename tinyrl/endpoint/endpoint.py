"""The policy behind the protocols of OpenAI and Anthropic, for `serve` and for agents: the app and its routes.

    dialect.py, completions.py, responses.py, messages_api.py   what each protocol reads and writes
    request_body.py, request_tools.py, request_images.py        the fields of a request, its tools and its images
    live_answer.py, answer_writer.py                            an answer that is being sampled, and how it is sent
    server.py                                                   connections of clients, and a server in a thread

Requests are decoded together as they come (live.py). What a client asks for and does not get is refused by name;
in an agent's episode such wishes are for the policy to learn: they are listed, and ignored.

Nothing here keeps other requests waiting: the number of sequences and of characters is limited before anything is
tokenised, and that runs in a thread.

Log-probabilities are those of softmax(logits / temperature) before top-p and top-k (at temperature 0 of the plain
softmax), of every sampled token, the one that ended the answer too.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinyrl.config.sections import GenerationConfig
from tinyrl.data.image_files import stored
from tinyrl.data.image_rows import placed_prompt
from tinyrl.data.images import is_image_id
from tinyrl.data.messages import messages_of, tools_of
from tinyrl.endpoint.agent_episode import AgentEpisode, Call, ClientInput
from tinyrl.endpoint.answer_writer import AnswerWriter
from tinyrl.endpoint.completions import ChatCompletions, TextCompletions
from tinyrl.endpoint.dialect import JSON, BadField, ContextOverflow, Dialect, Refused, TooManyTokens
from tinyrl.endpoint.live_answer import SLICE, Choice, LiveAnswer, Stream
from tinyrl.endpoint.messages_api import Messages
from tinyrl.endpoint.request_body import Body, read_json
from tinyrl.endpoint.request_images import ImageShelf, RequestImages, image_places, refuse
from tinyrl.endpoint.request_tools import left_out_note
from tinyrl.endpoint.responses import Responses
from tinyrl.generation.drawing import sample_keys
from tinyrl.generation.live import LIVE_STEP, LiveScheduler
from tinyrl.generation.request import DecodedSequence, Request, SampledRole
from tinyrl.models.image_inputs import ImageExpander
from tinyrl.models.tokens import unknown_variable
from tinyrl.tasks.call_forms import CallForm, call_form
from tinyrl.tasks.prompts import Rendered, open_thinking, render_prompt
from tinyrl.tasks.turn_text import TurnDetokenizer
from tinyrl.text import truncate

CLIENT_GONE = 499  # nginx's status; nobody receives it
LEAST_TEMPERATURE = 0.01  # below it the likeliest token is taken
MOST_SEQUENCES = 4096  # of all requests together
MOST_WISHES = 20  # fields, and tools, that are listed
NO_LIMIT = 1 << 60  # tokens of an agent's call that names no limit: its episode has one
OWN_VARIABLES = {  # of a chat template, which are given here
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tokenize", "tools",
}  # fmt: skip
DIALECTS: dict[str, type[Dialect]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": TextCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}


class Endpoint:
    """A scheduler's HTTP side. models: the role behind each name; key: what clients must bring (None: nothing);
    hosts: the names that clients may call it by (None: any);
    defaults: temperature, top_p, top_k and max_new_tokens of requests that do not say; positions: of the model;
    variables: of the chat template; episodes: of agents, by the key that they bring (None: no agents). form: how the
    model writes calls of tools (None: its template shows it none, or they cannot be read). expander: of images (None:
    the model reads text). note: what is told once of each kind of tool that clients declare and that is left out.
    """

    def __init__(
        self,
        scheduler: LiveScheduler,
        models: dict[str, SampledRole],
        *,
        defaults: GenerationConfig,
        positions: int,
        variables: dict[str, Any],
        key: str | None = None,
        hosts: list[str] | None = None,
        episodes: dict[str, AgentEpisode] | None = None,
        expander: ImageExpander | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.models = models
        self.defaults = defaults
        self.key = key
        self.hosts = hosts
        self.tokenizer = scheduler.tokenizer
        self.expander = expander
        keeps_images = episodes is not None  # training reads them again
        self.shelf = None if expander is None or keeps_images else ImageShelf(expander)
        self.positions = positions
        self.variables = variables
        self.episodes = episodes
        self.started = int(time.time())
        self.num_sequences = 0  # of all requests that are being answered
        self.wishes = dict[str, str]()  # what agents asked for and did not get, by field
        self.note = note
        self.left_out = dict[str, str]()  # tools of clients that no prompt shows, by name
        longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.most_characters = positions * longest_token  # no longer text fits into the model's positions
        self.form: CallForm | None = None
        if "tools" in str(self.tokenizer.chat_template):
            with suppress(ValueError):
                self.form = call_form(self.tokenizer, variables)

        routes = [
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._model),
            *(Route(path, self._complete, methods=["POST"]) for path in DIALECTS),
        ]
        self.writer = AnswerWriter(scheduler, models, self.form, expander)
        handlers: Any = {
            Refused: lambda request, refused: error_response(request, refused),
            Exception: lambda request, error: error_response(request, failed(error)),
            HTTPException: lambda request, error: error_response(request, unknown_path(request, error)),
            ClientDisconnect: lambda request, gone: Response(status_code=CLIENT_GONE),
        }
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    @contextmanager
    def serving(self, episodes: dict[str, AgentEpisode]) -> Iterator[None]:
        """Answer the agents of these episodes, by the key that each brings; at the end the episodes are over, and the
        scheduler keeps nothing of them.
        """
        self.episodes = episodes
        try:
            yield
        finally:
            for episode in episodes.values():
                episode.end()
            self.episodes = {}
            self.scheduler.release()

    def close(self) -> None:
        """Remove the files of clients' images."""
        if self.shelf is not None:
            self.shelf.close()

    # ---- requests ----

    def _authorized(self, request: HttpRequest) -> AgentEpisode | None:
        """Return the episode that a request belongs to. Raises Refused if it brings the wrong key, or another host."""
        # A page in a browser may send here under a name of its own that leads to this machine.
        called = request.headers.get("host", "")
        if self.hosts is not None and without_port(called) not in self.hosts:
            here = ", ".join(self.hosts)
            raise Refused(400, f"this server answers as {here}, and not as {truncate(called)!r}; --host opens it")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = bearer or request.headers.get("x-api-key", "")
        if self.episodes is not None:
            episode = self.episodes.get(key)
            if episode is None or episode.over:
                raise Refused(401, "no episode under way has this key")
            return episode
        if self.key is not None and not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refused(401, "the key is missing or another one: Authorization: Bearer KEY, or x-api-key: KEY")
        return None

    async def _list(self, request: HttpRequest) -> Response:
        self._authorized(request)
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self.models]})

    async def _model(self, request: HttpRequest) -> Response:
        self._authorized(request)
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._entry(name))

    def _entry(self, name: str) -> JSON:
        of_model = {"created": self.started, "owned_by": "tinyrl", "max_model_len": self.positions}
        return {"id": name, "object": "model", **of_model}

    def _check_model(self, name: str) -> None:
        if name not in self.models:
            raise Refused(404, f"there is no model {name[:100]!r}; there is {', '.join(self.models)}")

    async def _complete(self, request: HttpRequest) -> Response:
        """Answer a request: all at once, or streamed."""
        episode = self._authorized(request)
        kind = DIALECTS[request.url.path]
        asked = await read_json(request)
        body = Body.of(asked, kind)
        self._check_model(body.model)
        wishes = body.wishes(asked, kind)
        for name, wish in wishes.items():
            if episode is None:
                raise Refused(400, f"{wish} is not supported", param=truncate(name))
        if len(self.wishes) < MOST_WISHES:
            self.wishes = wishes | self.wishes
        self._note_left_out(body.left_out)
        count = body.num_sequences
        if self.num_sequences + count > MOST_SEQUENCES:
            here = f"{self.num_sequences} are being sampled" if self.num_sequences else "of one request and of all"
            raise Refused(429, f"{count} completions are too many now: at most {MOST_SEQUENCES} ({here})")
        answer = LiveAnswer(body, kind(asked), is_chat=kind is not TextCompletions)
        images = self._images(asked)

        def close() -> None:
            self.num_sequences -= count
            answer.give_up()
            if self.shelf is not None:
                self.shelf.release(images.found)

        self.num_sequences += count
        stream = None
        try:
            await self._submit(answer, await self._prompts(answer, images, episode), episode, request)
            if body.stream:
                stream = Stream(self.writer.lines(answer), close)
                return stream
            return await self.writer.whole(answer, request)
        except ContextOverflow:
            if episode is not None:
                episode.has_overflowed = True
            raise
        finally:
            if stream is None:
                close()

    def _note_left_out(self, tools: dict[str, str]) -> None:
        """Record tools that are left out of a prompt, and tell those that are new."""
        new = [name for name in tools if name not in self.left_out]
        listed = {name: tools[name] for name in new[: MOST_WISHES - len(self.left_out)]}
        self.left_out |= listed
        if listed and self.note is not None:
            self.note(left_out_note(listed))

    def _images(self, asked: JSON) -> RequestImages:
        """Return what reads the images of a request."""
        places = image_places(asked)
        if self.expander is None:
            return RequestImages(refuse, places=places)
        keep = stored if self.shelf is None else self.shelf.hold
        return RequestImages(keep, self.expander, places)

    async def _prompts(
        self, answer: LiveAnswer, images: RequestImages, episode: AgentEpisode | None
    ) -> list[list[int]]:
        """Return the tokens of a request's prompts. Raises Refused for those that the model cannot read."""
        field = answer.dialect.name_of("messages" if answer.is_chat else "prompt")
        try:
            if answer.is_chat:
                prompts = await self._chat(answer, images, episode)
            else:
                prompts = await self._text(answer)
        except ValueError as error:
            raise BadField(field, str(error)) from None
        size = self.scheduler.vocabulary
        for prompt in prompts:
            tokens = [token for token in prompt if not (answer.is_chat and is_image_id(token))]
            if not tokens or min(tokens) < 0 or max(tokens) >= size:
                raise BadField(field, f"is empty or has tokens other than the model's 0 to {size - 1}")
            if len(prompt) >= self.positions and episode is None:
                raise ContextOverflow(f"{len(prompt)} tokens", positions=self.positions)
        return prompts

    def _check_characters(self, *given: Any) -> None:
        """Raise ContextOverflow for texts that have more characters than the model's positions can hold."""
        for each in given:
            characters = count_characters(each)
            if characters > self.most_characters:
                raise ContextOverflow(f"{characters:,} characters", positions=self.positions)

    async def _chat(self, answer: LiveAnswer, images: RequestImages, episode: AgentEpisode | None) -> list[list[int]]:
        """Render the prompt of a chat. Raises ValueError if that cannot be done."""
        body = answer.body
        given = await run_sync(placed_prompt, body.messages, {}, images)
        self._check_characters(texts_of(given), body.tools)
        if not self.tokenizer.chat_template:
            raise Refused(400, "this model has no chat template; it continues text: /v1/completions")
        tools = tools_of(body.functions) if body.tool_choice != "none" else None
        if tools and self.form is None:  # chat pages send some with every message
            if episode is not None:
                raise BadField("tools", "the model's chat template shows none, or its calls of them cannot be read")
            tools = None
        own = body.chat_template_kwargs or {}
        for name in own:
            if name in OWN_VARIABLES or name.endswith("_token"):
                raise BadField("chat_template_kwargs", f"{truncate(name)} is the server's own, not a client's")
        problem = unknown_variable(self.tokenizer, own)
        if problem is not None:
            raise BadField("chat_template_kwargs", problem)
        variables = {**self.variables, **own, **({"tools": tools} if tools else {})}
        field = answer.dialect.name_of("messages")
        try:
            messages = await run_sync(messages_of, given, field)
        except ValueError as error:  # which begins with the field
            raise Refused(400, str(error), param=field) from None
        [rendered] = await self._rendered([messages], chat=True, variables=variables)
        answer.given = ClientInput(messages, variables)
        answer.text = open_thinking(self.tokenizer, rendered.opened)  # the client has the message that it began itself
        answer.begun = rendered.opened.removesuffix(answer.text)
        answer.reads_calls = bool(tools)
        return [rendered.tokens]

    async def _text(self, answer: LiveAnswer) -> list[list[int]]:
        """Encode the prompts of a request that is not a chat. Raises ValueError if that cannot be done."""
        body = answer.body
        self._check_characters(*body.prompts)
        if not body.prompts:
            raise ValueError("is empty")
        if body.echo and body.stream:
            raise BadField("echo", "is not streamed")
        if isinstance(body.prompt, str):
            answer.given = ClientInput(text=body.prompt)
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        rendered = iter(await self._rendered(texts, chat=False))
        return [next(rendered).tokens if isinstance(prompt, str) else prompt for prompt in body.prompts]

    async def _rendered(self, prompts: list[Any], **options: Any) -> list[Rendered]:
        """Render and tokenise prompts in a thread, a slice at a time; the end of the server does not wait for it."""

        def render(part: list[Any]) -> list[Rendered]:
            return [render_prompt(self.tokenizer, prompt, **options, images=self.expander) for prompt in part]

        found = list[Rendered]()
        for start in range(0, len(prompts), SLICE):
            part = prompts[start : start + SLICE]
            found += await run_sync(partial(render, part), abandon_on_cancel=True)
        return found

    async def _submit(
        self, answer: LiveAnswer, prompts: list[list[int]], episode: AgentEpisode | None, request: HttpRequest
    ) -> None:
        """Queue the completions of a request. Raises Refused if there is no room for them, and ClientDisconnect if
        nobody waits for them.
        """
        if await request.is_disconnected():
            raise ClientDisconnect
        body = answer.body
        count = body.n or 1
        if episode is not None and (count > 1 or len(prompts) > 1):
            raise Refused(400, "in an episode a call is one completion: n=1, one prompt")
        seed = secrets.randbits(62) if body.seed is None else body.seed
        keys = sample_keys(0, LIVE_STEP, prompts=np.full(count, seed), samples=np.arange(count))
        submitted = list[DecodedSequence]()
        for prompt, key in itertools.product(prompts, keys):
            if len(answer.choices) % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            call = None
            if episode is None:
                asked = self._request(answer, prompt, key, limit=self._limit(answer, prompt))
                sequence = DecodedSequence(asked)
            else:
                asked = self._request(answer, prompt, key, limit=answer.limit or NO_LIMIT)
                call = await self._call(episode, asked, answer.given)
                sequence = DecodedSequence(replace(asked, limit=0)) if call is None else call.sequence
            begins = sequence.finish_reason is None
            choice = Choice(
                index=len(answer.choices),
                sequence=sequence,
                detokenizer=TurnDetokenizer(self.tokenizer),
                stop=body.stops,
                shows_stop=bool(body.include_stop_str_in_output),
                text=answer.text if begins else "",
                places_tokens=answer.lists_logprobs and not answer.is_chat,
                call=call,
            )
            answer.choices.append(choice)
            if begins:
                submitted.append(sequence)
            else:
                answer.put(choice.index, None)
        self.scheduler.submit(submitted)

    async def _call(self, episode: AgentEpisode, asked: Request, given: ClientInput) -> Call | None:
        """Begin a call of an episode in a thread, as that renders and encodes texts. It is given up if the request has
        been cancelled meanwhile.
        """
        task = asyncio.ensure_future(run_sync(episode.call, asked, given))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(give_up_call)
            raise

    def _limit(self, answer: LiveAnswer, prompt: list[int]) -> int:
        """Return the most new tokens of a request. Raises TooManyTokens if its prompt leaves no room for them."""
        room = self.positions - len(prompt)
        most = min(self.defaults.max_new_tokens, room) if answer.limit is None else answer.limit
        if most > room:
            raise TooManyTokens(answer.limit_field, most, prompt=len(prompt), positions=self.positions)
        return most

    def _request(self, answer: LiveAnswer, prompt: list[int], key: np.uint64, *, limit: int) -> Request:
        """Return what is asked of the scheduler for an answer's next choice, as its client has it."""
        body = answer.body
        index = len(answer.choices)
        temperature = self.defaults.temperature if body.temperature is None else body.temperature
        top_k = self.defaults.top_k if body.top_k is None else body.top_k
        greedy = temperature < LEAST_TEMPERATURE
        return Request(
            prompt=prompt,
            key=key,
            limit=limit,
            temperature=1.0 if greedy else temperature,
            top_p=self.defaults.top_p if body.top_p is None else body.top_p,
            top_k=max(0, top_k),
            greedy=greedy,
            stop=body.stops,
            role=self.models[body.model],
            after="cached",
            on_tokens=partial(answer.put_tokens, index),
            on_end=partial(answer.put, index),
        )


def give_up_call(task: asyncio.Future[Call | None]) -> None:
    """Give up the call that a task has begun for nobody."""
    call = None if task.cancelled() or task.exception() else task.result()
    if call is not None:
        call.give_up()


def texts_of(messages: Any) -> Any:
    """Return messages without the entries of their images, whose paths and hashes are not for the model."""
    if not isinstance(messages, list):
        return messages
    found = list[Any]()
    for message in messages:
        is_object = isinstance(message, dict)
        found.append({key: value for key, value in message.items() if key != "images"} if is_object else message)
    return found


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


def error_response(request: HttpRequest, refused: Refused) -> Response:
    """Answer with an error in the words of the path's dialect, also for what its clients look for below the path."""
    kind = next((kind for path, kind in DIALECTS.items() if f"{request.url.path}/".startswith(f"{path}/")), Dialect)
    return JSONResponse(kind.error(refused), refused.status)


def without_port(host: str) -> str:
    """Return the name in a Host header; empty for what is none."""
    found = re.fullmatch(r"(\[[0-9a-f:]+\]|[^:]+)(:\d*)?", host.lower())
    return "" if found is None else found[1]


def failed(error: Exception) -> Refused:
    """Say that the server is at fault; its log has the traceback."""
    return Refused(500, f"the server failed: {type(error).__name__}")


def unknown_path(request: HttpRequest, error: HTTPException) -> Refused:
    """Say what there is to someone who asked for something else."""
    there = ", ".join([f"POST {path}" for path in DIALECTS] + ["GET /v1/models"])
    path = truncate(request.url.path)
    return Refused(error.status_code, f"there is no {request.method} {path}; there is {there}")
