"""OpenAI's Agents SDK (openai-agents 0.24) as an agent, at its defaults: the policy behind /v1/responses.

Set: a model provider with address and key, and the model. Environment:
`pip install -c constraints.txt -e '.[serve]' openai-agents==0.24.0`. The SDK sends what agents do to OpenAI where
OPENAI_API_KEY is set (OPENAI_AGENTS_DISABLE_TRACING=1: not). The first line makes a model that was taught to play (a
minute on a CPU); any model whose chat template shows tools will do.

    python -m tests.agents.teach examples/openai_sdk_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/openai_sdk_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 159 calls, none dropped.
"""

# pyright: reportMissingImports=none

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
