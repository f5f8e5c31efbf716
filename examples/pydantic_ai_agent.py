"""pydantic-ai (2.62) as an agent, with the model class that is its default for OpenAI: the policy behind /v1/responses.

Set: a provider with address and key, and the model; `OpenAIChatModel` in place of the class speaks chat completions.
Environment: `pip install -c constraints.txt -e '.[serve]' 'pydantic-ai-slim[openai]==2.62.0'`. The first line makes a
model that was taught to play (a minute on a CPU); any model whose chat template shows tools will do.

    python -m tests.agents.teach examples/pydantic_ai_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/pydantic_ai_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 160 calls, none dropped.
"""

# pyright: reportMissingImports=none

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
