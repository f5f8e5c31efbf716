"""All rewards of a run behind one call: functions, judges, reward model, verifier, environment; their weighted sum."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import RewardConfig
from tinyrl.environments import Transcript
from tinyrl.environments.environment import NONSENSE, Episode, episode_text
from tinyrl.errors import ExplainedByCheck
from tinyrl.models.batches import MicroBatches, RowSizes, Work
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.reward_model import SequenceRewardModel, is_reward_adapter, positions_of
from tinyrl.models.roles import Roles
from tinyrl.models.tokens import DATE, asks_for_date
from tinyrl.rewards.functions import FunctionReward, RewardCall, as_completion, call_in_process
from tinyrl.rewards.judge import JudgeGone, JudgeReward, Usage
from tinyrl.rewards.model_text import TextFormat, reward_tokens, within
from tinyrl.tasks import Task
from tinyrl.tasks.answers import answer_tokens, as_ended
from tinyrl.tasks.prompts import PreparedPrompt, columns_of
from tinyrl.workers.calls import RowFailure
from tinyrl.workers.worker import MAX_SCORE

# metrics of a run under reward/, beside the mean of each reward by its name
METRICS = ("mean", "std", "dropped", "zero_spread_groups", "zero_spread_kept", "known_prompts")
FEW = 4  # prompts whose answers all fail before a run is refused: the row of one may be at fault
JUDGED_PROMPTS = 8  # with gold answers, on which a judge is tried


@dataclass
class Scores:
    """scores (B, R): NaN where a reward does not apply or failed. rewards (B,): the weighted sum of those that apply,
    NaN where none does and where one failed, those of weight 0 aside. whys: B comments that came with scores, or None.
    """

    scores: Tensor
    rewards: Tensor
    failures: list[RowFailure] = field(default_factory=list)
    whys: list[str] | None = None


class Scorer:
    """Scores completions. State: a worker process for each reward function and the task's grader, the reward model.

    policy_format: how the policy's prompts are written, and so how its answers end; needed: there must be a reward.
    Raises ValueError where there is none, and for names that a metric has.
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
        self.policy_format, self.micro_batches, self.environment = policy_format, micro_batches, environment
        seconds = config.timeout_s
        self.functions = [
            (JudgeReward(f, timeout_s=seconds, weight=f.weight) if f.is_judge else
             FunctionReward(f.use, timeout_s=seconds, weight=f.weight)) for f in config.functions
        ]  # fmt: skip
        self.judges = [function for function in self.functions if isinstance(function, JudgeReward)]
        self.grader = FunctionReward(task.grader, timeout_s=seconds) if task.grader else None
        self.workers = [*self.functions, *([self.grader] if self.grader else [])]
        self.has_model = config.model is not None
        self.model_format: TextFormat | None = None  # how the reward model reads prompts; None: the policy's tokens
        if model is not None:
            self.model_format = found = TextFormat.of_config(model.model.config)
            day = policy_format.chat_template.get(DATE)  # for a template that asks and has none
            if day and asks_for_date(model.tokenizer):
                self.model_format = replace(found, chat_template={DATE: day} | found.chat_template)
        elif config.model is not None and is_reward_adapter(config.model):
            self.model_format = TextFormat.of_adapter(config.model)
        self._adapter_tokenizer = tokenizer  # of the adapter's base, whoever's completions are judged
        self._adapter_prompts: dict[str, list[int]] = {}  # by the policy's text
        self.uses_verifier = config.is_verifier and (needed or task.verify is not None)
        if self.uses_verifier and task.verify is None:
            raise ValueError(
                f"task {task.name} has no verifier, so a reward is needed: "
                "reward.functions=[{use: file.py:function}] or reward.model=PATH"
            )
        self.environment_rewards = environment is not None and environment.rewards
        others = (("model", self.has_model), (task.name, self.uses_verifier), ("environment", self.environment_rewards))
        named = [f.name for f in self.functions] + [name for name, there in others if there]
        self.names = [name if named.index(name) == i else f"{name}_{i + 1}" for i, name in enumerate(named)]
        if taken := [name for name in self.names if name in METRICS]:
            raise ValueError(
                f"reward.functions: `{taken[0]}` would overwrite the metric reward/{taken[0]} of a run; give the "
                "function another name"
            )
        self.retried: dict[str, str] = {}  # functions whose batch had to be tried row by row, and why at first
        self.weights = torch.tensor([f.weight for f in self.functions] + [1.0] * (len(named) - len(self.functions)))

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Scorer:
        """Return the same rewards for completions of another model, with its tokenizer; closed with this scorer.

        Raises ValueError for a reward adapter, which reads tokens of its own base, where the vocabularies differ.
        """
        if self.has_model and self.model is None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "the reward model is an adapter on the first model's base and reads that base's tokens; the other "
                "model has another vocabulary, so it cannot be judged by it"
            )
        other = copy.copy(self)
        other.tokenizer = tokenizer
        return other

    def spent(self) -> Usage:
        """Return the cost of the judges since the last call."""
        used = [judge.usage for judge in self.judges]
        for judge in self.judges:
            judge.usage = Usage()
        return Usage(*(sum(getattr(usage, name.name) for usage in used) for name in fields(Usage)))

    def start(self) -> None:
        """Start the workers, so that a reward that does not load is found before training."""
        for function in self.workers:
            function.start()

    def close(self) -> None:
        for function in self.workers:
            function.close()

    def check(self, prompts: list[PreparedPrompt]) -> tuple[list[str], list[str]]:
        """Try the rewards before step 1; return notes and warnings. Raises ExplainedByCheck where all completions would
        fail or a judge does not tell gold answers from others, ValueError where a judge does not answer.
        """
        judged = [prompt.row for prompt in prompts if self.task.gold(prompt.row) is not None][:JUDGED_PROMPTS]
        try:
            warning = self.check_gold(prompts) if self.names else None
            notes = [judge.check(self.task, judged) for judge in self.judges if len(judged) > 1]
        except JudgeGone as gone:
            raise ValueError(str(gone)) from None
        return notes, [f"warning: reward: {warning} (prompt {prompts[0].text[:60]!r})"] if warning else []

    def check_gold(self, prompts: list[PreparedPrompt]) -> str | None:
        """Score the first prompt's gold answer, an empty completion and nonsense, as training would; return what is
        wrong: a function misreads completions, the gold answer gets no score or does not win. Raises ExplainedByCheck
        where a function fails on all three, and on those of the next few prompts.
        """
        rewards, why, has_gold = list[float](), "", self.task.gold(prompts[0].row) is not None
        for prompt in prompts[:FEW]:
            how = {"chat": self.policy_format.chat, "variables": self.policy_format.chat_template}
            gold = self.task.gold(prompt.row) or ""
            tokens = [answer_tokens(self.tokenizer, prompt, text, **how) for text in (gold, "", NONSENSE)]
            sheet = self([prompt] * 3, tokens)
            failed = {failure.row: failure.reason for failure in reversed(sheet.failures)}
            rewards, why = rewards or sheet.rewards.tolist(), why or failed.get(min(failed, default=0), "")
            if len(failed) < 3 or not self.workers:
                break
        else:
            what = f"{'the gold answer, ' * has_gold}nothing and nonsense"
            raise ExplainedByCheck(f"the reward fails on {what}, so no completion would have one: {why}")
        hint = next((function.chat_hint for function in self.functions if function.chat_hint), None)
        gold, empty, nonsense = rewards
        if hint or not has_gold:
            return hint
        if math.isnan(gold):
            return "the gold answer gets no score" + (f": {why}" if why else "")
        if gold <= max((score for score in (empty, nonsense) if not math.isnan(score)), default=-math.inf):
            rivals = f"an empty one ({empty:.3g}) or nonsense ({nonsense:.3g})"
            return f"the gold answer scores {gold:.3g}, no more than {rivals}"
        return None

    def __call__(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        episodes: list[Episode] | None = None,
        group_size: int | None = None,
        world: World = ALONE,
    ) -> Scores:
        """Score B completions (token lists) of B prompts, or the episodes that they are; each `group_size` are of one
        prompt (None: all are). Of the processes of `world` rank 0 calls the functions, and each reads some of the rows
        with the reward model.
        """
        transcripts = None if episodes is None else [episode.transcript for episode in episodes]

        def call() -> list[RewardCall]:
            answers = self._reward_inputs(prompts, completions, transcripts)
            texts, columns = [p.prompt for p in prompts], {**columns_of(prompts), "completion_ids": completions}
            calls = []
            for function in self.functions:
                how: Any = {"group_size": group_size} if isinstance(function, JudgeReward) else {}
                calls.append(self._noted(function.name, function(texts, answers, columns, **how)))
            return [*calls, self._verify(prompts, answers)] if self.uses_verifier else calls

        calls = _on_main(world, call)
        whys = [call.whys for call in calls if call.whys]
        if self.has_model:  # before the verifier
            scores = self._model_scores(prompts, completions, transcripts, world)
            unusable = [row for row, score in enumerate(scores) if math.isnan(score)]
            failures = [RowFailure(row, "the reward model gave no number to learn from") for row in unusable]
            calls.insert(len(self.functions), RewardCall(scores, failures))
        columns = [call.scores for call in calls]
        failures = [failure for call in calls for failure in call.failures]
        counted = self.weights != 0 if self.weights.any() else torch.ones_like(self.weights, dtype=torch.bool)
        fatal = [f.row for call, counts in zip(calls, counted, strict=False) if counts for f in call.failures]
        if self.environment_rewards:
            columns.append([0.0] * len(prompts) if episodes is None else [episode.reward for episode in episodes])
        for row, episode in enumerate(episodes or []):
            if episode.failure is not None:
                failures.append(RowFailure(row, episode.failure))
                fatal.append(row)
        scores = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), len(prompts)).T
        rewards = torch.where(scores.isnan(), 0.0, scores * self.weights).sum(-1)
        dropped = scores[:, counted].isnan().all(-1)
        dropped[fatal] = True
        joined = ["\n".join(filter(None, of_row)) for of_row in zip(*whys, strict=True)] if whys else None
        return Scores(scores, torch.where(dropped, torch.nan, rewards), failures, joined)

    def verify(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        transcripts: list[Transcript] | None,
        world: World = ALONE,
    ) -> RewardCall:
        """Call the task's own verifier, whatever the training reward is; on rank 0 of `world`."""
        answers = self._reward_inputs(prompts, completions, transcripts)
        return _on_main(world, lambda: [self._verify(prompts, answers)])[0]

    def _verify(self, prompts: list[PreparedPrompt], answers: list[Any]) -> RewardCall:
        assert self.task.verify is not None
        texts, columns = [p.prompt for p in prompts], columns_of(prompts)
        if self.grader is None:
            return call_in_process(self.task.verify, self.task.name, texts, answers, columns)
        return self._noted(self.grader.name, self.grader(texts, answers, columns))

    def _noted(self, name: str, call: RewardCall) -> RewardCall:
        if call.retried:
            self.retried.setdefault(name, call.retried)
        return call

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _reward_inputs(
        self, prompts: list[PreparedPrompt], completions: list[list[int]], transcripts: list[Transcript] | None
    ) -> list[Any]:
        """Return completions as rewards get them; with an environment they are messages, whatever the data has. Of an
        agent's episode it is what the agent returned, as text or message by the data's form.
        """
        by_agents = self.environment is not None and self.environment.by_agents
        if transcripts is not None:
            pairs = zip(prompts, transcripts, strict=True)
            return [said[0]["content"] if by_agents and isinstance(p.prompt, str) else said for p, said in pairs]
        chat = self.environment is not None and not by_agents
        texts = [p.opened + self.text(tokens) for p, tokens in zip(prompts, completions, strict=True)]
        return [as_completion(text, [] if chat else p.prompt) for text, p in zip(texts, prompts, strict=True)]

    def _model_scores(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        transcripts: list[Transcript] | None,
        world: World,
    ) -> list[float]:
        if self.model is None:
            scores = self._adapter_scores(prompts, completions, world)
        else:
            assert self.model_format is not None
            how, tokens = {"text_format": self.model_format, "max_tokens": self.model.max_tokens}, []
            for i, p in enumerate(prompts):
                text = self.text(completions[i]) if transcripts is None else episode_text(transcripts[i])
                text = p.opened + text.removeprefix("" if transcripts is None else p.opened)
                tokens.append(reward_tokens(self.model.tokenizer, p.prompt, text, **how))
            scores = self.model.scores(tokens, micro_batches=self.micro_batches, world=world)
        return [s if abs(s) <= MAX_SCORE else math.nan for s in scores]

    @torch.inference_mode()
    def _adapter_scores(self, prompts: list[PreparedPrompt], completions: list[list[int]], world: World) -> list[float]:
        """Score rows by the reward adapter on the shared base, at each row's last token: token in, token out."""
        roles, tokenizer, text_format = self.roles, self._adapter_tokenizer, self.model_format
        room, end = (
            positions_of(roles.causal.config.get_text_config()),
            (text_format or self.policy_format).end(tokenizer),
        )
        asked, answers = list[list[int]](), list[list[int]]()
        for p, sampled in zip(prompts, completions, strict=True):
            tokens = p.tokens
            if text_format is not None:  # rendered as the adapter learnt to read it
                if p.text not in self._adapter_prompts:
                    self._adapter_prompts[p.text] = text_format.render(tokenizer, p.prompt).tokens
                tokens = self._adapter_prompts[p.text]
            prompt, answer = within(tokenizer, tokens, as_ended(tokenizer, sampled, end=end), room)
            asked.append(prompt)
            answers.append(answer)
        scores = torch.zeros(len(prompts), dtype=torch.float64)

        def run(rows: list[int]) -> None:
            batch = roles.batch([asked[i] for i in rows], [answers[i] for i in rows], last_tokens=True)
            scores[rows] = roles.scores(batch).double().cpu()

        sizes = RowSizes.of(asked, [len(answer) for answer in answers], packed=roles.packs)
        with roles.acting("reward"):
            self.micro_batches.run(Work(sizes, run, world=world))
        world.sum(scores)
        return scores.tolist()


def _on_main(world: World, calls: Callable[[], list[RewardCall]]) -> list[RewardCall]:
    """Return the result of `calls` on rank 0."""
    if world.size == 1:
        return calls()
    sent = world.on_main(lambda: [asdict(call) for call in calls()])
    return [RewardCall(**{**call, "failures": [RowFailure(**f) for f in call["failures"]]}) for call in sent]
