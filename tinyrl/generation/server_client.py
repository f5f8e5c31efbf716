"""A serving engine over HTTP (vLLM's protocol): requests, refusals in words, answers in their shape, its sleep; whether
its tokenizer is ours, and the adapters it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.data.http_client import Answer, HttpClient, NoAnswer
from tinyrl.models.lora import save_adapter
from tinyrl.models.roles import Roles
from tinyrl.text import masked, shortened, whole_address

SLEEP, WAKE, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
LOAD, UNLOAD, DETOKENIZE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/detokenize"
TOKENS_AT_ONCE = 4096  # whose text is compared in one request
PORTS = {"http": 80, "https": 443}
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key
TIMEOUT_S = 600.0  # for one request, however often it is tried
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
TELL_S = 5.0
MOST_SAID = 300  # characters of a refusal
ROUNDED = 1e-3  # by which a log-probability may be above 0


class ServerError(Exception):
    """What a server did instead of answering, in words; `status`: of a refusal (None: there was no answer)."""

    def __init__(self, said: str, *, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status


class ServerClient:
    """A server at an http address, that of `generation.url`, asked past any proxy: it is on this machine, as it reads
    adapters from a folder.

    Raises ValueError where the address lacks its password, which is in the environment.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(whole_address(url, setting="generation.url"))
        assert parts.scheme in ("http", "https"), "the configuration has checked it"
        assert parts.hostname
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = parts._replace(path=path, fragment="").geturl()
        self.host, self.port = parts.hostname, parts.port or PORTS[parts.scheme]
        self.http = HttpClient(
            self.url,
            timeout_s=TIMEOUT_S,
            waits_s=WAITS_S,
            try_again=TRY_AGAIN,
            proxies=False,
        )

    @property
    def name(self) -> str:
        """For messages, without a password that the address may hold."""
        return f"the server at {self.shown}"

    @property
    def shown(self) -> str:
        return shortened(masked(self.url))

    def get(self, path: str) -> Any:
        return self.ask("GET", path, [None])[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.ask("POST", path, [body])[0]

    def ask(self, method: str, path: str, bodies: list[Any], *, most: int = 1) -> list[Any]:
        """The JSON of the answers to some requests, in their order, `most` of them under way at a time; text where it
        is none, such as after a load.

        Raises ServerError with the first that fails or is refused, and Interrupted once a stop was asked for; the
        others are given up.
        """

        def read(answer: Answer) -> Any:
            value = answer.body.decode(errors="replace")
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
            if answer.status >= 300:
                said = shortened(_said(value), MOST_SAID)
                raise ServerError(f"{self.name} answered {path} with {answer.status}: {said}", status=answer.status)
            return value

        try:
            return self.http.ask(method, path, bodies, read=read, most=most, headers=_key())
        except NoAnswer as error:
            raise ServerError(f"{self.name} {error}") from None

    def is_asleep(self) -> bool | None:
        """Whether it sleeps; None where it does not know the question. Raises ServerError where there is no answer."""
        try:
            answer = self.get(IS_SLEEPING)
        except ServerError as error:
            if error.status is None:
                raise
            return None
        said = answer.get("is_sleeping") if isinstance(answer, dict) else None
        return said if isinstance(said, bool) else None

    def turn(self, path: str) -> None:
        """SLEEP: its weights go to the memory of the CPU, its cache is given up; WAKE: both are on the GPU again.

        Raises ServerError, also where it then says that it is not what it was asked to be.
        """
        self.post(path, {})
        if self.is_asleep() is not (path == SLEEP):
            raise ServerError(f"{self.name} answered {path}, and {IS_SLEEPING} says that it was not done")

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a request of which nothing depends: one try, whatever comes of it."""
        with contextlib.suppress(NoAnswer):
            self.http.ask("POST", path, [body], read=lambda answer: None, headers=_key(), once_s=TELL_S)


def _key() -> dict[str, str]:
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(answer: Any) -> str:
    if isinstance(answer, dict):
        inner = answer.get("error") if isinstance(answer.get("error"), dict) else answer
        return str(inner.get("message") or inner.get("detail") or answer)  # pyright: ignore[reportOptionalMemberAccess]
    return str(answer) or "no message"


class AnswerPart(BaseModel):
    """Of a server's answer: these fields as they are here, others are not looked at."""

    model_config = ConfigDict(strict=True)


class ServedModel(AnswerPart):
    """A base, or an adapter, which has a parent; root: what it was loaded from."""

    id: Annotated[str, Field(min_length=1)]
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None


class Models(AnswerPart):
    data: list[ServedModel]


class Logprobs(AnswerPart):
    token_logprobs: list[Annotated[float, Field(le=ROUNDED, allow_inf_nan=False)]]


class Choice(AnswerPart):
    """A completion; `token_ids` with the one that ended it."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Logprobs
    finish_reason: Literal["stop", "length"]


class Completions(AnswerPart):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


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


# ---- what a server has of ours ----


def check_tokenizer(server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, with the first token, where a token of ours means another text there; all are looked at.

    How text is split into tokens is ours alone: the server is sent tokens, and only reads them, for stop strings.
    Raises ServerError where it does not answer.
    """

    def texts(tokens: list[int]) -> tuple[str, str]:
        there = server.post(DETOKENIZE, {"model": base, "tokens": tokens})
        read = read_as(Detokenized, there, server=server, path=DETOKENIZE)
        return str(tokenizer.decode(tokens)), read.prompt

    for start in range(0, len(tokenizer), TOKENS_AT_ONCE):
        tokens = list(range(start, min(start + TOKENS_AT_ONCE, len(tokenizer))))
        here, there = texts(tokens)
        if here == there:
            continue
        while len(tokens) > 1:
            first, second = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
            here, there = texts(first)
            tokens = second if here == there else first
        here, there = texts(tokens)
        raise ValueError(
            f"{server.name} has another tokenizer: token {tokens[0]} is {shortened(repr(here))} here "
            f"and {shortened(repr(there))} there"
        )


class ServedAdapters:
    """Which weights of each adapter the server has, and under which name. Folders are in `folder`, under the system's
    one for temporary files (TMPDIR), and deleted in the end.
    """

    def __init__(self, server: ServerClient, roles: Roles) -> None:
        self.server, self.roles = server, roles
        self.loads = 0
        self._run = secrets.token_hex(4)  # other runs may use the same server
        self._temporary = tempfile.TemporaryDirectory(prefix="tinyrl-adapters-")
        self.folder = Path(self._temporary.name)
        self.served: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def name_of(self, adapter: str) -> str | None:
        """The name under which the server has an adapter's weights as they are now; None: it does not have them.

        Numbers are compared, since not every optimizer says which tensors it has written to.
        """
        name, weights = self.served.get(adapter, (None, {}))
        now = self.roles.adapter_parameters(adapter)
        return name if name and all(torch.equal(now[n].detach().cpu(), kept) for n, kept in weights.items()) else None

    def load(self, adapter: str) -> str:
        """Give the server an adapter's weights as they are now, and take the version before from it; the new name.

        Raises ServerError.
        """
        assert self.roles.peft is not None, "the configuration asks for LoRA"
        self.loads += 1
        name = f"tinyrl-{self._run}-{self.loads}"
        save_adapter(self.roles.peft, adapter, self.folder / name)
        self.server.post(LOAD, {"lora_name": name, "lora_path": str(self.folder / name)})
        self._unload(adapter)
        now = self.roles.adapter_parameters(adapter)
        self.served[adapter] = (name, {n: p.detach().to("cpu", copy=True) for n, p in now.items()})
        return name

    def unload_all(self) -> None:
        for adapter in list(self.served):
            self._unload(adapter)

    def close(self) -> None:
        self.unload_all()
        self._temporary.cleanup()

    def _unload(self, adapter: str) -> None:
        name, _ = self.served.pop(adapter, (None, {}))
        if name is not None:
            self.server.tell(UNLOAD, {"lora_name": name})  # started anew or away, it has no such adapter
            shutil.rmtree(self.folder / name, ignore_errors=True)
