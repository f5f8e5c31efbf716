"""Episodes of agents that call the policy by URL: every call is recorded token by token, as it was sampled.

    an agent asks     1. its key names the episode that the call belongs to
                      2. if it continues an earlier answer of the episode, that answer's own tokens stay, and only what
                         follows is tokenised: what is trained is what was sampled. It continues one that it repeats
                         with other white space, or with the stop string that ended it
                      3. otherwise it begins a conversation of its own: edited history, another system prompt, a
                         sub-agent, an image behind an answer (in a row all images are in the prompt)
                      4. the call counts when its answer is sent: one that the agent gave up before (it hung up, or
                         timed out and tries again) leaves no row, and its tokens and its turn are the episode's again
    it returns        5. rewards judge its text; each conversation is a row with the episode's reward (agents.py), but
                         for side conversations, such as a harness's request for a title

Tokens are drawn as the run says; temperature, top_p and top_k of a request are ignored, since log-probabilities must be
those of the trained distribution. generation.max_new_tokens is for an episode's calls together, and a call has at most
environment.max_call_tokens of them, so that none depends on which ends first. A call for which no turn or no token is
left is answered with nothing, as one that was cut off at once, and leaves no row: the episode is out of turns
(environment.max_turns), or it counts as truncated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinyrl.data.images import images_of
from tinyrl.data.messages import Message, messages_of
from tinyrl.endpoint.dialect import ContextOverflow, Refused
from tinyrl.environments.environment import Dialogue
from tinyrl.generation.drawing import advanced
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.generation.sample import FinishReason, Sample, SampleBuilder
from tinyrl.models.tokens import template_text, tokens_behind
from tinyrl.tasks.answers import after_answer, left_to_write, turn_closing

FIRST_BITS = 40  # of a call's offset among the random numbers of its episode


@dataclass(frozen=True)
class ClientInput:
    """A client's input: messages and the variables of their template, or text, or (neither) tokens."""

    messages: list[Message] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    text: str | None = None


@dataclass(frozen=True)
class SideConversations:
    """Which conversations of an agent are answered and not trained on: environment.side_prompts and min_tools."""

    prompts: list[str] = field(default_factory=list)
    min_tools: int = 0

    def has(self, given: ClientInput, *, prompt: str) -> bool:
        """Return whether a conversation that begins is one of them: by its system messages, or all of its `prompt`
        where it is no chat and has no roles; or by the number of tools that it declares, which a text never does.
        """
        told = [prompt]
        if given.messages is not None:
            told = [message["content"] for message in given.messages if message["role"] == "system"]
        is_named = any(any(one in text for one in self.prompts) for text in told)
        return is_named or len(given.variables.get("tools") or []) < self.min_tools


@dataclass(eq=False)
class AgentConversation:
    """A row: a prompt, and the tokens sampled and prefilled behind it. last: the answer before; known: all up to it as
    the agent has it (None: it cannot be continued); dialogue: the same as messages, for the records; pending: the
    call under way; was_denied: a call that would have continued it had no turn or no tokens left; is_side: it is
    answered, and is no row.
    """

    sample: SampleBuilder
    finish: FinishReason = "length"
    last: DecodedSequence | None = None
    was_denied: bool = False
    is_side: bool = False
    known: ClientInput | None = None
    dialogue: Dialogue = field(default_factory=Dialogue)
    pending: Call | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.sample.request.prompt, *self.sample.response]

    def add(self, read: list[int], answer: DecodedSequence, *, known: ClientInput | None) -> None:
        """Append tokens that were read and the answer to them."""
        assert answer.finish_reason is not None
        self.sample.read(read)
        self.sample.chose(answer.tokens, answer.logprobs)
        self.finish = answer.finish_reason
        self.last = answer
        self.known = known


@dataclass(eq=False)
class Call:
    """A call under way: its sequence, to be submitted, and the conversation that it begins or continues. Either it is
    `answered`, or it is given up and leaves nothing.

    given: what the agent sent; read: the tokens of it that are new; number: of the call among those with its prompt;
    limited: its length is limited by the episode and not by what the agent asked for.
    """

    episode: AgentEpisode
    conversation: AgentConversation
    sequence: DecodedSequence
    given: ClientInput
    read: list[int]
    number: tuple[str, int]
    limited: bool

    def answered(self, message: Message) -> None:
        """Record that the answer is sent, as this message or text, which is what will come back."""
        given = self.given
        known = None
        if given.text is not None:
            known = ClientInput(text=given.text + message["content"])
        elif given.messages is not None:
            added = messages_of([{"role": "assistant", **message}], "messages")
            known = ClientInput([*given.messages, *added], given.variables)
        with self.episode.lock:
            if self.episode.over:
                return
            self.conversation.pending = None
            self._note(message, known)
            self.conversation.add(self.read, self.sequence, known=known)
            self.episode.left -= len(self.sequence.tokens)
            self.episode.calls += 1
            self.episode.was_cut = self.limited and self.sequence.finish_reason == "length"

    def _note(self, message: Message, known: ClientInput | None) -> None:
        """Write the call and its answer into the record of the conversation; plain text is a message of the user."""
        dialogue = self.conversation.dialogue
        if known is not None and known.messages is not None:
            dialogue.messages = [*known.messages]
            dialogue.tools = known.variables.get("tools") or []
            return
        before = self.conversation.known
        text = self.given.text
        if text is not None and before is None:
            asked = text
        elif text is not None and before is not None and before.text is not None and text.startswith(before.text):
            asked = text.removeprefix(before.text)
        else:  # tokens, or a text that repeats the answer a little otherwise
            asked = str(self.episode.tokenizer.decode(self.read if dialogue.messages else self.sequence.request.prompt))
        dialogue.messages.append({"role": "user", "content": asked})
        dialogue.messages.append({"role": "assistant", "content": message["content"]})

    def give_up(self) -> None:
        """End a call that has no answer: its turn and its random numbers can be used again."""
        self.sequence.cancel()
        with self.episode.lock:
            if self.conversation.pending is not self:
                return
            self.conversation.pending = None
            if self.conversation.last is None:
                self.episode.conversations.remove(self.conversation)
            self.episode.calls_left += 1
            self.episode.numbers.remove(self.number)


@dataclass(frozen=True)
class Continued:
    """A conversation that a call continues behind its last answer, and the tokens that the call adds."""

    conversation: AgentConversation
    behind: DecodedSequence
    read: list[int]

    @property
    def is_current(self) -> bool:
        """Return whether no other call has continued the conversation."""
        return self.conversation.last is self.behind and self.conversation.pending is None


@dataclass
class AgentEpisode:
    """An episode under way. request: for it, with the prompt of the data; the tokens of its calls are drawn as it says;
    left: tokens that a call may still sample (calls under way are not counted, so that none depends on which ends
    first); calls: those answered; calls_left: those that may still be begun; call_tokens: the most of one call;
    numbers: of the calls answered and under way, by prompt; over: its agent has ended; denied: what the first call that
    was denied had none of, turns or length (tokens); was_cut: the last answer was cut off by a limit of the episode;
    has_overflowed: the model had no positions left for one; side: its chats that are no rows.
    """

    request: Request
    left: int
    call_tokens: int
    calls_left: int
    tokenizer: PreTrainedTokenizerBase
    positions: int
    calls: int = 0
    over: bool = False
    denied: Literal["turns", "length"] | None = None
    was_cut: bool = False
    has_overflowed: bool = False
    side: SideConversations = field(default_factory=SideConversations)
    conversations: list[AgentConversation] = field(default_factory=list)
    numbers: set[tuple[str, int]] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def call(self, asked: Request, given: ClientInput) -> Call | None:
        """Begin a call, `asked` as its client has it; None if the episode has no calls or no tokens left. Raises
        Refused if it is over, and ContextOverflow if the model has no position left.

        It renders and encodes texts, which takes long; meanwhile the lock is free for answers to be recorded.
        """
        while True:
            found = self._continued(asked.prompt, given)
            with self.lock:
                if self.over:
                    raise Refused(401, "the episode is over")
                if found is None or found.is_current:
                    return self._begun(found, asked, given)

    def _begun(self, found: Continued | None, asked: Request, given: ClientInput) -> Call | None:
        """Begin a call that continues the conversation found, or else another one; the lock must be held."""
        conversation = None if found is None else found.conversation
        read = [] if found is None else found.read
        if self.calls_left < 1 or self.left < 1:
            self.denied = self.denied or ("turns" if self.calls_left < 1 else "length")
            if conversation is not None:
                conversation.was_denied = True
            return None
        context = asked.prompt if conversation is None else [*conversation.tokens, *read]
        room = self.positions - len(context)
        if room < 1:
            raise ContextOverflow(f"{len(context)} tokens", positions=self.positions)
        own = self.request
        # The call's offset among the episode's random numbers is a function of its prompt and of how often that was
        # sent before, so that it does not depend on which of several calls comes first.
        digest = hashlib.sha256(json.dumps(context).encode()).hexdigest()
        number = next((digest, n) for n in itertools.count() if (digest, n) not in self.numbers)
        offset = hashlib.sha256(f"{digest} {number[1]}".encode()).hexdigest()
        [key] = advanced(np.array([own.key]), np.array([int(offset, 16) % (1 << FIRST_BITS)]))
        most = min(asked.limit, self.call_tokens, self.left, room)
        request = replace(
            asked,
            prompt=context,
            key=key,
            limit=most,
            row=own.row,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            greedy=own.greedy,
            role=own.role,
        )
        if conversation is None:
            prompt = "" if given.messages is not None else str(self.tokenizer.decode(context))
            conversation = AgentConversation(SampleBuilder(request), is_side=self.side.has(given, prompt=prompt))
            self.conversations.append(conversation)
        call = Call(
            self,
            conversation,
            DecodedSequence(request),
            given=given,
            read=read,
            number=number,
            limited=most < asked.limit,
        )
        conversation.pending = call
        self.calls_left -= 1
        self.numbers.add(number)
        return call

    def end(self) -> None:
        with self.lock:
            self.over = True
            for conversation in self.conversations:
                if conversation.pending is not None:
                    conversation.pending.sequence.cancel()

    def dialogues(self) -> list[Dialogue]:
        """Return the messages of the conversations that are rows, in the order of `samples`."""
        return [one.dialogue for one in self._rows]

    @property
    def _rows(self) -> list[AgentConversation]:
        """Return the conversations with an answer that are trained on."""
        return [one for one in self.conversations if one.last is not None and not one.is_side]

    def samples(self, *, cut_by: Literal["turns", "length"] | None = None) -> list[Sample]:
        """Return the conversations that are rows, in the order in which they began. Of an episode that was `cut_by` a
        limit those whose next call was denied have ended for it, or else the first; one whose last answer was itself
        cut off stays so.
        """
        answered = self._rows
        ended = [each for each in answered if each.was_denied] or answered[:1]
        for conversation in ended:
            if cut_by is not None and conversation.finish != "length":
                conversation.finish = cut_by
        return [each.sample.sample(finish=each.finish) for each in answered]

    def _continued(self, prompt: list[int], given: ClientInput) -> Continued | None:
        """Find the conversation that a call continues, and the tokens that it adds; None: it begins one."""
        for conversation in reversed([*self.conversations]):
            known = conversation.known
            last = conversation.last
            added = None
            if last is None or conversation.pending is not None:
                continue
            if given.messages is not None:
                added = None if known is None else self._added(last, known, given)
            elif given.text is not None:
                added = self._text_behind(last, known, given.text)
            elif prompt[: len(tokens := conversation.tokens)] == tokens:
                added = prompt[len(tokens) :]
            if added is not None:
                return Continued(conversation, behind=last, read=added)
        return None

    def _text_behind(self, last: DecodedSequence, known: ClientInput | None, text: str) -> list[int] | None:
        """Encode what follows an answer in a text; None if the text does not begin with what is known."""
        if known is None or known.text is None:
            return None
        rest = text[len(known.text) :] if text.startswith(known.text) else None
        stripped = known.text.rstrip()
        if rest is None and text.startswith(stripped):
            behind = text[len(stripped) :]
            ends_there = not behind or behind[0].isspace() or behind.startswith(tuple(last.request.stop))
            rest = behind if ends_there else None
        if rest is None:
            return None
        if last.finish_reason == "stop" and not known.text.endswith(tuple(last.request.stop)):
            rest = _without_stop(rest, last.request.stop)  # which was sampled, and not shown
        return tokens_behind(self.tokenizer, known.text, rest)

    def _added(self, last: DecodedSequence, known: ClientInput, given: ClientInput) -> list[int] | None:
        """Encode what the template writes for the messages behind an answer. None if they do not follow it, if tools or
        variables of the template differ, or if the template writes earlier turns otherwise once more follow (it may
        leave out their thinking).
        """
        ours = known.messages or []
        theirs = given.messages or []
        before = theirs[: len(ours)]
        if not ours or len(theirs) <= len(ours) or known.variables != given.variables:
            return None
        if not all(is_same(one, other, stops=last.request.stop) for one, other in zip(ours, before, strict=True)):
            return None
        if images_of(theirs[len(ours) :]):
            return None
        try:
            first = template_text(self.tokenizer, before, variables=given.variables)
            goes_on = theirs[-1]["role"] == "assistant"  # a beginning that the answer continues
            last_turn = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
            whole = template_text(self.tokenizer, theirs, variables=given.variables, **last_turn)
            closing = turn_closing(self.tokenizer, given.variables)
            after = after_answer(self.tokenizer, given.variables)
        except ValueError:
            return None
        if not whole.startswith(first):
            return None
        behind = after + whole[len(first) :]
        if last.finish_reason == "eos":
            behind = left_to_write(self.tokenizer, behind, ended_at=last.tokens[-1], closing=closing)
        return tokens_behind(self.tokenizer, str(self.tokenizer.decode([last.tokens[-1]])), behind)


def _without_stop(text: str, stops: list[str]) -> str:
    """Remove a stop string from the beginning of a text, and space before it."""
    for stop in stops:
        if text.startswith(stop):
            return text.removeprefix(stop)
        if stop.strip() and text.lstrip().startswith(stop.strip()):
            return text.lstrip().removeprefix(stop.strip())
    return text


def is_same(ours: Message, theirs: Message, *, stops: list[str]) -> bool:
    """Return whether a message has come back: its role, calls (whatever ids they have) and images are the same, and its
    text up to white space; up to a stop string, too, if it is an answer.
    """
    endings = stops if ours["role"] == "assistant" else []
    same_text = bool(_readings(ours, endings) & _readings(theirs, endings))
    same_images = [one.sha256 for one in images_of([ours])] == [one.sha256 for one in images_of([theirs])]
    return ours["role"] == theirs["role"] and _calls(ours) == _calls(theirs) and same_text and same_images


def _readings(message: Message, endings: list[str]) -> set[str]:
    """Return the words of a message, with one of the endings and without."""
    text = " ".join((message.get("content") or "").split())
    return {text} | {text.removesuffix(" ".join(ending.split())).rstrip() for ending in endings}


def _calls(message: Message) -> list[tuple[Any, Any]]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [(call.get("name"), call.get("arguments")) for call in calls]
