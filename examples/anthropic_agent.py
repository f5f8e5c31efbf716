from typing import Any

from anthropic import Anthropic, beta_tool


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    @beta_tool
    def look(colour: str) -> str:
        """Look into a box.

        Args:
            colour: of the box
        """
        return row["boxes"].get(colour, "no such box")

    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    asked = client.beta.messages.tool_runner(  # by default it needs a server that keeps the conversation
        model=model, max_tokens=1024, tools=[look], messages=messages, thread=False
    )
    return asked.until_done().content[-1].text
