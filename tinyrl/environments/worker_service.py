"""Services of a person's environment in its worker process: a function, tools, or a class; replies are checked.

    def weather(city: str) -> str:
        \"\"\"What the weather is like.

        Args:
            city: Where.
        \"\"\"

The model sees a tool's type hints and docstring, but not a parameter called `episode`: a tool that has one gets a dict
with the prompt, the seed and the columns of the row whose episode called it.

Run by workers/worker.py, which starts quickly: nothing here imports torch, but `schemas`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from tinyrl.environments import MAX_REWARD, Reply, Transcript
from tinyrl.environments.tool_calls import Tools, awaited, calls_of, carry_out, joined, rows_of, text_of
from tinyrl.environments.trl_classes import ClassEnvironment
from tinyrl.text import first_line
from tinyrl.workers.worker import Checked, Service, parameters_of

EPISODE = "episode"  # the parameter of a tool that the model does not see
GIVEN = ("row", "base_url", "api_key", "model")  # to an agent
MAX_TEXT_CHARS = 1 << 20  # of a reply, which is cut to a number of tokens later: this keeps megabytes from travelling


def environment(objects: list[Any]) -> Service:
    """Make the service of `environment.name`: a respond function, an environment class as TRL's trainers take it, or a
    function that makes an instance of one. Raises ValueError for anything else.
    """
    found = objects[0]
    name = getattr(found, "__name__", type(found).__name__)
    if not callable(found):
        raise ValueError(f"'{name}' is a {type(found).__name__}, neither a function nor an environment class.")
    if not inspect.isclass(found):
        known = parameters_of(found)
        if known["parameters"] is None or "transcripts" in known["parameters"]:
            return _service(found, rewards=True, **known)
        if known["required"]:
            raise ValueError(f"'{name}' takes no 'transcripts', as respond(prompts, transcripts, **columns) does.")
    made = ClassEnvironment(found)
    has = {"opening": True, "final_rewards": made.has_reward, "rewards": made.has_reward}
    service = _service(made.respond, tools=made.tools(), **has)
    service.calls["opening"] = lambda given, _: ([text and text[:MAX_TEXT_CHARS] for text in made.opening(**given)], [])
    service.calls["final_rewards"] = lambda given, _: (made.final_rewards(**given), [])
    return service


def tools(objects: list[Any]) -> Service:
    """Make the service of `environment.tools`."""
    return _service(respond_with(objects), tools=[_without_episode(tool) for tool in objects])


def _service(respond: Callable[..., Any], *, tools: Sequence[Callable[..., Any]] = (), **facts: Any) -> Service:
    """Make a service that answers turns, by default without openings and rewards."""
    common = {"schemas": schemas(tools) if tools else None, "opening": False, "final_rewards": False, "rewards": False}
    calls = {"respond": lambda arguments, num_rows: checked(respond(**arguments), num_rows)}
    return Service(calls, common | facts)


def checked(returned: Any, num_rows: int) -> Checked:
    """Return the replies of a call as JSON has them, [text, done, reward, invalid] or null for each row, and (row,
    reason) of the malformed ones; an exception in the place of a reply is the reason. Raises TypeError or ValueError if
    there is not one for each row.
    """
    if not isinstance(returned, list | tuple):
        raise TypeError(f"returned {type(returned).__name__}, not a list with one reply for each episode")
    if len(returned) != num_rows:
        raise ValueError(f"returned a list of {len(returned)} for a batch of {num_rows}")
    pairs = [_reply(value) for value in returned]
    return [reply for reply, _ in pairs], [(row, problem) for row, (_, problem) in enumerate(pairs) if problem]


def _reply(value: Any) -> tuple[list[Any] | None, str]:
    if value is None or isinstance(value, Exception):
        return None, "" if value is None else f"gave no answer: {value}"
    value = Reply(value) if isinstance(value, str) else value
    text, done, reward = (getattr(value, name, None) for name in ("text", "done", "reward"))
    if not isinstance(text, str) or not isinstance(done, bool):
        return None, f"answered with {type(value).__name__}, not with text, Reply(text, done, reward) or None"
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        shown = reward if isinstance(reward, float) and not math.isfinite(reward) else type(reward).__name__
        return None, f"gave the reward {shown}, not a number up to {MAX_REWARD:g}"
    return [text[:MAX_TEXT_CHARS], done, float(reward), bool(getattr(value, "invalid", False))], ""


# ---- agents ----


def agent(objects: list[Any]) -> Service:
    """Make the service of `environment.agent`: a function that plays an episode against an endpoint."""
    function = objects[0]
    if not callable(function):
        raise TypeError(f"is a {type(function).__name__}, not a function")
    known = parameters_of(function)
    if missing := [name for name in known["required"] if name not in GIVEN]:
        raise TypeError(f"takes {', '.join(missing)}; an agent is given {', '.join(GIVEN)}")

    def run(arguments: dict[str, list[Any]], _: int) -> Checked:
        names = arguments if known["parameters"] is None else arguments.keys() & known["parameters"]
        value = awaited([function(**{name: arguments[name][0] for name in names})])[0]
        if isinstance(value, BaseException):
            raise value
        return ["" if value is None else text_of(value)[:MAX_TEXT_CHARS]], []

    return Service({"run": run}, {"whole_batch": True})


# ---- tools ----


def respond_with(functions: Sequence[Callable[..., Any]]) -> Callable[..., list[Reply | str | None]]:
    """Make an environment that executes calls of these functions. A turn without a call ends the episode."""
    tools = _named(functions)

    def respond(prompts: list[Any], transcripts: list[Transcript], **columns: list[Any]) -> list[Reply | str | None]:
        rows, calls = rows_of(prompts, columns), [calls_of(transcript[-1]) for transcript in transcripts]
        own = [{name: _without_episode(tool, row) for name, tool in tools.items()} for row in rows]
        return [joined(made) if made else None for made in carry_out([*zip(own, calls, strict=True)])]

    return respond


def schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Describe each tool as chat templates take it: name, description, and its parameters as JSON schema.

    Raises ValueError naming the function and what is missing: a docstring, a line under its `Args:`, a type hint.
    """
    from transformers.utils import chat_template_utils as utils  # a second, and torch with it; the worker does without

    # NameError: a hint that names what is not there
    problems = (utils.DocstringParsingException, utils.TypeHintParsingException, NameError, TypeError, ValueError)
    found = []
    for name, function in _named(functions).items():
        try:
            found.append(utils.get_json_schema(function))
        except problems as error:
            raise ValueError(
                f"tool '{name}': {first_line(error)}. A tool is described to the model by its docstring, with a line "
                "`name: what it is` for each parameter under `Args:`, and by the type hint of each parameter."
            ) from error
    return found


def _named(functions: Sequence[Callable[..., Any]]) -> Tools:
    """Return functions by name. Raises ValueError for another object, a name twice, or a parameter without a name."""
    tools: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if inspect.isclass(function) or not callable(function):
            raise ValueError(f"tool '{name}': a tool is a function; an environment class goes to environment.name.")
        if name in tools:
            raise ValueError(f"tool '{name}': there are two of this name.")
        for each in inspect.signature(function).parameters.values():
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                raise ValueError(f"tool '{name}': its parameter '{each}' has no name that a call could give it by.")
        tools[name] = function
    return tools


def _without_episode(tool: Callable[..., Any], episode: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return a tool without its parameter `episode`, which it is given here."""
    signature = inspect.signature(tool)
    if EPISODE not in signature.parameters:
        return tool

    @functools.wraps(tool)
    def bound(**arguments: Any) -> Any:
        return tool(**arguments, **{EPISODE: episode})

    shown = [each for each in signature.parameters.values() if each.name != EPISODE]
    bound.__signature__ = signature.replace(parameters=shown)  # pyright: ignore  which inspect reads first
    bound.__annotations__ = {name: hint for name, hint in tool.__annotations__.items() if name != EPISODE}
    return bound
