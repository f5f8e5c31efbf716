"""Turns of the assistant: which of a conversation are answers, which of them are learnt, and one that a prompt begins.

A prompt whose last message is the assistant's holds the beginning of the answer. An answer in messages behind it goes
on with that message: its first content is the rest of it, as a policy would write it, and no turn of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyrl.data.messages import Message, Prompt, as_messages

Side = str | list[Message]  # an answer to a prompt

# Keys with which a turn says whether it is learnt: 1 and true, or 0 and false (OpenAI, ms-swift, axolotl, slime, ...).
WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask")
LEARNT = (*WEIGHTS, "loss", "train", "training", "trainable")
MASKED = ("masked",)  # and one that says the contrary (torchtune)
UNCLEAR = ("mask", "train_detail", "training_detail")  # of which nothing says what is learnt, or only parts of a turn
MARKS = frozenset((*LEARNT, *MASKED))
NOT_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # other parts of an answer


def is_learnt(message: Message) -> bool:
    """Return whether a turn of the assistant is to be learnt, by its MARKS. Raises ValueError for a value between, for
    keys of UNCLEAR, and for keys that contradict each other.
    """
    marks = dict[str, bool]()
    for name in (*LEARNT, *MASKED, *UNCLEAR):
        if name not in message:
            continue
        value = message[name]
        if name in UNCLEAR:
            raise ValueError(f"a turn has `{name}`={value!r:.60}, which is not read; write `weight`: 0 or 1")
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            none = "learnt" if name in MASKED else "not learnt"
            raise ValueError(f"the `{name}` of a turn is 0 or false ({none}), 1, true or null, not {value!r:.60}")
        marks[name] = bool(value) != (name in MASKED)
    if len({*marks.values()}) > 1:
        said = ", ".join(f"`{name}`={message[name]!r}" for name in marks)
        raise ValueError(f"a turn says both that it is learnt and that it is not: {said}")
    return all(marks.values())


def first_answer(messages: list[Message]) -> int | None:
    """Return the place of the first turn of the assistant that answers something: one behind a message that is not the
    system's, or, where there is none, behind any. A greeting is context. None if there is no such turn.
    """
    behind_any: int | None = None
    is_asked = False
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and is_asked:
            return place
        if message["role"] == "assistant" and place > 0 and behind_any is None:
            behind_any = place
        is_asked = is_asked or message["role"] not in ("system", "assistant")
    return behind_any


def goes_on(prompt: Prompt | None, answer: Side) -> bool:
    """Return whether an answer in messages goes on with the beginning of one that its prompt ends with."""
    if isinstance(answer, str) or not isinstance(prompt, list):
        return False
    return prompt[-1]["role"] == answer[0]["role"] == "assistant"


def rest_of(message: Message) -> str:
    """Return the text with which a message goes on with a begun one. Raises ValueError for one that holds more."""
    more = [f"`{name}`" for name in (*NOT_CONTENT, "images") if message.get(name)]
    if more:
        raise ValueError(
            f"the prompt ends with the beginning of an answer, and the message that goes on with it holds {more[0]}; "
            "only text can go on, so write the answer as one message"
        )
    return str(message["content"])


def joined(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Return the messages of a prompt and of an answer that goes on with the last of them."""
    *before, begun = prompt
    first, *others = answer
    whole: dict[str, Any] = {**begun, **first, "content": begun["content"] + rest_of(first)}
    return [*before, whole, *others]


@dataclass(frozen=True)
class LearntTurn:
    """A turn of the assistant, or the text that is left of a begun one, behind the messages before it."""

    prompt: list[Message]
    answer: Side


def learnt_turns(prompt: Prompt | None, answer: list[Message], *, continues: bool) -> list[LearntTurn]:
    """Return each turn of an answer that is to be learnt, behind the messages before it. continues: the answer goes on
    with the last message of its prompt, and its first turn is the text that is left of that.
    """
    messages = as_messages(prompt)
    turns = list[LearntTurn]()
    if continues:
        if is_learnt(answer[0]):
            turns.append(LearntTurn(messages, rest_of(answer[0])))
        conversation = joined(messages, answer)
    else:
        conversation = [*messages, *answer]
    for place in range(len(messages), len(conversation)):
        message = conversation[place]
        if message["role"] == "assistant" and is_learnt(message):
            turns.append(LearntTurn(conversation[:place], [message]))
    return turns


def behind_beginning(prompt: Prompt | None, answer: Side, *, continues: bool) -> tuple[Prompt | None, Side]:
    """Return an answer and what is before it as a reader of whole answers takes them: one that goes on with the last
    message of its prompt is the text that is left of that, or, where other messages follow it, a part of the prompt.
    """
    if not continues or isinstance(answer, str):
        return prompt, answer
    if len(answer) == 1:
        return prompt, rest_of(answer[0])
    messages = as_messages(prompt)
    conversation = joined(messages, answer)
    return conversation[: len(messages)], conversation[len(messages) :]
