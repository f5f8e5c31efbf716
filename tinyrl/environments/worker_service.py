"""Services of a user environment in its worker process: a function, tools, or a class; replies are checked.

    def weather(city: str) -> str:
        \"\"\"What the weather is like.

        Args:
            city: Where.
        \"\"\"

The model sees a tool's type hints and docstring, but not a parameter called `episode`: a tool that has one gets a dict
with the prompt, the seed and the columns of the row whose episode called it.

Run by workers/worker.py, which starts quickly: nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from tinyrl.environments import MAX_TEXT_CHARS, DropEpisode, Reply, Rewards, Transcript
from tinyrl.environments.tool_calls import calls_of, carry_out, joined, rows_of, text_of
from tinyrl.environments.tool_schema import schema_of
from tinyrl.environments.trl_classes import ClassEnvironment
from tinyrl.text import first_line
from tinyrl.workers.protocol import ServiceFacts
from tinyrl.workers.values import RowResults, as_score, check_values, message_of
from tinyrl.workers.worker import Service, awaited, facts_of

EPISODE = "episode"  # the parameter of a tool that the model does not see
GIVEN = ("row", "base_url", "api_key", "model")  # to an agent


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about a user environment.

    schemas     of its tools, as a chat template takes them; None: it has no tools
    opening     whether it writes something before the first turn
    rewards     which episodes have a reward of the environment
    """

    schemas: list[dict[str, Any]] | None = None
    opening: bool = False
    rewards: Rewards = "none"


def environment(objects: list[Any]) -> Service:
    """Make the service of `environment.name`: a respond function, an environment class as TRL's trainers take it, or a
    function that makes an instance of one.
    """
    [found] = objects
    if not inspect.isclass(found):
        takes = facts_of(found)
        if takes.parameters is None or "transcripts" in takes.parameters:
            return serve_replies(found, EnvironmentFacts(rewards="some"), takes)
        if takes.required:
            name = found.__name__
            raise ValueError(f"'{name}' takes no 'transcripts', as respond(prompts, transcripts, **columns) does.")
    made = ClassEnvironment(found)
    rewards: Rewards = "all" if made.has_reward else "none"
    facts = EnvironmentFacts(schemas=schemas(made.tools()) or None, opening=True, rewards=rewards)
    service = serve_replies(made.respond, facts)

    def opening(arguments: dict[str, list[Any]], _: int) -> RowResults:
        return RowResults([text and text[:MAX_TEXT_CHARS] for text in made.opening(**arguments)])

    def final_rewards(arguments: dict[str, list[Any]], num_rows: int) -> RowResults:
        return check_values(made.final_rewards(**arguments), num_rows, check=_as_final_reward)

    service.calls["opening"] = opening
    service.calls["final_rewards"] = final_rewards
    return service


def tools(objects: list[Any]) -> Service:
    """Make the service of `environment.tools`."""
    facts = EnvironmentFacts(schemas=schemas([_without_episode(tool) for tool in objects]) or None)
    return serve_replies(respond_with(objects), facts)


def serve_replies(
    respond: Callable[..., Any], facts: EnvironmentFacts = EnvironmentFacts(), takes: ServiceFacts = ServiceFacts()
) -> Service:
    """Make a service that answers turns; `takes`: the arguments of `respond`, by default any. Replies are checked."""

    def answer(arguments: dict[str, list[Any]], num_rows: int) -> RowResults:
        [returned] = awaited([respond(**arguments)])
        return check_values(returned, num_rows, check=as_reply)

    return Service({"respond": answer}, replace(takes, of_host=asdict(facts)))


def as_reply(value: Any) -> tuple[list[Any] | None, str]:
    """Return a reply as JSON has it, [text, done, reward, invalid, results, tool_error] or null, and what is wrong with
    a malformed one; an exception in the place of a reply is its own reason.
    """
    if value is None:
        return None, ""
    if isinstance(value, DropEpisode):
        return None, _dropped(value)
    if isinstance(value, Exception):
        return None, f"gave no answer: {message_of(value)}"
    value = Reply(value) if isinstance(value, str) else value
    text, done, reward = (getattr(value, name, None) for name in ("text", "done", "reward"))
    if not isinstance(text, str) or not isinstance(done, bool):
        return None, f"answered with {type(value).__name__}, not with text, Reply(text, done, reward) or None"
    number, problem = as_score(reward)
    if problem:
        return None, f"gave the reward {problem}"
    results = getattr(value, "results", ())
    if not isinstance(results, list | tuple) or not all(isinstance(result, str) for result in results):
        return None, "gave results that are not a list of texts"
    shown = [result[:MAX_TEXT_CHARS] for result in results]
    invalid, tool_error = (bool(getattr(value, name, False)) for name in ("invalid", "tool_error"))
    return [text[:MAX_TEXT_CHARS], done, number, invalid, shown, tool_error], ""


def _dropped(reason: DropEpisode) -> str:
    why = message_of(reason)
    return f"dropped the episode: {why}" if why else "dropped the episode"


def _as_final_reward(value: Any) -> tuple[float | None, str]:
    """Return the reward of an episode that was cut off, and what is wrong with it."""
    if isinstance(value, DropEpisode):
        return None, _dropped(value)
    reward, problem = as_score(value)
    return reward, problem and f"gave the reward {problem}"


# ---- agents ----


def agent(objects: list[Any]) -> Service:
    """Make the service of `environment.agent`: a function that plays an episode against an endpoint."""
    [function] = objects
    takes = facts_of(function)
    if missing := [name for name in takes.required if name not in GIVEN]:
        raise TypeError(f"takes {', '.join(missing)}; an agent is given {', '.join(GIVEN)}")

    def run(arguments: dict[str, list[Any]], _: int) -> RowResults:
        names = arguments if takes.parameters is None else arguments.keys() & takes.parameters
        [value] = awaited([function(**{name: arguments[name][0] for name in names})])
        return RowResults(["" if value is None else text_of(value)[:MAX_TEXT_CHARS]])

    return Service({"run": run}, ServiceFacts(whole=["run"]))


# ---- tools ----


def respond_with(functions: Sequence[Callable[..., Any]]) -> Callable[..., list[Reply | DropEpisode | None]]:
    """Make an environment that executes calls of these functions. A turn without a call ends the episode."""

    def respond(
        prompts: list[Any], transcripts: list[Transcript], **columns: list[Any]
    ) -> list[Reply | DropEpisode | None]:
        rows = rows_of(prompts, columns)
        calls = [calls_of(transcript[-1]) for transcript in transcripts]
        own = [{function.__name__: _without_episode(function, row) for function in functions} for row in rows]
        return [joined(made) for made in carry_out([*zip(own, calls, strict=True)])]

    return respond


def schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Describe each tool as chat templates take it: name, description, and its parameters as JSON schema.

    Raises ValueError naming the function and what is missing: a docstring, a line under its `Args:`, a type hint; for
    parameters that cannot be given by name, as calls give them; and for a method without its object.
    """
    found = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        if next((each.name for each in parameters), "") in ("self", "cls"):
            raise ValueError(
                f"tool '{function.__name__}' is a method and no call can give its `{next(iter(parameters)).name}`; "
                f"name the method of an object ({function.__name__} = Class().{function.__name__}), or a function"
            )
        if unnamed := [str(each) for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)]:
            raise ValueError(
                f"tool '{function.__name__}': the parameter {unnamed[0]} has no name in a call; "
                "write one that may be given by name"
            )
        try:
            schema = schema_of(function)
        except Exception as error:
            raise ValueError(
                f"tool '{function.__name__}': {first_line(error)}. A tool is described to the model by its docstring, "
                "with a line `name: what it is` for each parameter under `Args:`, and by their type hints."
            ) from error
        described = schema["function"].get("parameters", {}).get("properties", {})
        for parameter in parameters:
            if parameter.default is not parameter.empty and parameter.name in described:
                described[parameter.name] |= _default(parameter.default)
        found.append(schema)
    return found


def _default(value: Any) -> dict[str, Any]:
    """Return the `default` of a schema; none for a value that JSON does not have."""
    value = value.value if isinstance(value, Enum) else value
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


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
