"""Chat messages as people have them: OpenAI's and TRL's `role` and `content`, ShareGPT's `from` and `value`.

What a message may hold besides (name, reasoning_content) goes through to the chat template as it is. Of tool_calls,
arguments that are JSON text, as OpenAI writes them, become the object that templates expect and would quote once more.
"""

from __future__ import annotations

import json
from typing import Any

from tinyrl.data.readers import Row
from tinyrl.text import listed, shortened

Message = dict[str, Any]  # role, content (text), and what else a chat template reads of it
Prompt = str | list[Message]  # text, or chat messages, as the data has them

CONVERSATIONS = ("messages", "conversations")
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}


def check_prompt(prompt: Any) -> None:
    """ValueError with a sentence unless `prompt` is text or a list of {"role": ..., "content": text} messages."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return
    wanted = 'text, or a list of messages {"role": "user", "content": "..."}'
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt must be {wanted}, not {repr(prompt)[:60]}")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"the prompt must be {wanted}; one message is {repr(message)[:60]}")


def conversation(row: Row, column: str) -> list[Message]:
    """The messages that a row's column holds. Raises ValueError, naming the column, where it holds none."""
    messages = messages_of(parsed(row[column], column), column)
    system = row.get("system")  # ShareGPT files keep it beside the conversation
    if column == "conversations" and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def messages_of(value: Any, column: str) -> list[Message]:
    """A list of messages, each with a `role` and its `content` as text; ValueError for anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"'{column}' must be a list of messages, not {value!r:.60}")
    return [_message(message, column) for message in value]


def _message(value: Any, column: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"'{column}' holds {value!r:.60} where a message (role, content) belongs")
    message = {str(key): inner for key, inner in value.items() if inner is not None}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message, column)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"'{column}' has a message without a `role`: {value!r:.60}")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, column)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"'{column}' has a message whose `content` is not text: {content!r:.60}")
    if content is None and not (role == "assistant" and {"tool_calls", "reasoning_content"} & {*message}):
        raise ValueError(f"'{column}' has a message without `content`: {value!r:.60}")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return {**message, "role": role, "content": content or ""}


def _tool_call(call: Any) -> Any:
    """A call whose arguments are an object where they were its JSON text."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _of_sharegpt(message: Message, column: str) -> Message:
    sender, said = message.pop("from"), message.pop("value", None)
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        known = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"'{column}' has a message from {sender!r:.60}; known are {known}")
    if sender != "function_call":
        return {**message, "role": role, "content": said}
    call = parsed(said, column)
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in calls):
        raise ValueError(f"'{column}' has a function_call without a `name`: {said!r:.60}")
    return {**message, "role": role, "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _joined(parts: list[Any], column: str) -> str:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", part) if isinstance(part, dict) else part
            raise ValueError(f"'{column}' has a message with a part that is not text: {kind!r:.60}")
    return "".join(part["text"] for part in parts)


def as_messages(prompt: Prompt | None) -> list[Message]:
    """A prompt as messages: text is one of the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []


def roles_of(messages: list[Message]) -> str:
    return listed((message["role"] for message in messages), most=8)


def parsed(value: Any, column: str) -> Any:
    """A list that a .csv, or a table without nested columns, holds as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"'{column}' is text that is not JSON: {shortened(value, 60)!r}") from None


def policy_text(transcript: list[Message]) -> str:
    """What the policy wrote, turn after turn."""
    return "\n".join(message["content"] for message in transcript if message["role"] == "assistant")
