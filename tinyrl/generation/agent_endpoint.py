"""The endpoint of agents under training: each call of an episode is recorded token by token (agents.py)."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tinyrl.data.messages import Message, messages_of
from tinyrl.generation.agents import MODEL
from tinyrl.generation.endpoint import LOCAL, Endpoint
from tinyrl.generation.engine import Completion, Request, Response
from tinyrl.generation.live import Draw, LiveSampler, Spelling, Wanted
from tinyrl.generation.openai_requests import Asked, Choice, Refused, Said, Sampled
from tinyrl.models.templates import template_text
from tinyrl.models.tokens import tokens_behind
from tinyrl.tasks.prompts import ANSWER

FIRST_BITS = 40  # of a call's offset among the random numbers of its episode


@dataclass(kw_only=True)
class Conversation(Response):
    """A row: a prompt, and what was sampled and read behind it."""

    prompt: list[int]
    number: int  # of its first call in the episode
    last: Completion | None = None
    messages: list[Message] | None = None  # up to the last answer, as the agent has it
    variables: dict[str, Any] = field(default_factory=dict)  # with which these were rendered, tools among them
    text: str | None = None
    wanted: Wanted | None = None  # the call under way

    @property
    def busy(self) -> bool:
        return self.wanted is not None and not self.wanted.given_up

    def as_completion(self) -> Completion:
        assert self.last is not None
        return self.ended(self.last.finish_reason)


@dataclass
class Session:
    """An episode under way. left: tokens that a call may still sample (calls under way are not counted, so that none
    depends on which ends first); over: its agent has ended.
    """

    request: Request
    draw: Draw
    seed: int
    step: int
    left: int
    calls_left: int
    conversations: list[Conversation] = field(default_factory=list)
    calls: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    wanted: list[Wanted] = field(default_factory=list)
    over: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def first_token(self, prompt: list[int]) -> int:
        """A call's offset among the episode's random numbers: of its prompt, and how often that was asked before, so
        that it does not depend on which of several calls comes first.
        """
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
        again = self.seen[digest] = self.seen.get(digest, -1) + 1
        return int(hashlib.sha256(f"{digest} {again}".encode()).hexdigest(), 16) % (1 << FIRST_BITS)

    def end(self) -> None:
        with self.lock:
            self.over = True
            for wanted in self.wanted:
                wanted.given_up = True

    def rows(self) -> list[Conversation]:
        """Those with an answer, in the order in which they were begun."""
        return sorted((c for c in self.conversations if c.last is not None), key=lambda c: c.number)


@dataclass(frozen=True)
class Call:
    """A call that is to be sampled: the conversation it belongs to, and what that reads before it."""

    conversation: Conversation
    read: list[int]
    request: Request


class AgentEndpoint(Endpoint):
    """The endpoint of a run's agents. State: the episodes under way, by key."""

    def __init__(self, sampler: LiveSampler, *, positions: int, max_new_tokens: int, variables: dict[str, Any]) -> None:
        super().__init__(
            sampler,
            {MODEL: "policy"},
            defaults=Draw(),
            max_new_tokens=max_new_tokens,
            positions=positions,
            variables=variables,
            hosts=LOCAL,
        )
        self.sessions: dict[str, Session] = {}
        self._closing = _closing(self.tokenizer, variables) if self.tokenizer.chat_template else ""

    def _who(self, key: str) -> Session:
        session = self.sessions.get(key)
        if session is None or session.over:
            raise Refused(401, "no episode under way has this key")
        return session

    def _unseen_tools(self, why: str) -> None:
        raise Refused(400, why, param="tools")

    def _start(
        self,
        body: Sampled,
        prompts: list[list[int]],
        *,
        who: Any,
        said: Said,
        limit: int | None,
        opened: str = "",
        marker: str | None = None,
    ) -> Asked:
        session: Session = who
        if (body.n or 1) > 1 or len(prompts) > 1:
            raise Refused(400, "in an episode a call is one completion: n=1, one prompt", param="n")
        self._check(prompts[0])
        asked = Asked(body, [], id=secrets.token_hex(8))
        call = self._placed(session, prompts[0], said, limit=limit)
        conversation, request = call.conversation, call.request
        hidden = [] if body.include_stop_str_in_output else body.stops
        choice = Choice(0, request.prompt_tokens, Spelling(self.tokenizer), hidden, marker, text=opened)

        def message(content: dict[str, Any]) -> None:
            answer = messages_of([{"role": "assistant", **content}], "messages")  # as it will come back
            conversation.messages = [*(said.messages or []), *answer]
            conversation.variables = said.variables

        def end(result: Completion | Exception) -> None:
            with session.lock:
                if conversation.wanted is wanted and not wanted.given_up:  # else another call may go on from there
                    conversation.wanted = None
                    if isinstance(result, Completion) and not session.over:
                        conversation.add(call.read)
                        conversation.add(result.tokens, result.logprobs)
                        conversation.last = result
                        session.left -= len(result.tokens)
                        conversation.messages = conversation.text = None  # until the answer is sent
                        if said.text is not None:
                            written = self.tokenizer.decode(result.tokens, skip_special_tokens=True)
                            conversation.text = f"{said.text}{written}"
            asked.tell(choice, result)

        choice.on_message = message
        heard = partial(asked.tell, choice)
        wanted = Wanted(request, session.draw, body.stops, end, heard, seed=session.seed, step=session.step)
        choice.wanted = conversation.wanted = wanted
        session.wanted.append(wanted)
        asked.choices.append(choice)
        if not self.sampler.ask([wanted]):
            wanted.given_up = True
            raise Refused(429, "too many requests wait; try again later")
        session.calls += 1
        session.calls_left -= 1
        return asked

    def _placed(self, session: Session, prompt: list[int], said: Said, *, limit: int | None) -> Call:
        """Where a call stands in its episode. Raises Refused where that has no calls or tokens left."""
        with session.lock:
            if session.over:
                raise Refused(401, "the episode is over")
            if not session.calls_left:
                raise Refused(400, "the episode has no calls left (environment.max_turns)")
            going_on, read = self._continued(session, prompt, said)
            context = prompt if going_on is None else [*going_on.prompt, *going_on.tokens, *read]
            self._check(context)
            most = min(limit or session.left, session.left, self.positions - len(context))
            if most < 1:
                raise Refused(400, "the episode has no tokens left (generation.max_new_tokens)", param="max_tokens")
            conversation = going_on or Conversation(prompt=context, number=session.calls)
            if going_on is None:
                session.conversations.append(conversation)
            own, first = session.request, session.first_token(context)
            request = Request(context, own.prompt_row, own.first_sample, first_token=first, max_new_tokens=most)
            return Call(conversation, read, request)

    # ---- what a call goes on from ----

    def _continued(self, session: Session, prompt: list[int], said: Said) -> tuple[Conversation | None, list[int]]:
        """The conversation that a call continues, and the tokens that it adds; None: it begins one."""
        for conversation in reversed(session.conversations):
            if conversation.busy or conversation.last is None:
                continue
            added = self._added(conversation, prompt, said)
            if added is not None:
                return conversation, added
        return None, []

    def _added(self, before: Conversation, prompt: list[int], said: Said) -> list[int] | None:
        if said.messages is not None:
            return self._added_messages(before, said)
        if said.text is not None:
            text = before.text
            starts = text is not None and said.text.startswith(text)
            return tokens_behind(self.tokenizer, text, said.text[len(text) :]) if starts and text is not None else None
        known = [*before.prompt, *before.tokens]
        return prompt[len(known) :] if prompt[: len(known)] == known else None

    def _added_messages(self, before: Conversation, said: Said) -> list[int] | None:
        """Of messages that go on behind an answer: what the template writes after it. None where they do not, where
        tools or variables of the template are others, or where the template writes earlier turns otherwise once more
        follow (it may leave out their thinking).
        """
        known, messages = before.messages, said.messages or []
        if known is None or before.last is None or len(messages) <= len(known) or before.variables != said.variables:
            return None
        if any(not _same(ours, theirs) for ours, theirs in zip(known, messages, strict=False)):
            return None
        try:
            first = template_text(self.tokenizer, messages[: len(known)], variables=said.variables)
            whole = template_text(self.tokenizer, messages, variables=said.variables, add_generation_prompt=True)
        except ValueError:
            return None
        if not whole.startswith(first):
            return None
        closing, last = self._closing, before.last.tokens[-1]
        if before.last.finish_reason == "eos":
            closing = closing.removeprefix(str(self.tokenizer.decode([last])))
        return tokens_behind(self.tokenizer, str(self.tokenizer.decode([last])), closing + whole[len(first) :])


def _same(ours: Message, theirs: Message) -> bool:
    """Whether a message that came back is the one that was known; ids of calls are the client's business."""

    def shown(message: Message) -> tuple[Any, ...]:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        named = [(call.get("name"), call.get("arguments")) for call in calls]
        return message["role"], (message.get("content") or "").strip(), named

    return shown(ours) == shown(theirs)


def _closing(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> str:
    """What a chat template writes behind an answer."""
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": ANSWER}]
    try:
        return template_text(tokenizer, turn, variables=variables).rpartition(ANSWER)[2]
    except ValueError:
        return ""
