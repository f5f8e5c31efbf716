"""The server sampling engine: a serving engine, started by hand on this machine, samples over HTTP (vLLM's protocol).

    once       its base, tokenizer and use of adapters are compared with ours; a difference is refused
    each call  1. the policy's adapter goes there under a new name, if its weights are others than those it has
               2. after that: four completions are scored by our own forward; a gap beyond the first stops the run
               3. one request a completion: token ids in, token ids and log-probabilities out

Its numbers are those of other kernels and often another dtype, so `exact` is False: trainers score what it drew anew,
and weigh the difference. A completion's seed is the key of its random numbers (token_sampling.py), so that a server
that honours seeds draws from the same noise after a resume; its batching still rounds differently.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.errors import GuardStop, Interrupted
from tinyrl.generation import server_client as checks
from tinyrl.generation.engine import (
    Completion,
    Request,
    SampledRole,
    SampleOptions,
    SamplingEngine,
    SamplingSettings,
    eos_token_ids,
    max_new_tokens,
    row_keys,
)
from tinyrl.generation.server_client import ServerClient, ServerError
from tinyrl.generation.token_sampling import advanced
from tinyrl.models.lora import POLICY_ADAPTER, save_adapter
from tinyrl.models.roles import Roles

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank allows
DEFAULT_PORT = 8000
MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
AT_A_TIME = 256  # requests under way where generation.max_rows says nothing else
PROBED_PROMPTS, PROBED_TOKENS = 4, 64
LOST = 404  # an adapter the server does not have: it was started anew


class ServedAdapters:
    """Which weights of each adapter the server has, and under which name. Folders are in `folder`, made at the first
    load, under the system's one for temporary files (TMPDIR), and deleted in the end.
    """

    def __init__(self, server: ServerClient, roles: Roles) -> None:
        self.server, self.roles = server, roles
        self.loads = 0
        self._run = secrets.token_hex(4)  # other runs may use the same server
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._served: dict[str, tuple[str, dict[str, Tensor]]] = {}

    @property
    def folder(self) -> Path:
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tinyrl-adapters-")
        return Path(self._temporary.name)

    def name_of(self, adapter: str) -> str | None:
        """The name under which the server has an adapter's weights as they are now; None: it does not have them.

        Numbers are compared, since not every optimizer says which tensors it has written to.
        """
        name, weights = self._served.get(adapter, (None, {}))
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
        self._served[adapter] = (name, {n: p.detach().to("cpu", copy=True) for n, p in now.items()})
        return name

    def forget(self) -> None:
        """The server was started anew and has none of them."""
        self._served.clear()

    def close(self) -> None:
        for adapter in list(self._served):
            self._unload(adapter)
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _unload(self, adapter: str) -> None:
        name, _ = self._served.pop(adapter, (None, {}))
        if name is not None:
            self.server.tell(UNLOAD, {"lora_name": name})  # started anew or away, it has no such adapter
            shutil.rmtree(self.folder / name, ignore_errors=True)


def serve_command(roles: Roles, server: ServerClient, *, rank: int, longest: int) -> str:
    """What starts a serving engine for a run: vLLM's command, for sequences of at most `longest` tokens."""
    most = next((allowed for allowed in RANKS if allowed >= rank), rank)
    several = " --max-loras 2" if roles.reference_adapter else ""  # sampled from at a time
    where = f" --host {server.host}" + (f" --port {server.port}" if server.port != DEFAULT_PORT else "")
    return (
        f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {shlex.quote(str(roles.causal.name_or_path))} --enable-lora "
        f"--max-lora-rank {most}{several} --logprobs-mode processed_logprobs "
        f"--max-model-len {longest}{where}"
    )


class ServerEngine(SamplingEngine):
    """Samples from the policy's adapter on a server at `generation.url`, which holds the same base."""

    name, exact = "server", False

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        server: ServerClient,
        longest: int,
    ) -> None:
        self.roles, self.tokenizer, self.settings = roles, tokenizer, settings
        self.server, self.longest = server, longest
        self.max_rows = settings.max_rows
        self.eos = sorted(eos_token_ids(roles, tokenizer))
        self.vocabulary = len(roles.causal.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
        self.adapters = ServedAdapters(server, roles)
        assert roles.peft is not None, "the configuration asks for LoRA"
        self.rank: int = roles.peft.peft_config[POLICY_ADAPTER].r  # pyright: ignore[reportAttributeAccessIssue]
        self.command = serve_command(roles, server, rank=self.rank, longest=longest)
        self.first_gap: float | None = None  # of the base, then of the first policy if that is larger
        self._base, self._notes = "", list[str]()

    # ---- before the first step ----

    def start(self, prompts: list[list[int]]) -> list[str]:
        """Check once that the server samples from our models, with `prompts` (tokens) to try it on; lines about it.

        Raises ValueError, with what to do, where it does not.
        """
        if not self._base:
            try:
                self._notes = self._checked(prompts[:PROBED_PROMPTS])
            except ServerError as error:
                raise ValueError(self._sentence(error)) from error
        return self._notes

    def _checked(self, prompts: list[list[int]]) -> list[str]:
        base, root = self._served_base()
        checks.check_tokenizer(self.server, base, self.tokenizer)
        plain = self._check_base(base, root, prompts)
        with checks.perturbed(self.roles):
            drawn = self._probe(self.adapters.load(POLICY_ADAPTER), prompts)
            with_adapter = self._rescored("policy", prompts, drawn)
        theirs, without = checks.served(drawn), self._rescored("policy", prompts, drawn)
        if checks.unexplained(theirs, with_adapter, otherwise=without) > checks.UNEXPLAINED:
            raise ValueError(
                f"{self.server.name} took an adapter and does not sample with it: a token's log-probability is "
                f"{checks.gap(theirs, with_adapter):.2g} nats from ours with the adapter, on average, and "
                f"{checks.gap(theirs, without):.2g} from ours without it. Start it with\n  {self.command}"
            )
        self._base, self.first_gap = base, plain
        adapted, moved = checks.gap(theirs, with_adapter), checks.gap(with_adapter, without)
        return [
            f"{self.server.name} serves {base} ({root}); a token's log-probability differs from ours by {plain:.2g} "
            f"nats on average, under a test adapter, which moves it by {moved:.2g}, by {adapted:.2g}",
            f"asked of it: the adapter of rank {self.rank} after every update, under a new name, which it "
            f"reads from {self.adapters.folder}; {PROBED_PROMPTS} completions that are scored here too; then those of "
            f"the step, {self.max_rows or AT_A_TIME} at a time",
        ]

    def _served_base(self) -> tuple[str, str]:
        listed = checks.read_as(checks.Models, self.server.get(MODELS), server=self.server, path=MODELS)
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
        """The gap of the base. Raises ValueError where the server's numbers are not those of our base."""
        drawn = self._probe(base, prompts)
        theirs, ours = checks.served(drawn), self._rescored("base", prompts, drawn)
        plain = checks.gap(theirs, ours)
        if self.settings.temperature != 1:
            raw = checks.rescored(self.roles, "base", prompts, drawn, temperature=1.0)
            if checks.gap(theirs, raw) < plain / 2:
                raise ValueError(
                    f"{self.server.name} gives log-probabilities before the temperature of {self.settings.temperature}:"
                    f" start it with --logprobs-mode processed_logprobs, as in\n  {self.command}"
                )
        if checks.is_other_model(theirs, ours):
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

        try:
            try:
                flat = attempt()
            except ServerError as error:
                if error.status != LOST:
                    raise
                self.adapters.forget()  # the server was started anew, and does not know the adapter
                flat = attempt()
        except ServerError as error:
            raise Interrupted(self._sentence(error)) from error
        return [flat[i : i + samples_per_request] for i in range(0, len(flat), samples_per_request)]

    def close(self) -> None:
        self.adapters.close()

    def _synced(self, role: SampledRole, prompts: list[list[int]]) -> str:
        adapter = self.roles.adapter_of(role)
        if adapter is None:
            return self._base
        name = self.adapters.name_of(adapter)
        if name is None:
            name = self._guarded(adapter, role, prompts)
        return name

    def _guarded(self, adapter: str, role: SampledRole, prompts: list[list[int]]) -> str:
        """Load an adapter, and see by our own forward that the server samples with it; a bad gap is looked at twice."""
        assert self.first_gap is not None
        first = self.adapters.loads == 1  # after that of the test adapter
        for last in (False, True):
            name = self.adapters.load(adapter)
            drawn = self._probe(name, prompts)
            found = checks.gap(checks.served(drawn), self._rescored(role, prompts, drawn))
            if found <= max(checks.SMALLEST_GAP, checks.TIMES * self.first_gap):
                self.first_gap = max(self.first_gap, found) if first else self.first_gap
                return name
            if last:
                raise GuardStop(
                    f"the server samples from another policy: after the last sync the log-probabilities of "
                    f"{self.server.name} are {found:.2g} nats per token from ours, and were {self.first_gap:.2g} at "
                    f"first. Start it anew, and go on from the last checkpoint:\n  {self.command}"
                )
        raise AssertionError("unreachable")

    def _probe(self, name: str, prompts: list[list[int]]) -> list[Completion]:
        """A completion of each prompt by a served model, of so many tokens whatever they are, from all tokens."""
        new = min(PROBED_TOKENS, self.settings.max_new_tokens)
        own = {"max_tokens": new, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": []}
        requests = [Request(prompt, prompt_row=row) for row, prompt in enumerate(prompts)]
        bodies = [self._body(name, r, seed, greedy=False) | own for seed, r in enumerate(requests)]
        return self._drawn(bodies)

    def _rescored(self, role: SampledRole, prompts: list[list[int]], drawn: list[Completion]) -> Any:
        return checks.rescored(self.roles, role, prompts, drawn, temperature=self.settings.temperature)

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
        answers = self.server.post_all(COMPLETIONS, bodies, most=self.max_rows or AT_A_TIME)
        return [self._completion(answer, body) for answer, body in zip(answers, bodies, strict=True)]

    def _completion(self, answer: Any, asked: dict[str, Any]) -> Completion:
        """Raises ServerError where an answer is not one to what was asked for."""
        choice = checks.read_completion(answer, asked, vocabulary=self.vocabulary, server=self.server, path=COMPLETIONS)
        tokens = choice.token_ids
        return Completion(
            tokens, choice.logprobs.token_logprobs, "eos" if tokens[-1] in self.eos else choice.finish_reason
        )

    def _sentence(self, error: ServerError) -> str:
        said = str(error)
        if "No adapter found" in said:
            said += ": it cannot read the folder, which needs the same machine, user and path (TMPDIR says where)"
        elif error.status == LOST and LOAD in said:
            said += ": it takes no adapters, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora allow"
        elif "rank" in said and "max_lora_rank" in said:
            said += f" (lora.r is {self.rank} here)"
        elif error.status == LOST and LOAD not in said:
            said += ": it does not know this run's adapter"
        return f"{said}. Start it with\n  {self.command}"
