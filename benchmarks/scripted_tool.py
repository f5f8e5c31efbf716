"""The scripted tool of the benchmark of turns, and the chat template of its prompts: the same ones on both sides.

tinyrl runs `respond` in its worker process, as any environment that a person writes; TRL calls `look_up` in its own.
"""

from __future__ import annotations

from typing import Any

TURNS = 3
ANSWER = " ".join(f"w{i}" for i in range(100, 148))  # 48 words of every size's vocabulary, one token each
# Of words that the tokenizer knows: w3, w4 and w5 begin a message of the user, the tool and the policy; EOS ends it.
# TRL asks for the name and the arguments of a call to be in it; the policy's tokens are never made from text.
TEMPLATE = """\
{%- for message in messages -%}
{{- {"user": "w3 ", "tool": "w4 ", "assistant": "w5 "}[message.role] + message.content -}}
{%- for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments }}{% endfor -%}
{{- "<eos>" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "w5 " }}{% endif -%}
"""


def respond(prompts: list[Any], transcripts: list[list[dict[str, Any]]], **_: Any) -> list[str | None]:
    """tinyrl's: the answer to every turn but the third, after which the episode is over."""
    turns = [sum(message["role"] == "assistant" for message in transcript) for transcript in transcripts]
    return [ANSWER if count < TURNS else None for count in turns]


def look_up() -> str:
    """Look something up."""
    return ANSWER
