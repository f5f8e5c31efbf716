"""Environments: replies to a policy in the middle of an episode. Each is a function of the transcripts.

    def respond(prompts, transcripts, **columns) -> list[Reply | str | None]

It is called with a batch of episodes whose last turn the policy has just ended. A transcript is a list of messages,
`{"role": "assistant" | "tool", "content": text}`, that ends with the policy's turn; columns are the rows' own, and a
`seed` for each episode. A reply is read by the policy and never trained on; None: the episode is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from tinyrl.config.sections import EnvironmentConfig

MAX_TEXT_CHARS = 100_000  # of a reply, which is cut to a number of tokens later: this keeps megabytes from travelling
Message = dict[str, Any]
Transcript = list[Message]
Rewards = Literal["none", "some", "all"]  # of episodes that have one of their environment; some: its replies decide


class DropEpisode(Exception):
    """Raise this in a tool to drop the episode that called it: it ends without a reward, and the message is logged."""


@dataclass(frozen=True)
class Reply:
    """Reply to a turn: text for the policy, whether the episode ends with it (nobody reads it then), a reward for the
    turn (None: it has none). `invalid`: the turn asked for something that does not exist; `tool_error`: a tool that it
    called raised an exception of its own. results: those of a turn's several calls, each a message of its own where the
    chat template has a place for it; `text` is all of them, one below the other.
    """

    text: str = ""
    done: bool = False
    reward: float | None = None
    invalid: bool = False
    results: tuple[str, ...] = ()
    tool_error: bool = False


class BuiltIn:
    """An environment of tinyrl's own, opened for a run: a class in a file of this room (`built_in` in environment.py),
    and a name in config.sections.BUILT_IN_ENVIRONMENTS. about: what answers, for people.
    """

    stop: ClassVar[tuple[str, ...]] = ()  # texts that end a turn
    asks: ClassVar[str]  # a turn that is answered, with {words} of a question
    about: str

    def __init__(self, config: EnvironmentConfig, *, length: Callable[[str], int]) -> None:
        """Open it; length: tokens of a text. Raises ValueError where it cannot be opened."""
        raise NotImplementedError

    def respond(self, prompts: Any, transcripts: Any, **columns: Any) -> list[Any]:
        """Answer the last turn of each transcript, as the function above does."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it has started."""


def last_turn(transcript: Transcript) -> str:
    """Return the text of the last message."""
    return transcript[-1]["content"]
