"""Anthropic's Messages API as a translation of chat completions: /v1/messages.

The JSON is that of `anthropic.types`, by which tests/endpoint/test_dialects.py checks every answer and event; a
server needs no package for it.

Less than the original: content is text, images in base64, calls of tools and their results; thoughts are text; nothing
is cached for a client (cache_control is ignored). A block of thoughts in a request is another model's, and skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from tinyrl.data.image_rows import address_of_source
from tinyrl.endpoint.dialect import (
    JSON,
    BadField,
    Dialect,
    EndedChoice,
    ListedToken,
    Refused,
    Usage,
    refuse_several,
    refuse_state,
)
from tinyrl.endpoint.request_tools import flat_tools
from tinyrl.text import truncate

OWN = {  # translated here
    "cache_control", "messages", "output_config", "stop_sequences", "system", "tool_choice", "tools",
}  # fmt: skip
THOUGHTS = ("thinking", "redacted_thinking")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class Messages(Dialect):
    """An answer in the words of Messages: a block of text, if there is any or nothing else, and one for each call."""

    prefix = "msg_"
    foreign = frozenset(
        {"echo", "logprobs", "max_completion_tokens", "prompt", "return_token_ids", "stop", "top_logprobs"}
    )
    names: ClassVar[dict[str, str]] = {"stop": "stop_sequences"}

    def __init__(self, asked: JSON) -> None:
        super().__init__(asked)
        self.is_open = False  # the block of text has begun
        self.last: EndedChoice | None = None

    @staticmethod
    def chat_request(asked: JSON) -> JSON:
        refuse_state(asked)
        refuse_several(asked)
        chat = {name: value for name, value in asked.items() if name not in OWN}
        chat["messages"] = _messages(asked.get("system"), asked.get("messages"))
        chat["stop"] = asked.get("stop_sequences")
        chat["tools"] = flat_tools(asked.get("tools"), _function)
        chat["tool_choice"] = _tool_choice(asked.get("tool_choice"))
        config = asked.get("output_config")
        if isinstance(config, dict):
            chat |= {f"output_config.{name}": value for name, value in config.items() if name != "effort"}
        elif config is not None:
            chat["output_config"] = config
        thinking = asked.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "adaptive":  # as the model likes
            del chat["thinking"]
        return chat

    def whole(self, choices: list[EndedChoice], usage: Usage) -> JSON:
        [ended] = choices
        return self._message(ended, usage)

    def begin(self, count: int, usage: Usage) -> Iterator[JSON]:
        yield {"type": "message_start", "message": self._message(None, usage)}

    def piece(self, index: int, text: str, logprobs: list[ListedToken] | None) -> Iterator[JSON]:
        yield from self._opened()
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def end(self, index: int, ended: EndedChoice) -> Iterator[JSON]:
        self.last = ended
        for place, block in enumerate(_blocks(ended)):
            if block["type"] == "text":
                yield from self._opened()
            else:
                written = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": written}
                yield {"type": "content_block_start", "index": place, "content_block": {**block, "input": {}}}
                yield {"type": "content_block_delta", "index": place, "delta": delta}
            yield {"type": "content_block_stop", "index": place}

    def finish(self, usage: Usage) -> Iterator[JSON]:
        assert self.last is not None
        yield {"type": "message_delta", "delta": _reason(self.last), "usage": _usage(usage)}
        yield {"type": "message_stop"}

    @staticmethod
    def error(refused: Refused) -> JSON:
        kind = KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}

    def _opened(self) -> Iterator[JSON]:
        """Begin the block of text, unless it has begun."""
        if not self.is_open:
            self.is_open = True
            yield {"type": "content_block_start", "index": 0, "content_block": _text_block("")}

    def _message(self, ended: EndedChoice | None, usage: Usage) -> JSON:
        """Return the whole message; one under way is empty."""
        reason = {"stop_reason": None, "stop_sequence": None} if ended is None else _reason(ended)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked["model"],
            "content": [] if ended is None else _blocks(ended),
            **reason,
            "usage": _usage(usage),
        }


def _reason(ended: EndedChoice) -> JSON:
    reason = "stop_sequence" if ended.stop is not None else STOP_REASONS[ended.reason]
    return {"stop_reason": reason, "stop_sequence": ended.stop}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.completion,
    }


def _text_block(text: str) -> JSON:
    return {"type": "text", "text": text, "citations": None}


def _blocks(ended: EndedChoice) -> list[JSON]:
    blocks = list[JSON]()
    if ended.content or not ended.calls:
        blocks.append(_text_block(ended.content or ""))
    for call in ended.calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


# ---- a request ----


def _messages(system: Any, given: Any) -> list[JSON]:
    """Return chat messages: results of tools are messages of their own, in their places."""
    messages = list[JSON]()
    parts = system if isinstance(system, list) else [{"type": "text", "text": "" if system is None else system}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadField("system", f"must be text or blocks of text, not {truncate(repr(part), 60)}")
    if system:
        messages.append({"role": "system", "content": system})
    if not isinstance(given, list) or not given:
        raise BadField("messages", f"must be a list of messages, not {truncate(repr(given), 60)}")
    for message in given:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            shown = truncate(repr(message), 80)
            raise BadField("messages", f"has one of another role than user, assistant and system: {shown}")
        content = message.get("content")
        if not isinstance(content, list):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(content))
        else:
            messages += _others(role, content)
    return messages


def _kind(block: Any, *, known: tuple[str, ...]) -> str:
    """Return the type of a block. Raises Refused for one that is not known."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        raise BadField("messages", f"has a block of the type {truncate(repr(kind), 40)}; read are {', '.join(known)}")
    return kind


def _assistant(blocks: list[Any]) -> JSON:
    texts = list[JSON]()
    calls = list[JSON]()
    for block in blocks:
        kind = _kind(block, known=("text", "tool_use", *THOUGHTS))
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    return {"role": "assistant", "content": texts or None, **({"tool_calls": calls} if calls else {})}


def _others(role: str, blocks: list[Any]) -> list[JSON]:
    """Return the messages of a user's blocks: one for all text that stands together, one for each result."""
    messages = list[JSON]()
    for block in blocks:
        if _kind(block, known=("text", "image", "tool_result")) == "tool_result":
            content = block.get("content")
            shown = [*map(_shown, content)] if isinstance(content, list) else content
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(_shown(block))
        else:
            messages.append({"role": role, "content": [_shown(block)]})
    return messages or [{"role": role, "content": ""}]


def _shown(block: Any) -> Any:
    """Return a block of an image as the part of chat completions; others as they are. Raises Refused for a source that
    is neither base64 nor an address.
    """
    if not isinstance(block, dict) or block.get("type") != "image":
        return block
    try:
        url = address_of_source(block.get("source"))
    except ValueError as error:
        raise BadField("messages", str(error)) from None
    return {"type": "image_url", "image_url": {"url": url}}


def _function(tool: JSON) -> JSON | None:
    """Return a tool as chat completions write functions; None for one whose schema is the vendor's."""
    if tool.get("type") not in (None, "custom"):
        return None
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return CHOICES.get(str(kind), choice)
