"""One step of GRPO in the parts that a cell compares and times: scoring and an update, or decode steps.

The work is that of docs/benchmarks.md: random tokens in place of samples, as many and as long. The policy's LoRA is
moved away from zero, so that its branches count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import ours
from tinyrl.config.recipe import load_config
from tinyrl.generation.cached_engine import WIDTH_BUCKET
from tinyrl.generation.decoder import Decoder
from tinyrl.models.batch import Example
from tinyrl.models.checks import as_exact
from tinyrl.models.policy import Policy
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_policy
from tinyrl.runs.resolve import model_facts

MOVED = 0.02  # standard deviation of LoRA's B
COMPARED_PROMPTS = 2  # whose groups are compared with float32


def load(settings: dict[str, Any], *, dtype: str | None = None) -> Policy:
    """Load the policy of a cell's recipe, in another dtype where one is given. Its adapter is the same in both."""
    torch.set_num_threads(settings["threads"])
    overrides = [*settings["overrides"]]
    if dtype is not None:
        overrides.append(f"model.dtype={dtype}")
    config = load_config("grpo", str(ours.write(settings)), overrides=overrides, facts=model_facts)
    policy = load_policy(config, options=Options(device=settings["device"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.parameters["policy"].items():
            if "lora_B" in name:
                parameter.copy_(MOVED * torch.randn(parameter.shape, generator=generator))
    return policy


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls after a first one, and the most memory they held (0 on a CPU)."""

    seconds: list[float]
    peak_gb: float


def timed(run: Callable[[], object], *, repeats: int) -> Timing:
    run()
    synchronize()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing(seconds, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0)


# ---- scoring and update ----

Forward = Callable[[], AbstractContextManager[Any]]  # entered around each forward pass


class TrainingStep:
    """The groups of a step in micro-batches of a policy, as they are scored by the reference and learnt from."""

    def __init__(self, policy: Policy, settings: dict[str, Any]) -> None:
        self.policy = policy
        section = settings["recipe"]["grpo"]
        generation = settings["recipe"]["generation"]
        self.groups = random_groups(
            policy,
            prompts=section["num_prompts"],
            group_size=section["group_size"],
            prompt_tokens=generation["max_prompt_tokens"],
            new_tokens=generation["max_new_tokens"],
        )
        self.micro_batches = self.planned(self.groups, max_tokens=settings["micro_batch_tokens"])

    def planned(self, groups: list[list[Example]], *, max_tokens: int) -> list[list[Example]]:
        items = [item for group in groups for item in group]
        plan = self.policy.lengths(items).plan(range(len(items)), max_tokens=max_tokens)
        return [[items[i] for i in rows] for rows in plan]

    def score(self, micro_batches: list[list[Example]] | None = None) -> list[Tensor]:
        """Compute the reference's log-probabilities (b, T) of each micro-batch."""
        policy = self.policy
        found = []
        with torch.no_grad(), policy.acting("reference"), policy.run_device.autocast():
            for items in micro_batches or self.micro_batches:
                found.append(policy.logprobs("reference", policy.batch_of(items), temperature=1.0)[0])
        return found

    def update(
        self, micro_batches: list[list[Example]] | None = None, *, forward: Forward = nullcontext
    ) -> list[Tensor]:
        """Accumulate the gradient of the weighted log-probabilities, which are returned."""
        policy = self.policy
        for parameter in policy.parameters["policy"].values():
            parameter.grad = None
        found = []
        with policy.acting("policy"):
            for items in micro_batches or self.micro_batches:
                batch = policy.batch_of(items)
                with policy.run_device.autocast(), forward():
                    logprobs, _ = policy.logprobs("policy", batch, temperature=1.0)
                    weights = torch.linspace(-1.0, 1.0, len(logprobs), device=logprobs.device).unsqueeze(1)
                    loss = (weights * logprobs).sum() / len(batch.targets)
                loss.backward()
                found.append(logprobs.detach())
        return found

    def gradient(self) -> Tensor:
        grads = [p.grad.flatten().float() for p in self.policy.parameters["policy"].values() if p.grad is not None]
        return torch.cat(grads)

    def numbers(self, *, forward: Forward = nullcontext) -> StepNumbers:
        """Compute what a variant is compared by: some groups, and a row without company."""
        few = [*self.groups[:COMPARED_PROMPTS], self.groups[-1][:1]]
        items = [[item for group in few for item in group]]
        scored = torch.cat([logprobs.flatten() for logprobs in self.score(items)])
        learnt = torch.cat([logprobs.flatten() for logprobs in self.update(items, forward=forward)])
        return StepNumbers(scored.cpu(), learnt.cpu(), self.gradient().cpu())


@dataclass(frozen=True)
class StepNumbers:
    """Log-probabilities of the reference and of the policy, and the gradient of all LoRA matrices, flat."""

    scored: Tensor
    learnt: Tensor
    gradient: Tensor

    def gaps(self, exact: StepNumbers) -> dict[str, float]:
        """Return mean distances in nats, and that of the gradient as a share of its norm."""
        gradient = (self.gradient - exact.gradient).norm() / exact.gradient.norm()
        return {
            "scoring, nats": float((self.scored - exact.scored).abs().mean()),
            "update, nats": float((self.learnt - exact.learnt).abs().mean()),
            "gradient, of its norm": float(gradient),
        }


def random_groups(
    policy: Policy, *, prompts: int, group_size: int, prompt_tokens: int, new_tokens: int
) -> list[list[Example]]:
    """Make groups of responses of random tokens; each second response is shorter, by one token more each time."""
    draw = random.Random(0)
    vocabulary = policy.causal.config.get_text_config().vocab_size

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    groups = []
    for _ in range(prompts):
        prompt = tokens(prompt_tokens)
        lengths = [max(1, new_tokens - (i // 2 + 1) * (i % 2)) for i in range(group_size)]
        groups.append([Example(prompt, [tokens(length)]) for length in lengths])
    return groups


def wrong_gaps(gaps: dict[str, float], today: dict[str, float]) -> dict[str, float]:
    """Return the gaps to float32 that are larger than today's path explains."""
    return {name: gap for name, gap in gaps.items() if not as_exact(gap, today[name])}


# ---- decoding ----


class DecodeStep:
    """A full batch of rows in the middle of their completions, and one more token for each."""

    def __init__(self, policy: Policy, settings: dict[str, Any], *, kind: type[Decoder] = Decoder) -> None:
        section = settings["recipe"]["grpo"]
        generation = settings["recipe"]["generation"]
        self.rows = section["num_prompts"] * section["group_size"]
        longest = generation["max_prompt_tokens"] + generation["max_new_tokens"]
        width = -(-longest // WIDTH_BUCKET) * WIDTH_BUCKET  # as the engine's graphs have it
        with policy.acting("policy") as model:
            self.decoder = kind(model, dtype=policy.dtype, layout="separate_lora")
            self.decoder.sync(policy.adapter_of("policy"))
        self.cache = self.decoder.new_cache(self.rows, width)
        generator = torch.Generator().manual_seed(2)
        vocabulary = len(self.decoder.embedding)
        device = policy.device
        self.token = torch.randint(3, vocabulary, (self.rows,), generator=generator).to(device)
        spread = torch.linspace(generation["max_prompt_tokens"], longest - 1, self.rows)
        self.position = spread.long().to(device)
        self.uniforms = torch.rand(self.rows, dtype=torch.float64, generator=generator).to(device)

    def fill(self, entries: Tensor | None = None) -> Tensor:
        """Fill the cache with random keys and values, or with those of another; return them."""
        if entries is None:
            generator = torch.Generator(self.cache.entries.device).manual_seed(3)
            self.cache.entries.normal_(generator=generator)
        else:
            self.cache.entries.copy_(entries)
        return self.cache.entries

    @torch.inference_mode()
    def states(self) -> Tensor:
        return self.decoder.step(self.token, self.position, cache=self.cache, width=self.cache.width)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.decoder.head.logits(self.states())


def relative_gap(found: Tensor, exact: Tensor) -> float:
    """Return the mean over rows of their distance as a share of the row's norm."""
    gaps = (found.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1)
    return float(gaps.mean())


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `run` from a CUDA graph; on a CPU `run`."""
    if not torch.cuda.is_available():
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph.replay


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def all_of_them() -> None:
        for _ in range(times):
            run()

    return all_of_them
