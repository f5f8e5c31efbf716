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

from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.messages import Message
from tinyrl.data.readers import Row
from tinyrl.environments.agent import Agents, Job, Played
from tinyrl.environments.environment import Episode
from tinyrl.generation.draws import SamplingParams, advanced
from tinyrl.generation.engine import (
    Completion,
    LocalEngine,
    Request,
    Response,
    SampledRole,
    SampleOptions,
    SamplingEngine,
    Sequence,
    row_keys,
)
from tinyrl.generation.live import LiveScheduler
from tinyrl.models.templates import template_text
from tinyrl.models.tokens import tokens_behind
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import ANSWER, PreparedPrompt

if TYPE_CHECKING:  # it needs the extra `serve`
    from tinyrl.generation.endpoint import Endpoint, Listening

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
    """A row: a prompt, and what was sampled and prefilled behind it."""

    prompt: list[int]
    number: int  # of its first call in the episode
    last: Completion | None = None
    given: Given | None = None  # up to the last answer, as the agent has it; None until that is sent
    pending: Sequence | None = None  # the call under way

    @property
    def busy(self) -> bool:
        return self.pending is not None and not self.pending.cancelled

    def as_completion(self) -> Completion:
        assert self.last is not None
        return self.ended(self.last.finish_reason)


class AgentEpisode:
    """An episode under way. left: tokens that a call may still sample (calls under way are not counted, so that none
    depends on which ends first); over: its agent has ended.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        role: SampledRole,
        *,
        seed: int,
        step: int,
        left: int,
        calls_left: int,
        tokenizer: PreTrainedTokenizerBase,
        closing: str,
        positions: int,
    ) -> None:
        self.request, self.params, self.seed, self.step = request, params, seed, step
        self.role: SampledRole = role
        self.left, self.calls_left, self.calls = left, calls_left, 0
        self.tokenizer, self.closing, self.positions = tokenizer, closing, positions
        self.conversations: list[Conversation] = []
        self.sequences: list[Sequence] = []
        self.over, self.lock = False, threading.RLock()
        self._seen: dict[str, int] = {}

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
                conversation = Conversation(prompt=context, number=self.calls)
                self.conversations.append(conversation)
            own = self.request
            request = Request(context, own.prompt_row, own.first_sample, first_token=self._first_token(context))
            [key] = advanced(*row_keys([request], 1, seed=self.seed, step=self.step))
            sequence = Sequence(context, self.params, key, most, stop, "cached", self.role)
            conversation.pending = sequence
            self.sequences.append(sequence)
            self.calls, self.calls_left = self.calls + 1, self.calls_left - 1

        def end(result: Completion | Exception) -> None:
            with self.lock:
                if (
                    conversation.pending is sequence and not sequence.cancelled
                ):  # else another call may go on from there
                    conversation.pending = None
                    if isinstance(result, Completion) and not self.over:
                        conversation.add(read)
                        conversation.add(result.tokens, result.logprobs)
                        conversation.last, conversation.given = result, None
                        self.left -= len(result.tokens)
                        if given.text is not None:
                            text = str(self.tokenizer.decode(result.tokens, skip_special_tokens=True))
                            conversation.given = Given(text=given.text + text)

        sequence.on_end = end
        return sequence, conversation

    def end(self) -> None:
        with self.lock:
            self.over = True
            for sequence in self.sequences:
                sequence.cancelled = True

    def rows(self) -> list[Conversation]:
        """Those with an answer, in the order in which they were begun."""
        return sorted((c for c in self.conversations if c.last is not None), key=lambda c: c.number)

    def _first_token(self, prompt: list[int]) -> int:
        """A call's offset among the episode's random numbers: of its prompt, and how often that was asked before, so
        that it does not depend on which of several calls comes first.
        """
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
        again = self._seen[digest] = self._seen.get(digest, -1) + 1
        return int(hashlib.sha256(f"{digest} {again}".encode()).hexdigest(), 16) % (1 << FIRST_BITS)

    # ---- what a call goes on from ----

    def _continued(self, prompt: list[int], given: Given) -> tuple[Conversation | None, list[int]]:
        """The conversation that a call continues, and the tokens that it adds; None: it begins one."""
        for conversation in reversed(self.conversations):
            if not conversation.busy and conversation.last is not None:
                added = self._added(conversation, prompt, given)
                if added is not None:
                    return conversation, added
        return None, []

    def _added(self, before: Conversation, prompt: list[int], given: Given) -> list[int] | None:
        known = before.given
        if given.messages is not None:
            return None if known is None or known.messages is None else self._added_messages(before, known, given)
        if given.text is not None:
            text = None if known is None else known.text
            if text is None or not given.text.startswith(text):
                return None
            return tokens_behind(self.tokenizer, text, given.text[len(text) :])
        tokens = [*before.prompt, *before.tokens]
        return prompt[len(tokens) :] if prompt[: len(tokens)] == tokens else None

    def _added_messages(self, before: Conversation, known: Given, given: Given) -> list[int] | None:
        """Tokens that the template writes after an answer for the messages behind it. None where they are not behind
        it, where tools or variables of the template are others, or where the template writes earlier turns otherwise
        once more follow (it may leave out their thinking).
        """
        ours, theirs = known.messages or [], given.messages or []
        if len(theirs) <= len(ours) or known.variables != given.variables or before.last is None:
            return None
        if any(not _same(a, b) for a, b in zip(ours, theirs, strict=False)):
            return None
        try:
            first = template_text(self.tokenizer, theirs[: len(ours)], variables=given.variables)
            whole = template_text(self.tokenizer, theirs, variables=given.variables, add_generation_prompt=True)
        except ValueError:
            return None
        if not whole.startswith(first):
            return None
        closing, last = self.closing, str(self.tokenizer.decode([before.last.tokens[-1]]))
        if before.last.finish_reason == "eos":
            closing = closing.removeprefix(last)
        return tokens_behind(self.tokenizer, last, closing + whole[len(first) :])


def _same(ours: Message, theirs: Message) -> bool:
    """Whether a message that came back is the one that was known; ids of calls are the client's business."""

    def content(message: Message) -> tuple[Any, ...]:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        named = [(call.get("name"), call.get("arguments")) for call in calls]
        return message["role"], (message.get("content") or "").strip(), named

    return content(ours) == content(theirs)


def closing_of(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> str:
    """What a chat template writes behind an answer; nothing without one."""
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": ANSWER}]
    try:
        return (
            template_text(tokenizer, turn, variables=variables).rpartition(ANSWER)[2] if tokenizer.chat_template else ""
        )
    except ValueError:
        return ""


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
        self._endpoint: Endpoint | None = None
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
        endpoint, url = self._start(engine)
        settings, greedy = self.config.generation, options.get("greedy", False)
        params = SamplingParams(1.0 if greedy else settings.temperature, settings.top_p, settings.top_k, greedy)
        closing = closing_of(endpoint.tokenizer, self.variables)
        each = [(p, r.further(i, [], 0)) for p, r in zip(prompts, requests, strict=True) for i in range(group_size)]
        episodes = {
            f"episode-{secrets.token_urlsafe(24)}": AgentEpisode(
                request,
                params,
                options.get("role", "policy"),
                seed=options["seed"],
                step=options["step"],
                left=settings.max_new_tokens,
                calls_left=self.config.environment.max_turns,
                tokenizer=endpoint.tokenizer,
                closing=closing,
                positions=self.positions,
            )
            for _, request in each
        }
        jobs = [Job({"prompt": p.prompt, **p.row}, url, key, MODEL) for (p, _), key in zip(each, episodes, strict=True)]
        order = list(episodes.values())
        assert endpoint.episodes is not None
        endpoint.episodes |= episodes
        endpoint.scheduler.renew()
        try:
            played = self.environment.play(jobs, ended=lambda place: order[place].end())
        finally:
            for episode in order:
                episode.end()
            endpoint.episodes.clear()
            endpoint.scheduler.release()
        return self._gathered([p for p, _ in each], order, played)

    def _gathered(
        self, prompts: list[PreparedPrompt], episodes: list[AgentEpisode], played: list[Played]
    ) -> tuple[list[Completion], list[list[int]], list[Episode], list[Other]]:
        completions, first_prompts, gathered, others = [], [], [], []
        for place, (prompt, episode, result) in enumerate(zip(prompts, episodes, played, strict=True)):
            rows = episode.rows()
            failure = result.failure or (None if rows else f"`{self.environment.name}` asked the policy nothing")
            if rows and failure is None:
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

    def _start(self, engine: SamplingEngine) -> tuple[Endpoint, str]:
        """The endpoint, which listens from now on, and its URL."""
        from tinyrl.generation.endpoint import LOCAL, Endpoint, Listening

        if self._endpoint is None or self._listening is None:
            assert isinstance(engine, LocalEngine), "the configuration has checked it"
            self._endpoint = Endpoint(
                LiveScheduler(engine, max_rows=self.config.generation.max_rows or AT_ONCE),
                {MODEL: "policy"},
                defaults=SamplingParams(),
                max_new_tokens=self.config.generation.max_new_tokens,
                positions=self.positions,
                variables=self.variables,
                hosts=LOCAL,
                episodes={},
            )
            self._listening = Listening(self._endpoint)
        return self._endpoint, self._listening.url

    def close(self) -> None:
        self.environment.close()
        if self._endpoint is not None and self._listening is not None:
            self._listening.stop()
            self._endpoint.scheduler.close()
