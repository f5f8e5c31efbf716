"""Episodes of several turns: the policy writes, an environment answers, the policy goes on.

    until every episode is over:
        1. a turn for each: tokens up to EOS, a stop string or the episode's limit
        2. the environment answers the turns that have ended, a batch at a time
        3. its answer is appended to the tokens, prefilled and never trained on

Engines play the same `Episodes` in two ways: they prefill an episode from its beginning at each turn, or (CachedEngine)
hold the rows that wait, and prefill the answers only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.image_rows import with_parts
from tinyrl.data.messages import asked_of
from tinyrl.data.readers import Row
from tinyrl.environments import Message, Reply, Transcript
from tinyrl.environments.environment import Episode, Replies
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.generation.sample import Sample, SampleBuilder
from tinyrl.models.policy import Policy
from tinyrl.models.tokens import token_ids
from tinyrl.process.signals import check_stop
from tinyrl.tasks import Task
from tinyrl.tasks.answers import ObservationTokens
from tinyrl.tasks.call_forms import CallForm, call_form
from tinyrl.tasks.prompts import PreparedPrompt, in_chat, most_tokens, row_columns, shows_tools
from tinyrl.tasks.turn_text import turn_text

POLL_S = 0.1
SEED_BITS = 53  # of an episode's `seed`, which JSON's readers keep as they are


@dataclass(frozen=True)
class EpisodeRunner:
    """max_new_tokens: of the policy's own, over all turns; variables: those of the chat template; form: how the policy
    writes tool calls (None: the chat template shows no tools).
    """

    environment: Replies
    observations: ObservationTokens
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    variables: dict[str, Any]
    form: CallForm | None = None

    @property
    def max_episode_tokens(self) -> int:
        return self.max_new_tokens + (self.environment.max_turns - 1) * self.observations.most

    def close(self) -> None:
        self.environment.close()

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        """Return texts of the environment at the end of each row's prompt."""
        return self.environment.openings([with_parts(asked_of(task.prompt(row))) for row in rows], row_columns(rows))

    def longest_prompt(self, prompts: list[PreparedPrompt]) -> int:
        return most_tokens(prompts)

    def longest_text(self, prompts: list[PreparedPrompt]) -> int:
        """Return the most tokens of a prompt with its response."""
        return most_tokens(prompts) + self.max_episode_tokens

    def play(
        self,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        *,
        engine: SamplingEngine,
        on_reply: Callable[[list[int]], None] | None = None,
    ) -> list[Sample]:
        """Play an episode for each request, whose prompt is in `prompts`; return them, in order, each with its record
        (`played`). on_reply: called with the tokens of each reply.

        Raises Interrupted once a stop was asked for, and what `engine.sample` raises.
        """
        with Episodes(prompts, requests, runner=self, on_reply=on_reply) as episodes:
            engine.play(requests, episodes=episodes)
            return episodes.finalized()


def load_episode_runner(
    config: Config, *, task: Task, tokenizer: PreTrainedTokenizerBase, policy: Policy
) -> EpisodeRunner | None:
    """Start the configuration's environment, or the task's, and find out how its replies become tokens; None without
    one. Raises ValueError where they cannot.
    """
    section = config.environment
    template = config.task.chat_template_kwargs
    if section.agent is not None or not (section.name or section.tools or task.has_turns):
        return None
    environment = Replies(
        section,
        task=task.name,
        respond=task.respond,
        use=task.environment,
        stop=task.stop,
        worker=task.replies_worker(timeout_s=section.seconds),
        length=lambda text: len(token_ids(tokenizer, text)),
    )
    environment.start()
    schemas = environment.schemas
    chat = in_chat(tokenizer, config.task.chat)
    if schemas and not shows_tools(tokenizer, config.task.chat):
        what = "environment.tools" if section.tools else f"the methods of environment.name={section.name or task.name}"
        raise ValueError(
            f"{what} are tools, which the model's chat template shows, and this model "
            f"{'has none that shows them' if chat else 'is prompted without one'}; describe them in the prompt and "
            "answer with environment.name=FILE.py:FUNCTION"
        )
    variables = {**template, **({"tools": schemas} if schemas else {})}
    most = environment.max_observation_tokens
    observations = ObservationTokens(tokenizer, chat=chat, variables=variables, max_tokens=most)
    form = call_form(tokenizer, template) if schemas else None
    return EpisodeRunner(environment, observations, tokenizer, config.generation.max_new_tokens, variables, form)


class Episodes(AbstractContextManager):
    """The episodes of one call while they are played: given the end of each turn, it returns what is prefilled next.

    Replies are computed on a thread, for a batch of waiting episodes at a time, so that an engine may go on meanwhile.
    A reply is a function of its transcript, so which episodes share a batch changes nothing.
    """

    def __init__(
        self,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        *,
        runner: EpisodeRunner,
        on_reply: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.prompts = prompts
        self.requests = requests
        self.runner = runner
        self.on_reply = on_reply
        self.max_episode_tokens = runner.max_episode_tokens
        if runner.environment.has_openings:
            self.seeds = [request.row for request in requests]
        else:
            self.seeds = [int(request.key) >> (64 - SEED_BITS) for request in requests]
        self._thread = ThreadPoolExecutor(1)
        self._call: Future[tuple[list[int], list[Reply | None]]] | None = None  # samples, and their replies
        self.restart()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def restart(self) -> None:
        """Begin again: memory ran out, and the same episodes are played with fewer rows at a time."""
        if self._call is not None:
            wait_for([self._call])
            self._call = None
        self.episodes = [Episode() for _ in self.prompts]
        self.samples = [SampleBuilder(request) for request in self.requests]
        self._waiting = list[int]()
        self._ready = list[tuple[int, list[int] | None]]()

    def limit(self, sample: int) -> int:
        """Return the most tokens of an episode's next turn, at least one."""
        return self.runner.max_new_tokens - self.episodes[sample].num_actions

    def ended(self, sample: int, turn: DecodedSequence) -> None:
        """Record a turn that has ended; the environment is to answer it, unless it was cut off."""
        assert turn.finish_reason is not None
        episode = self.episodes[sample]
        tokens = turn.tokens
        opened = self.prompts[sample].opened
        if episode.transcript:  # after a turn's own end the template opened another; after a stop string this goes on
            opened = self.runner.observations.opened if episode.ended_at is not None else ""
        text = opened + turn_text(self.runner.tokenizer, tokens)
        message: Message = {"role": "assistant", "content": text}
        if (form := self.runner.form) is not None:
            message = form.message(text, tools=self.runner.variables["tools"])
        episode.transcript.append(message)
        self.samples[sample].chose(tokens, turn.logprobs)
        episode.num_tokens += len(tokens)
        episode.num_actions += len(tokens)
        episode.turn_ends.append(episode.num_tokens - 1)
        episode.turn_rewards.append(None)
        episode.finish_reason = turn.finish_reason
        episode.ended_at = tokens[-1] if turn.finish_reason == "eos" else None
        if turn.finish_reason == "length":
            self._ready.append((sample, None))
        else:
            self._waiting.append(sample)

    def answers(self, *, wait: bool) -> list[tuple[int, list[int] | None]]:
        """Return the episodes whose replies have come since: the tokens to be prefilled next, which their responses
        have from now on, or None for one that is over. wait: for one at least, where any is asked for.
        """
        while True:
            if self._call is None and self._waiting:
                asked = self._waiting
                self._waiting = []
                self._call = self._thread.submit(self._ask, asked)
            call = self._call
            must_wait = wait and not self._ready
            if call is None or not (call.done() or must_wait):
                ready = self._ready
                self._ready = []
                return ready
            self._call = None
            while not wait_for([call], timeout=POLL_S).done:
                check_stop()
            self._ready += [(sample, self._next(sample, reply)) for sample, reply in zip(*call.result(), strict=True)]

    def _next(self, sample: int, reply: Reply | None) -> list[int] | None:
        """Return the tokens of a reply (None: the environment has ended the episode, or failed); None: it ends here."""
        episode = self.episodes[sample]
        runner = self.runner
        if reply is None:
            episode.over = True
            return None
        episode.add_reward(reply.reward)
        episode.invalid += reply.invalid
        episode.tool_errors += reply.tool_error
        last = len(episode.turn_ends) == runner.environment.max_turns
        if reply.done or last or episode.num_actions >= runner.max_new_tokens:
            if reply.text:
                texts, _ = runner.observations.fitted(reply.results or [reply.text])
                episode.transcript += [{"role": "tool", "content": text} for text in texts]
            episode.over = reply.done
            if not reply.done:
                episode.finish_reason = "turns" if last else "length"
            return None
        observation = runner.observations(reply.results or [reply.text], ended_at=episode.ended_at)
        episode.transcript += [{"role": "tool", "content": text} for text in observation.texts]
        episode.cut += observation.cut
        episode.num_tokens += len(observation.tokens)
        self.samples[sample].read(observation.tokens)
        if self.on_reply is not None:
            self.on_reply(observation.tokens)
        return observation.tokens

    def finalized(self) -> list[Sample]:
        """Return the samples with their finish reasons; episodes cut off get the environment's final reward."""
        cut_off = [i for i, e in enumerate(self.episodes) if e.failure is None and not e.over]
        if cut_off:
            rows = self.runner.environment.final_rewards(*self._given(cut_off))
            for failure in rows.failures:
                self.episodes[cut_off[failure.row]].failure = failure.reason
            for sample, reward in zip(cut_off, rows.values, strict=True):
                self.episodes[sample].add_reward(reward)
        played = zip(self.samples, self.episodes, strict=True)
        return [sample.sample(finish=episode.finish_reason, played=episode) for sample, episode in played]

    def _ask(self, asked: list[int]) -> tuple[list[int], list[Reply | None]]:
        answers = self.runner.environment.respond(*self._given(asked))
        for failure in answers.failures:
            self.episodes[asked[failure.row]].failure = failure.reason
        return asked, answers.values

    def _given(self, samples: list[int]) -> tuple[list[Any], list[Transcript], dict[str, list[Any]]]:
        prompts = [self.prompts[i] for i in samples]
        columns = {"seed": [self.seeds[i] for i in samples], **row_columns([p.row for p in prompts])}
        return [with_parts(p.question) for p in prompts], [self.episodes[i].transcript for i in samples], columns
