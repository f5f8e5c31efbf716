"""What `tinyrl check` does with the models of a run: its checks before step 1, some answers, and its largest step.

Everything that knows how a trainer and a session are made stands here.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import row_key
from tinyrl.evaluation.evaluate import EVAL_STEP
from tinyrl.generation.engine import Completion, Request
from tinyrl.generation.turns import EpisodeRunner, show_episode
from tinyrl.models.checks import ordinary_ids
from tinyrl.models.device import peak_memory_gb
from tinyrl.rollout.collector import apply_length_rules, completion_text, sample_and_score
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.rollout.sample import Sample, rewards_of
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.model_checks import Check, check_parts
from tinyrl.training.session import Session
from tinyrl.training.state import Sources


@dataclass(frozen=True)
class Answer:
    """A completion of the policy: its reward (NaN: none), the tokens it chose, whether it was cut off, the gold answer
    of its row and the row's key, and why the reward failed (None: it did not).
    """

    prompt: str
    text: str
    reward: float
    tokens: int
    cut: bool
    gold: str | None
    row: str
    failed: str | None


@dataclass(frozen=True)
class Step:
    """The largest step as it was tried: seconds by phase, the peak of the process in GB, and how large it was."""

    seconds: dict[str, float]
    peak_gb: float
    size: str
    micro_batch_tokens: int


def load(config: Config, options: Options) -> tuple[Any, list[str]]:
    """Load the trainer of a run and check what it checks before step 1; return it with its notes."""
    trainer = trainer_of(config.method)(config, options=options)
    try:
        return trainer, [resolve_threads(trainer), *trainer.check()]
    except BaseException:
        trainer.close()
        raise


def check_numbers(trainer: Any) -> list[Check]:
    return check_parts(trainer, getattr(trainer, "engine", None))


def row_lines(trainer: Any) -> list[str]:
    """Return what the first row becomes: the prompt as text and tokens, or an example's parts that are learnt."""
    if not trainer.config.samples:
        return [*trainer.notes, *trainer.shown(trainer.train_rows[0])]
    first = trainer.train_prompts[0]
    pieces = [str(trainer.tokenizer.decode([token])) for token in first.tokens[-12:]]
    lengths = sorted(len(prompt.tokens) for prompt in trainer.train_prompts)
    about = f"prompts have {lengths[0]} to {lengths[-1]} tokens, half of them at most {lengths[len(lengths) // 2]}"
    lines = [f"as the model reads it: {first.text!r}", f"its last tokens: {pieces}", about]
    if isinstance(trainer.runner, EpisodeRunner):
        stop = [*trainer.config.generation.stop, *trainer.runner.environment.stop]
        lines += show_episode(trainer.runner, first, trainer.task, stop=stop)
    return lines


def answers(trainer: Any, prompts: list[PreparedPrompt], samples: int, *, greedy: bool) -> tuple[list[Answer], float]:
    """Sample and score some prompts as a step does; return the answers, and the sum of their log-probabilities."""
    sampled = sample_and_score(prompts, trainer, group_size=samples, step=EVAL_STEP, greedy=greedy)
    apply_length_rules(sampled, trainer.config.reward, max_new_tokens=trainer.config.generation.max_new_tokens)
    found, logprob = [], 0.0
    for prompt, one in zip((p for p in prompts for _ in range(samples)), sampled, strict=True):
        row: Row = prompt.row
        text, failed = completion_text(one, trainer.scorer), next(iter(one.failures), None)
        gold, key = trainer.task.gold(row), row_key(row)
        found.append(Answer(prompt.text, text, one.reward, one.num_actions, one.truncated, gold, key, failed))
        logprob += sum(x for x, chosen in zip(one.logprobs, one.mask, strict=True) if chosen)
    return found, logprob


def worst_step(trainer: Any) -> Step:
    """Train one step of the longest rows, every response as long as it may be, in a session that is thrown away: what
    it holds and takes is what the largest step of the run will. The trainer is of no use afterwards.
    """
    config = trainer.config
    section = config.run.model_copy(
        update={"num_steps": max(2, config.run.num_steps), "eval_prompts": 0, "save_every": 0, "trackers": []}
    )
    changes: dict[str, Any] = {"run": section}
    if config.uses("critic"):
        changes["critic"] = config.critic.model_copy(update={"warmup": 0})
    trainer.config = config.model_copy(update=changes)
    if config.samples:
        count = config.on_policy.num_prompts
        trainer.train_prompts = _longest(trainer, count)
        trainer.collect = lambda prompts, step: _longest_samples(trainer, prompts, step)
        size = f"{config.on_policy.batch_size} responses of {trainer.longest_response} tokens"
        size += f" to prompts of up to {max(len(p.tokens) for p in trainer.train_prompts)}"
    else:
        rows = sorted(trainer.train_rows, key=lambda row: -sum(map(len, trainer.texts(row))))[: trainer.batch_size]
        trainer.train_rows = rows
        trainer.forget()
        size = f"{len(rows)} rows of up to {sum(map(len, trainer.texts(rows[0])))} tokens"
    device = trainer.accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        session = Session(trainer, run, sources=Sources, silent=True)
        session.until = 1
        try:
            trainer.train(session)
        finally:
            session.close()
        line = read_steps(run.metrics, [])[1]
    seconds = {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
    return Step(seconds, peak_memory_gb(device), size, trainer.micro_batches.tokens)


def _longest(trainer: Any, count: int) -> list[PreparedPrompt]:
    """Return the longest training prompts; of agents, which write their own, as long as those may be."""
    longest = sorted(trainer.train_prompts, key=lambda prompt: -len(prompt.tokens))[:count]
    if trainer.config.environment.agent is None:
        return longest
    most = trainer.config.generation.max_prompt_tokens
    return [replace(p, tokens=(p.tokens * -(-most // len(p.tokens)))[:most]) for p in longest]


def _longest_samples(trainer: Any, prompts: list[PreparedPrompt], step: int) -> list[Sample]:
    """Sample responses that nothing ends before they are as long as they may be. Every second one has a reward, so that
    there is a gradient; only a reward model is asked for its own.
    """
    engine, size, most = trainer.engine, trainer.config.on_policy.group_size, trainer.longest_response
    requests = [Request(prompt.tokens, prompt_row=prompt.index) for prompt in prompts]
    if hasattr(engine, "eos"):
        settings, eos = engine.settings, engine.eos
        engine.settings = replace(settings, max_new_tokens=most, stop=[])
        engine.eos = eos[:0] if isinstance(eos, torch.Tensor) else set()
        try:
            groups = engine.sample(requests, size, seed=trainer.config.run.seed, step=step)
        finally:
            engine.settings, engine.eos = settings, eos
    else:  # of a server, whose memory is elsewhere
        ids = ordinary_ids(len(trainer.tokenizer), most)
        groups = [[Completion(ids, [math.log(0.5)] * most, "length")] * size for _ in requests]
    completions = [completion for group in groups for completion in group]
    repeated, names = [prompt for prompt in prompts for _ in range(size)], trainer.scorer.names
    if trainer.scorer.has_model:
        trainer.scorer._model_scores(repeated, [completion.tokens for completion in completions], None, trainer.world)
    samples = []
    for i, (prompt, completion) in enumerate(zip(repeated, completions, strict=True)):
        reward = float(i // max(1, size // 2) % 2)
        scores = [reward] * len(names)
        samples.append(Sample.of(prompt.tokens, completion, row=prompt.index, episode=i, reward=reward, scores=scores))
    trainer.tried.look(prompts, rewards_of(samples))
    return samples
