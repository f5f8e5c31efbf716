"""All rewards of a run behind one call: functions, judges, reward model, verifier, environment; their weighted sum."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import RewardConfig
from tinyrl.data.images import images_of, shown_text
from tinyrl.data.messages import Prompt, as_completion
from tinyrl.data.thoughts import ends_in_thought
from tinyrl.environments import Rewards, Transcript
from tinyrl.environments.environment import NONSENSE, Environment, Episode, episode_text
from tinyrl.environments.tool_calls import encodable
from tinyrl.models.batch import Example
from tinyrl.models.micro_batches import MicroBatches, Work
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.policy import Policy
from tinyrl.models.reward_model import SequenceRewardModel, positions_of
from tinyrl.models.tokens import DATE, asks_for_date
from tinyrl.process.errors import ExplainedByCheck
from tinyrl.rewards.budget import JUDGED_ROWS, TRIED_ANSWERS, TRIED_PROMPTS
from tinyrl.rewards.functions import AS_MESSAGES, FunctionReward, verifier_of
from tinyrl.rewards.holes import in_forms, right_value
from tinyrl.rewards.judge import JudgeGone, JudgeReward
from tinyrl.rewards.model_text import TextFormat, reward_tokens, within
from tinyrl.rewards.question import plain_text
from tinyrl.runs.metrics import REWARD_STATISTICS
from tinyrl.tasks import Task
from tinyrl.tasks.answers import answer_tokens, as_ended
from tinyrl.tasks.grading import answer_text
from tinyrl.tasks.own import OwnTask
from tinyrl.tasks.prompts import LongText, PreparedPrompt, row_columns
from tinyrl.tasks.turn_text import turn_text
from tinyrl.text import one_line
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.progress import Progress
from tinyrl.workers.values import MAX_SCORE, RowFailure, RowResults

PROMPT_CHARS = 80  # of a prompt, in the output of a reward
SLOW_ROW_S = 1.0  # a row that takes longer is named in reward_output.log


@dataclass
class Scores:
    """scores (B, R): NaN where a reward does not apply or failed. rewards (B,): the weighted sum of those that apply,
    NaN where none does and where one failed, those of weight 0 aside. comments: B texts that came with scores, or None.
    """

    scores: Tensor
    rewards: Tensor
    failures: list[RowFailure] = field(default_factory=list)
    comments: list[str] | None = None


@dataclass(frozen=True)
class Completions:
    """What rewards score: B completions, as tokens, of B prompts, or the episodes that they are; each `group_size` are
    of one prompt (None: all are). texts: as reward functions get them, on rank 0 of `world`.
    """

    prompts: list[PreparedPrompt]
    tokens: list[list[int]]
    episodes: list[Episode] | None
    group_size: int | None
    world: World
    progress: Progress
    texts: list[Any] = field(default_factory=list)

    @property
    def transcripts(self) -> list[Transcript] | None:
        return None if self.episodes is None else [episode.transcript for episode in self.episodes]


@dataclass(frozen=True)
class RewardSource:
    """One of the rewards of a run. on_main: rank 0 calls it, since it is user code or a judge. parts: names of what it
    is made of, a judge's criteria, which are logged beside it.
    """

    name: str
    weight: float
    score: Callable[[Completions], RowResults]
    on_main: bool
    parts: list[str] = field(default_factory=list)

    def with_parts(self, results: RowResults) -> list[RowResults]:
        """Return the results, then those of each part."""
        return [results, *(RowResults(results.parts[name]) for name in self.parts)]


def unique_names(names: list[str]) -> list[str]:
    """Append the number of a reward to its name where an earlier one or a metric of rewards has that name."""
    unique = list[str]()
    for number, name in enumerate(names, start=1):
        is_taken = name in names[: number - 1] or f"reward/{name}" in REWARD_STATISTICS
        unique.append(f"{name}_{number}" if is_taken else name)
    return unique


class Scorer:
    """Scores completions. State: a worker process for each reward function and the task's grader, the reward model, and
    what `metrics` reports of the calls since it was last asked.

    policy_format: how the policy's prompts are written; num_steps: of the run, for functions that ask how far it is;
    needed: there must be a reward. Raises ValueError where there is none.
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
        environment: Environment | None = None,
        num_steps: int = 1,
        needed: bool = True,
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.policy = policy
        self.model = model
        self.policy_format = policy_format
        self.micro_batches = micro_batches
        self.environment = environment
        self.num_steps = num_steps
        self.functions: list[FunctionReward | JudgeReward] = []
        for f in config.functions:
            how: Any = {"timeout_s": config.timeout_s, "weight": f.weight}
            self.functions.append(JudgeReward(f, **how) if f.is_judge else FunctionReward(f.use, **how))
        self.verifier = verifier_of(task, timeout_s=config.timeout_s) if task.has_verifier else None
        self.workers: list[WorkerFunction | JudgeReward] = [*self.functions]
        if self.verifier is not None:
            self.workers.append(self.verifier)
        if isinstance(task, OwnTask):
            self.workers.append(task.code.worker)
        self.has_model = config.model is not None
        self.model_format = TextFormat()  # how the reward model reads prompts
        if model is not None:
            self.model_format = found = TextFormat.of_config(model.model.config)
            day = policy_format.chat_template.get(DATE)  # for a template that asks and has none
            if day and asks_for_date(model.tokenizer):
                self.model_format = replace(found, chat_template={DATE: day} | found.chat_template)
        elif config.model is not None:
            self.model_format = TextFormat.of_adapter(config.model)
        self._adapter_tokenizer = tokenizer  # of the adapter's base, whoever's completions are judged
        self.environment_rewards: Rewards = "none" if environment is None else environment.rewards
        needs_verifier = needed and self.environment_rewards == "none"
        is_replaced = self.environment_rewards == "all"  # by a class with get_reward, as by reward functions
        self.replaces_verifier = config.is_verifier and is_replaced and task.has_verifier
        self.uses_verifier = config.is_verifier and not is_replaced and (needs_verifier or task.has_verifier)
        if self.uses_verifier and not task.has_verifier:
            raise ValueError(
                f"task {task.name} has no verifier, so a reward is needed: "
                "reward.functions=[{use: file.py:function}] or reward.model=PATH"
            )
        self.sources = self._sources()
        self.names = list[str]()  # of the columns of scores: rewards, each followed by its parts
        weights = list[float]()
        for source in self.sources:
            self.names += [source.name, *(f"{source.name}/{part}" for part in source.parts)]
            weights += [source.weight, *(0.0 for _ in source.parts)]
        self.weights = torch.tensor(weights)
        self.forget()

    def _sources(self) -> list[RewardSource]:
        """List the rewards in the order of their scores."""
        sources = list[RewardSource]()
        for function in self.functions:
            score = partial(self._by_function, function)
            parts = function.parts if isinstance(function, JudgeReward) else []
            sources.append(RewardSource(function.name, function.weight, score, on_main=True, parts=parts))
        if self.has_model:
            sources.append(RewardSource("model", 1.0, self._by_model, on_main=False))
        if self.uses_verifier:
            sources.append(RewardSource(self.task.name, 1.0, self._by_verifier, on_main=True))
        if self.environment_rewards != "none":
            sources.append(RewardSource("environment", 1.0, by_environment, on_main=False))
        names = unique_names([source.name for source in sources])
        return [replace(source, name=name) for source, name in zip(sources, names, strict=True)]

    @property
    def right_or_wrong(self) -> bool:
        """Return whether the reward is a verdict, 1 or 0, by its kind: that of a task which declares so, alone."""
        return self.uses_verifier and self.task.right_or_wrong and len(self.names) == 1

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Scorer:
        """Return the same rewards for completions of another model, with its tokenizer; closed with this scorer.

        Raises ValueError for a reward adapter, which reads tokens of its own base, where the vocabularies differ.
        """
        if self.has_model and self.model is None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "the reward model is an adapter on the first model's base; the other has another vocabulary"
            )
        other = copy.copy(self)
        other.tokenizer = tokenizer
        other.sources = other._sources()
        return other

    def forget(self) -> None:
        """Forget the completions since `metrics` was last asked, as those of an evaluation do not belong to a step."""
        self._slowest = 0.0
        self._respaced = 0
        self._completions = 0

    def metrics(self) -> dict[str, float]:
        """Return metrics of the calls since the last time, on rank 0: seconds of the slowest row, the share of
        completions that differ from another one to their prompt in white space alone, the cost of judges.
        """
        out = {"reward/slowest_seconds": self._slowest} if self._slowest else {}
        if self._completions:
            out["completion/whitespace_duplicates"] = self._respaced / self._completions
        for judge in self.judges().values():
            for name, spent in judge.take_usage().items():
                out[f"judge/{name}"] = out.get(f"judge/{name}", 0) + spent
        self.forget()
        return out

    def judges(self) -> dict[str, JudgeReward]:
        """Return the judges by their names among the rewards."""
        named = zip(self.sources, self.functions, strict=False)
        return {source.name: function for source, function in named if isinstance(function, JudgeReward)}

    def start(self) -> None:
        """Start the workers, so that a reward that does not load is found before training."""
        for function in self.workers:
            function.start()

    def close(self) -> None:
        for function in self.workers:
            function.close()

    def check(self, prompts: list[PreparedPrompt]) -> tuple[list[str], list[str]]:
        """Try the rewards before step 1; return notes and warnings. Raises ExplainedByCheck where all completions would
        fail or a judge does not tell reference answers from others, ValueError where a judge does not answer.
        """
        judged = [prompt.row for prompt in prompts if self.task.gold(prompt.row) is not None][:JUDGED_ROWS]
        try:
            reads_texts = any(source.score is not by_environment for source in self.sources)
            warning = self.check_gold(prompts) if reads_texts else None
            notes = [judge.check(self.task, judged) for judge in self.judges().values() if len(judged) > 1]
        except JudgeGone as gone:
            raise ValueError(str(gone)) from None
        for judge in self.judges().values():
            notes += judge.notes
        compared = self.task.compares_with
        could_verify = not compared or bool(judged)
        verifier = f"the verifier of {self.task.name}" + (f" (column `{compared}`)" if compared else "")
        if could_verify and self.uses_verifier and self.environment_rewards == "some":
            notes.append(f"reward: {verifier}, and rewards in replies are added to it")
        if could_verify and self.replaces_verifier:
            notes.append(f"reward: get_reward of the environment, in place of {verifier}")
        return notes, [f"warning: reward: {warning} (prompt {_end_of(prompts[0].prompt)!r})"] if warning else []

    def check_gold(self, prompts: list[PreparedPrompt]) -> str | None:
        """Score the first prompt's reference answer, an empty completion and nonsense, as training would; return what
        is wrong: the reference answer gets no score or does not win, alone or in a form. Raises ExplainedByCheck where
        a function fails on all three, and on those of the next few prompts.
        """
        rewards = list[float]()
        why = ""
        has_gold = self.task.gold(prompts[0].row) is not None
        for prompt in prompts[:TRIED_PROMPTS]:
            scores = self._of_texts(prompt, [self.task.gold(prompt.row) or "", "", NONSENSE])
            failed = {failure.row: failure.reason for failure in reversed(scores.failures)}
            rewards = rewards or scores.rewards.tolist()
            why = why or failed.get(min(failed, default=0), "")
            if len(failed) < TRIED_ANSWERS or not (self.functions or self.uses_verifier):
                break
        else:
            what = "the reference answer, nothing and nonsense" if has_gold else "nothing and nonsense"
            calls_code = any(isinstance(function, FunctionReward) for function in self.functions)
            form = f". {AS_MESSAGES}" if calls_code and not isinstance(prompts[0].prompt, str) else ""
            raise ExplainedByCheck(f"the reward fails on {what}, so every completion would be dropped: {why}{form}")
        gold, *rivals = rewards
        is_paid = not has_gold or _wins(gold, rivals) or self._pays_in_a_form(prompts, rivals)
        self.forget()
        if is_paid:
            return None
        if math.isnan(gold):
            return "the reference answer gets no score" + (f": {why}" if why else "")
        empty, nonsense = (f"({rival:.3g})" for rival in rivals)
        return f"the reference answer scores {gold:.3g}, no more than an empty one {empty} or nonsense {nonsense}"

    def _of_texts(self, prompt: PreparedPrompt, texts: list[str]) -> Scores:
        """Score texts as answers to a prompt."""
        how: Any = {"chat": self.policy_format.chat, "variables": self.policy_format.chat_template}
        ended = [behind_thought(prompt, prompt.rest_of(text)) for text in texts]
        answers = [answer_tokens(self.tokenizer, prompt, text, **how) for text in ended]
        return self([prompt] * len(texts), answers)

    def _pays_in_a_form(self, prompts: list[PreparedPrompt], rivals: list[float]) -> bool:
        """Return whether the first prompt's reference answer, in a form such as <answer>, scores more than `rivals` and
        than another prompt's (else nonsense) in the same form. A judge is not asked: it reads a bare answer as well.
        """
        values = (right_value(self.task, prompt.row) for prompt in prompts)
        right = next(values)
        wrong = next((value for value in values if value not in (None, right)), NONSENSE)
        if right is None or self.judges():
            return False
        forms = [*in_forms([right, wrong]).values()]
        scores = self._of_texts(prompts[0], [text for form in forms for text in form]).rewards.tolist()
        pairs = zip(scores[::2], scores[1::2], strict=True)
        return any(_wins(of_right, [*rivals, of_wrong]) for of_right, of_wrong in pairs)

    def __call__(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        episodes: list[Episode] | None = None,
        group_size: int | None = None,
        step: int | None = None,
        world: World = ALONE,
    ) -> Scores:
        """Score B completions (token lists) of B prompts, or the episodes that they are; each `group_size` are of one
        prompt (None: all are). step: of the run, from 0; None: no step trains on them (`Progress.at`). Of the processes
        of `world` rank 0 calls the functions, and each reads some of the rows with the reward model.
        """
        progress = Progress.at(step, self.num_steps)
        given = Completions(prompts, completions, episodes, group_size, world, progress)
        results = self._results(given)
        lost = [RowFailure(row, e.failure) for row, e in enumerate(episodes or []) if e.failure is not None]
        counted = self.weights != 0 if self.weights.any() else torch.ones_like(self.weights, dtype=torch.bool)
        fatal = {failure.row for failure in lost}
        for result, counts in zip(results, counted.tolist(), strict=True):
            if counts:
                fatal |= {failure.row for failure in result.failures}
        scores = torch.tensor([result.values for result in results], dtype=torch.float32)
        scores = scores.reshape(len(results), len(prompts)).T
        scores[[failure.row for failure in lost]] = math.nan  # of a text that ended too early
        rewards = torch.where(scores.isnan(), 0.0, scores * self.weights).sum(-1)
        dropped = scores[:, counted].isnan().all(-1)
        dropped[[*fatal]] = True
        failures = [failure for result in results for failure in result.failures] + lost
        return Scores(scores, torch.where(dropped, torch.nan, rewards), failures, joined_comments(results))

    def _results(self, given: Completions) -> list[RowResults]:
        """Call the rewards; return their results, in the order of `names`."""
        found = dict[str, RowResults]()
        called = [source for source in self.sources if source.on_main]

        def call() -> list[RowResults]:
            texts = self._reward_inputs(given.prompts, given.tokens, given.transcripts)
            self._note_duplicates(given.prompts, texts)
            return [source.score(replace(given, texts=texts)) for source in called]

        for source, result in zip(called, _on_main(given.world, call), strict=True):
            found[source.name] = result
        for source in self.sources:
            if not source.on_main:
                found[source.name] = source.score(given)
        return [result for source in self.sources for result in source.with_parts(found[source.name])]

    def _by_function(self, function: FunctionReward | JudgeReward, given: Completions) -> RowResults:
        prompts = given.prompts
        columns = {**row_columns([prompt.row for prompt in prompts]), "completion_ids": given.tokens}
        questions = [prompt.question for prompt in prompts]
        if isinstance(function, JudgeReward):
            results = function(questions, given.texts, columns, group_size=given.group_size)
        else:
            results = function(questions, given.texts, columns, progress=given.progress)
        return self._noted(function, results, prompts)

    def _by_verifier(self, given: Completions) -> RowResults:
        return self._verify(given.prompts, given.texts)

    def _by_model(self, given: Completions) -> RowResults:
        return self._model_scores(given.prompts, given.tokens, given.transcripts, given.world)

    def _note_duplicates(self, prompts: list[PreparedPrompt], answers: list[Any]) -> None:
        """Count completions that differ from another one to the same prompt in white space alone."""
        alike = defaultdict[tuple[int, str], list[str]](list)
        for prompt, text in zip(prompts, map(plain_text, answers), strict=True):
            alike[prompt.index, "".join(text.split())].append(text)
        self._respaced += sum(len(group) for group in alike.values() if len({*group}) > 1)
        self._completions += len(answers)

    def verify(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        *,
        transcripts: list[Transcript] | None,
        world: World = ALONE,
    ) -> RowResults:
        """Call the task's own verifier, whatever the training reward is; on rank 0 of `world`."""
        answers = self._reward_inputs(prompts, completions, transcripts)
        return _on_main(world, lambda: [self._verify(prompts, answers)])[0]

    def _verify(self, prompts: list[PreparedPrompt], answers: list[Any]) -> RowResults:
        assert self.verifier is not None
        found = self.verifier([p.question for p in prompts], answers, row_columns([p.row for p in prompts]))
        results = self._noted(self.verifier, found, prompts)
        return keep_verdicts(results, self.task.name) if self.task.right_or_wrong else results

    def _noted(
        self, function: FunctionReward | JudgeReward, call: RowResults, prompts: list[PreparedPrompt]
    ) -> RowResults:
        """Note the seconds of the slowest row; name one that is slow in the log of what the function prints."""
        seconds, row = call.slowest or (0.0, 0)
        self._slowest = max(self._slowest, seconds)
        if seconds > SLOW_ROW_S:
            name = f"prompt {prompts[row].index} ({one_line(prompts[row].text, PROMPT_CHARS)})"
            function.printed.add(f"slowest row: {name}, {seconds:.3g} s\n".encode(errors="replace"))
        return call

    def text(self, tokens: list[int]) -> str:
        return turn_text(self.tokenizer, tokens)

    def answers(
        self, prompts: list[PreparedPrompt], completions: list[list[int]], transcripts: list[Transcript] | None
    ) -> list[str]:
        """Return the texts of completions in which their answers are: without thoughts and an environment's replies."""
        return [answer_text(one) for one in self._reward_inputs(prompts, completions, transcripts)]

    def _reward_inputs(
        self, prompts: list[PreparedPrompt], completions: list[list[int]], transcripts: list[Transcript] | None
    ) -> list[Any]:
        """Return completions as rewards get them: in the data's form, or that of the environment."""
        environment = self.environment
        if transcripts is not None:
            assert environment is not None
            return [environment.completion(said, p.prompt) for p, said in zip(prompts, transcripts, strict=True)]
        form = as_completion if environment is None else environment.as_completion
        texts = [p.opened + self.text(tokens) for p, tokens in zip(prompts, completions, strict=True)]
        return [form(text, p.prompt) for text, p in zip(texts, prompts, strict=True)]

    @torch.inference_mode()
    def _model_scores(
        self,
        prompts: list[PreparedPrompt],
        completions: list[list[int]],
        transcripts: list[Transcript] | None,
        world: World,
    ) -> RowResults:
        """Score rows by the reward model at each one's last token. A classification model reads text in its own tokens,
        an adapter on the shared base the sampled tokens.
        """
        if self.model is None:
            scores = self._adapter_scores(prompts, completions, world)
        else:
            how: Any = {"text_format": self.model_format, "max_tokens": self.model.max_tokens}
            rows = []
            for i, p in enumerate(prompts):
                text = self.text(completions[i]) if transcripts is None else episode_text(transcripts[i])
                text = p.opened + text.removeprefix("" if transcripts is None else p.opened)
                rows.append(reward_tokens(self.model.tokenizer, p.question, text, **how))
            scores = self.model.reward_scores(rows, micro_batches=self.micro_batches, world=world)
        scores = [score if abs(score) <= MAX_SCORE else math.nan for score in scores]
        unusable = [row for row, score in enumerate(scores) if math.isnan(score)]
        return RowResults(
            scores, [RowFailure(row, "the reward model gave no number to learn from") for row in unusable]
        )

    def _adapter_scores(self, prompts: list[PreparedPrompt], completions: list[list[int]], world: World) -> list[float]:
        policy = self.policy
        tokenizer = self._adapter_tokenizer
        end = self.model_format.end(self._adapter_tokenizer)
        room = positions_of(policy.causal.config.get_text_config())
        images = policy.image_expander
        keys = [(p.text, *(image.key for image in images_of(p.prompt))) for p in prompts]
        different = {key: p.prompt for key, p in zip(keys, prompts, strict=True)}
        asked = {
            key: self.model_format.render(tokenizer, prompt, images=images).tokens for key, prompt in different.items()
        }
        ended = [as_ended(tokenizer, sampled, end=end) for sampled in completions]
        rows = list[int]()
        items = list[Example]()
        for row, (key, answer) in enumerate(zip(keys, ended, strict=True)):
            with suppress(LongText):  # an image would be cut off: there is no score
                read, scored = within(tokenizer, asked[key], answer, room)
                rows.append(row)
                items.append(Example(read, [scored]))
        found = torch.zeros(len(items), dtype=torch.float64)

        def run(part: list[int]) -> None:
            batch = policy.batch_of([items[i] for i in part], last_tokens=True)
            found[part] = policy.reward_scores(batch).double().cpu()

        with policy.acting("reward"):
            self.micro_batches.run(Work(policy.lengths(items), run), world=world)
        world.sum(found)
        scores = torch.full((len(prompts),), math.nan, dtype=torch.float64)
        scores[rows] = found
        return scores.tolist()


def by_environment(given: Completions) -> RowResults:
    """Return what episodes were rewarded with by their environment; NaN: nothing."""
    if given.episodes is None:
        return RowResults([math.nan] * len(given.prompts))
    return RowResults([episode.reward for episode in given.episodes])


def joined_comments(results: list[RowResults]) -> list[str] | None:
    """Join the texts that rewards gave beside the scores of each row; None if no reward gave any."""
    comments = [result.comments for result in results if result.comments]
    if not comments:
        return None
    return [encodable("\n".join(filter(None, of_row))) for of_row in zip(*comments, strict=True)]


def _wins(score: float, rivals: list[float]) -> bool:
    """Return whether there is a score, and none of `rivals` is as high."""
    return not math.isnan(score) and not any(score <= rival for rival in rivals)


def behind_thought(prompt: PreparedPrompt, text: str) -> str:
    """Return a text as an answer: behind the end of the thought that the prompt has opened, if the text has none."""
    return f"\n</think>\n\n{text}" if ends_in_thought(prompt.opened) and "</think>" not in text else text


def keep_verdicts(results: RowResults, name: str) -> RowResults:
    """Fail the rows whose score is neither 1 nor 0, of a task that declares right_or_wrong."""
    for row, score in enumerate(results.values):
        if score not in (0.0, 1.0) and not math.isnan(score):
            reason = f"`{name}` scored {score:g}, and its task declares right_or_wrong, which is 1 or 0"
            results.failures.append(RowFailure(row, reason))
            results.values[row] = math.nan
    return results


def _on_main(world: World, calls: Callable[[], list[RowResults]]) -> list[RowResults]:
    """Return the result of `calls` on rank 0."""
    if world.size == 1:
        return calls()
    return TypeAdapter(list[RowResults]).validate_python(world.on_main(lambda: [asdict(call) for call in calls()]))


def _end_of(prompt: Prompt) -> str:
    """Return the end of a prompt's last user message: its beginning may be a system prompt, which all rows share."""
    if isinstance(prompt, str):
        return prompt[-PROMPT_CHARS:]
    asked = [message for message in prompt if message["role"] == "user"]
    last = asked[-1] if asked else prompt[-1]
    return shown_text(last)[-PROMPT_CHARS:]
