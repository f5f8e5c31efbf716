from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    policy = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(policy, instructions="Look before you answer.")

    @agent.tool_plain
    def look(colour: str) -> str:
        """Look into a box.

        Args:
            colour: of the box
        """
        return row["boxes"].get(colour, "no such box")

    return agent.run_sync(row["prompt"]).output
