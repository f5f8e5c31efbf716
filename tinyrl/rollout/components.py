"""Loaded components of a run: device, tokenizer, models; for methods that sample also prompts, rewards and engine."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyrl.config.methods import METHODS
from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import FEW, few_held_out, fingerprints, prompt_key
from tinyrl.generation.agents import AgentRunner
from tinyrl.generation.engine import SamplingEngine, end_at_turn_end, eos_token_ids, unused_defaults
from tinyrl.generation.engines import engine_of
from tinyrl.generation.turns import EpisodeRunner, episode_notes, load_episode_runner
from tinyrl.models.batches import MicroBatches, RowSizes, SequenceBatch, Work
from tinyrl.models.build import build_reward_model, build_roles
from tinyrl.models.checks import check_reference
from tinyrl.models.device import cores_here, make_accelerator, resolve_dtype, seed_generators, threads_for, to_device
from tinyrl.models.loading import check_ids, check_vocabulary, embedding_rows, load_tokenizer
from tinyrl.models.parallel import World, world
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Role, bytes_by_role, load_roles, save_roles
from tinyrl.models.tokens import DATE, asks_for_date
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.sample import Sample, Tokens, batch_of, sizes_of
from tinyrl.runs.launched import Options
from tinyrl.tasks import Task, layout_notes, load_splits, load_task
from tinyrl.tasks.answers import template_fault
from tinyrl.tasks.prompts import PreparedPrompt, marker_notes, prepare_prompts


def trainer_of(method: str) -> Any:
    """The class of a method's trainer; imported now, since others may need libraries that this one does not."""
    module, _, name = METHODS[method].trainer.partition(":")
    return getattr(importlib.import_module(module), name)


class Parts:
    """What every method needs: a device, a tokenizer, the roles on one base, and the micro-batch budget.

    Random weights (LoRA's A) are drawn from run.seed. Raises ValueError, in a sentence, for what a user can fix.
    """

    learns: ClassVar[bool] = False  # whether it is to train, so that a teacher is loaded too

    def __init__(self, config: Config, *, options: Options) -> None:
        self.config = config
        self.accelerator = make_accelerator(options.device, dtype=config.model.dtype)
        dtype = resolve_dtype(config.model.dtype, on_cpu=self.accelerator.device.type == "cpu")
        seed_generators(config.run.seed)
        if config.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add up in another order
            torch.use_deterministic_algorithms(True, warn_only=True)
        model, trust = config.model, options.trust_remote_code
        self.tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=trust)
        self.config = config = self._dated(config)
        self.roles = build_roles(
            config, device=self.accelerator.device, dtype=dtype, trust_remote_code=trust, teacher=self.learns
        )
        check_vocabulary(self.tokenizer, self.roles.causal, path=model.path)
        if self.roles.critic_model is not None:  # it reads the policy's tokens
            rows, critic = embedding_rows(self.roles.causal), config.critic.path or model.path
            check_vocabulary(self.tokenizer, self.roles.critic_model, path=critic, sampled=rows)
        end_at_turn_end(self.roles.causal, self.tokenizer, config.task)
        self.micro_batches = MicroBatches(self.accelerator.device, config.run.micro_batch_tokens)

    def _dated(self, config: Config) -> Config:
        """Record the date of the run, where the chat template asks for one; a run that has one keeps it."""
        kept, where = config.task.chat_template, config.task
        variables = {name: value for name, value in kept.items() if name != DATE}
        if where.chat is not False and asks_for_date(self.tokenizer):
            variables[DATE] = kept.get(DATE) or self.world.on_main(lambda: date.today().isoformat())
        return config.model_copy(update={"task": where.model_copy(update={"chat_template": variables})})

    @property
    def world(self) -> World:
        return world()

    @property
    def positions(self) -> int:
        return positions_of(self.roles.causal.config.get_text_config())

    def check(self) -> list[str]:
        """Check what can only be checked now, before step 1; returns lines worth showing."""
        return []

    def template_fault(self) -> str | None:
        """What is wrong with the chat template, where prompts go through it, for a policy that is to end its turns."""
        where, ends = self.config.task, eos_token_ids(self.roles, self.tokenizer)
        return template_fault(self.tokenizer, ends, chat=where.chat, variables=where.chat_template)

    def template_warnings(self) -> list[str]:
        fault = self.template_fault()
        return [f"warning: chat template: {fault}"] if fault else []

    def memory(self) -> dict[str, int]:
        trained = sum(p.numel() for role in self.roles.parameters.values() for p in role.values())
        per_parameter = 8 if self.config.optim.optimizer == "adamw" else 2
        return {**bytes_by_role(self.roles), "optimizers": trained * per_parameter}

    def describe_memory(self) -> str:
        return "memory of weights: " + ", ".join(f"{n} {b / 1e6:,.1f} MB" for n, b in self.memory().items() if b)

    def save_models(self, folder: Path) -> None:
        save_roles(self.roles, folder, tokenizer=self.tokenizer, revision=self.config.model.revision)

    def load_models(self, folder: Path) -> None:
        load_roles(self.roles, folder)

    def forward(
        self,
        compute: Callable[[list[int]], tuple[Tensor, ...]],
        sizes: RowSizes,
        *,
        role: Role,
        width: int = 1,
        among: World | None = None,
    ) -> tuple[Tensor, ...]:
        """Run `compute` (rows -> tensors (n, at most width)) without gradient; returns (N, width) tensors on the CPU.
        Each process of `among` (None: all) computes some of the rows.
        """
        device, among = self.roles.device, self.world if among is None else among
        outputs: list[Tensor] = []

        def run(micro: list[int]) -> None:
            results = compute(micro)
            if not outputs:
                outputs.extend(torch.zeros(len(sizes), width, device=device) for _ in results)
            where = to_device(torch.as_tensor(micro), device)
            for output, result in zip(outputs, results, strict=True):
                output[where, : result.shape[1]] = result.float()

        with torch.no_grad(), self.roles.acting(role), self.accelerator.autocast():
            self.micro_batches.run(Work(sizes, run, world=among))
        count = max(1, *among.gather(len(outputs)))  # none where it had no rows
        outputs += [torch.zeros(len(sizes), width, device=device) for _ in range(count - len(outputs))]
        among.sum(*outputs)
        return tuple(output.cpu() for output in outputs)

    def forget(self) -> None:
        """Invalidate what was computed from rows or frozen models, which are others now."""

    def keep_output(self, write: Callable[[str], None]) -> None:
        """Hand what reward functions print to `write`, in whole lines, from now on."""

    def close(self) -> None:
        """End helper processes."""


def resolve_threads(parts: Parts) -> str:
    """Set torch's thread count (CPU only), by the model's width where run.threads is auto, and say which."""
    wanted = parts.config.run.threads
    if parts.accelerator.device.type != "cpu":
        return f"device {parts.accelerator.device} ({torch.cuda.get_device_name(parts.accelerator.device)})"
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return f"device cpu, {wanted} threads (run.threads)"
    cores = min(parts.world.gather(cores_here()))
    if parts.world.size > 1 and cores == 1:
        torch.set_num_threads(1)
        return f"device cpu, 1 thread ({parts.world.local_size} processes on this machine, a core for each)"
    # One number for all processes: norms are summed by threads, and weights must stay the same.
    threads = threads_for(width=parts.roles.causal.config.get_text_config().hidden_size, cores=cores)
    torch.set_num_threads(threads)
    return f"device cpu, {threads} thread{'s' if threads > 1 else ''} (run.threads=auto)"


class SamplingParts(Parts):
    """What methods that sample need in addition. judge: another run's scorer, in place of the configuration's own."""

    def __init__(self, config: Config, *, options: Options, judge: Scorer | None = None) -> None:
        rows = load_splits(config)  # a bad row is reported before a weight is loaded
        super().__init__(config, options=options)
        config = self.config
        self.task: Task = load_task(config.task.name or "rows", grading=config.task.grading)
        self.runner: EpisodeRunner | AgentRunner | None
        if config.environment.agent is not None and config.uses("environment"):
            if self.world.size > 1:
                raise ValueError("environment.agent works in one process, and several were launched")
            if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
                raise ValueError("environment.agent needs starlette and uvicorn: pip install 'tinyrl[serve]'")
            self.runner = AgentRunner(config, positions=self.positions)
        else:
            self.runner = load_episode_runner(config, tokenizer=self.tokenizer, roles=self.roles)
        generation, longest, positions = config.generation, self.longest_response, self.positions
        if longest >= positions:
            between = longest - generation.max_new_tokens
            read = "" if self.runner is None else f" and up to {between} that are read between turns"
            raise ValueError(
                f"generation.max_new_tokens={generation.max_new_tokens}{read}, but the model has {positions} "
                "positions for prompt and response (of longrope those of original_max_position_embeddings)"
            )
        limit = min(generation.max_prompt_tokens, positions - longest)
        self.train_prompts, self.eval_prompts = (self.prepared(split, limit=limit) for split in rows)
        self.owns_scorer = judge is None
        if judge is None:
            self.scorer = load_scorer(config, self.task, parts=self, options=options, runner=self.runner)
        else:
            self.scorer = judge.with_tokenizer(self.tokenizer)
        stop = [*generation.stop, *(self.runner.environment.stop if self.runner else ())]
        self.engine: SamplingEngine
        prompts = [len(p.tokens) for p in (*self.train_prompts, *self.eval_prompts)]
        by_agents = isinstance(self.runner, AgentRunner)  # which write their own prompts
        self.engine, self.engine_reason = engine_of(
            generation,
            self.roles,
            self.tokenizer,
            stop=stop,
            longest_response=longest,
            longest_prompt=generation.max_prompt_tokens if by_agents else max(prompts, default=0),
        )
        self.micro_batches.make_room = self.engine.release
        self.row_fingerprints = fingerprints([p.row for p in self.train_prompts], [p.row for p in self.eval_prompts])

    def over(
        self,
        samples: list[Sample],
        compute: Callable[[SequenceBatch], tuple[Tensor, ...]],
        *,
        role: Role,
        tokens: Tokens = "loss",
        among: World | None = None,
    ) -> tuple[Tensor, ...]:
        """`forward` over samples: `compute` takes a batch of them, and (B, T) tensors come back."""
        return self.forward(
            lambda rows: compute(batch_of([samples[i] for i in rows], self.roles, tokens)),
            sizes_of(samples, self.roles),
            role=role,
            width=max(len(sample.response) for sample in samples),
            among=among,
        )

    @property
    def longest_response(self) -> int:
        """Tokens of a response, with what is read between its turns."""
        return self.config.generation.max_new_tokens if self.runner is None else self.runner.max_episode_tokens

    def prepared(
        self, rows: list[Row], *, limit: int | None = None, openings: list[str | None] | None = None
    ) -> list[PreparedPrompt]:
        """Prompts of rows, with what an environment, or `openings`, add to them; `limit`: tokens of a prompt."""
        where, runner = self.config.task, self.runner
        if openings is None and runner is not None:
            openings = runner.openings(self.task, rows)
        prepared = prepare_prompts(
            self.task,
            rows,
            tokenizer=self.tokenizer,
            chat=where.chat,
            system_prompt=where.system_prompt,
            variables=where.chat_template if runner is None else runner.variables,
            max_prompt_tokens=1 << 30 if limit is None else limit,
            long_prompts=where.long_prompts,
            openings=openings,
        )
        check_ids((p.tokens for p in prepared), self.tokenizer, self.roles.causal)
        return prepared

    def template_warnings(self) -> list[str]:
        rows = [{"prompt": prompt.prompt} for prompt in self.train_prompts + self.eval_prompts]
        return super().template_warnings() + marker_notes(self.tokenizer, rows, chat=self.config.task.chat)

    def check(self) -> list[str]:
        """Check the reference at step 0, and the reward on a gold answer."""
        config, prompts = self.config, [prompt.tokens for prompt in self.train_prompts]
        how: Any = {"temperature": config.generation.temperature, "autocast": self.accelerator.autocast}
        check_reference(self.roles, prompts[:4], **how)
        if not self.world.is_main:  # rank 0 calls the rewards
            return []
        self.scorer.start()
        judged, warnings = self.scorer.check(self.train_prompts)
        warnings += self.template_warnings()
        if config.run.eval_prompts:
            held_out, train = ({prompt_key(p.prompt) for p in of} for of in (self.eval_prompts, self.train_prompts))
            warnings += few_held_out(len(held_out), trained_on=len(held_out) < FEW and held_out <= train)
        notes = [*layout_notes(self.train_prompts[0].row), *self.engine.start(prompts)]
        if isinstance(self.runner, AgentRunner):
            notes.append(f"environment {self.runner.environment.describe()}")
        elif self.runner is not None:
            notes += episode_notes(self.runner)
        notes += filter(None, [*judged, unused_defaults(self.roles.causal, config.generation)])
        return [f"sampling engine {self.engine.name} ({self.engine_reason})", *notes, self.describe_memory(), *warnings]

    def memory(self) -> dict[str, int]:
        model = self.scorer.model.model if self.scorer.model is not None else None
        roles = bytes_by_role(self.roles, reward_model=model)
        return {**roles, "sampling copy": self.engine.copy_bytes, "optimizers": super().memory()["optimizers"]}

    def keep_output(self, write: Callable[[str], None]) -> None:
        for function in [*self.scorer.workers, *(self.runner.environment.workers if self.runner else [])]:
            function.printed.send_to(write)

    def close(self) -> None:
        if self.owns_scorer:
            self.scorer.close()
        self.engine.close()
        if self.runner is not None:
            self.runner.close()


def load_scorer(
    config: Config, task: Task, *, parts: Parts, options: Options, runner: EpisodeRunner | AgentRunner | None
) -> Scorer:
    """The configuration's own rewards, not started."""
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
        environment=runner.environment if runner else None,
        needed=config.trains.rewarded,
    )
