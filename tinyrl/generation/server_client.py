"""A serving engine over HTTP (vLLM's protocol): requests, refusals in words, answers in their shape, its tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.parse
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from tinyrl.data.http_client import HttpAnswer, HttpClient, NoAnswer
from tinyrl.tasks.prompts import shared_length
from tinyrl.text import masked, shortened, whole_address

DETOKENIZE = "/detokenize"
TOKENS_AT_ONCE = 4096  # whose text is compared in one request
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key
TIMEOUT_S = 600.0  # for one request, however often it is tried
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
NOTIFY_S = 5.0
MOST_SHOWN = 300  # characters of a refusal
ROUNDED = 1e-3  # by which a log-probability may be above 0


class ServerError(Exception):
    """What a server did instead of answering, in words; `status`: of a refusal (None: there was no answer)."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A server at an http address, that of `generation.url`, asked past any proxy: it is on this machine, as it reads
    adapters from a folder.

    Raises ValueError where the address lacks its password, which is in the environment.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(whole_address(url, setting="generation.url"))
        self.url = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"), fragment="").geturl()
        self.name = f"the server at {shortened(masked(self.url))}"  # without a password that the address may hold
        self.http = HttpClient(self.url, timeout_s=TIMEOUT_S, waits_s=WAITS_S, try_again=TRY_AGAIN, proxies=False)

    def get(self, path: str) -> Any:
        return self.ask("GET", path, [None])[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.ask("POST", path, [body])[0]

    def ask(
        self, method: str, path: str, bodies: list[Any], *, most: int = 1, once_s: float | None = None
    ) -> list[Any]:
        """The JSON of the answers to some requests, in their order, `most` of them under way at a time; text where it
        is none, such as after a load. once_s: seconds of a single try.

        Raises ServerError with the first that fails or is refused, and Interrupted once a stop was asked for; the
        others are given up.
        """

        def read(answer: HttpAnswer) -> Any:
            value: Any = answer.body.decode(errors="replace")
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
            if answer.status >= 300:
                inner = value.get("error", value) if isinstance(value, dict) else value
                said = (inner.get("message") or inner.get("detail")) if isinstance(inner, dict) else inner
                said = shortened(str(said or value or "no message"), MOST_SHOWN)
                raise ServerError(f"{self.name} answered {path} with {answer.status}: {said}", status=answer.status)
            return value

        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return self.http.ask(method, path, bodies, read=read, most=most, headers=headers, once_s=once_s)
        except NoAnswer as error:
            raise ServerError(f"{self.name} {error}") from None

    def notify(self, path: str, body: dict[str, Any]) -> None:
        """Send a request on which nothing depends: one try, whatever comes of it."""
        with contextlib.suppress(ServerError):
            self.ask("POST", path, [body], once_s=NOTIFY_S)


class AnswerPart(BaseModel):
    """Fields of a server's answer; it may have others."""

    model_config = ConfigDict(strict=True)


class ServedModel(AnswerPart):
    """A base, or an adapter, which has a parent; root: what it was loaded from."""

    id: Annotated[str, Field(min_length=1)]
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None


class Models(AnswerPart):
    data: Annotated[list[ServedModel], Field(min_length=1)]


class Logprobs(AnswerPart):
    token_logprobs: list[Annotated[float, Field(le=ROUNDED, allow_inf_nan=False)]]


class ServedChoice(AnswerPart):
    """A completion; `token_ids` with the one that ended it."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Logprobs
    finish_reason: Literal["stop", "length"]


class Completions(AnswerPart):
    choices: Annotated[list[ServedChoice], Field(min_length=1, max_length=1)]


class Detokenized(AnswerPart):
    prompt: str


Shape = TypeVar("Shape", bound=AnswerPart)


def read_as(shape: type[Shape], answer: Any, *, server: ServerClient, path: str) -> Shape:
    """A server's answer in its shape. Raises ServerError naming the first field that is not as it should be."""
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the answer"
        given = "" if first["type"] == "missing" else f", not {shortened(repr(first['input']), 40)}"
        raise ServerError(f"{server.name} answered {path} with a wrong {place}: {first['msg']}{given}") from None


def check_tokenizer(server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, with the first text, where a token of ours means another text there; all are compared.

    How text is split into tokens is ours alone: the server is sent tokens, and only decodes them, for stop strings.
    Raises ServerError where it does not answer.
    """

    for start in range(0, len(tokenizer), TOKENS_AT_ONCE):
        tokens = [*range(start, min(start + TOKENS_AT_ONCE, len(tokenizer)))]
        there = server.post(DETOKENIZE, {"model": base, "tokens": tokens})
        texts = str(tokenizer.decode(tokens)), read_as(Detokenized, there, server=server, path=DETOKENIZE).prompt
        if texts[0] != texts[1]:
            at = shared_length(*texts)
            ours, theirs = (shortened(repr(text[at : at + 20])) for text in texts)
            where = f"character {at} of the text of tokens {tokens[0]} to {tokens[-1]}"
            raise ValueError(f"{server.name} has another tokenizer: from {where} on, {ours} here is {theirs} there")
