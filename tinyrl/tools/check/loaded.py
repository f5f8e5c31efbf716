"""Try the models of a run for `tinyrl check`: their numbers, and some answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.config.advice import longer_responses
from tinyrl.data.rows import row_key
from tinyrl.evaluation.evaluate import EVAL_STEP
from tinyrl.generation.engine import SamplingEngine, eos_token_ids
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample, apply_length_rules
from tinyrl.generation.turns import EpisodeRunner
from tinyrl.models.batch import Batch, batch_of, examples
from tinyrl.models.checks import MOST_IN_FLOAT32, as_exact, in_float32, ordinary_ids
from tinyrl.models.loading import embedding_rows
from tinyrl.models.policy import Policy
from tinyrl.models.tokens import asks_for_date, token_ids
from tinyrl.rollout.collect import Collector, template_fault
from tinyrl.rollout.records import completion_text
from tinyrl.runs.finding import Finding
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import PreparedPrompt, most_tokens, render_prompt
from tinyrl.text import truncate
from tinyrl.tools.check.first_row import lines_of
from tinyrl.tools.check.section import CheckSection
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.rows import RowMethod

GOLDS = 64  # reference answers whose lengths are compared with the limit
TEMPLATE = "warning: chat template: "  # begins a note about a fault of it


class Answer(NamedTuple):
    """A completion of the policy: the tokens it chose and their log-probability, and the row that it answers. score:
    the reward before length penalties; failed: why there is none (NaN); play_failed: since the environment or the agent
    failed in its episode; stopped_in_thought: a stop string ended it inside a thought; rewarded_turns: turns of an
    episode with a reward of the environment.
    """

    text: str
    reward: float
    score: float
    tokens: int
    cut: bool
    gold: str | None
    row: str
    failed: str | None
    logprob: float = 0.0
    play_failed: bool = False
    stopped_in_thought: bool = False
    rewarded_turns: int = 0


def row_lines(method: OnPolicy | RowMethod) -> list[str]:
    """Return what the first row becomes: the prompt as text and tokens, or an example's parts that are learnt."""
    if isinstance(method, RowMethod):
        return method.shown(method.train_rows[0])
    collector = method.collector
    tokenizer = method.policy.tokenizer
    first = collector.train_prompts[0]
    lengths = sorted(len(prompt.tokens) for prompt in collector.train_prompts)
    lines = [
        *lines_of(tokenizer, first.text, first.tokens),
        f"prompts have {lengths[0]} to {lengths[-1]} tokens, half of them at most {lengths[len(lengths) // 2]}",
    ]
    if isinstance(runner := collector.runner, EpisodeRunner):
        observation = runner.observations(["reply"], ended_at=runner.observations.end)
        text = str(tokenizer.decode(observation.tokens))
        lines.append(f"a reply of the environment as the model reads it, which is not learnt: {text!r}")
    return lines


def answers(collector: Collector, prompts: list[PreparedPrompt], samples: int, *, greedy: bool) -> list[Answer]:
    """Sample and score some prompts as a step does."""
    sampled = collector.collect(prompts, group_size=samples, step=EVAL_STEP, greedy=greedy)
    config = collector.config
    sampled = apply_length_rules(sampled, config.reward, max_new_tokens=config.generation.max_new_tokens)
    return [answer_of(sample, prompts[i // samples], collector) for i, sample in enumerate(sampled)]


def answer_of(sample: Sample, prompt: PreparedPrompt, collector: Collector) -> Answer:
    chosen = [logprob for logprob, is_chosen in zip(sample.logprobs, sample.mask, strict=True) if is_chosen]
    return Answer(
        text=completion_text(sample, collector.scorer),
        reward=sample.reward,
        score=sample.score,
        tokens=sample.num_actions,
        cut=sample.truncated,
        gold=collector.task.gold(prompt.row),
        row=row_key(prompt.row),
        failed=sample.play_failure or next(iter(sample.failures), None),
        logprob=sum(chosen),
        play_failed=sample.play_failure is not None,
        stopped_in_thought=sample.stopped_in_thought,
        rewarded_turns=0 if sample.played is None else sample.played.num_rewarded_turns,
    )


def check_model(method: OnPolicy | RowMethod, notes: list[str]) -> CheckSection:
    """Check tokens, template, lengths and numbers of a loaded model; `notes`: what the run notes before step 1."""
    collector = method.collector if isinstance(method, OnPolicy) else None
    checks = check_parts(method.policy, collector.engine if collector else None)
    if collector is not None:
        checks.append(_room_for_gold(collector))
    lines = [note for note in notes if not note.startswith(TEMPLATE)]  # which check_parts finds, too
    lines += [f"{one.result}: {one.name}: {one.said}" for one in checks if one.result != "ok"]
    lines.append(f"ok: {', '.join(one.name for one in checks if one.result == 'ok')}")
    wrong = [one for one in checks if one.result == "wrong"]
    found = [Finding(name=f"model: {one.name}", what=f"{one.said}.", change=one.change) for one in wrong]
    return CheckSection("model", lines, {"checks": [one._asdict() for one in checks], "notes": notes}, found)


def _room_for_gold(collector: Collector) -> Check:
    """Check that most reference answers fit into a completion."""
    tokenizer = collector.policy.tokenizer
    golds = [collector.task.gold(prompt.row) for prompt in collector.train_prompts[:GOLDS]]
    lengths = sorted(len(token_ids(tokenizer, str(gold))) for gold in golds if gold is not None)
    name = "room for reference answers"
    limit = collector.config.generation.max_new_tokens
    if not lengths or lengths[len(lengths) // 2] <= limit:
        return Check(name, "ok", f"they have at most {lengths[-1]} tokens" if lengths else "there are none")
    said = f"half of them have {lengths[len(lengths) // 2]} tokens or more, and a completion at most {limit}"
    between = collector.longest_response - limit
    room = collector.policy.positions - most_tokens(collector.train_prompts) - between
    advice = longer_responses(collector.config, (2 * lengths[-1], lengths[-1]), room=room)
    change = f"Take a model with a longer context: prompts leave {room:,} of {collector.policy.positions:,}."
    return Check(name, "wrong", said, change if advice is None else f"{advice}.")


# ---- checks of a model ----

LENGTHS = ((5, 23), (12, 37), (2, 41), (12, 34))  # tokens of prompt and response, where there are positions for them
NEW_TOKENS = 16
TEXTS = ("Hello, world! 2 + 2 = 4.\n", "na\u00efve caf\u00e9 \u6f22\u5b57", "a  b\tc")


class Check(NamedTuple):
    """A check of a model: ok, wrong, or a note on what is good to know."""

    name: str
    result: Literal["ok", "note", "wrong"]
    said: str
    change: str = "Another model, or model.dtype=float32."


def check_parts(policy: Policy, engine: SamplingEngine | None) -> list[Check]:
    """Check the tokens, the chat template and the numbers of a loaded model."""
    tokenizer = policy.tokenizer
    ends = sorted(eos_token_ids(policy, policy.tokenizer))
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!s} ({i})" for i in ends)
    pad = f"{tokenizer.pad_token} ({tokenizer.pad_token_id})"
    same = tokenizer.pad_token_id in ends
    safe = "the same token as the end of text, which is safe here: masks come from lengths"
    back = {text: _decoded(policy, token_ids(tokenizer, text)) for text in TEXTS}
    changed = [f"{truncate(text)!r} comes back as {truncate(got)!r}" for text, got in back.items() if text != got]
    return [
        Check("end of text", "ok" if ends else "wrong", names or "no token ends a completion", "Set generation.stop."),
        Check("padding", "note" if same else "ok", safe if same else pad),
        Check("text to tokens and back", "note" if changed else "ok", changed[0] if changed else "as it was"),
        _template(policy),
        *_numbers(policy, engine),
    ]


def _decoded(policy: Policy, tokens: list[int]) -> str:
    return str(policy.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _template(policy: Policy) -> Check:
    """Check that the chat template ends a turn with a token that ends a completion. (A message that it leaves out is
    refused whenever prompts are prepared.)
    """
    name = "chat template"
    tokenizer = policy.tokenizer
    if not tokenizer.chat_template:
        return Check(name, "note", "there is none, so prompts are text (task.chat=false)")
    if fault := template_fault(policy):
        return Check(name, "wrong", fault, "Another chat template, or task.chat=false.")
    prompt = render_prompt(tokenizer, "Hi", variables=policy.config.task.chat_template_kwargs)
    if (back := _decoded(policy, prompt.tokens)) != prompt.text:
        return Check(name, "note", f"{truncate(prompt.text)!r} comes back from its tokens as {truncate(back)!r}")
    end = answer_end(tokenizer, chat="auto", variables={})
    said = f"a turn ends with {tokenizer.convert_ids_to_tokens(end)!s}, which ends a completion"
    if asks_for_date(tokenizer):
        return Check(name, "note", f"{said}; it shows today's date, and a run keeps that of its first day")
    if end == tokenizer.eos_token_id:
        return Check(name, "ok", said)
    return Check(name, "note", f"{said}; the tokenizer's EOS is another ({tokenizer.eos_token})")


def _numbers(policy: Policy, engine: SamplingEngine | None) -> list[Check]:
    """Compare rows by themselves with rows padded together, and the sampler's log-probabilities, from its cache, with a
    pass over the whole of its tokens. (Packing and the reference are tried whenever a model is loaded.)
    """
    where: Any = {"device": policy.device, "images": policy.images}
    checks = list[Check]()
    temperature = policy.config.generation.temperature if policy.config.samples else 1.0
    most = min(embedding_rows(policy.causal), len(policy.tokenizer))
    prompts = [ordinary_ids(most, n, start=n) for n, _ in LENGTHS]
    room = [min(n, policy.positions - len(prompt)) for (_, n), prompt in zip(LENGTHS, prompts, strict=True)]
    responses = [ordinary_ids(most, n, start=100 * (i + 1)) for i, n in enumerate(room)]

    if policy.config.trains.policy:
        rows = [batch_of(examples([p], [r]), **where) for p, r in zip(prompts, responses, strict=True)]
        padded = _logprobs(policy, [batch_of(examples(prompts, responses), **where)], temperature)
        by_themselves = _logprobs(policy, rows, temperature)
        exact = partial(_logprobs, policy, rows, temperature, widened=True)
        checks.append(_compared("padded = unpadded", policy, padded, by_themselves, exact))
    if engine is not None and engine.name != "server":
        requests = list[Request]()
        for i, prompt in enumerate(prompts):
            requests += engine.requests_for(prompt, 2, row=i, seed=0, step=0, limit=NEW_TOKENS)
        drawn = engine.sample(requests)
        batch = batch_of(examples([s.prompt for s in drawn], [s.response for s in drawn]), **where)
        cached = pad_sequence([torch.tensor(sample.logprobs) for sample in drawn], batch_first=True)
        rescored = _logprobs(policy, [batch], temperature)
        exact = partial(_logprobs, policy, [batch], temperature, widened=True)
        checks.append(_compared("cached generation = rescored", policy, cached, rescored, exact))
    return checks


def _logprobs(policy: Policy, batches: list[Batch], temperature: float, *, widened: bool = False) -> Tensor:
    """Return the log-probabilities of the rows of batches, (rows, T), as training computes them, or `widened` to
    float32 throughout.
    """
    rows = list[Tensor]()
    for batch in batches:
        with torch.no_grad(), policy.acting("policy") as model, ExitStack() as precision:
            precision.enter_context(in_float32(model) if widened else policy.run_device.autocast())
            rows += policy.logprobs("policy", batch, temperature=temperature)[0].float().cpu()
    return pad_sequence(rows, batch_first=True)


def _compared(name: str, policy: Policy, ours: Tensor, theirs: Tensor, exact: Callable[[], Tensor]) -> Check:
    """Compare log-probabilities; in half precision, by how near each is to the exact ones."""
    gap = float((ours - theirs).abs().max())
    said = f"log-probabilities differ by at most {gap:.1g}"
    good = gap < MOST_IN_FLOAT32
    if policy.causal.dtype != torch.float32 or policy.run_device.dtype != torch.float32:
        wide = exact()
        not_padding = (ours != 0) | (theirs != 0)
        our_error = float((ours - wide).abs()[not_padding].mean())
        their_error = float((theirs - wide).abs()[not_padding].mean())
        said += f"; from float32 by {our_error:.2g} and {their_error:.2g} on average"
        good = as_exact(our_error, their_error)
    return Check(name, "ok" if good else "wrong", said)
