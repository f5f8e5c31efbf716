from typing import Any

from agents import Agent, RunConfig, Runner, function_tool
from agents.models.openai_provider import OpenAIProvider


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    @function_tool
    def look(colour: str) -> str:
        """Look into a box.

        Args:
            colour: of the box
        """
        return row["boxes"].get(colour, "no such box")

    agent = Agent(name="boxes", instructions="Look before you answer.", tools=[look], model=model)
    policy = OpenAIProvider(base_url=base_url, api_key=api_key)
    return Runner.run_sync(agent, row["prompt"], run_config=RunConfig(model_provider=policy)).final_output
