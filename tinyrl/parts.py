"""What a run is made of, once loaded: models, prompts, scorer, sampling engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.rows import few_held_out
from tinyrl.distributed import World, world
from tinyrl.generation.engine import SamplingEngine, eos_token_ids
from tinyrl.generation.turns import Game
from tinyrl.generation.turns_preview import episode_notes, show_episode
from tinyrl.models.build import check_reference
from tinyrl.models.memory import bytes_by_role
from tinyrl.models.micro_batches import MicroBatches, RowSizes, StepRows
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Roles
from tinyrl.models.weights_io import load_roles, save_roles
from tinyrl.rewards.scorer import Scorer
from tinyrl.rewards.trial import check_gold
from tinyrl.sampling import Truncation
from tinyrl.tasks import Task
from tinyrl.tasks.answers import template_fault
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.text import visible

SHOWN_TOKENS = 64


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

    def template_fault(self) -> str | None:
        """What is wrong with the chat template, where prompts go through it, for a policy that is to end its turns."""
        where, ends = self.config.task, eos_token_ids(self.roles, self.tokenizer)
        return template_fault(self.tokenizer, ends, chat=where.chat, variables=where.chat_template)

    def template_warnings(self) -> list[str]:
        """A line that says so."""
        fault = self.template_fault()
        return [f"warning: chat template: {fault}"] if fault else []

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
        warning = check_gold(self.scorer, self.train_prompts).warning
        warnings = [f"warning: {warning} (prompt {first.text[:60]!r})"] if warning else []
        warnings += self.template_warnings() + self._few_held_out()
        notes = [*self._engine_notes(), *(episode_notes(self.game) if self.game is not None else [])]
        return [f"sampling engine {self.engine.name} ({self.engine_reason})", *notes, self.describe_memory(), *warnings]

    def preview(self) -> str:
        """One rendered prompt with its tokens, the reward on three answers, and an episode where there are any."""
        self._check_reference()
        self.scorer.start()
        prompt, most = self.train_prompts[0], self.config.generation.max_prompt_tokens
        trial = check_gold(self.scorer, self.train_prompts)
        tokens = [f"{visible(str(self.tokenizer.decode([t])))!r}:{t}" for t in prompt.tokens[:SHOWN_TOKENS]]
        lines = [
            f"prompt ({len(prompt.tokens)} tokens of at most {most}):",
            visible(prompt.text),
            f"tokens: {' '.join(tokens)}{' ...' if len(prompt.tokens) > SHOWN_TOKENS else ''}",
            f"reward ({' + '.join(self.scorer.names)}):",
            *trial.lines(),
            *self._scripted_episode(prompt),
            *self._engine_notes(),
            *self.template_warnings(),
            f"prompts: {len(self.train_prompts)} to train on, {len(self.eval_prompts)} held out",
        ]
        return "\n".join([*lines, *([f"warning: {trial.warning}"] if trial.warning else []), *self._few_held_out()])

    def _scripted_episode(self, prompt: PreparedPrompt) -> list[str]:
        if self.game is None:
            return []
        stop = [*self.config.generation.stop, *self.game.environment.stop]
        return [*episode_notes(self.game), *show_episode(self.game, prompt, self.task, stop=stop)]

    def _engine_notes(self) -> list[str]:
        return self.engine.start([p.tokens for p in self.train_prompts])

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
        self.engine.close()
        if self.game is not None:
            self.game.environment.close()

    @property
    def truncation(self) -> Truncation:
        """How truncated responses are treated."""
        reward, most = self.config.reward, self.config.generation.max_new_tokens
        return Truncation(reward.truncated, reward.truncated_penalty, reward.overlong_tokens, most)
