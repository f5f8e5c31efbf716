"""The components of a run, built from its `Config`: device, tokenizer, roles, prompts, rewards, sampling engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.rows import few_held_out, fingerprints
from tinyrl.distributed import World, world
from tinyrl.environments.environment import Environment
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.game import Game, load_game
from tinyrl.generation.planned import Unsampled, likely_engine
from tinyrl.generation.select import engine_of
from tinyrl.generation.server import ServerEngine, engine_notes
from tinyrl.generation.turns_preview import episode_notes, show_episode
from tinyrl.models.batches import make_batch
from tinyrl.models.build import build_reward_model, build_roles, check_reference
from tinyrl.models.device import calibrate_threads, cores_here, make_accelerator, resolve_dtype
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.memory import bytes_by_role
from tinyrl.models.micro_batches import MicroBatches, RowSizes, StepRows
from tinyrl.models.outline import outline_roles
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Roles
from tinyrl.models.vocabulary import check_ids, check_vocabulary
from tinyrl.models.weights_io import load_roles, save_roles
from tinyrl.rewards.gold_check import check_gold
from tinyrl.rewards.scorer import Scorer
from tinyrl.sampling import Truncation
from tinyrl.tasks import Task, load_split, load_task
from tinyrl.tasks.prompts import PreparedPrompt, prepare_prompts
from tinyrl.text import visible

SHOWN_TOKENS = 64


@dataclass
class Options:
    """Command-line options that are not part of the configuration, and so not of what defines a run.

    weights: False loads everything but the numbers of models, which are then on the meta device (models/outline.py).
    """

    device: str = "auto"
    trust_remote_code: bool = False
    weights: bool = True


@dataclass
class Parts:
    """What every method needs: a device, a tokenizer, the roles on one base, and the micro-batch budget."""

    config: Config
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    roles: Roles
    micro_batches: MicroBatches

    @property
    def world(self) -> World:
        """The processes of the run."""
        return world()

    @property
    def positions(self) -> int:
        """How many tokens the model has positions for."""
        return positions_of(self.roles.causal.config.get_text_config())

    def check(self) -> list[str]:
        """Check what can only be checked now, before step 1; returns lines worth showing."""
        return []

    def preview(self) -> str:
        """What `--dry-run` shows besides the configuration; whoever loads rows has checked them by now."""
        return "configuration, model and rows are fine"

    def has_prompts(self) -> bool:
        """Whether another method finds prompts in the rows of task.data."""
        return True

    def step_rows(self) -> StepRows:
        """What a step learns from where rows are longest."""
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        """Bytes of weights by role, and of the optimizers once they have stepped."""
        trained = sum(p.numel() for role in self.roles.parameters.values() for p in role.values())
        per_parameter = 8 if self.config.optim.optimizer == "adamw" else 2
        return {**bytes_by_role(self.roles), "optimizers": trained * per_parameter}

    def describe_memory(self) -> str:
        """One line for the log."""
        return "memory of weights: " + ", ".join(f"{n} {b / 1e6:,.1f} MB" for n, b in self.memory().items() if b)

    def save_models(self, folder: Path) -> None:
        """Write the models of a run into a checkpoint folder."""
        save_roles(self.roles, folder, tokenizer=self.tokenizer)

    def load_models(self, folder: Path) -> None:
        """Put back what `save_models` wrote."""
        load_roles(self.roles, folder)

    def forget(self) -> None:
        """Let go of what was computed from rows or frozen models, which are others now."""

    def keep_output(self, write: Callable[[str], None]) -> None:
        """Hand what reward functions print to `write`, in whole lines, from now on."""

    def close(self) -> None:
        """End helper processes."""


@dataclass
class SamplingParts(Parts):
    """What methods that sample need in addition."""

    task: Task
    train_prompts: list[PreparedPrompt]
    eval_prompts: list[PreparedPrompt]
    scorer: Scorer
    engine: SamplingEngine
    engine_reason: str  # why it is that one
    row_fingerprints: dict[str, str]
    game: Game | None = None  # where an environment answers between turns

    def check(self) -> list[str]:
        """The reference at step 0, and the reward on a gold answer."""
        self._check_reference()
        if not self.world.is_main:  # rank 0 calls the rewards
            return []
        self.scorer.start()
        first = self.train_prompts[0]
        warning = check_gold(self.scorer, first).warning
        warnings = [f"warning: {warning} (prompt {first.text[:60]!r})"] if warning else []
        warnings += self._few_held_out()
        notes = [*self._engine_notes(), *(episode_notes(self.game) if self.game is not None else [])]
        return [f"sampling engine {self.engine.name} ({self.engine_reason})", *notes, self.describe_memory(), *warnings]

    def preview(self) -> str:
        """One rendered prompt with its tokens, the reward on three answers, and an episode where there are any."""
        self._check_reference()
        self.scorer.start()
        prompt, most = self.train_prompts[0], self.config.generation.max_prompt_tokens
        trial = check_gold(self.scorer, prompt)
        tokens = [f"{visible(str(self.tokenizer.decode([t])))!r}:{t}" for t in prompt.tokens[:SHOWN_TOKENS]]
        lines = [
            f"prompt ({len(prompt.tokens)} tokens of at most {most}):",
            visible(prompt.text),
            f"tokens: {' '.join(tokens)}{' ...' if len(prompt.tokens) > SHOWN_TOKENS else ''}",
            f"reward ({' + '.join(self.scorer.names)}):",
            *trial.lines(),
            *self._scripted_episode(prompt),
            *self._engine_notes(),
            f"prompts: {len(self.train_prompts)} to train on, {len(self.eval_prompts)} held out",
        ]
        return "\n".join([*lines, *([f"warning: {trial.warning}"] if trial.warning else []), *self._few_held_out()])

    def _scripted_episode(self, prompt: PreparedPrompt) -> list[str]:
        if self.game is None:
            return []
        stop = [*self.config.generation.stop, *self.game.environment.stop]
        return [*episode_notes(self.game), *show_episode(self.game, prompt, self.task, stop=stop)]

    def _engine_notes(self) -> list[str]:
        return engine_notes(self.engine, [p.tokens for p in self.train_prompts])

    def _few_held_out(self) -> list[str]:
        return few_held_out([p.prompt for p in self.eval_prompts]) if self.config.run.eval_prompts else []

    def _check_reference(self) -> None:
        prompts, temperature = [p.tokens for p in self.train_prompts[:4]], self.config.generation.temperature
        check_reference(self.roles, prompts, temperature=temperature, autocast=self.accelerator.autocast)

    def step_rows(self) -> StepRows:
        """The longest prompts, with responses as long as they may be."""
        on_policy, game = self.config.on_policy, self.game
        group = self.config.grpo.group_size if self.config.method == "grpo" else 1
        new = self.config.generation.max_new_tokens if game is None else game.columns
        longest = sorted((p.tokens for p in self.train_prompts), key=len, reverse=True)
        prompts = [longest[i % len(longest)] for i in range(on_policy.num_prompts) for _ in range(group)]
        sizes = RowSizes.of(prompts, [new] * len(prompts), packed=self.roles.packs)
        minibatch = min(on_policy.minibatch_size or len(prompts), len(prompts))
        return StepRows([[(prompt, [0] * new)] for prompt in prompts], sizes, minibatch)

    def memory(self) -> dict[str, int]:
        """With the reward model, and the copy that sampling reads."""
        model = self.scorer.model.model if self.scorer.model is not None else None
        roles = bytes_by_role(self.roles, reward_model=model)
        return {**roles, "sampling copy": self.engine.copy_bytes, "optimizers": super().memory()["optimizers"]}

    def keep_output(self, write: Callable[[str], None]) -> None:
        for function in [*self.scorer.workers, *(self.game.environment.workers if self.game else [])]:
            function.printed.send_to(write)

    def close(self) -> None:
        self.scorer.close()
        if isinstance(self.engine, ServerEngine):
            self.engine.close()
        if self.game is not None:
            self.game.environment.close()

    @property
    def truncation(self) -> Truncation:
        """How truncated responses are treated."""
        reward, most = self.config.reward, self.config.generation.max_new_tokens
        return Truncation(reward.truncated, reward.truncated_penalty, reward.overlong_tokens, most)


def load_parts(config: Config, *, options: Options) -> Parts:
    """Read the model and build policy, reference and critic. Random weights (LoRA's A) are drawn from run.seed."""
    accelerator = make_accelerator(options.device, dtype=config.model.dtype)
    dtype = resolve_dtype(config.model.dtype, on_cpu=accelerator.device.type == "cpu")
    torch.manual_seed(config.run.seed)
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
    micro_batches = MicroBatches(accelerator.device, config.run.micro_batch_tokens)
    return Parts(config, accelerator, tokenizer, roles, micro_batches)


def settle_threads(parts: Parts) -> str:
    """Choose torch's thread count (CPU only) by a short calibration with the run's own model, and say which."""
    wanted = parts.config.run.threads
    if parts.accelerator.device.type != "cpu":
        return f"device {parts.accelerator.device} ({torch.cuda.get_device_name(parts.accelerator.device)})"
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return f"device cpu, {wanted} threads (run.threads)"
    if parts.world.size > 1 and min(parts.world.gather(cores_here())) == 1:
        torch.set_num_threads(1)
        return f"device cpu, 1 thread ({parts.world.local_size} processes on this machine, a core for each)"
    batch = make_batch([list(range(1, 17))] * 32, [list(range(1, 17))] * 32)

    def work() -> None:
        with torch.no_grad(), parts.roles.acting("policy"):
            parts.roles.logprobs("policy", batch, temperature=1.0)

    threads, seconds = calibrate_threads(work)
    if parts.world.size > 1:  # one number for all: norms are summed by threads, and weights must stay the same
        threads = parts.world.on_main(lambda: threads)
        torch.set_num_threads(threads)
    timings = ", ".join(f"{n}: {s * 1e3:.1f} ms" for n, s in seconds.items())
    return f"device cpu, {threads} thread{'s' if threads > 1 else ''} (calibrated, {timings})"


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
        engine, why = Unsampled(likely_engine(config.generation, parts.roles, quantized=quantized)), "not tried"
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
