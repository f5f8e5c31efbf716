"""A client of a serving engine: vLLM's protocol over our HTTP client, with refusals in words.

It goes past any proxy: the server is on this machine, since it reads adapters from a folder of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.engine import Completion, SampledRole
from tinyrl.http_client import Answer, HttpClient, NoAnswer
from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.roles import Roles
from tinyrl.text import masked, shortened, whole_address

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
MOST_SAID = 300  # characters of a refusal
TELL_S = 5.0
PORTS = {"http": 80, "https": 443}
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key


class ServerError(Exception):
    """What a server did instead of answering, in words; `status`: of a refusal (None: there was no answer)."""

    def __init__(self, said: str, *, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status


class ServerClient:
    """A server at an http address, that of `generation.url`. `timeout_s` is for one request, however often it is tried.

    Raises ValueError where the address lacks its password, which is in the environment.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(whole_address(url, setting="generation.url"))
        assert parts.scheme in ("http", "https"), "the configuration has checked it"
        assert parts.hostname
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = parts._replace(path=path, fragment="").geturl()
        self.host, self.port = parts.hostname, parts.port or PORTS[parts.scheme]
        self.http = HttpClient(
            self.url,
            timeout_s=timeout_s,
            setting="generation.timeout_s",
            waits_s=WAITS_S,
            try_again=TRY_AGAIN,
            proxies=False,
        )

    @property
    def name(self) -> str:
        """For messages, without a password that the address may hold."""
        return f"the server at {shortened(masked(self.url))}"

    def get(self, path: str) -> Any:
        return self._all("GET", path, [None], most=1)[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._all("POST", path, [body], most=1)[0]

    def post_all(self, path: str, bodies: list[dict[str, Any]], *, most: int) -> list[Any]:
        """The answers to some requests, in their order, `most` of them under way at a time.

        Raises ServerError with the first that fails, and Interrupted once a stop was asked for; the others
        are given up.
        """
        return self._all("POST", path, bodies, most=most)

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a request of which nothing depends: one try, whatever comes of it."""
        with contextlib.suppress(NoAnswer):
            self.http.ask("POST", path, [body], read=lambda answer: None, headers=_key(), once_s=TELL_S)

    def _all(self, method: str, path: str, bodies: list[Any], *, most: int) -> list[Any]:
        def read(answer: Answer) -> Any:
            return self._read(path, answer)

        try:
            return self.http.ask(method, path, bodies, read=read, most=most, headers=_key())
        except NoAnswer as error:
            raise ServerError(f"{self.name} {error}") from None

    def _read(self, path: str, answer: Answer) -> Any:
        """An answer's JSON; as text where it is none, such as after a load. Raises ServerError for a refusal."""
        text = answer.body.decode(errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if answer.status >= 300:
            said = shortened(_said(value), MOST_SAID)
            raise ServerError(f"{self.name} answered {path} with {answer.status}: {said}", status=answer.status)
        return value


def _key() -> dict[str, str]:
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(answer: Any) -> str:
    if isinstance(answer, dict):
        inner = answer.get("error") if isinstance(answer.get("error"), dict) else answer
        return str(inner.get("message") or inner.get("detail") or answer)  # pyright: ignore[reportOptionalMemberAccess]
    return str(answer) or "no message"


# ---- Checks that it samples from our policy ----


TOKENS_AT_ONCE = 4096  # whose text is compared in one request
STIRRED = 0.02  # deviation of the numbers added to LoRA's B, which is zero in a fresh adapter
UNEXPLAINED = 0.1  # of the squares that the server's numbers may leave, where another model leaves 1 or more
SMALLEST_GAP, TIMES = 1e-4, 5.0  # nats per token: a gap is too large above the first one, this many times
ROUNDED = 1e-3  # by which a log-probability may be above 0


class _Part(BaseModel):
    """Of a server's answer: these fields as they are here, others are not looked at."""

    model_config = ConfigDict(strict=True)


class ServedModel(_Part):
    """A base, or an adapter, which has a parent; root: what it was loaded from."""

    id: Annotated[str, Field(min_length=1)]
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None


class Models(_Part):
    """The answer of /v1/models."""

    data: list[ServedModel]


class _Logprobs(_Part):
    token_logprobs: list[Annotated[float, Field(le=ROUNDED, allow_inf_nan=False)]]


class Choice(_Part):
    """A completion; `token_ids` with the one that ended it."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


class Completions(_Part):
    """The answer of /v1/completions to a request for one."""

    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


class Detokenized(_Part):
    prompt: str


Shape = TypeVar("Shape", bound=_Part)


def read_as(shape: type[Shape], answer: Any, *, server: ServerClient, path: str) -> Shape:
    """A server's answer in its shape. Raises ServerError naming the first field that is not as it should be."""
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the answer"
        given = "" if first["type"] == "missing" else f", not {shortened(repr(first['input']), 40)}"
        raise ServerError(f"{server.name} answered {path} with a wrong {place}: {first['msg']}{given}") from None


def read_completion(answer: Any, asked: dict[str, Any], *, vocabulary: int, server: ServerClient, path: str) -> Choice:
    """The one completion of an answer to the request `asked`, from a vocabulary of so many tokens. Raises ServerError
    where it is not one that such a request can have.
    """
    [choice] = read_as(Completions, answer, server=server, path=path).choices
    tokens, most = choice.token_ids, asked["max_tokens"]
    logprobs = choice.logprobs.token_logprobs
    beyond = next((token for token in tokens if token >= vocabulary), None)
    early = next((token for token in tokens[:-1] if token in asked["stop_token_ids"]), None)
    ended, said_so = tokens[-1] in asked["stop_token_ids"], choice.finish_reason == "stop"
    wrong = ""
    if len(tokens) > most:
        wrong = f"{len(tokens)} tokens where {most} were asked for"
    elif len(logprobs) != len(tokens):
        wrong = f"{len(logprobs)} log-probabilities of {len(tokens)} tokens"
    elif beyond is not None:
        wrong = f"token {beyond}, and the vocabulary has {vocabulary:,}"
    elif early is not None:
        wrong = f"tokens that go on after {early}, which ends a completion"
    elif said_so and not ended and not asked["stop"]:
        wrong = "a completion that ends by itself, which was not asked for"
    elif not said_so and not ended and len(tokens) < most:
        wrong = f"{len(tokens)} tokens cut off for their length, where there was room for {most}"
    if wrong:
        raise ServerError(f"{server.name} answered {path} with {wrong}")
    return choice


def check_tokenizer(server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, with the first token, where a token of ours means another text there; all are looked at.

    How text is split into tokens is ours alone: the server is sent tokens, and only reads them, for stop strings.
    Raises ServerError where it does not answer.
    """
    for start in range(0, len(tokenizer), TOKENS_AT_ONCE):
        tokens = list(range(start, min(start + TOKENS_AT_ONCE, len(tokenizer))))
        if _texts(server, base, tokenizer, tokens) is None:
            continue
        while len(tokens) > 1:
            first, second = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
            tokens = second if _texts(server, base, tokenizer, first) is None else first
        here, there = _texts(server, base, tokenizer, tokens) or ("", "")
        raise ValueError(
            f"{server.name} has another tokenizer: token {tokens[0]} is {shortened(repr(here))} here "
            f"and {shortened(repr(there))} there"
        )


def _texts(
    server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase, tokens: list[int]
) -> tuple[str, str] | None:
    here = str(tokenizer.decode(tokens))
    there = server.post("/detokenize", {"model": base, "tokens": tokens})
    there = read_as(Detokenized, there, server=server, path="/detokenize").prompt
    return None if here == there else (here, there)


def rescored(
    roles: Roles, role: SampledRole, prompts: list[list[int]], drawn: list[Completion], *, temperature: float
) -> Tensor:
    """Our own log-probabilities (N,) of all tokens that were drawn, row by row."""
    batch = roles.batch(prompts, [c.tokens for c in drawn])
    with torch.no_grad(), roles.acting(role):
        logprobs, _ = roles.logprobs("reference" if role == "reference" else "policy", batch, temperature=temperature)
    return torch.cat([row[: len(c.tokens)] for row, c in zip(logprobs.float().cpu(), drawn, strict=True)])


def served(drawn: list[Completion]) -> Tensor:
    return torch.tensor([logprob for c in drawn for logprob in c.logprobs])


def gap(theirs: Tensor, ours: Tensor) -> float:
    """Mean |difference| over the N tokens, in nats per token."""
    return float((theirs - ours).abs().mean())


def unexplained(theirs: Tensor, ours: Tensor, *, otherwise: Tensor) -> float:
    """The share of squares that `ours` leaves of the server's numbers: sum (theirs - ours)^2 over
    sum (ours - otherwise)^2. About 0 where the server computes what we do, 1 where it computes `otherwise`.
    """
    return float((theirs - ours).square().sum() / (ours - otherwise).square().sum().clamp(min=1e-30))


def is_other_model(theirs: Tensor, ours: Tensor) -> bool:
    """Whether our log-probabilities do not explain how the server's vary from token to token."""
    return unexplained(theirs, ours, otherwise=ours.mean().expand_as(ours)) > UNEXPLAINED


@contextmanager
def perturbed(roles: Roles) -> Iterator[None]:
    """Inside, the policy's adapter is another one, which changes the model at once; then exactly its own again."""
    generator = torch.Generator().manual_seed(0)
    matrices = [p for n, p in roles.adapter_parameters(POLICY_ADAPTER).items() if "_B." in n]
    before = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.add_((torch.randn(p.shape, generator=generator) * STIRRED).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, own in zip(matrices, before, strict=True):
                p.copy_(own)
