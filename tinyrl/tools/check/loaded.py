"""Try the trainer of a run for `tinyrl check`: its numbers, some answers, and its largest step."""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.data.rows import row_key
from tinyrl.errors import OutOfRoom
from tinyrl.evaluation.evaluate import EVAL_STEP
from tinyrl.generation.engine import Completion, Request, SamplingEngine, eos_token_ids
from tinyrl.generation.turns import EpisodeRunner
from tinyrl.models.batch import Batch, batch_of, examples
from tinyrl.models.checks import MOST_IN_FLOAT32, as_exact, in_float32, ordinary_ids
from tinyrl.models.device import memory_room, peak_memory_gb
from tinyrl.models.loading import embedding_rows
from tinyrl.models.parallel import ALONE
from tinyrl.models.policy import Policy
from tinyrl.models.tokens import asks_for_date, token_ids
from tinyrl.rewards.scorer import Scorer, Scores
from tinyrl.rollout.collect import template_fault
from tinyrl.rollout.records import completion_text
from tinyrl.rollout.sample import apply_length_rules
from tinyrl.runs.findings import Finding
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import PreparedPrompt, render_prompt
from tinyrl.text import truncate
from tinyrl.tools.check.offline import CheckSection, size
from tinyrl.training.run import Run, out_of_memory_stops
from tinyrl.workers.values import RowResults

MOST_EVAL_TOKENS = 1 << 17  # of an evaluation that is tried, beyond as many rows as a step has
LESS_MEMORY = (
    "A smaller run.micro_batch_tokens, generation.max_new_tokens or model, or model.gradient_checkpointing=true."
)
GOLDS = 64  # gold answers whose lengths are compared with the limit
TEMPLATE = "warning: chat template: "  # begins a note about a fault of it


class Answer(NamedTuple):
    """A completion of the policy: the tokens it chose and their log-probability, and the row that it answers. failed:
    why there is no reward (NaN).
    """

    text: str
    reward: float
    tokens: int
    cut: bool
    gold: str | None
    row: str
    failed: str | None
    logprob: float = 0.0


def row_lines(trainer: Any) -> list[str]:
    """Return what the first row becomes: the prompt as text and tokens, or an example's parts that are learnt."""
    if not trainer.config.samples:
        return trainer.shown(trainer.train_rows[0])
    first = trainer.collector.train_prompts[0]
    pieces = [str(trainer.policy.tokenizer.decode([token])) for token in first.tokens[-12:]]
    lengths = sorted(len(prompt.tokens) for prompt in trainer.collector.train_prompts)
    about = f"prompts have {lengths[0]} to {lengths[-1]} tokens, half of them at most {lengths[len(lengths) // 2]}"
    lines = [f"as the model reads it: {first.text!r}", f"its last tokens: {pieces}", about]
    if isinstance(runner := trainer.collector.runner, EpisodeRunner):
        tokens, _ = runner.observations("reply", ended_at=runner.observations.end)
        text = str(trainer.policy.tokenizer.decode(tokens))
        lines.append(f"a reply of the environment as the model reads it, which is not learnt: {text!r}")
    return lines


def answers(trainer: Any, prompts: list[PreparedPrompt], samples: int, *, greedy: bool) -> list[Answer]:
    """Sample and score some prompts as a step does."""
    sampled = trainer.collector.collect(prompts, group_size=samples, step=EVAL_STEP, greedy=greedy)
    apply_length_rules(sampled, trainer.config.reward, max_new_tokens=trainer.config.generation.max_new_tokens)
    return [
        Answer(
            completion_text(one, trainer.collector.scorer), one.reward, one.num_actions, one.truncated,
            trainer.collector.task.gold(prompts[i // samples].row), row_key(prompts[i // samples].row),
            next(iter(one.failures), None), sum(x for x, chosen in zip(one.logprobs, one.mask, strict=True) if chosen),
        )
        for i, one in enumerate(sampled)
    ]  # fmt: skip


def check_model(trainer: Any, notes: list[str]) -> CheckSection:
    """Check tokens, template, lengths and numbers of a loaded model; `notes`: what the run notes before step 1."""
    checks = check_parts(trainer.policy, trainer.collector.engine if trainer.config.samples else None)
    checks += [_room_for_gold(trainer)] if trainer.config.samples else []
    lines = [note for note in notes if not note.startswith(TEMPLATE)]  # which check_parts finds, too
    lines += [f"{one.result}: {one.name}: {one.said}" for one in checks if one.result != "ok"]
    lines.append(f"ok: {', '.join(one.name for one in checks if one.result == 'ok')}")
    found = [Finding(f"model: {one.name}", f"{one.said}.", one.change, {}) for one in checks if one.result == "wrong"]
    return CheckSection("model", lines, {"checks": [one._asdict() for one in checks], "notes": notes}, found)


def _room_for_gold(trainer: Any) -> Check:
    """Check that most gold answers fit into a completion."""
    golds = [trainer.collector.task.gold(prompt.row) for prompt in trainer.collector.train_prompts[:GOLDS]]
    lengths = sorted(len(token_ids(trainer.policy.tokenizer, str(gold))) for gold in golds if gold is not None)
    name, limit = "room for gold answers", trainer.config.generation.max_new_tokens
    if not lengths or lengths[len(lengths) // 2] <= limit:
        return Check(name, "ok", f"they have at most {lengths[-1]} tokens" if lengths else "there are none")
    said = f"half of them have {lengths[len(lengths) // 2]} tokens or more, and a completion at most {limit}"
    return Check(name, "wrong", said, f"generation.max_new_tokens={2 * lengths[-1]}.")


def worst_step(trainer: Any) -> CheckSection:
    """Train one step of the longest rows, every response as long as it may be, and evaluate after it, in a session that
    is thrown away: its peak is the run's. The trainer is of no use afterwards.
    """
    config, device = trainer.config, trainer.policy.accelerator.device
    short: dict[str, Any] = {"eval_every": 1, "save_every": 0, "trackers": []}
    short["num_steps"] = max(2, config.run.num_steps)
    changes = {"critic": config.critic.model_copy(update={"warmup_steps": 0})} if config.uses("critic") else {}
    if config.samples:
        rows = max(config.on_policy.batch_size, MOST_EVAL_TOKENS // trainer.collector.longest_response)
        short["eval_prompts"] = min(config.run.eval_prompts, rows)
    trainer.policy.config = config.model_copy(update={"run": config.run.model_copy(update=short), **changes})
    if config.samples:
        longest = _longest_responses(trainer)
    else:
        trainer.train_rows.sort(key=lambda row: -sum(map(len, (text for one in row for text in one.texts))))
        trainer.train_rows = trainer.train_rows[: trainer.batch_size]
        trainer.forget()
        most = sum(map(len, (text for one in trainer.train_rows[0] for text in one.texts)))
        longest = f"{len(trainer.train_rows)} rows of up to {most} tokens"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    room, section = memory_room(device), CheckSection("worst step")
    with tempfile.TemporaryDirectory() as folder:
        made = RunDir(Path(folder))
        run = Run(trainer, made, silent=True)
        run.until, run.state.phase = 1, "rollout"  # evaluated after the step alone
        try:
            with contextlib.closing(run), out_of_memory_stops("in the largest step"):
                trainer.train(run)
        except OutOfRoom as error:
            section.lines = [str(error)]
            section.findings = [Finding("not enough memory", f"{error}.", LESS_MEMORY, {})]
            return section
        line = read_steps(made.metrics, [])[1]
    seconds = {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
    peak, tokens = peak_memory_gb(device), trainer.policy.micro_batches.tokens
    phases = ", ".join(f"{name} {seconds[name]:.2g}" for name in seconds if name not in ("total", "evaluation"))
    evaluation = f"; an evaluation {seconds['evaluation']:.2g} s" if "evaluation" in seconds else ""
    section.lines = [
        f"{longest}, tried and thrown away: {seconds['total']:.2g} s ({phases}){evaluation}",
        f"peak {peak:.2f} GB; {size(room)} are there; micro-batches of {tokens} tokens",
    ]
    section.facts = {"seconds": seconds, "peak_gb": peak, "size": longest, "micro_batch_tokens": tokens, "room": room}
    if peak * 1e9 > room:
        section.findings = [Finding("not enough memory", f"{section.lines[1]}.", LESS_MEMORY, {})]
    return section


class PlantedScorer(Scorer):
    """Scorer that rewards half of each group, so that there is a gradient; only a reward model is asked."""

    def __call__(self, prompts: Any, completions: Any, *, group_size: int | None = None, **_: Any) -> Scores:
        if self.has_model:
            self._model_scores(prompts, completions, None, ALONE)
        rewards = (torch.arange(len(prompts)) // max(1, (group_size or 2) // 2) % 2).float()
        return Scores(rewards.unsqueeze(1).expand(-1, len(self.names)).clone(), rewards)

    def verify(self, prompts: Any, completions: Any, **_: Any) -> RowResults:
        return RowResults([1.0] * len(prompts))


def _longest_responses(trainer: Any) -> str:
    """Let a trainer sample to its longest prompts, until responses are as long as they may be (an episode in one turn);
    return how large a step is.
    """
    config, most, engine = trainer.config, trainer.collector.longest_response, trainer.collector.engine
    longest = sorted(trainer.collector.train_prompts, key=lambda prompt: -len(prompt.tokens))
    longest = longest[: config.on_policy.num_prompts]
    if config.environment.agent is not None:  # an agent writes its own prompts
        limit = config.generation.max_prompt_tokens
        longest = [replace(p, tokens=(p.tokens * -(-limit // len(p.tokens)))[:limit]) for p in longest]
    trainer.collector.train_prompts, trainer.collector.runner = longest, None
    trainer.collector.scorer = copy.copy(trainer.collector.scorer)
    trainer.collector.scorer.__class__ = PlantedScorer
    if config.generation.engine == "server":  # its memory is elsewhere
        ids = ordinary_ids(len(trainer.policy.tokenizer), most)
        completion = Completion(ids, [math.log(0.5)] * most, "length")
        engine.sample = lambda requests, count, **_: [[completion] * count for _ in requests]
    else:
        engine.settings = engine.settings.model_copy(update={"max_new_tokens": most, "stop": []})
        engine.eos = set()
    size = f"{config.on_policy.batch_size} responses of {most} tokens"
    return f"{size} to prompts of up to {len(longest[0].tokens)}"


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
    tokenizer, ends = policy.tokenizer, sorted(eos_token_ids(policy, policy.tokenizer))
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!s} ({i})" for i in ends)
    pad, same = f"{tokenizer.pad_token} ({tokenizer.pad_token_id})", tokenizer.pad_token_id in ends
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
    """Check that the chat template shows a system prompt and ends a turn with a token that ends a completion."""
    name, tokenizer, where = "chat template", policy.tokenizer, policy.config.task
    if not tokenizer.chat_template:
        return Check(name, "note", "there is none, so prompts are text (task.chat=false)")
    if fault := template_fault(policy):
        return Check(name, "wrong", fault, "Another chat template, or task.chat=false.")
    prompt = render_prompt(tokenizer, "Hi", system_prompt=where.system_prompt, variables=where.chat_template_kwargs)
    if where.chat is not False and (where.system_prompt or "").strip() not in prompt.text:
        return Check(name, "wrong", "it leaves the system prompt out", "Put task.system_prompt into the prompts.")
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
    device, checks = policy.device, list[Check]()
    temperature = policy.config.generation.temperature if policy.config.samples else 1.0
    most = min(embedding_rows(policy.causal), len(policy.tokenizer))
    prompts = [ordinary_ids(most, n, start=n) for n, _ in LENGTHS]
    room = [min(n, policy.positions - len(prompt)) for (_, n), prompt in zip(LENGTHS, prompts, strict=True)]
    responses = [ordinary_ids(most, n, start=100 * (i + 1)) for i, n in enumerate(room)]

    def logprobs(batch: Batch, *, widened: bool = False) -> Tensor:
        """(b, T) as training computes them, or `widened` to float32 throughout."""
        how = in_float32 if widened else lambda _: policy.accelerator.autocast()
        with torch.no_grad(), policy.acting("policy") as model, how(model):
            return policy.logprobs("policy", batch, temperature=temperature)[0].float().cpu()

    def alone(*, widened: bool = False) -> Tensor:
        rows = [batch_of(examples([p], [r]), device=device) for p, r in zip(prompts, responses, strict=True)]
        return pad_sequence([logprobs(row, widened=widened)[0] for row in rows], batch_first=True)

    def compare(name: str, ours: Tensor, theirs: Tensor, exact: Callable[..., Tensor]) -> None:
        """Compare log-probabilities; in half precision, how near each is to `exact(widened=True)`."""
        gap = float((ours - theirs).abs().max())
        said, good = f"log-probabilities differ by at most {gap:.1g}", gap < MOST_IN_FLOAT32
        if policy.causal.dtype != torch.float32 or policy.accelerator.mixed_precision != "no":
            there, wide = (ours != 0) | (theirs != 0), exact(widened=True)  # not padding
            error, other = (float((x - wide).abs()[there].mean()) for x in (ours, theirs))
            said += f"; from float32 by {error:.2g} and {other:.2g} on average"
            good = as_exact(error, other)
        checks.append(Check(name, "ok" if good else "wrong", said))

    if policy.config.trains.policy:
        wanted, padded = alone(), batch_of(examples(prompts, responses), device=device)
        compare("padded = unpadded", logprobs(padded), wanted, alone)
    if engine is not None and engine.name != "server":
        requests = [Request(p, prompt_row=i, max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
        drawn = [c for group in engine.sample(requests, 2, seed=0, step=0) for c in group]
        batch = batch_of(examples([p for p in prompts for _ in range(2)], [c.tokens for c in drawn]), device=device)
        cached = pad_sequence([torch.tensor(c.logprobs) for c in drawn], batch_first=True)
        again = partial(logprobs, batch)
        compare("cached generation = rescored", cached, again(), again)
    return checks
