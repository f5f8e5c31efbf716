"""Sampling through vLLM's server on this machine: the engine and its client.

    0. under generation.server_sleep wake it, and put it to sleep afterwards: two processes, one GPU
    1. if the policy's weights have changed, load its adapter there under a new name
    2. then score four of its completions by our own forward pass: numbers of another model are refused at the start,
       and a gap beyond the first stops the run
    3. send one request per completion: token ids in, token ids and log-probabilities out

The server has other kernels and often another dtype, so `exact` is False: trainers rescore the tokens that it sampled
and weigh the difference. A completion's seed is the key of its random numbers.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import GenerationConfig
from tinyrl.data.http_client import HttpClient, NoAnswer
from tinyrl.generation.engine import BatchScheduler, SamplingEngine
from tinyrl.generation.request import DecodedSequence, Request, SampledRole
from tinyrl.models.batch import examples
from tinyrl.models.lora import save_adapter
from tinyrl.models.policy import Policy
from tinyrl.process.errors import GuardStop, Interrupted
from tinyrl.text import truncate
from tinyrl.urls import mask_url, resolve_url

MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
DETOKENIZE = "/detokenize"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
SLEEP = "/sleep"
WAKE = "/wake_up"
API_KEY = "VLLM_API_KEY"  # the variable from which vLLM's own server takes its key
TIMEOUT_S = 600.0  # for one request, however often it is tried
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the second try and those after it
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
TOKENS_AT_ONCE = 4096  # whose text is compared in one request
ROUNDED = 1e-3  # by which a log-probability may be above 0
AT_A_TIME = 256  # requests under way where generation.max_rows is not set
PROBED_PROMPTS = 4
PROBED_TOKENS = 64
UNEXPLAINED = 0.1  # share of the variance of our numbers; another model leaves 1 or more
HOW_TO_START = "docs/scale.md has vLLM's command; it runs on this machine, able to read TMPDIR"
SMALLEST_GAP = 1e-4  # nats per token that are never too many
TIMES = 5.0  # the first gap: one above that is too large


class ServerError(Exception):
    """A server refused a request or did not answer it."""


class ServerClient:
    """A server at the http address that a setting names, asked past any proxy, since it is on this machine. Raises
    ValueError if the address lacks its password, which is in the environment.
    """

    def __init__(self, url: str, *, setting: str = "generation.url") -> None:
        parts = urllib.parse.urlsplit(resolve_url(url, setting=setting))
        self.url = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"), fragment="").geturl()
        self.name = f"the server at {truncate(mask_url(self.url))}"
        self.http = HttpClient(self.url, timeout_s=TIMEOUT_S, waits_s=WAITS_S, try_again=TRY_AGAIN, proxies=False)

    def ask(self, method: str, path: str, bodies: list[Any], *, most: int = 1) -> list[Any]:
        """Send requests, `most` at a time; return the JSON of their answers (text where it is none), in their order.

        Raises ServerError with the first that fails or is refused, and Interrupted once a stop was requested.
        """
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(API_KEY)) else {}
        found = list[Any]()
        try:
            answers = self.http.ask(method, path, bodies, most=most, headers=headers)
        except NoAnswer as error:
            raise ServerError(f"{self.name} {error}") from None
        for answer in answers:
            if answer.status_code >= 300:
                raise ServerError(
                    f"{self.name} answered {path} with {answer.status_code}: {truncate(answer.text, 300)}"
                )
            try:
                found.append(answer.json())
            except (ValueError, RecursionError):  # a load is answered with text
                found.append(answer.text)
        return found

    def get(self, path: str) -> Any:
        return self.ask("GET", path, [None])[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.ask("POST", path, [body])[0]


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


class ServerLogprobs(AnswerPart):
    token_logprobs: list[Annotated[float, Field(le=ROUNDED, allow_inf_nan=False)]]


class ServedChoice(AnswerPart):
    """A completion; `token_ids` with the one that ended it."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: ServerLogprobs
    finish_reason: Literal["stop", "length"]


class ServerCompletions(AnswerPart):
    choices: Annotated[list[ServedChoice], Field(min_length=1, max_length=1)]


Shape = TypeVar("Shape", bound=AnswerPart)


def read_as(shape: type[Shape], answer: Any, *, server: ServerClient, path: str) -> Shape:
    """Check the shape of a server's answer. Raises ServerError naming the first wrong field."""
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "answer"
        given = truncate(repr(first["input"]), 40)
        raise ServerError(f"{server.name} answered {path} with a wrong {place}: {first['msg']}, not {given}") from None


def check_tokenizer(server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the text of every token. Raises ValueError if the server's tokenizer is another one, ServerError if it
    does not answer. Splitting text into tokens is ours alone; the server decodes them, for stop strings.
    """
    for start in range(0, len(tokenizer), TOKENS_AT_ONCE):
        tokens = [*range(start, min(start + TOKENS_AT_ONCE, len(tokenizer)))]
        answer = server.post(DETOKENIZE, {"model": base, "tokens": tokens})
        if not isinstance(answer, dict) or answer.get("prompt") != str(tokenizer.decode(tokens)):
            raise ValueError(
                f"{server.name} has another tokenizer: tokens {start} to {tokens[-1]} are other texts there"
            )


class ServerEngine(SamplingEngine):
    """Samples from the policy's adapter on a server, which holds the same base. Log-probabilities are the server's: of
    greedy completions at temperature 1, under top-k or top-p renormalised.

    Under generation.server_sleep adapters are loaded and checked again each time. served: names of adapters there;
    checked: weights of those that it is known to sample from (the base is None). Their folders are under TMPDIR, and
    deleted in the end.
    """

    name = "server"
    exact = False

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig, *, longest: int
    ) -> None:
        super().__init__(policy, tokenizer, settings)
        assert policy.adapters.peft is not None, "the configuration asks for LoRA"
        assert settings.url is not None, "the configuration has checked it"
        self.server = ServerClient(settings.url)
        self.peft = policy.adapters.peft
        self.longest = longest
        self.served: dict[str | None, str] = {}
        self.checked: dict[str | None, dict[str, Tensor]] = {}
        self.first_gap: float | None = None
        self.loads = 0
        self._run = secrets.token_hex(4)  # other runs may use the same server
        self._temporary = tempfile.TemporaryDirectory(prefix="tinyrl-adapters-")
        self.folder = Path(self._temporary.name)
        self._notes = list[str]()

    @contextmanager
    def scheduler(
        self, role: SampledRole, *, rows: int, width: int, serving: bool = False
    ) -> Iterator[ServerScheduler]:
        """Yield a scheduler. Raises Interrupted if the server no longer answers, so that the run can be resumed, and
        GuardStop if it samples from another policy.
        """
        with self._failing_as(Interrupted), self._awake():
            yield ServerScheduler(self, role)

    @contextmanager
    def _failing_as(self, kind: type[ValueError] | type[Interrupted]) -> Iterator[None]:
        """Raise a ServerError as `kind`."""
        try:
            yield
        except ServerError as error:
            for adapter in {*self.served} - {None}:  # nothing is left to be unloaded
                del self.served[adapter]
            self.checked.clear()
            raise kind(f"{error}; {HOW_TO_START}") from error

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wake a server that sleeps between samplings, and give it the memory that torch does not use."""
        if not self.settings.server_sleep:
            yield
            return
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        self.server.post(WAKE, {})
        try:
            yield
        finally:
            self.checked.clear()
            self.server.post(SLEEP, {})

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once that the server samples from our models, on `prompts` (tokens); return notes for the log.

        Raises ValueError if it does not, with what to do.
        """
        if self._notes or not prompts:
            return self._notes
        server = self.server
        with self._failing_as(ValueError):
            listed = read_as(Models, server.get(MODELS), server=server, path=MODELS)
            base = next((model for model in listed.data if not model.parent), listed.data[0])
            if base.max_model_len is not None and base.max_model_len < self.longest:
                raise ServerError(f"{server.name} has room for {base.max_model_len} tokens, the run for {self.longest}")
            self.served[None] = base.id
            with self._awake():
                check_tokenizer(server, base.id, self.tokenizer)
                self.synced("policy", prompts)
        self._notes = [
            f"{server.name} serves {base.id} ({base.root or base.id}): log-probabilities differ from ours by "
            f"{self.first_gap:.2g} nats per token; adapters are loaded from {self.folder}"
            + ("; it sleeps between samplings" if self.settings.server_sleep else "")
        ]
        return self._notes

    def close(self) -> None:
        for adapter in list(self.served):
            self._unload(adapter)
        self._temporary.cleanup()

    def synced(self, role: SampledRole, prompts: list[list[int]]) -> str:
        """Load the role's weights if they have changed, and check by our own forward pass that the server samples from
        them; return their name there. A bad gap is measured twice.

        Raises ServerError if the first numbers are another model's, and GuardStop if later ones are.
        """
        adapter = self.policy.adapter_of(role)
        gap = 0.0
        prompts = prompts[:PROBED_PROMPTS]
        weights = {} if adapter is None else self.policy.adapters.parameters(adapter)
        known = self.checked.get(adapter)
        # Numbers are compared, since not every optimizer marks the tensors it has written to.
        if known is not None and all(torch.equal(weights[n].detach().cpu(), before) for n, before in known.items()):
            return self.served[adapter]
        for _ in range(2):
            theirs, ours = self._compared(role, prompts)
            gap = float((theirs - ours).abs().mean())
            if self.first_gap is None:
                if (theirs - ours).square().sum() > UNEXPLAINED * (ours - ours.mean()).square().sum():
                    raise ServerError(
                        f"{self.server.name} has another base than {self.policy.causal.name_or_path}, does not sample "
                        "with the adapter, or lacks --logprobs-mode processed_logprobs: its log-probabilities are "
                        f"{gap:.2g} nats per token from ours"
                    )
                self.first_gap = gap
            if gap <= max(SMALLEST_GAP, TIMES * self.first_gap):
                self.checked[adapter] = {n: p.detach().to("cpu", copy=True) for n, p in weights.items()}
                return self.served[adapter]
        raise GuardStop(
            f"{self.server.name} samples from another policy: its log-probabilities are {gap:.2g} nats per token from "
            f"ours, and were {self.first_gap:.2g} at first. Restart it, and resume from the last checkpoint"
        )

    def _compared(self, role: SampledRole, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Load the role's adapter under a new name and sample a completion of each prompt, of fixed length and from all
        tokens; return the server's and our log-probabilities (N,) of all their tokens.
        """
        adapter = self.policy.adapter_of(role)
        if adapter is not None:
            self.checked.pop(adapter, None)
            self.loads += 1
            name = f"tinyrl-{self._run}-{self.loads}"
            save_adapter(self.peft, adapter, self.folder / name)
            self.server.post(LOAD, {"lora_name": name, "lora_path": str(self.folder / name)})
            self._unload(adapter)
            self.served[adapter] = name
        new = min(PROBED_TOKENS, self.settings.max_new_tokens)
        own = {"max_tokens": new, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": []}
        probes = list[DecodedSequence]()
        for row, prompt in enumerate(prompts):
            [request] = self.requests_for(prompt, 1, row=row, seed=0, step=0)
            probes.append(DecodedSequence(request))
        self.draw(probes, [self.body(self.served[adapter], probe.request) | own for probe in probes])
        policy = self.policy
        scored = "reference" if role == "reference" else "policy"
        with torch.inference_mode(False), torch.no_grad(), policy.acting(role):
            batch = policy.batch_of(examples(prompts, [probe.tokens for probe in probes]))
            logprobs, _ = policy.logprobs(scored, batch, temperature=self.settings.temperature)
        ours = [row[: len(probe.tokens)] for row, probe in zip(logprobs.float().cpu(), probes, strict=True)]
        return torch.tensor([logprob for probe in probes for logprob in probe.logprobs]), torch.cat(ours)

    def _unload(self, adapter: str | None) -> None:
        if adapter is not None and (name := self.served.pop(adapter, None)):
            with suppress(ServerError):  # a server that was restarted no longer has it
                self.server.post(UNLOAD, {"lora_name": name})
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def body(self, name: str, request: Request) -> dict[str, Any]:
        """Name every setting: a server fills in what is missing from the model's generation_config.json. Ends are ours
        (ignore_eos); a stop string may be a special token; logprobs 0: of the sampled token only.
        """
        return {
            "model": name, "prompt": request.prompt, "max_tokens": request.limit,
            "seed": int(request.key.view(np.int64)), "temperature": 0.0 if request.greedy else request.temperature,
            "top_p": request.top_p, "top_k": request.top_k, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop": request.stop, "include_stop_str_in_output": True, "skip_special_tokens": False,
            "stop_token_ids": sorted(self.eos), "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip

    def draw(self, sequences: list[DecodedSequence], bodies: list[dict[str, Any]]) -> None:
        """Send a request for each sequence, and fill in what was sampled. Raises ServerError if it cannot be what was
        asked for.
        """
        server = self.server
        at_a_time = self.settings.max_rows or AT_A_TIME
        answers = server.ask("POST", COMPLETIONS, bodies, most=at_a_time)
        for sequence, answer, asked in zip(sequences, answers, bodies, strict=True):
            [choice] = read_as(ServerCompletions, answer, server=server, path=COMPLETIONS).choices
            tokens = choice.token_ids
            logprobs = choice.logprobs.token_logprobs
            if not len(logprobs) == len(tokens) <= asked["max_tokens"]:
                fault = truncate(repr(choice), 200)
                raise ServerError(f"{server.name} answered {COMPLETIONS} with what was not asked for: {fault}")
            sequence.end(tokens, logprobs, "eos" if tokens[-1] in self.eos else choice.finish_reason)


class ServerScheduler(BatchScheduler):
    """Sequences that are sent together, one request each."""

    def __init__(self, engine: ServerEngine, role: SampledRole) -> None:
        super().__init__()
        self.engine = engine
        self.role: SampledRole = role

    def step(self) -> list[DecodedSequence]:
        """Sample all that wait, from the role's weights as they are now; return them."""
        ended = [*self.waiting]
        self.waiting.clear()
        if ended:
            name = self.engine.synced(self.role, [sequence.request.prompt for sequence in ended])
            self.engine.draw(ended, [self.engine.body(name, sequence.request) for sequence in ended])
        return ended
