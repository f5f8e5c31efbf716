"""Sample a step's responses and score them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from tinyrl.config.schema import Config
from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.data.rows import few_held_out, fingerprints, prompt_key, trained_on_too
from tinyrl.data.thoughts import ends_in_thought
from tinyrl.endpoint.agents import AgentRunner
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import SamplingEngine, eos_token_ids
from tinyrl.generation.request import Request, SampledRole
from tinyrl.generation.sample import Sample
from tinyrl.generation.turns import EpisodeRunner
from tinyrl.models.loading import check_ids
from tinyrl.models.memory import describe_memory
from tinyrl.models.policy import Policy
from tinyrl.rewards.judge import JudgeReward
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks import Task, answers
from tinyrl.tasks.prompts import (
    NO_LIMIT,
    PreparedPrompt,
    PromptLimit,
    marker_notes,
    most_tokens,
    prepare_prompts,
    unread_key_notes,
)
from tinyrl.workers.calls import WorkerFunction

Runner = EpisodeRunner | AgentRunner


class Collector:
    """Samples from a policy and scores the samples, with prompts, task, environment, engine and scorer; made by
    `load_collector`.

    runner: plays episodes of several turns, or agents; None: one turn. config: the settings of sampling and training,
    with the number of steps that run.epochs gives. owns_scorer: `close` ends the scorer's workers too. engine_reason:
    why this engine was selected. row_notes: warnings about the rows. row_fingerprints: of the rows of both splits.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        runner: Runner | None,
        *,
        config: Config,
        train_prompts: list[PreparedPrompt],
        eval_prompts: list[PreparedPrompt],
        scorer: Scorer,
        owns_scorer: bool,
        engine: SamplingEngine,
        engine_reason: str,
        row_notes: list[str],
    ) -> None:
        self.policy = policy
        self.task = task
        self.runner = runner
        self.config = config
        self.train_prompts = train_prompts
        self.eval_prompts = eval_prompts
        self.scorer = scorer
        self.owns_scorer = owns_scorer
        self.engine = engine
        self.engine_reason = engine_reason
        self.row_notes = row_notes
        self.row_fingerprints = fingerprints(
            [prompt.row for prompt in train_prompts], [prompt.row for prompt in eval_prompts]
        )
        self.world = policy.world

    @property
    def longest_response(self) -> int:
        """Return the most tokens of a response."""
        return longest_response(self.config, self.runner)

    @property
    def longest_text(self) -> int:
        """Return the most tokens of a prompt with its response."""
        if self.runner is not None:
            return self.runner.longest_text(self.train_prompts)
        return most_tokens(self.train_prompts) + self.longest_response

    def check(self) -> list[str]:
        """Check the reference at step 0, and the reward on a reference answer; returns lines worth showing."""
        config = self.config
        prompts = [prompt.tokens for prompt in self.train_prompts]
        policy = self.policy
        temperature = config.generation.temperature
        policy.check_reference(prompts[:4], temperature=temperature)
        if not self.world.is_main:  # rank 0 calls the rewards
            return []
        self.scorer.start()
        judged, warnings = self.scorer.check(self.train_prompts)
        rows = [{"prompt": prompt.prompt} for prompt in self.train_prompts + self.eval_prompts]
        warnings += self.row_notes + template_warnings(policy)
        chat = config.task.chat
        warnings += marker_notes(policy.tokenizer, rows, chat=chat)
        if config.environment.agent is None:  # which sends messages of its own
            conversations = (as_messages(row["prompt"]) for row in rows)
            variables = config.task.chat_template_kwargs
            warnings += unread_key_notes(policy.tokenizer, conversations, chat=chat, variables=variables)
        if config.run.eval_prompts:
            key_of = partial(prompt_key, system_prompt=config.task.system_prompt)
            held_out = [key_of(prompt.prompt) for prompt in self.eval_prompts]
            warnings += few_held_out(held_out)
            warnings += trained_on_too([key_of(prompt.prompt) for prompt in self.train_prompts], held_out)
        notes = self.engine.start(prompts)
        if self.runner is not None:
            notes.append(f"environment {self.runner.environment.describe()}")
        notes += [*judged, self.describe_memory()]
        return [f"sampling engine {self.engine.name} ({self.engine_reason})", *notes, *warnings]

    def describe_memory(self) -> str:
        model = self.scorer.model.model if self.scorer.model is not None else None
        return describe_memory(self.policy, reward_model=model, sampling_copy=self.engine.copy_bytes)

    def notes(self) -> list[str]:
        """Return notes on what was sampled since the last call."""
        return self.runner.notes() if isinstance(self.runner, AgentRunner) else []

    @property
    def workers(self) -> list[WorkerFunction | JudgeReward]:
        """The functions of rewards and of the environment."""
        return [*self.scorer.workers, *(self.runner.environment.workers if self.runner else [])]

    @property
    def code_workers(self) -> list[WorkerFunction]:
        """The functions that are user code, and not judges."""
        return [function for function in self.workers if isinstance(function, WorkerFunction)]

    def keep_output(self, write: Callable[[str], None]) -> None:
        """Hand what reward functions print to `write`, in whole lines, from now on."""
        for function in self.workers:
            function.printed.send_to(write)

    def close(self) -> None:
        """End helper processes."""
        if self.owns_scorer:
            self.scorer.close()
        self.engine.close()
        if self.runner is not None:
            self.runner.close()

    def collect(
        self,
        prompts: list[PreparedPrompt],
        *,
        group_size: int,
        step: int,
        greedy: bool = False,
        role: SampledRole = "policy",
    ) -> list[Sample]:
        """Sample `group_size` responses for each prompt and score them, in training and evaluation. A prompt that is in
        the batch twice gets further samples. Samples without a reward are not in the loss. Each process samples some of
        the prompts, and all of them get all samples.
        """
        groups = self._groups(prompts, group_size, step=step, greedy=greedy, role=role)
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        samples = self._sample(prompts, groups)
        tokens = [sample.response for sample in samples]
        episodes = [sample.played for sample in samples if sample.played is not None] or None
        found = self.scorer(repeated, tokens, episodes=episodes, group_size=group_size, step=step, world=self.world)
        failures: list[list[str]] = [[] for _ in samples]
        for failure in found.failures:
            failures[failure.row].append(failure.reason)
        scored = list[Sample]()
        for i, (sample, prompt) in enumerate(zip(samples, repeated, strict=True)):
            score = float(found.rewards[i])
            stopped = sample.finish == "stop"
            scored.append(
                replace(
                    sample,
                    episode=i,
                    stopped_in_thought=stopped and ends_in_thought(self._last_turn(sample, prompt)),
                    scores=found.scores[i].tolist(),
                    score=score,
                    reward=score,
                    comment=found.comments[i] if found.comments else "",
                    failures=failures[i],
                    in_loss=not math.isnan(score),
                )
            )
        return scored

    def _last_turn(self, sample: Sample, prompt: PreparedPrompt) -> str:
        """Return the text of a sample's last turn, with what the prompt has opened of it; "" of an agent's, whose calls
        have stop strings of their own.
        """
        if sample.played is None:
            return prompt.opened + self.scorer.text(sample.response)
        if sample.played.dialogues is not None:
            return ""
        turns = [message["content"] for message in sample.played.transcript if message["role"] == "assistant"]
        return turns[-1]

    def _groups(
        self, prompts: list[PreparedPrompt], group_size: int, *, step: int, greedy: bool, role: SampledRole
    ) -> list[list[Request]]:
        """Return `group_size` requests for each prompt."""
        seen: dict[int, int] = {}
        groups = list[list[Request]]()
        for prompt in prompts:
            row = prompt.index
            first = seen.get(row, 0)
            seen[row] = first + group_size
            group = self.engine.requests_for(
                prompt.tokens,
                group_size,
                row=row,
                seed=self.config.run.seed,
                step=step,
                first=first,
                greedy=greedy,
                role=role,
            )
            groups.append(group)
        return groups

    def _sample(self, prompts: list[PreparedPrompt], groups: list[list[Request]]) -> list[Sample]:
        """Sample the requests of each prompt, this process those of its own prompts."""
        runner = self.runner
        world = self.world
        requests = list[Request]()
        asked = list[PreparedPrompt]()  # the prompt of each
        for i in world.own(range(len(prompts))):
            requests += groups[i]
            asked += [prompts[i]] * len(groups[i])
        samples = list[Sample]()
        if runner is None:
            samples = self.engine.sample(requests)
        elif requests:
            samples = runner.play(asked, requests, engine=self.engine)
        if world.size == 1:
            return samples
        group_size = len(groups[0])
        sampled = [[asdict(one) for one in samples[i : i + group_size]] for i in range(0, len(samples), group_size)]
        gathered = list[Sample]()  # whole groups, so that they are in order
        for group in world.merge(sampled):
            for fields in group:
                if fields["played"] is not None:
                    fields["played"] = Episode(**fields["played"])
                gathered.append(Sample(**fields))
        return gathered


def longest_response(config: Config, runner: Runner | None) -> int:
    """Return the most tokens of a response, with those that are read between its turns."""
    return config.generation.max_new_tokens if runner is None else runner.max_episode_tokens


def prepare_rows(
    rows: list[Row],
    *,
    policy: Policy,
    task: Task,
    runner: Runner | None,
    limit: PromptLimit = NO_LIMIT,
    openings: list[str | None] | None = None,
) -> list[PreparedPrompt]:
    """Prepare the prompts of rows. openings: texts at the end of each prompt; None: those of the environment."""
    section = policy.config.task
    has_agent = policy.config.environment.agent is not None  # which sends messages of its own
    if openings is None and runner is not None:
        openings = runner.openings(task, rows)
    prepared = prepare_prompts(
        task,
        rows,
        tokenizer=policy.tokenizer,
        chat=section.chat,
        system_prompt=None if has_agent else section.system_prompt,
        variables=section.chat_template_kwargs if runner is None else runner.variables,
        limit=limit,
        on_overlong_prompt=section.on_overlong_prompt,
        openings=openings,
        images=policy.image_expander,
    )
    check_ids((prompt.tokens for prompt in prepared), policy.tokenizer, policy.causal)
    return prepared


def template_fault(policy: Policy) -> str | None:
    """Return what is wrong with the chat template for a policy that ends its turns; None if nothing is."""
    where = policy.config.task
    ends = eos_token_ids(policy, policy.tokenizer)
    return answers.template_fault(policy.tokenizer, ends, chat=where.chat, variables=where.chat_template_kwargs)


def template_warnings(policy: Policy) -> list[str]:
    """Return a warning where the chat template does not end turns as the policy does, else []."""
    fault = template_fault(policy)
    return [f"warning: chat template: {fault}"] if fault else []
