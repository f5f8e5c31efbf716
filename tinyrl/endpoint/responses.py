"""OpenAI's Responses API as a translation of chat completions: /v1/responses.

The JSON is that of `openai.types.responses`, by which tests/endpoint/test_dialects.py checks every answer and event;
it is written as it stands, since the client's classes gain required fields from one version to the next.

Less than the original: nothing is stored (previous_response_id, conversation, background and stored prompts are
refused), tools are functions, thoughts are text, and items are messages, calls and their results (of the type
`reasoning` they are skipped: another model's thoughts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, ClassVar

from tinyrl.endpoint.dialect import (
    JSON,
    BadField,
    Dialect,
    EndedChoice,
    ListedToken,
    Refused,
    Usage,
    logprob_entries,
    refuse_several,
    refuse_state,
)
from tinyrl.endpoint.request_tools import NamespacedName, flat_tools, namespaced_names
from tinyrl.text import truncate

OWN = {  # fields that are translated here; the others mean what they mean in chat completions
    "include", "input", "instructions", "max_output_tokens", "prompt", "reasoning", "text", "tool_choice", "tools",
}  # fmt: skip
WITH_LOGPROBS = "message.output_text.logprobs"
Items = list[Any]


class Responses(Dialect):
    """An answer in the words of Responses: a message, if there is text or nothing else, and then calls."""

    prefix = "resp_"
    foreign = frozenset(
        {
            "echo", "logprobs", "max_completion_tokens", "max_tokens", "messages", "response_format",
            "return_token_ids",
        }
    )  # fmt: skip
    names: ClassVar[dict[str, str]] = {
        "logprobs": "include",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
    }

    def __init__(self, asked: JSON) -> None:
        super().__init__(asked)
        self.message_id = self.id.replace("resp_", "msg_")
        self.number = 0  # of the next event
        self.is_open = False  # the message has begun
        self.logprobs = list[ListedToken]()  # of its text so far
        self.last: EndedChoice | None = None
        self.namespaces = namespaced_names(asked.get("tools"))

    @staticmethod
    def chat_request(asked: JSON) -> JSON:
        refuse_state(asked)
        refuse_several(asked)
        if asked.get("prompt") is not None:
            raise BadField("prompt", "not supported, as none is stored here; send instructions and input")
        text = _object(asked, "text")
        _object(asked, "reasoning")  # how hard to think, which nothing here does by degrees
        include = _included(asked.get("include"))
        chat = {name: value for name, value in asked.items() if name not in OWN}
        chat["messages"] = _messages(asked.get("instructions"), asked.get("input"))
        chat["tools"] = flat_tools(asked.get("tools"), _function)
        chat["tool_choice"] = _tool_choice(asked.get("tool_choice"))
        chat["max_completion_tokens"] = asked.get("max_output_tokens")
        chat["response_format"] = _format(text.get("format"))
        chat["verbosity"] = text.get("verbosity")
        chat["logprobs"] = True if WITH_LOGPROBS in include else None
        chat |= {f"text.{name}": value for name, value in text.items() if name not in ("format", "verbosity")}
        return chat

    def whole(self, choices: list[EndedChoice], usage: Usage) -> JSON:
        [ended] = choices
        self.logprobs += ended.logprobs or []
        return self._response(ended, usage)

    def begin(self, count: int, usage: Usage) -> Iterator[JSON]:
        response = self._response(None, None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, index: int, text: str, logprobs: list[ListedToken] | None) -> Iterator[JSON]:
        yield from self._opened()
        self.logprobs += logprobs or []
        yield self._of_text("response.output_text.delta", delta=text, logprobs=logprob_entries(logprobs or []))

    def end(self, index: int, ended: EndedChoice) -> Iterator[JSON]:
        self.last = ended
        self.logprobs += ended.logprobs or []
        for place, item in enumerate(self._output(ended)):
            if item["type"] == "message":
                yield from self._opened()
                [part] = item["content"]
                yield self._of_text("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._of_text("response.content_part.done", part=part)
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                of_call = {"item_id": item["id"], "output_index": place}
                arguments = item["arguments"]
                done = {**of_call, "name": item["name"], "arguments": arguments}
                yield self._event("response.output_item.added", output_index=place, item=begun)
                yield self._event("response.function_call_arguments.delta", **of_call, delta=arguments)
                yield self._event("response.function_call_arguments.done", **done)
            yield self._event("response.output_item.done", output_index=place, item=item)

    def finish(self, usage: Usage) -> Iterator[JSON]:
        response = self._response(self.last, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, refused: Refused) -> Iterator[JSON]:
        error = self.error(refused)  # by which the client raises
        code = str(error["error"]["code"])
        yield self._event("error", code=code, message=str(refused), param=None, **error)

    # ---- parts ----

    def _opened(self) -> Iterator[JSON]:
        """Begin the message, unless it has begun."""
        if self.is_open:
            return
        self.is_open = True
        item = {"type": "message", "id": self.message_id, "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_text("response.content_part.added", part=_text_part("", []))

    def _event(self, kind: str, **fields: Any) -> JSON:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **fields}

    def _of_text(self, kind: str, **fields: Any) -> JSON:
        return self._event(kind, item_id=self.message_id, output_index=0, content_index=0, **fields)

    def _output(self, ended: EndedChoice) -> list[JSON]:
        items = list[JSON]()
        if ended.content or not ended.calls:
            items.append(
                {
                    "type": "message",
                    "id": self.message_id,
                    "status": "incomplete" if ended.reason == "length" else "completed",
                    "role": "assistant",
                    "content": [_text_part(ended.content or "", self.logprobs)],
                }
            )
        for call in ended.calls:
            shown = call["function"]["name"]
            of_namespace = self.namespaces.get(shown)
            named = {"name": shown} if of_namespace is None else asdict(of_namespace)
            items.append(
                {
                    "type": "function_call",
                    "id": call["id"].replace("call_", "fc_"),
                    "call_id": call["id"],
                    **named,
                    "arguments": call["function"]["arguments"],
                    "status": "completed",
                }
            )
        return items

    def _response(self, ended: EndedChoice | None, usage: Usage | None) -> JSON:
        """Return the whole response; one under way has no output and no usage."""
        asked = self.asked
        is_cut = ended is not None and ended.reason == "length"
        status = "in_progress"
        if ended is not None:
            status = "incomplete" if is_cut else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": asked["model"],
            "output": [] if ended is None else self._output(ended),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _text_part(text: str, logprobs: list[ListedToken]) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_entries(logprobs)}


# ---- a request ----


def _object(asked: JSON, name: str) -> JSON:
    value = asked.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadField(name, f"must be an object, not {truncate(repr(value), 60)}")
    return value


def _included(include: Any) -> list[str]:
    """Return what an answer is to have besides; all but log-probabilities are parts that no answer here has."""
    is_list = isinstance(include, list) and all(isinstance(one, str) for one in include)
    if include is not None and not is_list:
        raise BadField("include", f"must be a list of texts, not {truncate(repr(include), 60)}")
    return include or []


def _messages(instructions: Any, given: Any) -> Items:
    """Return chat messages. A call belongs to the assistant's message right before it, as do further ones behind it.
    Thoughts are another model's, since answers here have none apart from their text.
    """
    messages = Items()
    if not isinstance(instructions, str | None):
        raise BadField("instructions", f"must be text, not {truncate(repr(instructions), 60)}")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadField("input", f"must be text or a list of items, not {truncate(repr(given), 60)}")
    for item in given:
        if not isinstance(item, dict):
            raise BadField("input", f"has an item that is not an object: {truncate(repr(item), 60)}")
        kind = item.get("type") or "message"
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "function_call":
            name = item.get("name")
            if item.get("namespace"):
                name = NamespacedName(str(item["namespace"]), str(name)).shown
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind != "reasoning":
            shown = truncate(repr(kind), 40)
            raise BadField(
                "input", f"has an item of the type {shown}; read are message, function_call, function_call_output"
            )
    return messages


def _function(tool: JSON) -> JSON | None:
    """Return a function as chat completions nest it; None for another tool."""
    if tool.get("type") != "function":
        return None
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get("parameters")}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: of for name, of in given.items() if name != "type"}}
    return given
