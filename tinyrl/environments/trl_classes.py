"""TRL's environment classes (`environment_factory`, TRL 1.16), unchanged, as functions of the transcript.

    class Game:
        def reset(self, **row) -> str | None: ...    # gets a row's columns, `prompt` among them; the text it returns
                                                     # is appended to the prompt's last message
        def guess(self, word: str) -> str: ...       # each public method is a tool
        def get_reward(self) -> float: ...           # optional: called when the episode is over; may be async

TRL keeps an instance for each episode in flight. Here the calls of a transcript are replayed on a fresh one, so that
nothing has to be saved and a worker that dies loses nothing; live instances are only a cache. So a replay must reach
the same state: a class that draws random numbers takes `seed` in `reset` and draws them from that alone.

Other than in TRL, an instance serves one episode (what takes long to make belongs into the module), and the calls of a
turn at which an episode is cut off are executed, so that a winning last move counts.
"""

import copy
import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from tinyrl.environments import DropEpisode, Message, Reply, Transcript
from tinyrl.environments.tool_calls import calls_of, carry_out, joined, rows_of, text_of
from tinyrl.workers.worker import awaited, facts_of

MOST_LIVE = 4096  # cached instances; the oldest are dropped, and a replay makes them again


class ClassEnvironment:
    """An environment class, or a function without parameters that makes an instance, called with whole transcripts.

    Prompts are the rows' own, without the text of reset.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._probe = make()
        self._live: dict[str, Any] = {}  # by the history of its state
        # Looked up on the class, as TRL does: on an instance, properties would be evaluated.
        names = [name for name, _ in inspect.getmembers(type(self._probe), predicate=inspect.isfunction)]
        self.has_reward = "get_reward" in names
        self._tool_names = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]

    def tools(self) -> list[Callable[..., Any]]:
        """Return the public methods, bound to an instance that plays no episode."""
        return [*self._tools_of(self._probe).values()]

    def opening(self, prompts: list[Any], **columns: list[Any]) -> list[str | None]:
        """Reset an instance for each row; return the texts for the end of the prompts' last messages."""
        texts = []
        for row in rows_of(prompts, columns):
            instance, text = self._reset(row)
            self._keep(_keys(row, [])[-1], instance)
            texts.append(text)
        return texts

    def respond(
        self, prompts: list[Any], transcripts: list[Transcript], **columns: list[Any]
    ) -> list[Reply | DropEpisode | None]:
        """Answer the calls of each last turn. A turn without one ends the episode, with get_reward() if it has that."""
        rows = rows_of(prompts, columns)
        turns = [_policy_turns(transcript) for transcript in transcripts]
        instances = self._after(rows, [messages[:-1] for messages in turns])
        calls = [calls_of(messages[-1]) for messages in turns]
        made = carry_out([(self._tools_of(i), asked) for i, asked in zip(instances, calls, strict=True)])
        replies = [
            instance if isinstance(instance, DropEpisode) else joined(found)
            for instance, found in zip(instances, made, strict=True)
        ]
        for row, messages, instance, reply in zip(rows, turns, instances, replies, strict=True):
            if isinstance(reply, Reply):
                self._keep(_keys(row, messages)[-1], instance)
        if self.has_reward:
            over = [index for index, reply in enumerate(replies) if reply is None]
            rewards = awaited([instances[index].get_reward() for index in over])
            for index, reward in zip(over, rewards, strict=True):
                replies[index] = Reply(done=True, reward=reward)
        return replies

    def final_rewards(self, prompts: list[Any], transcripts: list[Transcript], **columns: list[Any]) -> list[Any]:
        """Return get_reward() of episodes that were cut off, after all their calls, those of the last turn too; the
        DropEpisode of one that a call dropped.
        """
        turns = [_policy_turns(transcript) for transcript in transcripts]
        instances = self._after(rows_of(prompts, columns), turns)
        return awaited([each if isinstance(each, DropEpisode) else each.get_reward() for each in instances])

    def _after(self, rows: list[dict[str, Any]], turns: list[list[Message]]) -> list[Any]:
        """Return an instance for each row that has answered the calls of these turns, and leaves the cache; or the
        DropEpisode that one of them raised.
        """
        instances = []
        missed = []
        for row, messages in zip(rows, turns, strict=True):
            keys = _keys(row, messages)
            seen = next((count for count in reversed(range(len(keys))) if keys[count] in self._live), None)
            instances.append(self._reset(row)[0] if seen is None else self._live.pop(keys[seen]))
            missed.append([call for message in messages[seen or 0 :] for call in calls_of(message)])
        made = carry_out([(self._tools_of(i), calls) for i, calls in zip(instances, missed, strict=True)])
        return [
            of_calls if isinstance(of_calls, DropEpisode) else i for i, of_calls in zip(instances, made, strict=True)
        ]

    def _keep(self, key: str, instance: Any) -> None:
        self._live.pop(key, None)  # of an identical sample; this one is in the same state, and now the newest
        self._live[key] = instance
        if len(self._live) > MOST_LIVE:
            del self._live[next(iter(self._live))]

    def _tools_of(self, instance: Any) -> dict[str, Callable[..., Any]]:
        if isinstance(instance, DropEpisode):
            return {}
        methods = [getattr(instance, name) for name in self._tool_names]
        return {method.__name__: method for method in methods}  # the name that the model sees; the same for an alias

    def _reset(self, row: dict[str, Any]) -> tuple[Any, str | None]:
        """Make an instance and reset it with the columns that its reset takes; return it and the text of reset."""
        instance = self._make()
        known = facts_of(instance.reset).parameters
        given = row if known is None else {name: row[name] for name in known if name in row}
        [text] = awaited([instance.reset(**copy.deepcopy(given))])  # which may change what it is given
        return instance, None if text is None else text_of(text)


def _policy_turns(transcript: Transcript) -> list[Message]:
    return [message for message in transcript if message["role"] == "assistant"]


def _keys(row: dict[str, Any], messages: list[Message]) -> list[str]:
    """Return keys of an instance's state after none, one, two, ... of the turns."""
    history = hashlib.blake2b(json.dumps(row, sort_keys=True).encode("ascii"))
    keys = [history.hexdigest()]
    for message in messages:
        history.update(json.dumps([message.get("content"), message.get("tool_calls")]).encode("ascii"))
        keys.append(history.hexdigest())
    return keys
