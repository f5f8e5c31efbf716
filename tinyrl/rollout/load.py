"""Load what a method works on: the models of a run, and what samples from them and scores the samples."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from datetime import date
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tinyrl.config.conflicts import conflicts
from tinyrl.config.derive import with_num_steps
from tinyrl.config.refusal import raise_first
from tinyrl.config.schema import Config
from tinyrl.endpoint.agents import AgentRunner
from tinyrl.generation.engine import SamplingEngine, end_at_turn_end
from tinyrl.generation.engines import select_engine
from tinyrl.generation.turns import load_episode_runner
from tinyrl.models.build import build_policy, build_reward_model
from tinyrl.models.device import cores_here, make_device, resolve_dtype, seed_generators, threads_for
from tinyrl.models.loading import (
    check_vocabulary,
    comes_with_tower,
    embedding_rows,
    load_model_config,
    load_tokenizer,
)
from tinyrl.models.parallel import world
from tinyrl.models.policy import Policy
from tinyrl.models.tokens import DATE, asks_for_date
from tinyrl.process.launched import Options
from tinyrl.rewards.budget import check_judge_budgets
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.collect import Collector, Runner, longest_response, prepare_rows
from tinyrl.rollout.prepared import PreparedRun
from tinyrl.runs.resolve import no_room_for_prompt, room_for_prompt
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import PreparedPrompt, PromptLimit, most_tokens


def load_policy(config: Config, *, options: Options, teacher: bool = False) -> Policy:
    """Load the models of a run on its device: policy, reference, critic and, if wanted, the teacher. Random weights
    (LoRA's A) are drawn from run.seed. Raises ValueError for what a user can fix.
    """
    run_device = make_device(options.device, dtype=config.model.dtype)
    model = config.model
    trust = options.trust_remote_code
    seed_generators(config.run.seed)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add up in another order
        torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=trust)
    config = _with_tower(_with_date(config, tokenizer), trust)
    policy = build_policy(config, tokenizer=tokenizer, device=run_device, trust_remote_code=trust, teacher=teacher)
    check_vocabulary(tokenizer, policy.causal, path=model.path)
    if policy.critic_model is not None:  # it reads the policy's tokens
        rows = embedding_rows(policy.causal)
        critic = config.critic.path or model.path
        check_vocabulary(tokenizer, policy.critic_model, path=critic, sampled=rows)
    end_at_turn_end(policy.causal, tokenizer, config.task)
    return policy


def _with_tower(config: Config, trust_remote_code: bool) -> Config:
    """Record that a model is loaded with its vision tower, also for rows of text, where it cannot be loaded without.
    Raises Refusal where the tower conflicts with another setting.
    """
    model = config.model
    where: dict[str, Any] = {"revision": model.revision, "trust_remote_code": trust_remote_code}
    if model.with_images is not None or not comes_with_tower(load_model_config(model.path, **where)):
        return config
    config = config.model_copy(update={"model": model.model_copy(update={"with_images": True})})
    raise_first(conflicts(config))
    return config


def _with_date(config: Config, tokenizer: PreTrainedTokenizerBase) -> Config:
    """Record the date of the run, where the chat template asks for one; a resume has that of the start."""
    before = config.task.chat_template_kwargs
    task = config.task
    variables = {name: value for name, value in before.items() if name != DATE}
    if task.chat is not False and asks_for_date(tokenizer):
        variables[DATE] = before.get(DATE) or world().on_main(lambda: date.today().isoformat())
    return config.model_copy(update={"task": task.model_copy(update={"chat_template_kwargs": variables})})


def resolve_threads(policy: Policy) -> str:
    """Set torch's thread count (CPU only), by the model's width where run.threads is auto; returns a note."""
    wanted = policy.config.run.threads
    device = policy.device
    processes = policy.world
    if device.type != "cpu":
        return f"device {device} ({torch.cuda.get_device_name(device)})"
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return f"device cpu, {wanted} thread{'s' if wanted > 1 else ''} (run.threads)"
    cores = min(processes.gather(cores_here()))
    if processes.size > 1 and cores == 1:
        torch.set_num_threads(1)
        return f"device cpu, 1 thread ({processes.local_size} processes on this machine, a core for each)"
    # One number for all processes: norms are summed by threads, and weights must stay the same.
    threads = threads_for(width=policy.causal.config.get_text_config().hidden_size, cores=cores)
    torch.set_num_threads(threads)
    return f"device cpu, {threads} thread{'s' if threads > 1 else ''} (run.threads=auto)"


def load_collector(
    prepared: PreparedRun,
    *,
    options: Options,
    judge: Scorer | None = None,
    seed: int | None = None,
    teacher: bool = False,
) -> Collector:
    """Load the policy with all that samples from it. judge: another run's scorer, in place of the configuration's own;
    seed: of the samples, where it is not that of the weights; teacher: to train, so also the model to learn from.
    Raises ValueError for what a user can fix.
    """
    task = prepared.task
    policy = load_policy(prepared.config, options=options, teacher=teacher)
    config = policy.config  # with the date of the run
    runner = load_runner(policy, task)
    if runner is not None:
        rows = (*prepared.rows.train, *prepared.rows.held_out)
        runner.environment.check_columns([*dict.fromkeys(name for row in rows for name in row if name != "prompt")])
    limit = prompt_limit(policy, runner)
    prompts_of = partial(prepare_rows, policy=policy, task=task, runner=runner, limit=limit)
    train_prompts = prompts_of(prepared.rows.train)
    eval_prompts = prompts_of(prepared.rows.held_out)
    policy.try_images()
    if config.samples:
        config = with_num_steps(config, rows=len(train_prompts), of_step=config.on_policy.num_prompts)
    if judge is None:
        scorer = load_scorer(config, task, policy=policy, options=options, runner=runner)
    else:
        scorer = judge.with_tokenizer(policy.tokenizer)
    if teacher and config.run.epochs is not None:  # else it is checked before anything is loaded
        check_judge_budgets(config)
    if seed is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    # An agent may send images where no row has one.
    with policy.trying_images() if isinstance(runner, AgentRunner) else nullcontext():
        engine, engine_reason = load_engine(policy, runner, train_prompts + eval_prompts)
    policy.micro_batches.when_full(engine.release)
    return Collector(
        policy,
        task,
        runner,
        config=config,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        owns_scorer=judge is None,
        engine=engine,
        engine_reason=engine_reason,
        row_notes=prepared.rows.notes,
    )


def load_runner(policy: Policy, task: Task) -> Runner | None:
    """Load what plays episodes: an environment of several turns, or agents; None: responses of one turn. Raises
    ValueError where agents cannot be played here.
    """
    config = policy.config
    if config.environment.agent is None or not config.uses("environment"):
        return load_episode_runner(config, task=task, tokenizer=policy.tokenizer, policy=policy)
    if policy.world.size > 1:
        raise ValueError("environment.agent works in one process, and several were launched")
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ValueError("environment.agent needs starlette and uvicorn: pip install 'tinyrl[serve]'")
    return AgentRunner(config, positions=policy.positions)


def prompt_limit(policy: Policy, runner: Runner | None) -> PromptLimit:
    """Return the limit of prompts. Raises ValueError where the longest response leaves no room for one."""
    generation = policy.config.generation
    longest = longest_response(policy.config, runner)
    positions = policy.positions
    if longest >= positions:
        named = getattr(policy.causal.config.get_text_config(), "max_position_embeddings", None)
        is_longrope = named is not None and positions < named
        raise ValueError(
            no_room_for_prompt(
                policy.config,
                positions=positions,
                between=longest - generation.max_new_tokens,
                limited_by=" (its original_max_position_embeddings, as it has longrope)" if is_longrope else "",
            )
        )
    room = positions - longest
    words = f"generation.max_prompt_tokens={generation.max_prompt_tokens}"
    if room < generation.max_prompt_tokens:
        words = f"the {room:,} that responses of up to {longest:,} leave of the model's context length of {positions:,}"
    between = longest - generation.max_new_tokens
    return PromptLimit(
        tokens=min(generation.max_prompt_tokens, room),
        words=words,
        advice=partial(room_for_prompt, policy.config, positions=positions, between=between),
    )


def load_engine(policy: Policy, runner: Runner | None, prompts: list[PreparedPrompt]) -> tuple[SamplingEngine, str]:
    """Select the engine that samples responses to the prompts; return it, and why that one."""
    generation = policy.config.generation
    longest = longest_response(policy.config, runner)
    longest_prompt = most_tokens(prompts) if runner is None else runner.longest_prompt(prompts)
    stop = [*generation.stop, *(runner.environment.stop if runner else ())]
    return select_engine(
        generation.model_copy(update={"stop": stop}),
        policy,
        policy.tokenizer,
        longest=generation.max_prompt_tokens + longest,
        tried=min(longest_prompt + longest, policy.positions),
    )


def load_scorer(config: Config, task: Task, *, policy: Policy, options: Options, runner: Runner | None) -> Scorer:
    """Load the configuration's own rewards, not started."""
    dtype = resolve_dtype(config.model.dtype, on_cpu=policy.device.type == "cpu")
    model = build_reward_model(config, policy, dtype=dtype, trust_remote_code=options.trust_remote_code)
    return Scorer(
        config.reward,
        task,
        tokenizer=policy.tokenizer,
        policy=policy,
        policy_format=TextFormat.of_run(config),
        model=model,
        micro_batches=policy.micro_batches,
        environment=runner.environment if runner else None,
        num_steps=config.run.num_steps,
        needed=config.trains.rewarded,
    )
