"""Train the largest step that a run can have, for `tinyrl check`: how long it takes, and how much memory."""

from __future__ import annotations

import contextlib
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinyrl.config.schema import Config
from tinyrl.data.readers import Placed
from tinyrl.formatting import format_bytes, format_seconds
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample, SampleBuilder
from tinyrl.models.checks import ordinary_ids
from tinyrl.models.device import memory_room, peak_memory_gb
from tinyrl.models.parallel import ALONE
from tinyrl.process.errors import OutOfRoom
from tinyrl.rewards.scorer import Scorer, Scores
from tinyrl.rollout.collect import Collector
from tinyrl.runs.finding import Finding
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.prompts import PreparedPrompt, most_tokens
from tinyrl.tools.check.offline import ReadRows, check_memory
from tinyrl.tools.check.sampled import eval_rows_tried
from tinyrl.tools.check.section import CheckSection
from tinyrl.tools.check.trial import Trial
from tinyrl.training.load import make_method
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.rows import RowMethod
from tinyrl.training.run import Run, out_of_memory_stops
from tinyrl.training.run_state import RunState
from tinyrl.workers.values import RowResults

LESS_MEMORY = (
    "A smaller run.micro_batch_tokens, generation.max_new_tokens or model, or model.gradient_checkpointing=true."
)


def worst_step(method: OnPolicy | RowMethod, *, text: Placed) -> CheckSection:
    """Train one step of the longest rows, every response as long as it may be, and evaluate after it, in a session that
    is thrown away: its peak is the run's. The method is of no use afterwards. text: the rows of ppo.ptx_data.
    """
    policy = method.policy
    device = policy.device
    config = trial_config(method)
    if isinstance(method, RowMethod):
        rows, most = method.keep_longest()
        longest = f"{rows} rows of up to {most} tokens"
    else:
        collector = largest_collector(method.collector, config)
        tokens = len(collector.train_prompts[0].tokens)
        size = f"{method.config.on_policy.batch_size} responses of {method.collector.longest_response} tokens"
        longest = f"{size} to prompts of up to {tokens}"
        method = make_method(collector, text)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    room = memory_room(device)
    try:
        seconds = train_one_step(method, config)
    except OutOfRoom as error:
        finding = Finding(name="not enough memory", what=f"{error}.", change=LESS_MEMORY)
        return CheckSection("worst step", [str(error)], findings=[finding])
    peak = peak_memory_gb(device)
    micro_batch = policy.micro_batches.tokens
    phases = ", ".join(f"{name} {seconds[name]:.2g}" for name in seconds if name not in ("total", "evaluation"))
    evaluation = f"; an evaluation {seconds['evaluation']:.2g} s" if "evaluation" in seconds else ""
    memory = f"peak {peak:.2f} GB; {format_bytes(room)} are there; micro-batches of {micro_batch} tokens"
    section = CheckSection("worst step")
    section.lines = [f"{longest}, tried and thrown away: {seconds['total']:.2g} s ({phases}){evaluation}", memory]
    section.facts = {
        "seconds": seconds,
        "peak_gb": peak,
        "size": longest,
        "micro_batch_tokens": micro_batch,
        "room": room,
    }
    if peak * 1e9 > room:
        section.findings = [Finding(name="not enough memory", what=f"{memory}.", change=LESS_MEMORY)]
    return section


def trial_config(method: OnPolicy | RowMethod) -> Config:
    """Return the settings of a trial: two steps, an evaluation after the first, nothing saved, the critic from the
    start, an advantage for each response.
    """
    config = method.config
    run: dict[str, Any] = {"eval_every": 1, "save_every": 0, "trackers": []}
    run |= {"epochs": None, "num_steps": max(2, config.run.num_steps)}
    if isinstance(method, OnPolicy):
        run["eval_prompts"] = eval_rows_tried(method.collector)
    changes: dict[str, Any] = {"run": config.run.model_copy(update=run)}
    if config.uses("critic"):
        changes["critic"] = config.critic.model_copy(update={"warmup_steps": 0})
    if config.method == "grpo":  # the longest responses are no episodes, so they have no turns
        changes["grpo"] = config.grpo.model_copy(update={"credit": "episode"})
    return config.model_copy(update=changes)


def train_one_step(method: OnPolicy | RowMethod, config: Config) -> dict[str, float]:
    """Train a step in a folder that is deleted; return the seconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        made = RunDir(Path(folder))
        state = RunState(phase="rollout")  # evaluated after the step alone
        run = Run(method, made, config=config, state=state, until=1, silent=True)
        with contextlib.closing(run), out_of_memory_stops("in the largest step"):
            method.train(run)
        line = read_steps(made.metrics, [])[1]
    return {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}


# ---- the longest responses ----


class HalfRewarded(Scorer):
    """A scorer that rewards half of each group, so that there is a gradient; only a reward model is asked."""

    def __call__(
        self, prompts: list[PreparedPrompt], completions: list[list[int]], *, group_size: int | None = None, **_: Any
    ) -> Scores:
        if self.has_model:
            self._model_scores(prompts, completions, None, ALONE)
        half = max(1, (group_size or 2) // 2)
        rewards = (torch.arange(len(prompts)) // half % 2).float()
        return Scores(rewards.unsqueeze(1).expand(-1, len(self.names)).clone(), rewards)

    def verify(self, prompts: list[PreparedPrompt], completions: list[list[int]], **_: Any) -> RowResults:
        return RowResults([1.0] * len(prompts))


class UnsampledEngine(SamplingEngine):
    """An engine in place of a server, whose memory is elsewhere: completions of ordinary tokens, without sampling."""

    name = "server"
    exact = False

    def sample(self, requests: list[Request]) -> list[Sample]:
        length = self.settings.max_new_tokens
        tokens = ordinary_ids(len(self.tokenizer), length)
        logprobs = [math.log(0.5)] * length
        samples = list[Sample]()
        for request in requests:
            one = SampleBuilder(request)
            one.chose(tokens, logprobs)
            samples.append(one.sample(finish="length"))
        return samples


def largest_collector(collector: Collector, config: Config) -> Collector:
    """Return a collector, for a trial with `config`, of the longest prompts, whose responses are as long as they may be
    (an episode in one turn), with rewards that leave a gradient.
    """
    policy = collector.policy
    scorer = collector.scorer
    length = collector.longest_response
    prompts = sorted(collector.train_prompts, key=lambda prompt: -len(prompt.tokens))[: config.on_policy.num_prompts]
    if config.environment.agent is not None:  # an agent writes its own prompts
        limit = config.generation.max_prompt_tokens
        repeated = [prompt.tokens * -(-limit // len(prompt.tokens)) for prompt in prompts]
        prompts = [replace(prompt, tokens=tokens[:limit]) for prompt, tokens in zip(prompts, repeated, strict=True)]
    half_rewarded = HalfRewarded(
        config.reward,
        collector.task,
        tokenizer=policy.tokenizer,
        policy=policy,
        policy_format=scorer.policy_format,
        model=scorer.model,
        micro_batches=policy.micro_batches,
        environment=scorer.environment,
        needed=config.trains.rewarded,
    )
    if config.generation.engine == "server":
        settings = config.generation.model_copy(update={"max_new_tokens": length})
        endless = UnsampledEngine(policy, policy.tokenizer, settings)
    else:
        endless = collector.engine.without_ends(length)
    policy.micro_batches.when_full(endless.release)
    return Collector(
        policy,
        collector.task,
        None,
        config=config,
        train_prompts=prompts,
        eval_prompts=collector.eval_prompts,
        scorer=half_rewarded,
        owns_scorer=False,
        engine=endless,
        engine_reason=collector.engine_reason,
        row_notes=[],
    )


# ---- without a trial ----


def rough_step(trial: Trial, collector: Collector, *, minutes: float, device: str) -> CheckSection:
    """Return what is known of the largest step where trying it would take too long: memory by arithmetic."""
    config = collector.config
    seconds = trial.step_seconds
    section = CheckSection("worst step", facts={"seconds_estimated": seconds})
    enough = math.ceil((trial.seconds + seconds) / 6) / 10
    section.lines = [
        f"not tried: with its update and an evaluation it may take {format_seconds(seconds)}, and --minutes "
        f"{minutes:g} leaves no time for that; --minutes {enough:g} would"
    ]
    read = None
    if config.environment.agent is None:  # which writes its own prompts
        prompts = most_tokens([*collector.train_prompts, *collector.eval_prompts])
        read = ReadRows(prompt_tokens=prompts, eval_rows=len(collector.eval_prompts))
    try:
        memory = check_memory(config, device=device, read=read)
    except ValueError as error:  # a model of unusual shape
        section.lines.append(f"memory: not estimated ({error})")
        return section
    section.lines += memory.lines
    section.facts |= memory.facts
    section.findings = memory.findings
    return section
