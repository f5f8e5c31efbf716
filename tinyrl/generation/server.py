"""The server sampling engine: a serving engine, started by hand on this machine, samples over HTTP (vLLM's protocol).

    once       its base, tokenizer and use of adapters are compared with ours; a difference is refused
    each call  0. under generation.server_sleep it is woken first, and sleeps again after it: two processes, one GPU
               1. the policy's adapter goes there under a new name, if its weights are others than those it has
               2. after that: four completions are scored by our own forward; a gap beyond the first stops the run
               3. one request a completion: token ids in, token ids and log-probabilities out

Its numbers are those of other kernels and often another dtype, so `exact` is False: trainers score what it drew anew,
and weigh the difference. A completion's seed is the key of its random numbers (engine.py), so that a server
that honours seeds draws from the same noise after a resume; its batching still rounds differently.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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
    max_new_tokens,
    row_keys,
)
from tinyrl.generation.server_client import (
    IS_SLEEPING,
    LOAD,
    SLEEP,
    WAKE,
    Completions,
    Models,
    ServedAdapters,
    ServerClient,
    ServerError,
    check_tokenizer,
    read_as,
)
from tinyrl.generation.turns import Episodes, play_plainly
from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.roles import Roles

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank allows
DEFAULT_PORT = 8000
LOST = 404  # an adapter the server does not have: it was started anew
AT_A_TIME = 256  # requests under way where generation.max_rows says nothing else
PROBED_PROMPTS, PROBED_TOKENS = 4, 64
PERTURBED = 0.02  # deviation of the numbers added to LoRA's B, which is zero in a fresh adapter
UNEXPLAINED = 0.1  # of the squares that the server's numbers may leave, where another model leaves 1 or more
SMALLEST_GAP, TIMES = 1e-4, 5.0  # nats per token: a gap is too large above the first one, this many times
SLEEPER_SHARE = 0.5  # of the GPU, for a server that sleeps while the run learns there


class ServerEngine(SamplingEngine):
    """Samples from the policy's adapter on a server at `generation.url`, which holds the same base.

    sleeps: it is awake only while it samples. What it has is loaded and looked at anew each time it wakes.
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
        self._is_awake, self._base_seen = False, True
        self.most = settings.max_rows or AT_A_TIME
        self.eos = sorted(eos_token_ids(roles, tokenizer))
        self.vocabulary = len(roles.causal.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
        self.adapters = ServedAdapters(server, roles)
        assert roles.peft is not None, "the configuration asks for LoRA"
        self.rank: int = roles.peft.peft_config[POLICY_ADAPTER].r  # pyright: ignore[reportAttributeAccessIssue]
        self.first_gap: float | None = None  # of the base, then of the first policy if that is larger
        self._base, self._notes = "", list[str]()

    @property
    def command(self) -> str:
        """What starts a serving engine for this run: vLLM's command."""
        server, rank = self.server, next((allowed for allowed in RANKS if allowed >= self.rank), self.rank)
        several = " --max-loras 2" if self.roles.reference_adapter else ""  # sampled from at a time
        where = f" --host {server.host}" + (f" --port {server.port}" if server.port != DEFAULT_PORT else "")
        allowed, sleeps = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", ""
        if self.sleeps:
            allowed += " VLLM_SERVER_DEV_MODE=1"
            sleeps = f" --enable-sleep-mode --gpu-memory-utilization {SLEEPER_SHARE}"
        return (
            f"{allowed} vllm serve {shlex.quote(str(self.roles.causal.name_or_path))} "
            f"--enable-lora --max-lora-rank {rank}{several} --logprobs-mode processed_logprobs "
            f"--max-model-len {self.longest}{sleeps}{where}"
        )

    # ---- before the first step ----

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once that the server samples from our models, with `prompts` (tokens) to try it on; lines about it.

        Raises ValueError, with what to do, where it does not.
        """
        if not self._base:
            with self._failing_as(ValueError):
                base, root = self._served_base()
                self._check_sleep()
                with self._awake():
                    notes, first_gap = self._checked(base, root, prompts[:PROBED_PROMPTS])
                    awake = _free_bytes(self.roles.device)
                asleep = _free_bytes(self.roles.device)
            if self.sleeps:
                notes.append(self._given_back(asleep - awake))
            self._base, self.first_gap, self._notes = base, first_gap, notes
        return self._notes

    def _checked(self, base: str, root: str, prompts: list[list[int]]) -> tuple[list[str], float]:
        """What to say of the server, and the gap of its base."""
        check_tokenizer(self.server, base, self.tokenizer)
        plain = self._check_base(base, root, prompts)
        with perturbed(self.roles):
            drawn = self._probe(self.adapters.load(POLICY_ADAPTER), prompts)
            with_adapter = self._rescored("policy", prompts, drawn)
        theirs, without = _served(drawn), self._rescored("policy", prompts, drawn)
        if _unexplained(theirs, with_adapter, otherwise=without) > UNEXPLAINED:
            raise ValueError(
                f"{self.server.name} took an adapter and does not sample with it: a token's log-probability is "
                f"{_gap(theirs, with_adapter):.2g} nats from ours with the adapter, on average, and "
                f"{_gap(theirs, without):.2g} from ours without it. Start it with\n  {self.command}"
            )
        adapted, moved = _gap(theirs, with_adapter), _gap(with_adapter, without)
        return [
            f"{self.server.name} serves {base} ({root}); a token's log-probability differs from ours by {plain:.2g} "
            f"nats on average, under a test adapter, which moves it by {moved:.2g}, by {adapted:.2g}",
            f"asked of it: the adapter of rank {self.rank} after every update, under a new name, which it "
            f"reads from {self.adapters.folder}; {PROBED_PROMPTS} completions that are scored here too; then those of "
            f"the step, {self.most} at a time",
        ], plain

    def _check_sleep(self) -> None:
        asleep = self.server.is_asleep()
        if self.sleeps and asleep is None:
            raise ValueError(
                f"generation.server_sleep: {self.server.name} does not know {IS_SLEEPING}, which "
                f"VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode allow. Start it with\n  {self.command}"
            )
        if asleep and not self.sleeps:
            raise ValueError(
                f"{self.server.name} is asleep: generation.server_sleep=true wakes it for each sampling, and "
                f"`curl -X POST {self.server.shown}{WAKE}` for good"
            )

    def _given_back(self, freed: int) -> str:
        """A line about the memory of this GPU that a sleeping server leaves to the run."""
        if not _on_gpu(self.roles.device):
            return "it sleeps between samplings"
        weights = sum(p.numel() * p.element_size() for p in self.roles.causal.parameters())
        if freed < weights / 2:
            raise ValueError(
                f"generation.server_sleep: {self.server.name} says that it sleeps, and this GPU has only "
                f"{max(0, freed) / 1e9:.1f} GB more than before: start it on the same GPU, with\n  {self.command}"
            )
        return f"it sleeps between samplings, which leaves {freed / 1e9:.1f} GB more of this GPU to the run"

    def _served_base(self) -> tuple[str, str]:
        listed = read_as(Models, self.server.get(MODELS), server=self.server, path=MODELS)
        base = next((model for model in listed.data if not model.parent), None)
        if base is None:
            raise ServerError(f"{self.server.name} lists no model under {MODELS}")
        room = base.max_model_len
        if room is not None and room < self.longest:
            raise ValueError(
                f"{self.server.name} has room for {room} tokens of prompt and completion, and the run may need "
                f"{self.longest}: start it with --max-model-len {self.longest}, or lower generation.max_prompt_tokens "
                "or generation.max_new_tokens"
            )
        return base.id, base.root or base.id

    def _check_base(self, base: str, root: str, prompts: list[list[int]]) -> float:
        drawn = self._probe(base, prompts)
        theirs, ours = _served(drawn), self._rescored("base", prompts, drawn)
        plain = _gap(theirs, ours)
        if self.settings.temperature != 1:
            raw = self._rescored("base", prompts, drawn, temperature=1.0)
            if _gap(theirs, raw) < plain / 2:
                raise ValueError(
                    f"{self.server.name} gives log-probabilities before the temperature of {self.settings.temperature}:"
                    f" start it with --logprobs-mode processed_logprobs, as in\n  {self.command}"
                )
        # Ours do not explain how the server's vary from token to token.
        if _unexplained(theirs, ours, otherwise=ours.mean().expand_as(ours)) > UNEXPLAINED:
            raise ValueError(
                f"{self.server.name} has another base: it serves {root}, whose log-probabilities are {plain:.2g} nats "
                f"per token from those of {self.roles.causal.name_or_path}. Start it with\n  {self.command}"
            )
        return plain

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
        prompts = [r.prompt_tokens for r in requests]
        self.start(prompts)
        keys, first = row_keys(requests, samples_per_request, seed=options["seed"], step=options["step"])
        seeds = advanced(keys, first).view(np.int64).tolist()
        rows = [r for r in requests for _ in range(samples_per_request)]

        def attempt() -> list[Completion]:
            name = self._synced(options.get("role", "policy"), prompts[:PROBED_PROMPTS])
            greedy = options.get("greedy", False)
            return self._drawn([self._body(name, r, s, greedy=greedy) for r, s in zip(rows, seeds, strict=True)])

        with self._failing_as(Interrupted), self._awake():
            try:
                return grouped(attempt(), samples_per_request)
            except ServerError as error:
                if error.status != LOST:
                    raise
                self.adapters.served.clear()
                return grouped(attempt(), samples_per_request)

    def play(
        self, requests: list[Request], group_size: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """Episodes turn by turn, between which a server that sleeps stays awake."""
        self.start([r.prompt_tokens for r in requests])
        with self._failing_as(Interrupted), self._awake():
            play_plainly(requests, group_size, engine=self, episodes=episodes, options=options)

    def close(self) -> None:
        self.adapters.close()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside, a server that sleeps between samplings is awake, with the memory that torch holds here and does not
        use. Raises ServerError where it does not wake or, after all went well, not sleep.
        """
        if not self.sleeps or self._is_awake:
            yield
            return
        if _on_gpu(self.roles.device):
            torch.cuda.empty_cache()
        self.server.turn(WAKE)
        self._is_awake, self._base_seen, went_well = True, False, False
        try:
            yield
            self.adapters.unload_all()
            went_well = True
        finally:
            self._is_awake = False
            if went_well:
                self.server.turn(SLEEP)
            else:  # what happened is what is told
                with contextlib.suppress(Interrupted):
                    self.server.tell(SLEEP, {})
                self.adapters.served.clear()

    @contextmanager
    def _failing_as(self, kind: type[ValueError] | type[Interrupted]) -> Iterator[None]:
        """What a server did instead of answering is raised as `kind`, with what starts one."""
        try:
            yield
        except ServerError as error:
            raise kind(self._sentence(error)) from error

    def _synced(self, role: SampledRole, prompts: list[list[int]]) -> str:
        """The name of the role's weights on the server. New ones are loaded, and our own forward shows whether it
        samples with them; a bad gap is looked at twice.
        """
        adapter = self.roles.adapter_of(role)
        name = self._base if adapter is None else self.adapters.name_of(adapter)
        if name is not None and (adapter is not None or self._base_seen):
            return name
        assert self.first_gap is not None
        first, found = self.adapters.loads == 1, 0.0  # after that of the test adapter
        for _ in range(2):
            name = self._base if adapter is None else self.adapters.load(adapter)
            drawn = self._probe(name, prompts)
            found = _gap(_served(drawn), self._rescored(role, prompts, drawn))
            if found <= max(SMALLEST_GAP, TIMES * self.first_gap):
                self.first_gap = max(self.first_gap, found) if first else self.first_gap
                self._base_seen = self._base_seen or adapter is None
                return name
        raise GuardStop(
            f"the server samples from another policy: after the last sync the log-probabilities of {self.server.name} "
            f"are {found:.2g} nats per token from ours, and were {self.first_gap:.2g} at first. Start it anew, and go "
            f"on from the last checkpoint:\n  {self.command}"
        )

    def _probe(self, name: str, prompts: list[list[int]]) -> list[Completion]:
        """A completion of each prompt by a served model, of so many tokens whatever they are, from all tokens."""
        new = min(PROBED_TOKENS, self.settings.max_new_tokens)
        own = {"max_tokens": new, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": []}
        requests = [Request(prompt, prompt_row=row) for row, prompt in enumerate(prompts)]
        bodies = [self._body(name, r, seed, greedy=False) | own for seed, r in enumerate(requests)]
        return self._drawn(bodies)

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
        """Every setting is named: a server fills in what is missing from the model's generation_config.json."""
        settings = self.settings
        return {
            "model": name,
            "prompt": request.prompt_tokens,
            "max_tokens": max_new_tokens(request, settings),
            "temperature": 0.0 if greedy else settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "stop": settings.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # a stop string may be one
            "stop_token_ids": self.eos,
            "ignore_eos": True,  # ours are named above
            "logprobs": 0,  # of the token drawn, and of no others
            "return_token_ids": True,
        }

    def _drawn(self, bodies: list[dict[str, Any]]) -> list[Completion]:
        answers = self.server.ask("POST", COMPLETIONS, bodies, most=self.most)
        return [self._completion(answer, body) for answer, body in zip(answers, bodies, strict=True)]

    def _completion(self, answer: Any, asked: dict[str, Any]) -> Completion:
        [choice] = read_as(Completions, answer, server=self.server, path=COMPLETIONS).choices
        tokens, logprobs, most = choice.token_ids, choice.logprobs.token_logprobs, asked["max_tokens"]
        beyond = next((token for token in tokens if token >= self.vocabulary), None)
        early = next((token for token in tokens[:-1] if token in asked["stop_token_ids"]), None)
        ended, said_so = tokens[-1] in asked["stop_token_ids"], choice.finish_reason == "stop"
        wrong = ""
        if len(tokens) > most:
            wrong = f"{len(tokens)} tokens where {most} were asked for"
        elif len(logprobs) != len(tokens):
            wrong = f"{len(logprobs)} log-probabilities of {len(tokens)} tokens"
        elif beyond is not None:
            wrong = f"token {beyond}, and the vocabulary has {self.vocabulary:,}"
        elif early is not None:
            wrong = f"tokens that go on after {early}, which ends a completion"
        elif said_so and not ended and not asked["stop"]:
            wrong = "a completion that ends by itself, which was not asked for"
        elif not said_so and not ended and len(tokens) < most:
            wrong = f"{len(tokens)} tokens cut off for their length, where there was room for {most}"
        if wrong:
            raise ServerError(f"{self.server.name} answered {COMPLETIONS} with {wrong}")
        return Completion(tokens, logprobs, "eos" if tokens[-1] in self.eos else choice.finish_reason)

    def _sentence(self, error: ServerError) -> str:
        said = str(error)
        if "No adapter found" in said:
            said += ": it cannot read the folder, which needs the same machine, user and path (TMPDIR says where)"
        elif error.status == LOST and LOAD in said:
            said += ": it takes no adapters, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora allow"
        elif "rank" in said and "max_lora_rank" in said:
            said += f" (lora.r is {self.rank} here)"
        elif f"answered {WAKE}" in said:
            said += ": where the GPU has no room for both, lower --gpu-memory-utilization"
        elif error.status == LOST and LOAD not in said:
            said += ": it does not know this run's adapter"
        return f"{said}. Start it with\n  {self.command}"


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if _on_gpu(device) else 0


def _served(drawn: list[Completion]) -> Tensor:
    return torch.tensor([logprob for c in drawn for logprob in c.logprobs])


def _gap(theirs: Tensor, ours: Tensor) -> float:
    """Mean |difference| over the N tokens, in nats per token."""
    return float((theirs - ours).abs().mean())


def _unexplained(theirs: Tensor, ours: Tensor, *, otherwise: Tensor) -> float:
    """The share of squares that `ours` leaves of the server's numbers: sum (theirs - ours)^2 over
    sum (ours - otherwise)^2. About 0 where the server computes what we do, 1 where it computes `otherwise`.
    """
    return float((theirs - ours).square().sum() / (ours - otherwise).square().sum().clamp(min=1e-30))


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
