"""An agent that knows only an address: it answers questions with the embedded lookup model and a search of its own.

tinyrl train grpo lookup environment.agent=examples/lookup_agent.py:run environment.max_call_tokens=24
"""

from typing import Any

from openai import OpenAI

from tinyrl.starter.lookup import fact, found_text


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """What the policy wrote, turn after turn: it searches until it answers."""
    client, text, written = OpenAI(base_url=base_url, api_key=api_key), row["prompt"], ""
    for _ in range(4):
        ask: dict[str, Any] = {"model": model, "prompt": text, "max_tokens": 24, "stop": [";", "."]}
        said = client.completions.create(**ask, extra_body={"include_stop_str_in_output": True}).choices[0].text
        text, written, words = text + said, written + said, said.split()
        if "answer" in words or words[-1:] != [";"]:
            break
        text += found_text(fact(row["world"], *words[1:-1]) if len(words) == 5 else None)
    return written
