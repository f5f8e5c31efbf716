"""Tools of a request, by one rule for chats, Responses and Messages.

Functions are the client's, which runs them. So are those within a `namespace` (Codex groups its own): the model calls
one as NAMESPACE.NAME, and reads what the namespace is for in front of what the function does, since chat templates
have functions alone. What only a provider can run, or has the schema of, is left out of the prompt and cannot be
called: `web_search`, `local_shell`, `mcp`, `custom` of OpenAI's (a grammar), `bash_20250124`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyrl.endpoint.dialect import JSON, BadField
from tinyrl.text import truncate

NAMESPACE = "namespace"


@dataclass(frozen=True)
class NamespacedName:
    """The name of a function within a namespace."""

    namespace: str
    name: str

    @property
    def shown(self) -> str:
        """Return the name by which the model calls the function."""
        return f"{self.namespace}.{self.name}"


def flat_tools(tools: Any, function_of: Callable[[JSON], JSON | None]) -> Any:
    """Return tools with all functions as chat completions write them; others stay as they are, for `left_out`.
    function_of: translates a tool (None: it is no function). Raises Refused for what is no tool.
    """
    if not isinstance(tools, list):
        return tools
    flat = list[JSON]()
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == NAMESPACE:
            flat += _functions_within(tool, function_of)
            continue
        function = function_of(tool) if isinstance(tool, dict) else None
        if function is None and not isinstance(kind, str):
            raise BadField("tools", f"are objects with a `type`, not {truncate(repr(tool), 60)}")
        if function is None and isinstance(tool.get("function"), dict):  # which nothing but a function has
            raise BadField("tools", f"has a `function` of the type {truncate(repr(kind), 60)}; its type is `function`")
        if function is not None and function.get("type") == "function":
            _check_function(function.get("function"))
        flat.append(function or tool)
    return flat


def _check_function(function: Any) -> None:
    """Raise Refused for a function without a name, or whose name, description or parameters are of another type."""
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise BadField("tools", f"has a function without a `name`: {truncate(repr(function), 60)}")
    if not isinstance(function.get("description"), str | None):
        raise BadField("tools", f"has a function {truncate(name)} whose `description` is not text")
    if not isinstance(function.get("parameters"), dict | None):
        raise BadField("tools", f"has a function {truncate(name)} whose parameters are not an object (a JSON schema)")


def _functions_within(tool: JSON, function_of: Callable[[JSON], JSON | None]) -> list[JSON]:
    """Return the functions of a namespace by their shown names, with its description before theirs, and what else is
    in it.
    """
    namespace = tool.get("name")
    about = tool.get("description")
    tools = tool.get("tools")
    if not isinstance(namespace, str) or not isinstance(tools, list):
        raise BadField("tools", f"has a namespace without `name` or `tools`: {truncate(repr(tool), 60)}")
    if not isinstance(about, str | None):
        raise BadField("tools", f"has a namespace {truncate(namespace)} whose `description` is not text")
    if any(isinstance(inner, dict) and inner.get("type") == NAMESPACE for inner in tools):
        raise BadField("tools", f"has a namespace within the namespace {truncate(namespace)}")
    found = list[JSON]()
    for inner in flat_tools(tools, function_of):
        shown = NamespacedName(namespace, name_of(inner)).shown
        function = inner.get("function")
        if isinstance(function, dict):
            texts = [text for text in (about, function.get("description")) if text]
            found.append({**inner, "function": {**function, "name": shown, "description": "\n\n".join(texts) or None}})
        else:
            found.append({**inner, "name": shown})
    return found


def namespaced_names(tools: Any) -> dict[str, NamespacedName]:
    """Return the names of functions within namespaces, by what the model calls them; tools: that `flat_tools` took."""
    names = list[NamespacedName]()
    for tool in tools or []:
        if tool.get("type") == NAMESPACE:
            names += [NamespacedName(tool["name"], name_of(inner)) for inner in tool["tools"]]
    return {name.shown: name for name in names}


def is_function(tool: JSON) -> bool:
    """Return whether a tool of a chat is the client's; one without a type goes to the chat template as it is."""
    return tool.get("type", "function") == "function"


def name_of(tool: JSON) -> str:
    """Return the name by which a tool would be called: its own, or its type."""
    kind = str(tool.get("type"))
    of_kind = tool.get(kind)
    own = tool.get("name") or (of_kind.get("name") if isinstance(of_kind, dict) else None)
    return str(own or kind)


def left_out(tools: list[JSON] | None) -> dict[str, str]:
    """Return the tools of a chat that are no functions, and share no name with one: how to show each to people, by the
    name that it would be called by.
    """
    functions = {name_of(tool) for tool in tools or [] if is_function(tool)}
    found = dict[str, str]()
    for tool in tools or []:
        name = name_of(tool)
        if not is_function(tool) and name not in functions:
            kind = str(tool["type"])
            found[name] = truncate(name if name == kind else f"{name} ({kind})")
    return found


def left_out_note(tools: dict[str, str]) -> str:
    """Say that tools are left out of prompts."""
    names = ", ".join(tools.values())
    return f"tools that only a provider can run are left out of prompts, and cannot be called: {names}"
