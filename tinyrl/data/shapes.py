"""Shapes of row contents: a prompt as text or as chat messages."""

from __future__ import annotations

from typing import Any

Prompt = str | list[dict[str, str]]  # text, or chat messages, as the data has them


def check_prompt(prompt: Any) -> None:
    """ValueError with a sentence unless `prompt` is text or a list of {"role": ..., "content": text} messages."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return
    wanted = 'text, or a list of messages {"role": "user", "content": "..."}'
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt must be {wanted}, not {repr(prompt)[:60]}")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"the prompt must be {wanted}; one message is {repr(message)[:60]}")
