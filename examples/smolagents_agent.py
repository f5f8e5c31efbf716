from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    @tool
    def look(colour: str) -> str:
        """Look into a box.

        Args:
            colour: of the box
        """
        return row["boxes"].get(colour, "no such box")

    agent = ToolCallingAgent(tools=[look], model=OpenAIModel(model, api_base=base_url, api_key=api_key))
    return str(agent.run(row["prompt"]))
