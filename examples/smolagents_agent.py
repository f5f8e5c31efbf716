"""smolagents (1.26) as an agent: its ToolCallingAgent, which runs tools and nothing else, over chat completions.

Set: address, key and model. Environment: `pip install -c constraints.txt -e '.[serve]' smolagents==1.26.0`. The first
line makes a model that was taught to play (a minute on a CPU); any model whose chat template shows tools will do.

    python -m tests.agents.teach examples/smolagents_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/smolagents_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 160 calls, none dropped.
It writes earlier calls into its next prompt as text, so each call is a row of its own.
"""

# pyright: reportMissingImports=none

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
