"""Anthropic's client (2.14), with its tool runner, as an agent: the policy behind /v1/messages.

Set: the address without its /v1, key, model, and thread=False: by default the tool runner wants a server that keeps the
conversation. Environment: `pip install -c constraints.txt -e '.[serve]' anthropic==2.14.0`. The first line makes a
model that was taught to play (a minute on a CPU); any model whose chat template shows tools will do.

    python -m tests.agents.teach examples/anthropic_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/anthropic_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 160 calls, none dropped.
"""

# pyright: reportMissingImports=none

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
    messages: Any = [{"role": "user", "content": row["prompt"]}]
    asked = client.beta.messages.tool_runner(  # by default it needs a server that keeps the conversation
        model=model, max_tokens=1024, tools=[look], messages=messages, thread=False
    )
    said: Any = asked.until_done().content[-1]
    return said.text
