"""Episodes of agents that speak to the policy by URL: every call is recorded token by token, as it was sampled.

    an agent asks     1. its key names the episode that the call belongs to
                      2. where what it sends continues an earlier answer of the episode, that answer's own tokens stay,
                         and only what follows is tokenised: what is trained is what was sampled
                      3. otherwise it begins a conversation of its own: edited history, another system prompt, a
                         sub-agent
    it returns        4. its text is what rewards judge; each conversation is a row with the episode's reward

How tokens are drawn is the run's: temperature, top_p and top_k of a request are ignored, since log-probabilities must
be those of the trained distribution. generation.max_new_tokens is for an episode's calls together.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.messages import Message, messages_of
from tinyrl.data.readers import Row
from tinyrl.environments.agent import Agents, Job, Played
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import (
    Completion,
    LocalEngine,
    Request,
    Response,
    SampledRole,
    SampleOptions,
    SamplingEngine,
    SamplingParams,
    Sequence,
    advanced,
    row_keys,
)
from tinyrl.generation.scheduler import LiveScheduler
from tinyrl.models.tokens import template_text, tokens_behind
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import ANSWER, PreparedPrompt

if TYPE_CHECKING:  # it needs the extra `serve`
    from tinyrl.generation.endpoint import Listening

MODEL = "policy"  # its name at the endpoint
AT_ONCE = 256  # completions decoded together where generation.max_rows says nothing else
FIRST_BITS = 40  # of a call's offset among the random numbers of its episode


class Refused(Exception):
    """A request that is answered with an error: its status, and the parameter that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


@dataclass(frozen=True)
class Given:
    """What a client has sent before the answer: messages and the variables of their template, or text, or tokens."""

    messages: list[Message] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    text: str | None = None


@dataclass(kw_only=True)
class Conversation(Response):
    """A row: a prompt, and what was sampled and prefilled behind it. known: all up to its last answer, as the agent has
    it; None until that is sent.
    """

    prompt: list[int]
    last: Completion | None = None
    known: Given | None = None
    pending: Sequence | None = None  # the call under way

    def answer(self, given: Given, message: Message) -> None:
        """Record the message in which the last answer is sent, as it will come back."""
        added = messages_of([{"role": "assistant", **message}], "messages")
        self.known = Given([*(given.messages or []), *added], given.variables)

    def as_completion(self) -> Completion:
        assert self.last is not None
        return self.ended(self.last.finish_reason)


@dataclass
class AgentEpisode:
    """An episode under way. key: of its random numbers; left: tokens that a call may still sample (calls under way are
    not counted, so that none depends on which ends first); closing: what the chat template writes behind an answer;
    over: its agent has ended.
    """

    key: np.uint64
    params: SamplingParams
    role: SampledRole
    left: int
    calls_left: int
    tokenizer: PreTrainedTokenizerBase
    closing: str
    positions: int
    calls: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.conversations, self.sequences = list[Conversation](), list[Sequence]()
        self.lock, self._seen = threading.RLock(), dict[str, int]()

    def call(
        self, prompt: list[int], given: Given, *, limit: int | None, stop: list[str]
    ) -> tuple[Sequence, Conversation]:
        """Begin a call: its sequence, to be submitted, and the conversation that it goes on in. Raises Refused where
        the episode has no calls or tokens left.
        """
        with self.lock:
            if self.over:
                raise Refused(401, "the episode is over")
            if not self.calls_left:
                raise Refused(400, "the episode has no calls left (environment.max_turns)")
            conversation, read = self._continued(prompt, given)
            context = prompt if conversation is None else [*conversation.prompt, *conversation.tokens, *read]
            room = self.positions - len(context)
            if room < 1:
                raise Refused(400, f"the prompt has {len(context)} tokens, and the model {self.positions} positions")
            most = min(limit or self.left, self.left, room)
            if most < 1:
                raise Refused(400, "the episode has no tokens left (generation.max_new_tokens)", param="max_tokens")
            if conversation is None:
                conversation = Conversation(prompt=context)
                self.conversations.append(conversation)
            # The call's offset among the episode's random numbers is a function of its prompt, and of how often that
            # was asked before, so that it does not depend on which of several calls comes first.
            digest = hashlib.sha256(json.dumps(context).encode()).hexdigest()
            again = self._seen[digest] = self._seen.get(digest, -1) + 1
            first = int(hashlib.sha256(f"{digest} {again}".encode()).hexdigest(), 16) % (1 << FIRST_BITS)
            [key] = advanced(np.array([self.key]), np.array([first]))
            sequence = Sequence(context, self.params, key, most, stop, "cached", self.role)
            conversation.pending = sequence
            self.sequences.append(sequence)
            self.calls, self.calls_left = self.calls + 1, self.calls_left - 1

        def end(result: Completion | Exception) -> None:
            with self.lock:
                if conversation.pending is not sequence or sequence.cancelled:  # another call may go on from there
                    return
                conversation.pending = None
                if isinstance(result, Completion) and not self.over:
                    conversation.add(read)
                    conversation.add(result.tokens, result.logprobs)
                    conversation.last, conversation.known = result, None
                    self.left -= len(result.tokens)
                    if given.text is not None:
                        text = str(self.tokenizer.decode(result.tokens, skip_special_tokens=True))
                        conversation.known = Given(text=given.text + text)

        sequence.on_end = end
        return sequence, conversation

    def end(self) -> None:
        with self.lock:
            self.over = True
            for sequence in self.sequences:
                sequence.cancelled = True

    def rows(self) -> list[Conversation]:
        """Those with an answer, in the order in which they were begun."""
        return [conversation for conversation in self.conversations if conversation.last is not None]

    def _continued(self, prompt: list[int], given: Given) -> tuple[Conversation | None, list[int]]:
        """The conversation that a call continues, and the tokens that it adds; None: it begins one."""
        for conversation in reversed(self.conversations):
            pending, known, added = conversation.pending, conversation.known, None
            if conversation.last is None or (pending is not None and not pending.cancelled):
                continue
            if given.messages is not None:
                added = None if known is None else self._added(conversation.last, known, given)
            elif given.text is not None:
                if known is not None and known.text is not None and given.text.startswith(known.text):
                    added = tokens_behind(self.tokenizer, known.text, given.text[len(known.text) :])
            elif prompt[: len(tokens := [*conversation.prompt, *conversation.tokens])] == tokens:
                added = prompt[len(tokens) :]
            if added is not None:
                return conversation, added
        return None, []

    def _added(self, last: Completion, known: Given, given: Given) -> list[int] | None:
        """Tokens that the template writes after an answer for the messages behind it. None where they are not behind
        it, where tools or variables of the template are others, or where the template writes earlier turns otherwise
        once more follow (it may leave out their thinking).
        """
        ours, theirs = known.messages, given.messages
        if not ours or not theirs or len(theirs) <= len(ours) or known.variables != given.variables:
            return None
        if [*map(_content, ours)] != [*map(_content, theirs[: len(ours)])]:
            return None
        try:
            first = template_text(self.tokenizer, theirs[: len(ours)], variables=given.variables)
            whole = template_text(self.tokenizer, theirs, variables=given.variables, add_generation_prompt=True)
        except ValueError:
            return None
        if not whole.startswith(first):
            return None
        closing, end = self.closing, str(self.tokenizer.decode([last.tokens[-1]]))
        if last.finish_reason == "eos":
            closing = closing.removeprefix(end)
        return tokens_behind(self.tokenizer, end, closing + whole[len(first) :])


def _content(message: Message) -> tuple[Any, ...]:
    """What must be the same of a message that comes back; ids of calls are the client's business."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    named = [(call.get("name"), call.get("arguments")) for call in calls]
    return message["role"], (message.get("content") or "").strip(), named


def closing_of(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> str:
    """What a chat template writes behind an answer; nothing without one."""
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = template_text(tokenizer, turn, variables=variables) if tokenizer.chat_template else ""
    except ValueError:
        return ""
    return text.rpartition(ANSWER)[2]


@dataclass(frozen=True)
class Other:
    """A further conversation of an episode: whose (a row of the rollout), its prompt, and what was sampled there."""

    episode: int
    prompt: list[int]
    completion: Completion


class AgentRunner:
    """Plays episodes by handing them to agents. State: the endpoint and its thread, from the first call on."""

    def __init__(self, config: Config, *, positions: int) -> None:
        self.config, self.positions = config, positions
        self.variables = config.task.chat_template
        self.environment = Agents(config.environment)
        self.environment.start()
        self._listening: Listening | None = None

    @property
    def max_episode_tokens(self) -> int:
        """The most that a row may sample; what an agent writes between its calls is limited by the model alone."""
        return self.config.generation.max_new_tokens

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        return [None] * len(rows)

    def play(
        self,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        group_size: int,
        *,
        engine: SamplingEngine,
        options: SampleOptions,
    ) -> tuple[list[Completion], list[list[int]], list[Episode], list[Other]]:
        """`group_size` episodes for each request, in order: the first conversation of each, the prompt it had, the
        episode, and further conversations. An episode that failed, or asked nothing, has one token that is not chosen.
        """
        from tinyrl.generation.endpoint import LOCAL, Endpoint, Listening

        if (listening := self._listening) is None:
            assert isinstance(engine, LocalEngine), "the configuration has checked it"
            scheduler = LiveScheduler(engine, max_rows=self.config.generation.max_rows or AT_ONCE)
            own: Any = {
                "positions": self.positions,
                "variables": self.variables,
                "max_new_tokens": 0,
            }  # an episode's own
            opened = Endpoint(scheduler, {MODEL: "policy"}, defaults=SamplingParams(), hosts=LOCAL, episodes={}, **own)
            listening = self._listening = Listening(opened)
        settings, greedy, endpoint = self.config.generation, options.get("greedy", False), listening.endpoint
        keys, _ = row_keys(requests, group_size, seed=options["seed"], step=options["step"])
        params = SamplingParams(1.0 if greedy else settings.temperature, settings.top_p, settings.top_k, greedy)
        limits = settings.max_new_tokens, self.config.environment.max_turns
        read = endpoint.tokenizer, closing_of(endpoint.tokenizer, self.variables), self.positions
        order = [AgentEpisode(key, params, options.get("role", "policy"), *limits, *read) for key in keys]
        each = [prompt for prompt in prompts for _ in range(group_size)]
        names = [f"episode-{secrets.token_urlsafe(24)}" for _ in each]
        jobs = [Job({"prompt": p.prompt, **p.row}, listening.url, k, MODEL) for p, k in zip(each, names, strict=True)]
        assert endpoint.episodes is not None
        endpoint.episodes.update(zip(names, order, strict=True))
        try:
            played = self.environment.play(jobs, ended=lambda place: order[place].end())
        finally:
            for episode in order:
                episode.end()
            endpoint.episodes.clear()
            endpoint.scheduler.release()
        return self._gathered(each, order, played)

    def _gathered(
        self, prompts: list[PreparedPrompt], episodes: list[AgentEpisode], played: list[Played]
    ) -> tuple[list[Completion], list[list[int]], list[Episode], list[Other]]:
        completions, first_prompts, gathered, others = [], [], [], []
        for place, (prompt, episode, result) in enumerate(zip(prompts, episodes, played, strict=True)):
            rows = episode.rows()
            failure = result.failure or (None if rows else f"`{self.environment.name}` asked the policy nothing")
            if failure is None:
                completion, tokens = rows[0].as_completion(), rows[0].prompt
                others += [Other(place, row.prompt, row.as_completion()) for row in rows[1:]]
            else:
                completion, tokens = Completion([0], [0.0], "length", [False]), prompt.tokens
            mask, calls = completion.action_mask or [], max(1, episode.calls)
            ends = [i for i, chosen in enumerate(mask) if chosen][-1:] or [0]
            gathered.append(
                Episode(
                    transcript=[{"role": "assistant", "content": result.text or ""}],
                    turn_ends=ends * calls,
                    turn_rewards=[0.0] * calls,
                    num_tokens=len(completion.tokens),
                    num_actions=sum(mask),
                    finish_reason=completion.finish_reason,
                    over=True,
                    failure=failure,
                )
            )
            completions.append(completion)
            first_prompts.append(tokens)
        return completions, first_prompts, gathered, others

    def close(self) -> None:
        self.environment.close()
        if self._listening is not None:
            self._listening.stop()
            self._listening.endpoint.scheduler.close()
