"""A run's parts (parts.py), built from its `Config`: device, tokenizer, roles, prompts, rewards, sampling engine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tinyrl.config.schema import Config
from tinyrl.data.rows import fingerprints
from tinyrl.environments.environment import Environment
from tinyrl.generation.engine import SamplingEngine, end_at_turn_end
from tinyrl.generation.planned import Unsampled
from tinyrl.generation.select import engine_of, planned_engine
from tinyrl.generation.turns import Game, load_game
from tinyrl.models.build import build_reward_model, build_roles
from tinyrl.models.device import cores_here, make_accelerator, resolve_dtype, threads_for
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.outline import outline_roles
from tinyrl.models.weight_checks import check_ids, check_vocabulary
from tinyrl.parts import Parts, SamplingParts
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.runs.rng_state import seed_generators
from tinyrl.tasks import Task, load_split, load_task
from tinyrl.tasks.prompts import PreparedPrompt, prepare_prompts


@dataclass
class Options:
    """Command-line options that are not part of the configuration, and so not of what defines a run.

    weights: False loads everything but the numbers of models, which are then on the meta device (models/outline.py).
    """

    device: str = "auto"
    trust_remote_code: bool = False
    weights: bool = True


def load_parts(config: Config, *, options: Options) -> Parts:
    """Read the model and build policy, reference and critic. Random weights (LoRA's A) are drawn from run.seed."""
    accelerator = make_accelerator(options.device, dtype=config.model.dtype)
    dtype = resolve_dtype(config.model.dtype, on_cpu=accelerator.device.type == "cpu")
    seed_generators(config.run.seed)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add up in another order
        torch.use_deterministic_algorithms(True, warn_only=True)
    trust = options.trust_remote_code
    tokenizer = load_tokenizer(config.model.path, revision=config.model.revision, trust_remote_code=trust)
    if options.weights:
        roles = build_roles(config, device=accelerator.device, dtype=dtype, trust_remote_code=trust)
    else:
        roles = outline_roles(config, dtype=dtype, trust_remote_code=trust)
    check_vocabulary(tokenizer, roles.causal, path=config.model.path)
    if roles.critic_model is not None:  # it reads the policy's tokens
        check_vocabulary(tokenizer, roles.critic_model, path=config.critic.path or config.model.path)
    end_at_turn_end(roles.causal, tokenizer, config.task)
    micro_batches = MicroBatches(accelerator.device, config.run.micro_batch_tokens)
    return Parts(config, accelerator, tokenizer, roles, micro_batches)


def settle_threads(parts: Parts) -> str:
    """Set torch's thread count (CPU only), by the model's width where run.threads is auto, and say which."""
    wanted = parts.config.run.threads
    if parts.accelerator.device.type != "cpu":
        return f"device {parts.accelerator.device} ({torch.cuda.get_device_name(parts.accelerator.device)})"
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return f"device cpu, {wanted} threads (run.threads)"
    if parts.world.size > 1 and min(parts.world.gather(cores_here())) == 1:
        torch.set_num_threads(1)
        return f"device cpu, 1 thread ({parts.world.local_size} processes on this machine, a core for each)"
    width = parts.roles.causal.config.get_text_config().hidden_size
    # One number for all processes: norms are summed by threads, and weights must stay the same.
    threads = threads_for(width=width, cores=min(parts.world.gather(cores_here())))
    torch.set_num_threads(threads)
    return f"device cpu, {threads} thread{'s' if threads > 1 else ''} (run.threads=auto)"


def load_sampling_parts(config: Config, *, options: Options) -> SamplingParts:
    """Everything a method that samples needs. Raises ValueError, in a sentence, for what a user can fix."""
    return _sampling_parts(config, options=options, judge=None)


def load_judged_parts(config: Config, *, options: Options, judge: Scorer) -> SamplingParts:
    """`load_sampling_parts`, with another run's scorer in place of the configuration's own rewards."""
    return _sampling_parts(config, options=options, judge=judge)


def _sampling_parts(config: Config, *, options: Options, judge: Scorer | None) -> SamplingParts:
    parts = load_parts(config, options=options)
    task = load_task(config.task.name or "rows", grading=config.task.grading)
    game = load_game(config, task, tokenizer=parts.tokenizer, roles=parts.roles)
    environment = game.environment if game is not None else None
    train_prompts, eval_prompts = (
        load_prompts(config, task, split, parts=parts, game=game) for split in ("train", "eval")
    )
    if judge is None:
        scorer = load_scorer(config, task, parts=parts, options=options, environment=environment)
    else:
        scorer = judge.reading(parts.tokenizer)
    stop = [*config.generation.stop, *(environment.stop if environment else ())]
    longest = config.generation.max_new_tokens if game is None else game.columns
    engine: SamplingEngine
    if options.weights:
        engine, why = engine_of(config.generation, parts.roles, parts.tokenizer, stop=stop, longest_response=longest)
    else:
        quantized = config.model.quantization is not None
        name = planned_engine(
            config.generation,
            parts.roles,
            device=parts.accelerator.device,
            longest_response=longest,
            quantized=quantized,
        )
        engine, why = Unsampled(name), "not tried"
    parts.micro_batches.make_room = engine.release
    return SamplingParts(
        **vars(parts),
        task=task,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        engine=engine,
        engine_reason=why,
        row_fingerprints=fingerprints([p.row for p in train_prompts], [p.row for p in eval_prompts]),
        game=game,
    )


def load_scorer(
    config: Config, task: Task, *, parts: Parts, options: Options, environment: Environment | None
) -> Scorer:
    """The configuration's own rewards, not started."""
    model = None
    if options.weights:
        dtype = resolve_dtype(config.model.dtype, on_cpu=parts.accelerator.device.type == "cpu")
        model = build_reward_model(config, parts.roles, dtype=dtype, trust_remote_code=options.trust_remote_code)
    return Scorer(
        config.reward,
        task,
        tokenizer=parts.tokenizer,
        roles=parts.roles,
        policy_format=TextFormat.of_run(config),
        model=model,
        micro_batches=parts.micro_batches,
        environment=environment,
    )


def load_prompts(
    config: Config, task: Task, split: str, *, parts: Parts, game: Game | None = None
) -> list[PreparedPrompt]:
    """The prompts of a split, tokenised and checked."""
    where, generation = config.task, config.generation
    rows = load_split(config, split)
    longest = generation.max_new_tokens if game is None else game.columns
    limit = generation.max_prompt_tokens
    positions = getattr(parts.roles.causal.config, "max_position_embeddings", None)
    if positions is not None and longest >= positions:
        read = "" if game is None else f" and up to {longest - generation.max_new_tokens} that are read between turns"
        raise ValueError(
            f"generation.max_new_tokens={generation.max_new_tokens}{read}, but the model has {positions} "
            "positions for prompt and response"
        )
    if positions is not None:
        limit = min(limit, positions - longest)
    prepared = prepare_prompts(
        task,
        rows,
        tokenizer=parts.tokenizer,
        chat=where.chat,
        system_prompt=where.system_prompt,
        variables=where.chat_template if game is None else game.variables,
        max_prompt_tokens=limit,
        long_prompts=where.long_prompts,
        openings=None if game is None else game.openings(task, rows),
    )
    check_ids((p.tokens for p in prepared), parts.tokenizer, parts.roles.causal)
    return prepared
