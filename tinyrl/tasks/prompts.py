"""Rows made ready for the model once, before training: rendered through the chat template, tokenised, checked for
length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tinyrl.data.rows import Prompt, Row, render_prompt
from tinyrl.tasks import Task


@dataclass(frozen=True)
class PreparedPrompt:
    """A row, and its prompt as the data has it, as text and as tokens; `opened` is a <think> that the template
    opened.
    """

    index: int  # of the row in its split
    row: Row
    prompt: Prompt
    text: str
    tokens: list[int]
    opened: str

    def completion_for_reward(self, text: str) -> str | list[dict[str, str]]:
        """A completion as reward functions get it: with the <think> it continues, as a message where the data has
        messages.
        """
        text = self.opened + text
        return text if isinstance(self.prompt, str) else [{"role": "assistant", "content": text}]


def prepare_prompts(
    task: Task,
    rows: list[Row],
    *,
    tokenizer: PreTrainedTokenizerBase,
    chat: Literal["auto"] | bool,
    system_prompt: str | None,
    max_prompt_tokens: int,
    long_prompts: Literal["error", "drop"],
) -> list[PreparedPrompt]:
    """Render every row. Prompts over `max_prompt_tokens` are refused with the first one named, or dropped when told
    so.
    """
    prepared, long = [], []
    for index, row in enumerate(rows):
        prompt = task.prompt(row)
        rendered = render_prompt(tokenizer, prompt, chat=chat, system_prompt=system_prompt)
        ready = PreparedPrompt(index, row, prompt, rendered.text, rendered.tokens, rendered.opened)
        (long if len(rendered.tokens) > max_prompt_tokens else prepared).append(ready)
    if long and (long_prompts == "error" or not prepared):
        longest = max(len(p.tokens) for p in long)
        raise ValueError(
            f"{len(long)} of {len(rows)} prompts have more than "
            f"generation.max_prompt_tokens={max_prompt_tokens} tokens "
            f"(first: row {long[0].index + 1} with {len(long[0].tokens)}; longest {longest}): "
            f"{long[0].text[:60]!r}...\n"
            f"Set generation.max_prompt_tokens={longest}, or leave them out with task.long_prompts=drop."
        )
    return prepared


def columns_of(prompts: list[PreparedPrompt]) -> dict[str, list[Any]]:
    """The rows' columns as lists, one entry a prompt, as TRL's reward signature passes them; the prompt has its own
    argument.
    """
    names = dict.fromkeys(name for p in prompts for name in p.row if name not in ("prompt", "prompts", "completions"))
    return {name: [p.row.get(name) for p in prompts] for name in names}
