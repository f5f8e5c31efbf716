"""All rewards of a run behind one call: functions, judges, reward model, verifier, environment; their weighted sum."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import RewardConfig
from tinyrl.environments import Transcript
from tinyrl.environments.environment import NONSENSE, Episode, episode_text
from tinyrl.errors import ExplainedByCheck
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.policy import Policy
from tinyrl.models.reward_model import SequenceRewardModel, is_reward_adapter, positions_of
from tinyrl.models.tokens import DATE, asks_for_date
from tinyrl.rewards.functions import PROMPT_CHARS, FunctionReward, RewardCall, as_completion, call_in_process
from tinyrl.rewards.judge import JudgeGone, JudgeReward, text_of
from tinyrl.rewards.model_text import TextFormat, reward_tokens, within
from tinyrl.tasks import Task
from tinyrl.tasks.answers import answer_tokens, as_ended
from tinyrl.tasks.prompts import PreparedPrompt, columns_of
from tinyrl.text import one_line
from tinyrl.workers.calls import RowFailure
from tinyrl.workers.worker import MAX_SCORE

# metrics of a run under reward/, beside the mean of each reward by its name
METRICS = ("mean", "std", "dropped", "zero_spread_groups", "zero_spread_kept", "known_prompts", "slowest_seconds")
FEW = 4  # prompts whose answers all fail before a run is refused: the row of one may be at fault
JUDGED_PROMPTS = 8  # with gold answers, on which a judge is tried
SLOW_ROW_S = 1.0  # rows that take longer are named in the log of the reward's output


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
    """Scores completions. State: a worker process for each reward function and the task's grader, the reward model, and
    what `metrics` reports of the calls since it was last asked.

    policy_format: how the policy's prompts are written, and so how its answers end; needed: there must be a reward.
    Raises ValueError where there is none, and for names that a metric has.
    """

    def __init__(
        self,
        config: RewardConfig,
        task: Task,
        *,
        tokenizer: PreTrainedTokenizerBase,
        policy: Policy,
        policy_format: TextFormat,
        model: SequenceRewardModel | None = None,
        micro_batches: MicroBatches,
        environment: Any = None,
        needed: bool = True,
    ) -> None:
        self.task, self.tokenizer, self.policy, self.model = task, tokenizer, policy, model
        self.policy_format, self.micro_batches, self.environment = policy_format, micro_batches, environment
        self.functions: list[FunctionReward | JudgeReward] = []
        for f in config.functions:
            how: Any = {"timeout_s": config.timeout_s, "weight": f.weight}
            self.functions.append(JudgeReward(f, **how) if f.is_judge else FunctionReward(f.use, **how))
        self.judges = [function for function in self.functions if isinstance(function, JudgeReward)]
        self.grader = FunctionReward(task.grader, timeout_s=config.timeout_s) if task.grader else None
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
            raise ValueError(f"reward.functions: `{taken[0]}` is the name of a metric; give the function another one")
        self.retried: dict[str, str] = {}  # functions whose batch had to be tried row by row, and why at first
        self.weights = torch.tensor([f.weight for f in self.functions] + [1.0] * (len(named) - len(self.functions)))
        self.forget()

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Scorer:
        """Return the same rewards for completions of another model, with its tokenizer; closed with this scorer.

        Raises ValueError for a reward adapter, which reads tokens of its own base, where the vocabularies differ.
        """
        if self.has_model and self.model is None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "the reward model is an adapter on the first model's base, whose tokens it reads; the other model has "
                "another vocabulary"
            )
        other = copy.copy(self)
        other.tokenizer = tokenizer
        return other

    def forget(self) -> None:
        """Forget the completions since `metrics` was last asked, as those of an evaluation are no training step's."""
        self._slowest, self._respaced, self._completions = 0.0, 0, 0

    def metrics(self) -> dict[str, float]:
        """Return metrics of the calls since the last time, on rank 0: seconds of the slowest row, the share of
        completions that differ from another one to their prompt in white space alone, the cost of judges.
        """
        out = {"reward/slowest_seconds": self._slowest} if self._slowest else {}
        if self._completions:
            out["completion/whitespace_duplicates"] = self._respaced / self._completions
        for judge in self.judges:
            for name, spent in judge.usage.items():
                out[f"judge/{name}"] = out.get(f"judge/{name}", 0) + spent
            judge.usage = dict.fromkeys(judge.usage, 0)
        self.forget()
        return out

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
        how: Any = {"chat": self.policy_format.chat, "variables": self.policy_format.chat_template}
        for prompt in prompts[:FEW]:
            texts = (self.task.gold(prompt.row) or "", "", NONSENSE)
            scores = self([prompt] * 3, [answer_tokens(self.tokenizer, prompt, text, **how) for text in texts])
            failed = {failure.row: failure.reason for failure in reversed(scores.failures)}
            rewards, why = rewards or scores.rewards.tolist(), why or failed.get(min(failed, default=0), "")
            if len(failed) < 3 or not self.workers:
                break
        else:
            what = f"{'the gold answer, ' * has_gold}nothing and nonsense"
            raise ExplainedByCheck(f"the reward fails on {what}, so no completion would have one: {why}")
        self.forget()
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
            self._respaced += whitespace_duplicates([p.index for p in prompts], [text_of(answer) for answer in answers])
            self._completions += len(answers)
            calls = []
            for function in self.functions:
                how: Any = {"group_size": group_size} if isinstance(function, JudgeReward) else {}
                calls.append(self._noted(function, function(texts, answers, columns, **how), prompts))
            return [*calls, self._verify(prompts, answers)] if self.uses_verifier else calls

        calls = _on_main(world, call)
        whys = [call.whys for call in calls if call.whys]
        if self.has_model:  # before the verifier
            scores = self._model_scores(prompts, completions, transcripts, world)
            unusable = [row for row, score in enumerate(scores) if math.isnan(score)]
            failures = [RowFailure(row, "the reward model gave no number to learn from") for row in unusable]
            calls.insert(len(self.functions), RewardCall(scores, failures))
        columns, failures = [call.scores for call in calls], [failure for call in calls for failure in call.failures]
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
        if self.grader is not None:
            return self._noted(self.grader, self.grader(texts, answers, columns), prompts)
        return self._noted(None, call_in_process(self.task.verify, self.task.name, texts, answers, columns), prompts)

    def _noted(
        self, function: FunctionReward | JudgeReward | None, call: RewardCall, prompts: list[PreparedPrompt]
    ) -> RewardCall:
        """Note why rows were tried alone, and the slowest row; function: None for a verifier in this process."""
        seconds, row = call.slowest or (0.0, 0)
        self._slowest = max(self._slowest, seconds)
        if function is not None and call.retried:
            self.retried.setdefault(function.name, call.retried)
        if function is not None and seconds > SLOW_ROW_S:
            name = f"prompt {prompts[row].index} ({one_line(prompts[row].text, PROMPT_CHARS)})"
            function.printed.add(f"slowest row: {name}, {seconds:.3g} s\n".encode(errors="replace"))
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

    @torch.inference_mode()
    def _model_scores(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        transcripts: list[Transcript] | None,
        world: World,
    ) -> list[float]:
        """Score rows by the reward model; NaN for a score without a usable number. A classification model reads text
        in its own tokens, an adapter on the shared base the sampled tokens; both are scored at each row's last token.
        """
        rows, answers = list[list[int]](), list[list[int]]()
        if self.model is not None:
            assert self.model_format is not None
            how: Any = {"text_format": self.model_format, "max_tokens": self.model.max_tokens}
            for i, p in enumerate(prompts):
                text = self.text(completions[i]) if transcripts is None else episode_text(transcripts[i])
                text = p.opened + text.removeprefix("" if transcripts is None else p.opened)
                rows.append(reward_tokens(self.model.tokenizer, p.prompt, text, **how))
            found = self.model.scores(rows, micro_batches=self.micro_batches, world=world)
            return [s if abs(s) <= MAX_SCORE else math.nan for s in found]
        policy, tokenizer, own = self.policy, self._adapter_tokenizer, self.model_format
        room, end = positions_of(policy.causal.config.get_text_config()), (own or self.policy_format).end(tokenizer)
        for p, sampled in zip(prompts, completions, strict=True):
            if own is not None and p.text not in self._adapter_prompts:  # rendered as the adapter learnt to read it
                self._adapter_prompts[p.text] = own.render(tokenizer, p.prompt).tokens
            tokens = p.tokens if own is None else self._adapter_prompts[p.text]
            prompt, answer = within(tokenizer, tokens, as_ended(tokenizer, sampled, end=end), room)
            rows.append(prompt)
            answers.append(answer)
        scores = torch.zeros(len(prompts), dtype=torch.float64)

        def run(part: list[int]) -> None:
            batch = policy.batch([rows[i] for i in part], [answers[i] for i in part], last_tokens=True)
            scores[part] = policy.scores(batch).double().cpu()

        sizes = SequenceLengths.of(rows, [len(answer) for answer in answers], packed=policy.packs)
        with policy.acting("reward"):
            self.micro_batches.run(Work(sizes, run), world=world)
        world.sum(scores)
        return [s if abs(s) <= MAX_SCORE else math.nan for s in scores.tolist()]


def _on_main(world: World, calls: Callable[[], list[RewardCall]]) -> list[RewardCall]:
    """Return the result of `calls` on rank 0."""
    if world.size == 1:
        return calls()
    sent = world.on_main(lambda: [asdict(call) for call in calls()])
    return [RewardCall(**{**call, "failures": [RowFailure(**f) for f in call["failures"]]}) for call in sent]


def whitespace_duplicates(prompts: Sequence[int], texts: Sequence[str]) -> int:
    """Count completions that differ from another one to the same prompt in white space alone."""
    alike = defaultdict[tuple[int, str], list[str]](list)
    for prompt, text in zip(prompts, texts, strict=True):
        alike[prompt, "".join(text.split())].append(text)
    return sum(len(group) for group in alike.values() if len({*group}) > 1)
