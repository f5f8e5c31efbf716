"""What `tinyrl check` tries of a model before anybody trains it: that the same numbers come out whichever way
they are computed (alone, padded, packed, cached while sampling), that adapters come off, that its tokens go round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tinyrl.generation.engine import Completion, Request, SamplingEngine, eos_token_ids
from tinyrl.models.batches import SequenceBatch, make_batch
from tinyrl.models.checks import MOST_IN_FLOAT32, as_exact, in_float32, ordinary_ids
from tinyrl.models.loading import embedding_rows
from tinyrl.models.templates import asks_for_date
from tinyrl.models.tokens import token_ids
from tinyrl.rollout.components import Parts
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import render_prompt
from tinyrl.text import shortened

LENGTHS = ((5, 23), (12, 37), (2, 41), (12, 34))  # tokens of prompt and response, where there are positions for them
NEW_TOKENS = 16
TEXTS = ("Hello, world! 2 + 2 = 4.\n", "na\u00efve caf\u00e9 \u6f22\u5b57", "a  b\tc")
STIRRED = 0.02  # deviation of LoRA's B, which is zero in a fresh adapter


@dataclass(frozen=True)
class Check:
    """A thing tried: ok, wrong, or a note on what is good to know."""

    name: str
    result: Literal["ok", "note", "wrong"]
    said: str


def check_parts(parts: Parts, engine: SamplingEngine | None) -> list[Check]:
    """Try a loaded model; its adapters are as before afterwards."""
    checks = [*_tokens(parts), _template(parts)]
    if parts.config.trains.policy:
        checks += [*_batches(parts), *_adapters(parts)]
    return [*checks, *([_rescored(parts, engine)] if engine is not None and engine.name != "server" else [])]


def _tokens(parts: Parts) -> list[Check]:
    tokenizer, ends = parts.tokenizer, sorted(eos_token_ids(parts.roles, parts.tokenizer))
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!s} ({i})" for i in ends)
    checks = [Check("end of text", "ok" if ends else "wrong", names or "no token ends a completion")]
    if tokenizer.pad_token_id in ends:
        said = "the same token as the end of text, which is safe here: masks come from lengths"
        checks.append(Check("padding", "note", said))
    else:
        checks.append(Check("padding", "ok", f"{tokenizer.pad_token} ({tokenizer.pad_token_id})"))
    changed = [text for text in TEXTS if _decoded(parts, token_ids(tokenizer, text)) != text]
    if changed:
        back = _decoded(parts, token_ids(tokenizer, changed[0]))
        said = f"{shortened(changed[0])!r} comes back as {shortened(back)!r}"
        return [*checks, Check("text to tokens and back", "note", said)]
    return [*checks, Check("text to tokens and back", "ok", "as it was")]


def _decoded(parts: Parts, tokens: list[int]) -> str:
    return str(parts.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _template(parts: Parts) -> Check:
    """Whether a turn of the assistant ends with a token that ends a completion."""
    name, tokenizer = "chat template", parts.tokenizer
    if not tokenizer.chat_template:
        return Check(name, "note", "there is none, so prompts are text (task.chat=false)")
    fault = parts.template_fault()
    if fault is not None:
        return Check(name, "wrong", fault)
    prompt = render_prompt(tokenizer, "Hi")
    if _decoded(parts, prompt.tokens) != prompt.text:
        back = shortened(_decoded(parts, prompt.tokens))
        return Check(name, "note", f"{shortened(prompt.text)!r} comes back from its tokens as {back!r}")
    end = answer_end(tokenizer, chat="auto", variables={})
    said = f"a turn ends with {tokenizer.convert_ids_to_tokens(end)!s}, which ends a completion"
    if asks_for_date(tokenizer):
        return Check(name, "note", f"{said}; it shows today's date, and a run keeps that of its first day")
    if end == tokenizer.eos_token_id:
        return Check(name, "ok", said)
    return Check(name, "note", f"{said}; the tokenizer's EOS is another ({tokenizer.eos_token})")


def _rows(parts: Parts) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of several lengths, two of the prompts alike."""
    most = min(embedding_rows(parts.roles.causal), len(parts.tokenizer))
    prompts = [ordinary_ids(most, n, start=n) for n, _ in LENGTHS]
    room = [min(n, parts.positions - len(prompt)) for (_, n), prompt in zip(LENGTHS, prompts, strict=True)]
    return prompts, [ordinary_ids(most, n, start=100 * (i + 1)) for i, n in enumerate(room)]


def _logprobs(
    parts: Parts, role: Literal["policy", "reference"], batch: SequenceBatch, *, widened: bool = False
) -> Tensor:
    """Log-probabilities (b, T) as training computes them, or `widened` to float32 throughout."""
    roles = parts.roles
    with torch.no_grad(), roles.acting(role) as model, in_float32(model) if widened else parts.accelerator.autocast():
        return roles.logprobs(role, batch, temperature=1.0)[0].float().cpu()


def _gap(parts: Parts, name: str, ours: Tensor, theirs: Tensor, exact: Callable[[], Tensor]) -> Check:
    """Whether log-probabilities agree: in half precision, whether both are as near to `exact`, of float32."""
    gap = (ours - theirs).abs()
    said = f"log-probabilities differ by at most {float(gap.max()):.1g}"
    if parts.roles.causal.dtype == torch.float32 and parts.accelerator.mixed_precision == "no":
        return Check(name, "ok" if float(gap.max()) < MOST_IN_FLOAT32 else "wrong", said)
    there = (ours != 0) | (theirs != 0)  # not padding
    errors = [float((x - exact()).abs()[there].mean()) for x in (ours, theirs)]
    said += f"; from float32 by {errors[0]:.2g} and {errors[1]:.2g} on average"
    return Check(name, "ok" if as_exact(errors[0], errors[1]) else "wrong", said)


def _batches(parts: Parts) -> list[Check]:
    """Rows by themselves, padded together, and packed end to end."""
    prompts, responses = _rows(parts)
    device = parts.roles.device

    def alone(*, widened: bool = False) -> Tensor:
        rows = [make_batch([p], [r], device=device) for p, r in zip(prompts, responses, strict=True)]
        each = [_logprobs(parts, "policy", row, widened=widened)[0] for row in rows]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True)

    wanted, exact = alone(), partial(alone, widened=True)
    padded = _logprobs(parts, "policy", make_batch(prompts, responses, device=device))
    checks = [_gap(parts, "padded = unpadded", padded, wanted, exact)]
    if not parts.roles.packs:
        return [*checks, Check("packed", "note", "rows are padded: packed ones would not be read as they are alone")]
    packed = _logprobs(parts, "policy", parts.roles.batch(prompts, responses))
    return [*checks, _gap(parts, "packed = unpadded", packed, wanted, exact)]


def _adapters(parts: Parts) -> list[Check]:
    """Adapters off is the base, also after they have changed; on, they do something."""
    if parts.roles.peft is None:
        return []
    batch = make_batch(*_rows(parts), device=parts.roles.device)
    fresh, base = _logprobs(parts, "policy", batch), _logprobs(parts, "reference", batch)
    exact = partial(_logprobs, parts, "reference", batch, widened=True)
    outer = [p for name, p in parts.roles.parameters["policy"].items() if "lora_B" in name]
    before = [parameter.detach().clone() for parameter in outer]
    with torch.no_grad():
        for parameter in outer:
            parameter.normal_(std=STIRRED)
    changed = float((_logprobs(parts, "policy", batch) - base).abs().max())
    acts = Check("adapters on", "ok" if changed > 0 else "wrong", f"drawn at random they change up to {changed:.2g}")
    off = _gap(parts, "adapters off = base", _logprobs(parts, "reference", batch), base, exact)
    with torch.no_grad():
        for parameter, value in zip(outer, before, strict=True):
            parameter.copy_(value)
    is_fresh = parts.config.model.adapter is None
    return [*([_gap(parts, "a fresh adapter = base", fresh, base, exact)] if is_fresh else []), acts, off]


def _rescored(parts: Parts, engine: SamplingEngine) -> Check:
    """What sampling says of the tokens it drew, from its cache, against a pass over the whole of them."""
    prompts, _ = _rows(parts)
    requests = [Request(p, prompt_row=i, max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
    drawn: list[Completion] = [c for group in engine.sample(requests, 2, seed=0, step=0) for c in group]
    batch = make_batch([p for p in prompts for _ in range(2)], [c.tokens for c in drawn], device=parts.roles.device)
    cached = torch.nn.utils.rnn.pad_sequence([torch.tensor(c.logprobs) for c in drawn], batch_first=True)
    exact = partial(_logprobs, parts, "policy", batch, widened=True)
    return _gap(parts, "cached generation = rescored", cached, _logprobs(parts, "policy", batch), exact)
