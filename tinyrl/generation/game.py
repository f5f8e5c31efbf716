"""The game that episodes are played by: what answers, how its answers become tokens, how long an episode may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.environments.environment import Environment
from tinyrl.generation.engine import eos_token_ids
from tinyrl.models.roles import Roles
from tinyrl.tasks import Task
from tinyrl.tasks.observations import ObservationTokens
from tinyrl.tasks.prompts import in_chat, token_ids


@dataclass(frozen=True)
class Game:
    """max_new_tokens: of the policy's own, over all turns; variables: what the chat template is asked with."""

    environment: Environment
    observations: ObservationTokens
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    variables: dict[str, Any]

    @property
    def columns(self) -> int:
        """The most tokens of an episode, chosen and read."""
        return self.max_new_tokens + (self.environment.max_turns - 1) * self.observations.most

    def text(self, tokens: list[int]) -> str:
        """What tokens say, special ones left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        """What the environment says at the end of each row's prompt."""
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        columns = {name: [row.get(name) for row in rows] for name in names}
        return self.environment.openings([task.prompt(row) for row in rows], columns)


def load_game(config: Config, task: Task, *, tokenizer: PreTrainedTokenizerBase, roles: Roles) -> Game | None:
    """Start the configuration's environment, or the task's, and find out how its answers become tokens; None where
    nothing answers. Raises ValueError where that cannot be done.
    """
    environment = _environment(config, task, tokenizer)
    if environment is None:
        return None
    environment.start()
    schemas = environment.schemas
    chat = in_chat(tokenizer, config.task.chat)
    if schemas and (not chat or "tools" not in str(tokenizer.chat_template)):
        raise ValueError(
            "environment.tools are shown to the model by its chat template, and this model "
            f"{'has none that shows them' if chat else 'is prompted without one'}; describe them in the prompt and "
            "answer with environment.use=FILE.py:FUNCTION"
        )
    variables = {**config.task.chat_template, **({"tools": schemas} if schemas else {})}
    observations = ObservationTokens(
        tokenizer,
        chat=chat,
        variables=variables,
        eos=eos_token_ids(roles, tokenizer),
        max_tokens=environment.max_observation_tokens,
    )
    return Game(environment, observations, tokenizer, config.generation.max_new_tokens, variables)


def plays(config: Config, task: Task) -> bool:
    """Whether an environment answers, the configuration's or the task's."""
    named = config.environment.use is not None or bool(config.environment.tools)
    return named or task.respond is not None or task.environment is not None


def _environment(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
    if not plays(config, task):
        return None

    def length(text: str) -> int:
        return len(token_ids(tokenizer, text))

    return Environment(
        config.environment, task=task.name, respond=task.respond, use=task.environment, stop=task.stop, length=length
    )
