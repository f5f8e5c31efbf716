"""Checks of a model before it is trained (`tinyrl check`): the same numbers come out alone, padded, and cached while
sampling; texts survive their tokens; turns end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.generation.engine import Request, SamplingEngine, eos_token_ids
from tinyrl.models.batches import SequenceBatch, make_batch
from tinyrl.models.checks import MOST_IN_FLOAT32, as_exact, in_float32, ordinary_ids
from tinyrl.models.loading import embedding_rows
from tinyrl.models.tokens import asks_for_date, token_ids
from tinyrl.rollout.components import Parts
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import render_prompt
from tinyrl.text import shortened

LENGTHS = ((5, 23), (12, 37), (2, 41), (12, 34))  # tokens of prompt and response, where there are positions for them
NEW_TOKENS = 16
TEXTS = ("Hello, world! 2 + 2 = 4.\n", "na\u00efve caf\u00e9 \u6f22\u5b57", "a  b\tc")


@dataclass(frozen=True)
class Check:
    """A check of a model: ok, wrong, or a note on what is good to know."""

    name: str
    result: Literal["ok", "note", "wrong"]
    said: str


def check_parts(parts: Parts, engine: SamplingEngine | None) -> list[Check]:
    """Check a loaded model."""
    return [*_tokens(parts), _template(parts), *_numbers(parts, engine)]


def _tokens(parts: Parts) -> list[Check]:
    tokenizer, ends = parts.tokenizer, sorted(eos_token_ids(parts.roles, parts.tokenizer))
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!s} ({i})" for i in ends)
    pad = f"{tokenizer.pad_token} ({tokenizer.pad_token_id})"
    same = tokenizer.pad_token_id in ends
    safe = "the same token as the end of text, which is safe here: masks come from lengths"
    back = {text: _decoded(parts, token_ids(tokenizer, text)) for text in TEXTS}
    changed = [
        f"{shortened(text)!r} comes back as {shortened(other)!r}" for text, other in back.items() if text != other
    ]
    return [
        Check("end of text", "ok" if ends else "wrong", names or "no token ends a completion"),
        Check("padding", "note" if same else "ok", safe if same else pad),
        Check("text to tokens and back", "note" if changed else "ok", changed[0] if changed else "as it was"),
    ]


def _decoded(parts: Parts, tokens: list[int]) -> str:
    return str(parts.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _template(parts: Parts) -> Check:
    """Check that a turn of the assistant ends with a token that ends a completion."""
    name, tokenizer = "chat template", parts.tokenizer
    if not tokenizer.chat_template:
        return Check(name, "note", "there is none, so prompts are text (task.chat=false)")
    if fault := parts.template_fault():
        return Check(name, "wrong", fault)
    prompt = render_prompt(tokenizer, "Hi")
    if (back := _decoded(parts, prompt.tokens)) != prompt.text:
        return Check(name, "note", f"{shortened(prompt.text)!r} comes back from its tokens as {shortened(back)!r}")
    end = answer_end(tokenizer, chat="auto", variables={})
    said = f"a turn ends with {tokenizer.convert_ids_to_tokens(end)!s}, which ends a completion"
    if asks_for_date(tokenizer):
        return Check(name, "note", f"{said}; it shows today's date, and a run keeps that of its first day")
    if end == tokenizer.eos_token_id:
        return Check(name, "ok", said)
    return Check(name, "note", f"{said}; the tokenizer's EOS is another ({tokenizer.eos_token})")


def _numbers(parts: Parts, engine: SamplingEngine | None) -> list[Check]:
    """Compare rows by themselves with rows padded together, and the sampler's log-probabilities, from its cache, with a
    pass over the whole of its tokens. (Packing and the reference are tried whenever a model is loaded.)
    """
    roles, device, checks = parts.roles, parts.roles.device, list[Check]()
    most = min(embedding_rows(roles.causal), len(parts.tokenizer))
    prompts = [ordinary_ids(most, n, start=n) for n, _ in LENGTHS]
    room = [min(n, parts.positions - len(prompt)) for (_, n), prompt in zip(LENGTHS, prompts, strict=True)]
    responses = [ordinary_ids(most, n, start=100 * (i + 1)) for i, n in enumerate(room)]

    def logprobs(batch: SequenceBatch, *, widened: bool = False) -> Tensor:
        """(b, T) as training computes them, or `widened` to float32 throughout."""
        how = in_float32 if widened else lambda _: parts.accelerator.autocast()
        with torch.no_grad(), roles.acting("policy") as model, how(model):
            return roles.logprobs("policy", batch, temperature=1.0)[0].float().cpu()

    def alone(*, widened: bool = False) -> Tensor:
        rows = [make_batch([p], [r], device=device) for p, r in zip(prompts, responses, strict=True)]
        return pad_sequence([logprobs(row, widened=widened)[0] for row in rows], batch_first=True)

    def compare(name: str, ours: Tensor, theirs: Tensor, exact: Callable[..., Tensor]) -> None:
        """Log-probabilities agree: in half precision, both are as near to `exact(widened=True)`."""
        gap = float((ours - theirs).abs().max())
        said, good = f"log-probabilities differ by at most {gap:.1g}", gap < MOST_IN_FLOAT32
        if roles.causal.dtype != torch.float32 or parts.accelerator.mixed_precision != "no":
            there, wide = (ours != 0) | (theirs != 0), exact(widened=True)  # not padding
            error, other = (float((x - wide).abs()[there].mean()) for x in (ours, theirs))
            said += f"; from float32 by {error:.2g} and {other:.2g} on average"
            good = as_exact(error, other)
        checks.append(Check(name, "ok" if good else "wrong", said))

    if parts.config.trains.policy:
        wanted, padded = alone(), make_batch(prompts, responses, device=device)
        compare("padded = unpadded", logprobs(padded), wanted, alone)
    if engine is not None and engine.name != "server":
        requests = [Request(p, prompt_row=i, max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
        drawn = [c for group in engine.sample(requests, 2, seed=0, step=0) for c in group]
        batch = make_batch([p for p in prompts for _ in range(2)], [c.tokens for c in drawn], device=device)
        cached = pad_sequence([torch.tensor(c.logprobs) for c in drawn], batch_first=True)
        again = partial(logprobs, batch)
        compare("cached generation = rescored", cached, again(), again)
    return checks
