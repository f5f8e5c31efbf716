"""Chat messages in the forms that data has: OpenAI's and TRL's `role` and `content`, ShareGPT's `from` and `value`.

One rule for rows, prompts and requests to serve. Content becomes text: parts of text are joined, null and [] are empty.
Images have been put in their places before (image_rows.py): IMAGE_MARK in the content, in order those of `images`.
Arguments of tool calls that are JSON text, as OpenAI writes them, become the object that chat templates expect. Other
keys (name, reasoning_content) go to the chat template as they are, except for null ones.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import groupby
from typing import Any

from tinyrl.data.images import IMAGE_MARK, TEXT_PARTS, is_entry
from tinyrl.data.readers import Row, first_repeated, json_of, valid_text
from tinyrl.text import first_line, join_truncated, truncate

Message = dict[str, Any]  # role, content (text), images in it, and what else a chat template reads of it
Prompt = str | list[Message]  # text, or chat messages, as the data has them

NOT_TEXT = "whose `content` is not text"
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}


def prompt_of(value: Any) -> Prompt:
    """Parse a prompt: text, or messages as `messages_of` reads them. Raises ValueError for others, and empty ones."""
    if not isinstance(value, str | list) or value == []:
        raise ValueError(f"the prompt must be text, or a list of messages, not {value!r:.60}")
    if isinstance(value, str):
        try:
            prompt = valid_text(value)
        except ValueError as error:
            raise ValueError(f"the prompt {error}") from None
        has_content = bool(value) and not value.isspace()
    else:
        prompt = messages_of(value, "prompt")
        has_content = any(message["content"].strip() or message.get("tool_calls") for message in prompt)
    if not has_content:
        raise ValueError("the prompt is empty")
    return prompt


def conversation(row: Row, column: str) -> list[Message]:
    """Parse the messages in a row's column, behind ShareGPT's column `system`. Raises ValueError naming the column."""
    messages = messages_of(parsed(row[column], column), column)
    system = row.get("system")
    if column == "conversations" and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def messages_of(value: Any, column: str) -> list[Message]:
    """Parse a list of messages, each with a `role` and its `content` as text. Results of tools are put in the order of
    the calls whose ids they have, since most chat templates write no ids. Raises ValueError naming the column, also
    where some of a turn's calls have results and others have none.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"'{column}' must be a list of messages, not {value!r:.60}")
    messages = [_message(message, column) for message in value]
    turn = Message()  # the last of the assistant's
    for is_result, run in groupby(enumerate(messages), key=lambda placed: placed[1]["role"] == "tool"):
        places = [place for place, _ in run]
        if is_result:
            results = messages[places[0] : places[-1] + 1]
            messages[places[0] : places[-1] + 1] = _in_order(results, _ids(turn), column)
            _check_results(results, turn, column)
        else:
            turns = [messages[place] for place in places if messages[place]["role"] == "assistant"]
            turn = turns[-1] if turns else turn
    return messages


def _check_results(results: list[Message], turn: Message, column: str) -> None:
    """Raise ValueError where a turn has more calls than results. A list in JSON may be the results of all of them."""
    calls = turn.get("tool_calls", [])
    if len(results) >= len(calls):
        return
    with suppress(ValueError, RecursionError):
        together = json.loads(results[0]["content"])
        if len(results) == 1 and isinstance(together, list) and len(together) == len(calls):
            return
    ids = _ids(turn)
    given = {str(result.get("tool_call_id") or "") for result in results}
    missing = [one for one in ids if one not in given] if all(given) else []
    which = f"; none is for the call {missing[0]!r:.60}" if missing else ""
    raise ValueError(
        f"'{column}' has {len(calls)} calls of tools in a turn, and {len(results)} of their results{which}"
    )


def _ids(turn: Message) -> list[str]:
    """Return the ids of a turn's calls; none where they do not tell the calls apart."""
    ids = [str(call.get("id") or "") for call in turn.get("tool_calls", []) if isinstance(call, dict)]
    return ids if all(ids) and len({*ids}) == len(ids) else []


def _in_order(results: list[Message], calls: list[str], column: str) -> list[Message]:
    """Return results in the order of the calls with these ids. Raises ValueError for an id of no call, or given twice;
    results without ids, or to calls without ids, stay as they are.
    """
    ids = [str(result["tool_call_id"]) for result in results if result.get("tool_call_id")]
    if not calls or not ids:
        return results
    places = {call: place for place, call in enumerate(calls)}
    for one in ids:
        if one not in places:
            raise ValueError(f"'{column}' has a result with tool_call_id={one!r:.60}; the calls are {calls!r:.80}")
    twice = first_repeated(ids)
    if twice is not None:
        raise ValueError(f"'{column}' has two results with tool_call_id={twice!r:.60}")
    if len(ids) < len(results):
        return results
    return sorted(results, key=lambda result: places[str(result["tool_call_id"])])


def tools_of(value: Any) -> list[Any] | None:
    """Parse the tool definitions of a row or a request, without null keys; None if there are none."""
    tools = _without_nulls(parsed(value, "tools"))
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"'tools' must be a list of tool definitions, not {tools!r:.60}")
    return tools or None


def _message(value: Any, column: str) -> Message:
    def refuse(problem: str) -> ValueError:
        return ValueError(f"'{column}' has a message {problem}: {value!r:.80}")

    if not isinstance(value, dict):
        raise refuse("that is not an object with role and content")
    message = {str(key): inner for key, inner in value.items() if inner is not None}
    if "role" not in message and "from" in message:  # ShareGPT
        sender = str(message.pop("from"))
        message["content"] = message.pop("value", "")
        if sender not in SHAREGPT_ROLES:
            raise refuse(f"from none of {', '.join(SHAREGPT_ROLES)}")
        message["role"] = SHAREGPT_ROLES[sender]
        if sender == "function_call":
            calls = parsed(message.pop("content"), column)
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise refuse("without a `role`")
    if message["role"] == "developer":  # OpenAI's newer name, which chat templates do not know
        message["role"] = "system"
    calls = _without_nulls(parsed(message.pop("tool_calls", None), "tool_calls")) or []
    if not isinstance(calls, list):
        raise refuse("whose `tool_calls` are not a list")
    if calls:
        message["tool_calls"] = [_tool_call(call, column) for call in calls]
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type", "text") in TEXT_PARTS for p in content):
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str | None) for text in texts):
            raise refuse("with a part whose `text` is not text")
        content = "".join(text or "" for text in texts)
    if not isinstance(content, str):
        kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        other = next((kind for kind in kinds if kind not in (None, *TEXT_PARTS)), None)
        raise refuse(f"with a part of the type {other!r:.30}, and only text is read" if other else NOT_TEXT)
    try:
        valid_text(content)
    except ValueError as error:
        raise refuse(f"whose content {error}") from None
    images = message.pop("images", None) or []
    if not isinstance(images, list) or not all(map(is_entry, images)):
        raise refuse('with `images`; images are parts of its content, {"type": "image"}')
    if images and content.count(IMAGE_MARK) != len(images):
        raise refuse(f"with {len(images)} images, and {content.count(IMAGE_MARK)} places for them")
    return {**message, "content": content, "images": images} if images else {**message, "content": content}


def _tool_call(call: Any, column: str) -> Any:
    """Parse the arguments of a call: the object in JSON text; {} for null, empty and absent ones. Other text stays.
    Raises ValueError for a call without a name, and for arguments with a key given twice, half of a character or a
    number of thousands of digits.
    """
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"], column)}
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"'{column}' has a call without a `name` in `tool_calls`: {truncate(repr(call), 60)}")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            found = _without_nulls(json_of(arguments.strip() or "{}"))
            valid_text(json.dumps(found, ensure_ascii=False))
            arguments = found if isinstance(found, dict) else arguments if found else {}
        except (json.JSONDecodeError, RecursionError):
            pass  # text that is no JSON is for the chat template
        except ValueError as error:
            raise ValueError(f"'{column}' has a call of {truncate(name)}: {first_line(error)}") from None
    return {**call, "arguments": arguments}


def _without_nulls(value: Any) -> Any:
    """Drop null keys at any depth: tables (parquet, Arrow) have them in place of absent ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_messages(prompt: Prompt | None) -> list[Message]:
    """Return a prompt as messages: text is one of the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []


def asked_of(prompt: Prompt) -> Prompt:
    """Return a prompt without the beginning of the answer that it may end with, for whoever reads it beside the whole
    answer.
    """
    begins_answer = not isinstance(prompt, str) and len(prompt) > 1 and prompt[-1].get("role") == "assistant"
    return prompt[:-1] if begins_answer else prompt


def as_completion(text: str, prompt: Prompt) -> str | list[Message]:
    """Return a text as a completion in the data's form: a message where the prompt is a chat."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def roles_of(messages: list[Message]) -> str:
    """Join the roles of the first messages, to quote them in an error."""
    return join_truncated((message["role"] for message in messages), most=8)


def parsed(value: Any, column: str) -> Any:
    """Parse a list that a .csv, or a table without nested columns, holds as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json_of(value) if value.strip() else None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"'{column}' is text that is not JSON: {truncate(value, 60)!r}") from None
    except ValueError as error:
        raise ValueError(f"'{column}': {first_line(error)}") from None
