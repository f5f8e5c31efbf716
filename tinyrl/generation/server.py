"""The engine that samples over HTTP by a server on this machine (vLLM's protocol), and its client.

    once       its base, tokenizer and use of adapters are compared with ours; a difference is refused
    each call  0. under generation.server_sleep it is woken first, and sleeps again after it: two processes, one GPU
               1. the policy's adapter goes there under a new name, if its weights are others than those it has
               2. after that: four completions are scored by our own forward; a gap beyond the first stops the run
               3. one request a completion: token ids in, token ids and log-probabilities out

Its numbers are those of other kernels and often another dtype, so `exact` is False: trainers rescore what it drew, and
weigh the difference. A completion's seed is the key of its random numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Unpack

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.data.http_client import HttpAnswer, HttpClient, NoAnswer
from tinyrl.errors import GuardStop, Interrupted
from tinyrl.generation.engine import (
    Completion,
    Request,
    SampledRole,
    SampleOptions,
    SamplingEngine,
    SamplingSettings,
    advanced,
    eos_token_ids,
    grouped,
    row_keys,
)
from tinyrl.generation.turns import Episodes, play_plainly
from tinyrl.models.loading import embedding_rows
from tinyrl.models.lora import POLICY_ADAPTER, save_adapter
from tinyrl.models.roles import Roles
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


# ---- the engine ----

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SLEEP, WAKE, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank allows
LOST = 404  # an adapter the server does not have: it was started anew
AT_A_TIME = 256  # requests under way where generation.max_rows says nothing else
PROBED_PROMPTS, PROBED_TOKENS = 4, 64
PERTURBED = 0.02  # deviation of the numbers added to LoRA's B, which is zero in a fresh adapter
UNEXPLAINED = 0.1  # of the squares that the server's numbers may leave, where another model leaves 1 or more
SMALLEST_GAP, TIMES = 1e-4, 5.0  # nats per token: a gap is too large above the first one, this many times
SLEEPER_SHARE = 0.5  # of the GPU, for a server that sleeps while the run learns there
HINTS = {  # by what a refusal contains
    "No adapter found": "it cannot read the folder, which needs the same machine, user and path (TMPDIR says where)",
    "max_lora_rank": "lora.r is {rank} here",
    f"answered {WAKE}": "where the GPU has no room for both, lower --gpu-memory-utilization",
    f"answered {LOAD} with {LOST}": "it takes no adapters, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora "
    "allow",
    f"with {LOST}": "it does not know this run's adapter",
}


class ServerEngine(SamplingEngine):
    """Samples from the policy's adapter on a server at `generation.url`, which holds the same base.

    sleeps: it is awake only while it samples. What it has is loaded and compared anew each time it wakes. served: the
    name and the weights of each adapter that it has, and of the base (None) once it was compared; their folders are
    under TMPDIR, and deleted in the end.
    """

    name, exact = "server", False

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        server: ServerClient,
        longest: int,
        sleeps: bool = False,
    ) -> None:
        self.roles, self.tokenizer, self.settings = roles, tokenizer, settings
        self.server, self.longest, self.sleeps = server, longest, sleeps
        self.most = settings.max_rows or AT_A_TIME
        self.eos = sorted(eos_token_ids(roles, tokenizer))
        self.vocabulary = embedding_rows(roles.causal)
        assert roles.peft is not None, "the configuration asks for LoRA"
        self.peft, self.rank = roles.peft, int(roles.peft.peft_config[POLICY_ADAPTER].r)  # pyright: ignore
        self.first_gap = 0.0  # under the test adapter, then of the first policy if that is larger
        self.served: dict[str | None, tuple[str, dict[str, Tensor]]] = {}
        self.loads, self._run = 0, secrets.token_hex(4)  # other runs may use the same server
        self._temporary = tempfile.TemporaryDirectory(prefix="tinyrl-adapters-")
        self.folder = Path(self._temporary.name)
        self._base, self._notes = "", list[str]()
        self._is_awake = False

    @property
    def command(self) -> str:
        """vLLM's command that starts a serving engine for this run."""
        address, rank = urllib.parse.urlsplit(self.server.url), next((r for r in RANKS if r >= self.rank), self.rank)
        several = " --max-loras 2" if self.roles.reference_adapter else ""  # sampled from at a time
        develops = " VLLM_SERVER_DEV_MODE=1" if self.sleeps else ""
        sleeps = f" --enable-sleep-mode --gpu-memory-utilization {SLEEPER_SHARE}" if self.sleeps else ""
        return (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1{develops} vllm serve "
            f"{shlex.quote(str(self.roles.causal.name_or_path))} --enable-lora --max-lora-rank {rank}{several} "
            f"--logprobs-mode processed_logprobs --max-model-len {self.longest}{sleeps} "
            f"--host {address.hostname} --port {address.port or 80}"
        )

    @contextmanager
    def _failing_as(self, kind: type[ValueError] | type[Interrupted]) -> Iterator[None]:
        """Raise what a server did instead of answering as `kind`, with what starts one."""
        try:
            yield
        except ServerError as error:
            hint = next((f": {hint}" for part, hint in HINTS.items() if part in str(error)), "")
            raise kind(f"{error}{hint.format(rank=self.rank)}. Start it with\n  {self.command}") from error

    # ---- before the first step ----

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once that the server samples from our models, with `prompts` (tokens) to try it on; lines about it.

        Raises ValueError, with what to do, where it does not.
        """
        if self._base:
            return self._notes
        server = self.server
        with self._failing_as(ValueError):
            listed = read_as(Models, server.get(MODELS), server=server, path=MODELS)
            base = next((model for model in listed.data if not model.parent), listed.data[0])
            if base.max_model_len is not None and base.max_model_len < self.longest:
                raise ValueError(
                    f"{server.name} has room for {base.max_model_len} tokens of prompt and completion, and the run may "
                    f"need {self.longest}: start it with --max-model-len {self.longest}, or lower "
                    "generation.max_prompt_tokens or generation.max_new_tokens"
                )
            asleep = self._is_asleep()
            if self.sleeps and asleep is None:
                raise ServerError(f"{server.name} does not know {IS_SLEEPING}, as generation.server_sleep needs it")
            if asleep and not self.sleeps:
                raise ValueError(f"{server.name} is asleep: set generation.server_sleep=true, or POST to {WAKE}")
            with self._awake():
                check_tokenizer(server, base.id, self.tokenizer)
                moved = self._check_numbers(base.root or base.id, prompts[:PROBED_PROMPTS])
        self._base = base.id
        self._notes = [
            f"{server.name} serves {base.id} ({base.root or base.id}); a token's log-probability differs from ours by "
            f"{self.first_gap:.2g} nats on average, under a test adapter that moves it by {moved:.2g}",
            f"each step: the adapter of rank {self.rank} is loaded under a new name from {self.folder} and compared on "
            f"{PROBED_PROMPTS} completions; then the step's completions are sampled, {self.most} at a time",
            *(["it sleeps between samplings"] if self.sleeps else []),
        ]
        return self._notes

    def _check_numbers(self, root: str, prompts: list[list[int]]) -> float:
        """Compare log-probabilities under a test adapter, whose gap is the first; how far it moves our own.

        Raises ValueError where ours do not explain how the server's vary from token to token, or without the adapter
        explain them better.
        """
        with perturbed(self.roles):
            drawn, theirs = self._probe(self._load(POLICY_ADAPTER), prompts)
            ours = self._rescored("policy", prompts, drawn)
            raw = self._rescored("policy", prompts, drawn, temperature=1.0)
        without = self._rescored("policy", prompts, drawn)

        def unexplained(otherwise: Tensor) -> float:
            """The share of squares that `ours` leaves: sum (theirs - ours)^2 over sum (ours - otherwise)^2. About 0
            where the server computes what we do, 1 where it computes `otherwise`.
            """
            return float((theirs - ours).square().sum() / (ours - otherwise).square().sum().clamp(min=1e-30))

        gap, gap_without, fault = _gap(theirs, ours), _gap(theirs, without), ""
        if self.settings.temperature != 1 and _gap(theirs, raw) < gap / 2:
            fault = f"gives log-probabilities before the temperature of {self.settings.temperature}"
        elif unexplained(ours.mean()) > UNEXPLAINED or (unexplained(without) > UNEXPLAINED and gap_without < gap):
            fault = (
                f"has other log-probabilities than ours: a token's is {gap:.2g} nats from ours with a test adapter, on "
                f"average, and {gap_without:.2g} from ours without it. It does not sample with the adapter, or it has "
                f"another base: it serves {root}, and ours is {self.roles.causal.name_or_path}"
            )
        if fault:
            raise ValueError(f"{self.server.name} {fault}. Start it with\n  {self.command}")
        self.first_gap = gap
        return _gap(ours, without)

    # ---- sampling ----

    def sample(
        self, requests: list[Request], samples_per_request: int, **options: Unpack[SampleOptions]
    ) -> list[list[Completion]]:
        """`samples_per_request` completions for every request, in order; the role's weights go to the server first.

        Log-probabilities are the server's: of greedy completions at temperature 1, under top-k or top-p of what is left
        by these. Raises Interrupted when the server does not answer any more, so that the run can be resumed, and
        GuardStop when it samples from another policy.
        """
        if not requests:
            return []
        prompts, greedy = [r.prompt_tokens for r in requests], options.get("greedy", False)
        self.start(prompts)
        keys = advanced(*row_keys(requests, samples_per_request, seed=options["seed"], step=options["step"]))
        rows, seeds = [r for r in requests for _ in range(samples_per_request)], keys.view(np.int64).tolist()
        with self._failing_as(Interrupted), self._awake():
            for last in (False, True):
                try:
                    name = self._synced(options.get("role", "policy"), prompts[:PROBED_PROMPTS])
                    bodies = [self._body(name, r, s, greedy=greedy) for r, s in zip(rows, seeds, strict=True)]
                    return grouped(self._drawn(bodies), samples_per_request)
                except ServerError as error:
                    if last or error.status != LOST:
                        raise
                    self.served.clear()
        raise AssertionError("unreachable")

    def play(
        self, requests: list[Request], group_size: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """Episodes turn by turn, between which a server that sleeps stays awake."""
        self.start([r.prompt_tokens for r in requests])
        with self._failing_as(Interrupted), self._awake():
            play_plainly(requests, group_size, engine=self, episodes=episodes, options=options)

    def close(self) -> None:
        for adapter in list(self.served):
            self._unload(adapter)
        self._temporary.cleanup()

    def _synced(self, role: SampledRole, prompts: list[list[int]]) -> str:
        """The name of the role's weights on the server. New ones are loaded, and our own forward shows whether it
        samples with them; a bad gap is measured twice.
        """
        adapter = self.roles.adapter_of(role)
        name, weights = self.served.get(adapter, ("", {}))
        now = {} if adapter is None else self.roles.adapter_parameters(adapter)
        # Numbers are compared, since not every optimizer says which tensors it has written to.
        if name and all(torch.equal(now[n].detach().cpu(), before) for n, before in weights.items()):
            return name
        first, found = self.loads == 1, 0.0  # after that of the test adapter
        for _ in range(2):
            name = self._load(adapter)
            drawn, theirs = self._probe(name, prompts)
            found = _gap(theirs, self._rescored(role, prompts, drawn))
            if found <= max(SMALLEST_GAP, TIMES * self.first_gap):
                self.first_gap = max(self.first_gap, found) if first else self.first_gap
                return name
        raise GuardStop(
            f"the server samples from another policy: after the last sync the log-probabilities of {self.server.name} "
            f"are {found:.2g} nats per token from ours, and were {self.first_gap:.2g} at first. Start it anew, and go "
            f"on from the last checkpoint:\n  {self.command}"
        )

    def _load(self, adapter: str | None) -> str:
        """Give the server an adapter's weights as they are now, and take the version before from it; the new name."""
        if adapter is None:
            self.served[None] = (self._base, {})
            return self._base
        self.loads += 1
        name = f"tinyrl-{self._run}-{self.loads}"
        save_adapter(self.peft, adapter, self.folder / name)
        self.server.post(LOAD, {"lora_name": name, "lora_path": str(self.folder / name)})
        self._unload(adapter)
        now = self.roles.adapter_parameters(adapter)
        self.served[adapter] = (name, {n: p.detach().to("cpu", copy=True) for n, p in now.items()})
        return name

    def _unload(self, adapter: str | None) -> None:
        name, _ = self.served.pop(adapter, ("", {}))
        if name and adapter is not None:
            self.server.notify(UNLOAD, {"lora_name": name})  # started anew or away, it has no such adapter
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _probe(self, name: str, prompts: list[list[int]]) -> tuple[list[Completion], Tensor]:
        """A completion of each prompt by a served model, of so many tokens whatever they are, from all tokens; and the
        log-probabilities of all their tokens.
        """
        new = min(PROBED_TOKENS, self.settings.max_new_tokens)
        own = {"max_tokens": new, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": []}
        requests = [Request(prompt, prompt_row=row) for row, prompt in enumerate(prompts)]
        drawn = self._drawn([self._body(name, r, seed, greedy=False) | own for seed, r in enumerate(requests)])
        return drawn, torch.tensor([logprob for c in drawn for logprob in c.logprobs])

    def _rescored(
        self, role: SampledRole, prompts: list[list[int]], drawn: list[Completion], *, temperature: float | None = None
    ) -> Tensor:
        temperature = temperature or self.settings.temperature
        roles, scored = self.roles, "reference" if role == "reference" else "policy"
        batch = roles.batch(prompts, [c.tokens for c in drawn])
        with torch.no_grad(), roles.acting(role):
            logprobs, _ = roles.logprobs(scored, batch, temperature=temperature)
        return torch.cat([row[: len(c.tokens)] for row, c in zip(logprobs.float().cpu(), drawn, strict=True)])

    def _body(self, name: str, request: Request, seed: int, *, greedy: bool) -> dict[str, Any]:
        """Every setting is named: a server fills in what is missing from the model's generation_config.json. Ends are
        ours (ignore_eos); a stop string may be a special token; logprobs 0: of the token drawn, and of no others.
        """
        s = self.settings
        return {
            "model": name, "prompt": request.prompt_tokens, "max_tokens": request.limit(s), "seed": seed,
            "temperature": 0.0 if greedy else s.temperature, "top_p": s.top_p, "top_k": s.top_k, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop": s.stop, "include_stop_str_in_output": True, "skip_special_tokens": False,
            "stop_token_ids": self.eos, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip

    def _drawn(self, bodies: list[dict[str, Any]]) -> list[Completion]:
        """The completions that the server answers with. Raises ServerError where one cannot be what was asked for."""
        drawn = []
        for answer, asked in zip(self.server.ask("POST", COMPLETIONS, bodies, most=self.most), bodies, strict=True):
            [choice] = read_as(Completions, answer, server=self.server, path=COMPLETIONS).choices
            tokens, logprobs, most = choice.token_ids, choice.logprobs.token_logprobs, asked["max_tokens"]
            ends, stopped = asked["stop_token_ids"], choice.finish_reason == "stop"
            by_itself, fault = tokens[-1] in ends, None
            if len(tokens) > most:
                fault = f"{len(tokens)} tokens where {most} were asked for"
            elif len(logprobs) != len(tokens):
                fault = f"{len(logprobs)} log-probabilities of {len(tokens)} tokens"
            elif max(tokens) >= self.vocabulary:
                fault = f"token {max(tokens)}, and the vocabulary has {self.vocabulary:,}"
            elif any(token in ends for token in tokens[:-1]):
                fault = "tokens that go on after one that ends a completion"
            elif stopped and not by_itself and not asked["stop"]:
                fault = "a completion that ends by itself, which was not asked for"
            elif not stopped and not by_itself and len(tokens) < most:
                fault = f"{len(tokens)} tokens cut off for their length, where there was room for {most}"
            if fault is not None:
                raise ServerError(f"{self.server.name} answered {COMPLETIONS} with {fault}")
            drawn.append(Completion(tokens, logprobs, "eos" if tokens[-1] in self.eos else choice.finish_reason))
        return drawn

    # ---- a server that sleeps ----

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside, a server that sleeps between samplings is awake, with the memory that torch holds here and does not
        use. Raises ServerError where it does not wake or, after all went well, not sleep.
        """
        if not self.sleeps or self._is_awake:
            yield
            return
        if self.roles.device.type == "cuda":
            torch.cuda.empty_cache()
        self._turn(WAKE)
        self._is_awake = True
        try:
            yield
            for adapter in list(self.served):
                self._unload(adapter)
            self._turn(SLEEP)
        except BaseException:  # what happened is what is raised
            self.served.clear()
            with contextlib.suppress(Interrupted):
                self.server.notify(SLEEP, {})
            raise
        finally:
            self._is_awake = False

    def _turn(self, path: str) -> None:
        """SLEEP: its weights go to the memory of the CPU, its cache is given up; WAKE: both are on the GPU again."""
        self.server.post(path, {})
        if self._is_asleep() is not (path == SLEEP):
            raise ServerError(f"{self.server.name} answered {path}, and {IS_SLEEPING} says that it was not done")

    def _is_asleep(self) -> bool | None:
        """Whether it sleeps; None where it does not know the question. Raises ServerError where there is no answer."""
        try:
            answer = self.server.get(IS_SLEEPING)
        except ServerError as error:
            if error.status is None:
                raise
            return None
        return answer.get("is_sleeping") if isinstance(answer, dict) else None


def _gap(theirs: Tensor, ours: Tensor) -> float:
    """Mean |difference| over the N tokens, in nats per token."""
    return float((theirs - ours).abs().mean())


@contextmanager
def perturbed(roles: Roles) -> Iterator[None]:
    """Inside, the policy's adapter is another one, which changes the model at once; then exactly its own again."""
    generator = torch.Generator().manual_seed(0)
    matrices = [p for n, p in roles.adapter_parameters(POLICY_ADAPTER).items() if "_B." in n]
    before = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.add_((torch.randn(p.shape, generator=generator) * PERTURBED).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, own in zip(matrices, before, strict=True):
                p.copy_(own)
