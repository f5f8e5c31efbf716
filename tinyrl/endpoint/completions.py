"""OpenAI's chat completions and completions of text: /v1/chat/completions, /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tinyrl.endpoint.dialect import JSON, BadField, Dialect, EndedChoice, ListedToken, Usage, logprob_entries
from tinyrl.endpoint.request_tools import flat_tools, is_function
from tinyrl.text import truncate


class ChatCompletions(Dialect):
    """An answer of one choice or several, each a message of the assistant's."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    foreign = frozenset({"echo", "prompt"})
    closing = "data: [DONE]\n\n"

    @staticmethod
    def chat_request(asked: JSON) -> JSON:
        """Return the request without what chat templates have no words for: `developer` is `system`, and whether the
        decoding of a tool's arguments is `strict` is not for the model to read.
        """
        _check_limits(asked)
        if not isinstance(asked.get("logprobs"), bool | None):
            raise BadField("logprobs", f"is true or false of a chat, not {truncate(repr(asked['logprobs']), 60)}")
        chat = dict(asked)
        if isinstance(asked.get("messages"), list):
            chat["messages"] = [_as_system(message) for message in asked["messages"]]
        if "tools" in asked:
            chat["tools"] = flat_tools(asked["tools"], _without_strict)
        return chat

    def whole(self, choices: list[EndedChoice], usage: Usage) -> JSON:
        parts = [self._whole_choice(index, ended) for index, ended in enumerate(choices)]
        return {**self._payload(self.kind, parts), "usage": _usage(usage)}

    def begin(self, count: int, usage: Usage) -> Iterator[JSON]:
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, logprobs: list[ListedToken] | None) -> Iterator[JSON]:
        yield self._chunk(index, {"content": text}, logprobs=logprobs)

    def end(self, index: int, ended: EndedChoice) -> Iterator[JSON]:
        if ended.calls:
            yield self._chunk(index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(ended.calls)]})
        yield self._chunk(index, {}, reason=ended.reason, logprobs=ended.logprobs, fields=ended.fields)

    def finish(self, usage: Usage) -> Iterator[JSON]:
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield {**self._payload(self.chunk_kind, []), "usage": _usage(usage)}

    # ---- parts ----

    def _payload(self, kind: str, choices: list[JSON]) -> JSON:
        model = self.asked["model"]
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "choices": choices}

    def _whole_choice(self, index: int, ended: EndedChoice) -> JSON:
        message = {"role": "assistant", **ended.message}
        logprobs = self._listed(ended.logprobs)
        return {
            "index": index,
            "message": message,
            "finish_reason": ended.reason,
            "logprobs": logprobs,
            **ended.fields,
        }

    def _chunk(
        self,
        index: int,
        delta: JSON,
        *,
        reason: str | None = None,
        logprobs: list[ListedToken] | None = None,
        fields: JSON | None = None,
    ) -> JSON:
        ended = {"finish_reason": reason, "logprobs": self._listed(logprobs), **(fields or {})}
        return self._payload(self.chunk_kind, [{"index": index, **self._written(delta), **ended}])

    def _written(self, delta: JSON) -> JSON:
        """Return what a chunk adds to its choice."""
        return {"delta": delta}

    def _listed(self, logprobs: list[ListedToken] | None) -> JSON | None:
        return None if logprobs is None else {"content": logprob_entries(logprobs), "refusal": None}


class TextCompletions(ChatCompletions):
    """An answer of one text or several."""

    prefix = "cmpl-"
    foreign = frozenset({"chat_template_kwargs", "messages", "tools", "top_logprobs"})
    kind = "text_completion"
    chunk_kind = "text_completion"

    @staticmethod
    def chat_request(asked: JSON) -> JSON:
        """Return the request as it is."""
        _check_limits(asked)
        if asked.get("logprobs") is True:
            raise BadField("logprobs", "is a number of tokens, 0 to 20, and not true")
        return asked

    def begin(self, count: int, usage: Usage) -> Iterator[JSON]:
        yield from ()

    def _whole_choice(self, index: int, ended: EndedChoice) -> JSON:
        logprobs = self._listed(ended.logprobs)
        return {
            "index": index,
            "text": ended.content,
            "finish_reason": ended.reason,
            "logprobs": logprobs,
            **ended.fields,
        }

    def _written(self, delta: JSON) -> JSON:
        return {"text": delta.get("content", "")}

    def _listed(self, logprobs: list[ListedToken] | None) -> JSON | None:
        if logprobs is None:
            return None
        return {
            "tokens": [one.text for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [_likeliest(one) for one in logprobs],
            "text_offset": [one.offset for one in logprobs],
        }


def _check_limits(asked: JSON) -> None:
    """Raise Refused where the older and the newer name of one limit have two values."""
    older = asked.get("max_tokens")
    newer = asked.get("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        shown = f"{truncate(repr(newer), 30)} of max_completion_tokens"
        raise BadField("max_tokens", f"{truncate(repr(older), 30)} contradicts the {shown}; give one of them")


def _as_system(message: Any) -> Any:
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


def _without_strict(tool: JSON) -> JSON | None:
    if not is_function(tool):
        return None
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def _likeliest(one: ListedToken) -> dict[str, float | None] | None:
    """Return a token and the likeliest in its place; of two with one spelling the likelier stays."""
    if one.logprob is None:
        return None
    return {one.text: one.logprob, **{other.text: other.logprob for other in reversed(one.top)}}


def _usage(usage: Usage) -> JSON:
    total = usage.prompt + usage.completion
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "total_tokens": total}
