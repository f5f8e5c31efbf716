"""All rewards of a run behind one call: functions, verifier, reward model; scores by name and their weighted sum."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import RewardConfig
from tinyrl.environments import Transcript
from tinyrl.environments.environment import Episode, episode_text
from tinyrl.models.distributed import ALONE, World
from tinyrl.models.micro_batches import MicroBatches, RowSizes, Work, own_rows
from tinyrl.models.reward_model import SequenceRewardModel, is_reward_adapter, positions_of
from tinyrl.models.roles import Roles
from tinyrl.models.templates import DATE, asks_for_date
from tinyrl.rewards.functions import FunctionReward, RewardCall, call_in_process
from tinyrl.rewards.judge import JudgeReward, Usage
from tinyrl.rewards.model_text import TextFormat, adapter_rows, reward_tokens
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import PreparedPrompt, columns_of
from tinyrl.workers.calls import Limits, RowFailure
from tinyrl.workers.worker import MAX_SCORE

# of a run under reward/, beside the mean of each reward by its name
METRICS = ("mean", "std", "dropped", "zero_spread_groups", "zero_spread_kept", "known_prompts")


@dataclass
class ScoreSheet:
    """scores (B, R): NaN where a reward does not apply or failed; rewards (B,): the weighted sum of those that apply,
    NaN where none does and where one failed, those of weight 0 aside; whys: B texts that came with scores, or None.
    """

    scores: Tensor
    rewards: Tensor
    failures: list[RowFailure] = field(default_factory=list)
    whys: list[str] | None = None


class Scorer:
    """Scores completions. State: a worker process for each reward function and the task's grader, the reward model.

    policy_format: how the prompts of the policy are written, and so how its answers end; needed: that there must be a
    reward.
    """

    def __init__(
        self,
        config: RewardConfig,
        task: Task,
        *,
        tokenizer: PreTrainedTokenizerBase,
        roles: Roles,
        policy_format: TextFormat,
        model: SequenceRewardModel | None = None,
        micro_batches: MicroBatches,
        environment: Any = None,
        needed: bool = True,
    ) -> None:
        self.task, self.tokenizer, self.roles, self.model = task, tokenizer, roles, model
        self.policy_format, self.micro_batches = policy_format, micro_batches
        self.by_agents = environment is not None and environment.by_agents
        self.plays = environment is not None and not self.by_agents
        self.environment_rewards = environment is not None and environment.rewards
        limits: Limits = {"timeout_s": config.timeout_s}
        self.functions = [
            JudgeReward(f, timeout_s=config.timeout_s, weight=f.weight)
            if f.is_judge
            else FunctionReward(f.use, weight=f.weight, **limits)
            for f in config.functions
        ]
        self.judges = [function for function in self.functions if isinstance(function, JudgeReward)]
        self.grader = FunctionReward(task.grader, **limits) if task.grader else None
        self.workers = [*self.functions, *([self.grader] if self.grader else [])]
        self.has_model = config.model is not None
        self.uses_verifier = config.is_verifier
        self.text_format = _text_format(config.model, model, policy_format.chat_template.get(DATE))
        self._adapter_tokenizer = tokenizer  # of the adapter's base, whoever's completions are judged
        self._adapter_prompts: dict[str, list[int]] = {}  # by the policy's text
        if self.uses_verifier and task.verify is None:
            self.uses_verifier = needed
        if self.uses_verifier and task.verify is None:
            raise ValueError(
                f"task {task.name} has no verifier, so a reward is needed: "
                "reward.functions=[{use: file.py:function}] or reward.model=PATH"
            )
        named = [(f.name, f.weight) for f in self.functions]
        named += [("model", 1.0)] if self.has_model else []
        named += [(task.name, 1.0)] if self.uses_verifier else []
        named += [("environment", 1.0)] if self.environment_rewards else []
        self.names = [
            name if [n for n, _ in named[:i]].count(name) == 0 else f"{name}_{i + 1}"
            for i, (name, _) in enumerate(named)
        ]
        if taken := [name for name in self.names if name in METRICS]:
            raise ValueError(
                f"reward.functions: `{taken[0]}` would overwrite the metric reward/{taken[0]} of a run; give the "
                "function another name"
            )
        self.retried: dict[str, str] = {}  # functions whose batch had to be tried row by row, and why at first
        self.weights = torch.tensor([weight for _, weight in named])

    def reading(self, tokenizer: PreTrainedTokenizerBase) -> Scorer:
        """The same rewards for completions of another model, with that model's tokenizer; closed with this scorer.

        Raises ValueError for a reward adapter, which reads tokens of its own base, where the vocabularies differ.
        """
        reads_tokens = self.has_model and self.model is None
        if reads_tokens and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "the reward model is an adapter on the first model's base and reads that base's tokens; the other "
                "model has another vocabulary, so it cannot be judged by it"
            )
        other = copy.copy(self)
        other.tokenizer = tokenizer
        return other

    def spent(self) -> Usage:
        """Return the cost of the judges since the last call."""
        total = Usage()
        for judge in self.judges:
            total = Usage(*(a + b for a, b in zip(astuple(total), astuple(judge.usage), strict=True)))
            judge.usage = Usage()
        return total

    def start(self) -> None:
        """Start the workers, so that a reward that does not load is found before training."""
        for function in self.workers:
            function.start()

    def close(self) -> None:
        for function in self.workers:
            function.close()

    def __call__(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        episodes: list[Episode] | None = None,
        group_size: int | None = None,
        world: World = ALONE,
    ) -> ScoreSheet:
        """Score B completions (token lists) of B prompts, or the episodes that they are; each `group_size` are of one
        prompt (None: all are). Of the processes of `world` rank 0 calls the functions, and each reads some of the rows
        with the reward model.
        """
        transcripts = None if episodes is None else [episode.transcript for episode in episodes]
        calls = _on_main(world, lambda: self._calls(prompts, completions, transcripts, group_size))
        said = [call.whys for call in calls if call.whys]
        if self.has_model:  # it stands before the verifier
            scores = self._model_scores(prompts, completions, transcripts, world)
            unusable = [row for row, score in enumerate(scores) if math.isnan(score)]
            failures = [RowFailure(row, "the reward model gave no number to learn from") for row in unusable]
            calls.insert(len(self.functions), RewardCall(scores, failures))
        columns = [call.scores for call in calls]
        failures = [failure for call in calls for failure in call.failures]
        counted = self.weights != 0 if self.weights.any() else torch.ones_like(self.weights, dtype=torch.bool)
        weighing = [call for call, counts in zip(calls, counted, strict=False) if counts]  # an environment is no call
        fatal = {failure.row for call in weighing for failure in call.failures}
        if self.environment_rewards:
            columns.append([0.0] * len(prompts) if episodes is None else [episode.reward for episode in episodes])
        for row, episode in enumerate(episodes or []):
            if episode.failure is not None:
                failures.append(RowFailure(row, episode.failure))
                fatal.add(row)
        scores = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), len(prompts)).T
        whys = ["\n".join(filter(None, of_row)) for of_row in zip(*said, strict=True)] if said else None
        rewards = torch.where(scores.isnan(), 0.0, scores * self.weights).sum(-1)
        dropped = scores[:, counted].isnan().all(-1)
        dropped[[*fatal]] = True
        return ScoreSheet(scores, torch.where(dropped, torch.nan, rewards), failures, whys)

    def verify(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        transcripts: list[Transcript] | None,
        world: World = ALONE,
    ) -> RewardCall:
        """The task's own verifier, whatever the training reward is; rank 0 of `world` calls it."""
        handed_over = self._handed_over
        return _on_main(world, lambda: [self._verify(prompts, handed_over(prompts, completions, transcripts))])[0]

    def _calls(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        transcripts: list[Transcript] | None,
        group_size: int | None,
    ) -> list[RewardCall]:
        """The scores of each function, then of the verifier where that is the reward."""
        answers = self._handed_over(prompts, completions, transcripts)
        columns = {**columns_of(prompts), "completion_ids": completions}
        calls = [self._asked(function, prompts, answers, columns, group_size) for function in self.functions]
        return [*calls, self._verify(prompts, answers)] if self.uses_verifier else calls

    def _verify(self, prompts: list[PreparedPrompt], answers: list[Any]) -> RewardCall:
        assert self.task.verify is not None
        columns = columns_of(prompts)
        if self.grader is not None:
            return self._asked(self.grader, prompts, answers, columns)
        return call_in_process(self.task.verify, self.task.name, [p.prompt for p in prompts], answers, columns)

    def _asked(
        self,
        function: FunctionReward | JudgeReward,
        prompts: list[PreparedPrompt],
        answers: list[Any],
        columns: dict[str, list[Any]],
        group_size: int | None = None,
    ) -> RewardCall:
        texts = [p.prompt for p in prompts]
        if isinstance(function, JudgeReward):
            call = function(texts, answers, columns, group_size=group_size)
        else:
            call = function(texts, answers, columns)
        if call.retried:
            self.retried.setdefault(function.name, call.retried)
        return call

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _handed_over(
        self, prompts: list[PreparedPrompt], completions: list[list[int]], transcripts: list[Transcript] | None
    ) -> list[Any]:
        """Completions as rewards get them; where an environment answers they are messages, whatever the data has. Of an
        agent's episode what it returned, as text or message by the data's form.
        """
        if transcripts is not None and self.by_agents:
            pairs = zip(prompts, transcripts, strict=True)
            return [said[0]["content"] if isinstance(p.prompt, str) else said for p, said in pairs]
        if transcripts is not None:
            return transcripts
        pairs = [(p, self.text(tokens)) for p, tokens in zip(prompts, completions, strict=True)]
        if self.plays:
            return [[{"role": "assistant", "content": p.opened + text}] for p, text in pairs]
        return [p.completion_for_reward(text) for p, text in pairs]

    def _model_scores(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        transcripts: list[Transcript] | None,
        world: World,
    ) -> list[float]:
        if self.model is not None:
            if transcripts is None:
                texts = [self.text(tokens) for tokens in completions]
            else:
                pairs = zip(prompts, transcripts, strict=True)
                texts = [episode_text(transcript).removeprefix(p.opened) for p, transcript in pairs]
            assert self.text_format is not None
            reads = {"text_format": self.text_format, "max_tokens": self.model.max_tokens}
            tokens = [
                reward_tokens(self.model.tokenizer, p.prompt, p.opened + text, **reads)
                for p, text in zip(prompts, texts, strict=True)
            ]
            scores = self.model.scores(tokens, micro_batches=self.micro_batches, world=world)
        else:
            tokenizer, text_format = self._adapter_tokenizer, self.text_format or self.policy_format
            tokens, answers = adapter_rows(
                tokenizer,
                [self._adapter_prompt(p) for p in prompts],
                completions,
                end=text_format.end(tokenizer),
                max_tokens=positions_of(self.roles.causal.config.get_text_config()),
            )
            scores = adapter_scores(self.roles, tokens, answers, micro_batches=self.micro_batches, world=world)
        return [s if abs(s) <= MAX_SCORE else math.nan for s in scores]

    def _adapter_prompt(self, prompt: PreparedPrompt) -> list[int]:
        """The prompt as the adapter learnt to read it: the policy's own tokens, unless it is written otherwise."""
        if self.text_format is None:
            return prompt.tokens
        if prompt.text not in self._adapter_prompts:
            rendered = self.text_format.render(self._adapter_tokenizer, prompt.prompt)
            self._adapter_prompts[prompt.text] = rendered.tokens
        return self._adapter_prompts[prompt.text]


def _text_format(path: str | None, model: SequenceRewardModel | None, day: Any) -> TextFormat | None:
    """Return how a reward model reads prompts; `day`: the date of the run, for a template that asks and has none."""
    if path is None:
        return None
    if model is not None:
        found = TextFormat.of_config(model.model.config)
        dated = {DATE: day} if day and asks_for_date(model.tokenizer) else {}
        return replace(found, chat_template=dated | found.chat_template)
    return TextFormat.of_adapter(path) if is_reward_adapter(path) else None  # a model whose weights are not loaded


@torch.inference_mode()
def adapter_scores(
    roles: Roles,
    prompts: list[list[int]],
    completions: list[list[int]],
    *,
    micro_batches: MicroBatches,
    world: World = ALONE,
) -> list[float]:
    """Score rows by the reward adapter on the shared base, read at each row's last token: token in, token out."""
    scores = torch.zeros(len(prompts), dtype=torch.float64)

    def run(rows: list[int]) -> None:
        batch = roles.batch([prompts[i] for i in rows], [completions[i] for i in rows], last_tokens=True)
        scores[rows] = roles.scores(batch).double().cpu()

    sizes = RowSizes.of(prompts, [len(c) for c in completions], packed=roles.packs)
    with roles.acting("reward"):
        micro_batches.run(Work(sizes, run, own_rows(sizes, None, world)))
    world.sum(scores)
    return scores.tolist()


def _on_main(world: World, calls: Callable[[], list[RewardCall]]) -> list[RewardCall]:
    """Return the result of `calls` on rank 0."""
    if world.size == 1:
        return calls()
    told = world.on_main(lambda: [asdict(call) for call in calls()])
    return [RewardCall(**{**one, "failures": [RowFailure(**f) for f in one["failures"]]}) for one in told]
