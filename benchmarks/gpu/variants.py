"""Cells that put variants beside today's path: compared with float32 first, timed only where they are as exact.

A result has a row for each that was timed, and a sentence for each that was wrong or cannot run here.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import flash
from benchmarks.gpu.attention import RaggedAttend
from benchmarks.gpu.decode import FlashDecoder
from benchmarks.gpu.drawing import draw_in_two_levels
from benchmarks.gpu.offload import OffloadInputs
from benchmarks.gpu.pointwise import fused_pointwise
from benchmarks.gpu.step import (
    DecodeStep,
    Forward,
    StepNumbers,
    Timing,
    TrainingStep,
    captured,
    load,
    relative_gap,
    repeated,
    timed,
    wrong_gaps,
)
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.drawing import sample_tokens
from tinyrl.models import device, layers, logprobs
from tinyrl.models.kernels import Kernels

DECODE_STEPS = 20
OTHER_TOKENS = 0.01  # share of rows in which rounding may choose another token
LOGPROB_GAP = 1e-4  # nats, where the token is the same
NO_TRITON = "triton is not installed"


@dataclass
class Outcome:
    """rows: by name what was timed, seconds and peak GB of each part, and its gaps to float32. wrong, skipped: by name
    a sentence.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def judge(self, name: str, gaps: dict[str, float], today: dict[str, float]) -> bool:
        """Note a variant that is further from float32 than today's path; return whether it may be timed."""
        wrong = wrong_gaps(gaps, today)
        if wrong:
            found = [f"{part} {gap:.3g} (today {today[part]:.3g})" for part, gap in wrong.items()]
            self.wrong[name] = f"distance from float32: {', '.join(found)}"
        return not wrong

    def add(self, name: str, timings: dict[str, Timing], gaps: dict[str, float]) -> None:
        self.rows[name] = {"parts": {part: asdict(timing) for part, timing in timings.items()}, "gaps": gaps}


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- scoring and update ----


@dataclass(frozen=True)
class Variant:
    """swap: the context in which the package computes by it. forward: what a forward pass of an update is in."""

    swap: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Forward = nullcontext
    needs_triton: bool = False


def fixed_chunks() -> AbstractContextManager[Any]:
    """The head's chunks of 2^25 logits, as they were when a card was first measured."""

    def chunk(vocabulary: int, where: torch.device) -> int:
        return max(1, device.CHUNK_ELEMENTS["cuda"] // vocabulary)

    return patch.object(logprobs, "chunk_tokens", chunk)


@contextmanager
def by_kernels(step: TrainingStep, kernels: Kernels) -> Iterator[None]:
    """Compute as a run does that has chosen these; on a CPU torch's varlen_attn by its formula."""
    with ExitStack() as undo:
        undo.enter_context(patch.object(step.policy, "kernels", kernels))
        if step.policy.device.type == "cpu":
            undo.enter_context(patch("torch.nn.attention.varlen.varlen_attn", flash.varlen_attn))
            undo.enter_context(patch("tinyrl.models.packing.computes_varlen", lambda query: True))
        yield


def head_variants(step: TrainingStep) -> dict[str, Variant]:
    one_pass = Variant(lambda: by_kernels(step, Kernels(one_pass_logits=True)), needs_triton=True)
    return {"chunks by free memory": Variant(), "chunks of 2^25": Variant(fixed_chunks), "one pass": one_pass}


def attention_variants(step: TrainingStep) -> dict[str, Variant]:
    ragged = Variant(lambda: patch.object(layers, "attend", RaggedAttend()))
    one_call = Variant(lambda: by_kernels(step, Kernels(varlen_attention=True)))
    return {"blocks": Variant(), "one ragged call": ragged, "varlen_attn": one_call}


def pointwise_variants(_: TrainingStep) -> dict[str, Variant]:
    return {"one by one": Variant(), "fused": Variant(fused_pointwise)}


def offload_variants(step: TrainingStep) -> dict[str, Variant]:
    """Recomputed layers: today their inputs stay on the device."""
    hidden = step.policy.hidden_size("policy")
    pool: list[Tensor] = []

    @contextmanager
    def recomputing() -> Iterator[None]:
        with step.policy.gradient_checkpointing():
            yield

    return {
        "recomputed": Variant(recomputing),
        "inputs on the host": Variant(recomputing, lambda: OffloadInputs(hidden, pool)),
    }


TRAINING = {
    "head": head_variants,
    "attention": attention_variants,
    "pointwise": pointwise_variants,
    "offload": offload_variants,
}


def compare_training(settings: dict[str, Any]) -> Outcome:
    """Scoring and update of a step by today's path, the first of the variants, and by each of the others."""
    exact = exact_numbers(settings)
    step = TrainingStep(load(settings), settings)
    outcome, today = Outcome(), dict[str, float]()
    for name, variant in TRAINING[settings["variants"]](step).items():
        if variant.needs_triton and not has_triton():
            outcome.skipped[name] = NO_TRITON
            continue
        with variant.swap():
            gaps = step.numbers(forward=variant.forward).gaps(exact)
            today = today or gaps
            if not outcome.judge(name, gaps, today):
                continue
            repeats = settings["repeats"]
            timings = {
                "scoring": timed(step.score, repeats=repeats),
                "update": timed(lambda forward=variant.forward: step.update(forward=forward), repeats=repeats),
            }
        outcome.add(name, timings, gaps)
        free_memory()
    return outcome


def exact_numbers(settings: dict[str, Any]) -> StepNumbers:
    """The same numbers by today's path in float32, whose model is freed."""
    numbers = TrainingStep(load(settings, dtype="float32"), settings).numbers()
    free_memory()
    return numbers


# ---- decoding ----


def compare_decoding(settings: dict[str, Any]) -> Outcome:
    """Decode steps with today's attention, and with flash attention over the length of each row."""
    policy = load(settings)
    entries = DecodeStep(policy, settings).fill().cpu()
    exact_step = DecodeStep(load(settings, dtype="float32"), settings)
    exact_step.fill(entries)
    exact = exact_step.states().cpu()
    del exact_step
    free_memory()
    outcome, today = Outcome(), dict[str, float]()
    kinds: dict[str, type[Decoder]] = {"all columns, masked": Decoder, "each row's length": FlashDecoder}
    for name, kind in kinds.items():
        step = DecodeStep(policy, settings, kind=kind)
        step.fill(entries)
        gaps = {"states, of their norm": relative_gap(step.states().cpu(), exact)}
        today = today or gaps
        if outcome.judge(name, gaps, today):
            run = repeated(captured(step.states), DECODE_STEPS)
            outcome.add(name, {f"{DECODE_STEPS} tokens": timed(run, repeats=settings["repeats"])}, gaps)
        del step
        free_memory()
    return outcome


# ---- drawing ----


def compare_drawing(settings: dict[str, Any]) -> Outcome:
    """The head and the draw of decode steps: as today, in two levels, and the head alone."""
    step = DecodeStep(load(settings), settings)
    step.fill()
    states = step.states()
    head, u = step.decoder.head, step.uniforms

    @torch.inference_mode()
    def by_sample_tokens() -> tuple[Tensor, Tensor]:
        return sample_tokens(head.logits(states), u, {})

    @torch.inference_mode()
    def in_two_levels() -> tuple[Tensor, Tensor]:
        return draw_in_two_levels(head.logits(states), u)

    @torch.inference_mode()
    def nothing() -> Tensor:
        return head.logits(states)

    outcome = Outcome()
    token, logprob = exactly_drawn(head.logits(states), u)
    for name, draw in {"today": by_sample_tokens, "two levels": in_two_levels}.items():
        if name == "two levels" and not has_triton():
            outcome.skipped[name] = NO_TRITON
            continue
        found, found_logprob = draw()
        same = found == token
        others = 1.0 - float(same.float().mean())
        gap = float((found_logprob - logprob)[same].abs().max()) if bool(same.any()) else float("inf")
        if not (others <= OTHER_TOKENS and gap <= LOGPROB_GAP):
            outcome.wrong[name] = f"{others:.3g} of the tokens differ, log-probabilities by {gap:.3g} nats"
            continue
        run = repeated(captured(draw), DECODE_STEPS)
        gaps = {"other tokens": others, "nats": gap}
        outcome.add(name, {f"{DECODE_STEPS} tokens": timed(run, repeats=settings["repeats"])}, gaps)
    run = repeated(captured(nothing), DECODE_STEPS)
    outcome.add("the head alone", {f"{DECODE_STEPS} tokens": timed(run, repeats=settings["repeats"])}, {})
    return outcome


def exactly_drawn(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by the inverse of the distribution function in float64."""
    log_p = logits.double().log_softmax(-1)
    ends = log_p.exp().cumsum(-1)
    token = torch.searchsorted(ends, u.unsqueeze(-1) * ends[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    return token.squeeze(-1), log_p.gather(-1, token).squeeze(-1)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    name = settings["variants"]
    compare = {"decode": compare_decoding, "drawing": compare_drawing}.get(name, compare_training)
    return asdict(compare(settings))
