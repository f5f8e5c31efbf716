"""Texts of a reward model: prompt and completion rendered and tokenised, the same in training and in scoring.

A reward model reads a finished turn. A classification model reads it through its own chat template, closing tokens
included, or without a template as plain text; an adapter on the policy's base reads the tokens that the policy saw and
sampled. How the prompts were written (`TextFormat`) is kept with the weights, so a model that learnt with a system
prompt is asked with it, whatever the policy's is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.formats import Side
from tinyrl.data.messages import Message, Prompt, as_messages
from tinyrl.models.reading import reading
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.models.templates import template_text
from tinyrl.models.tokens import added_around, disguised, token_ids
from tinyrl.tasks.answers import answer_end, answer_tokens, as_ended
from tinyrl.tasks.prompts import Rendered, asked_messages, in_chat, render_prompt

TEXT_FORMAT = "tinyrl_text_format"  # in a classification model's config, and in the metadata of an adapter's score head


@dataclass(frozen=True)
class TextFormat:
    """task.chat, .system_prompt and .chat_template of the run that trained a reward model; the defaults for others."""

    chat: Literal["auto"] | bool = "auto"
    system_prompt: str | None = None
    chat_template: dict[str, Any] = field(default_factory=dict)

    def render(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Rendered:
        """A prompt as this format writes it for a policy."""
        variables = self.chat_template
        return render_prompt(tokenizer, prompt, chat=self.chat, system_prompt=self.system_prompt, variables=variables)

    def end(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """The token that ends an answer of a policy behind such a prompt."""
        return answer_end(tokenizer, chat=self.chat, variables=self.chat_template)

    @classmethod
    def of_run(cls, config: Config) -> TextFormat:
        """How a run's configuration writes prompts."""
        return cls(config.task.chat, config.task.system_prompt, config.task.chat_template)

    @classmethod
    def of_config(cls, config: Any) -> TextFormat:
        """What a classification model's config says."""
        return cls._read(getattr(config, TEXT_FORMAT, None), "the reward model's config.json")

    @classmethod
    def of_adapter(cls, folder: str) -> TextFormat | None:
        """What an adapter's score head says; None for one that says nothing: it read the policy's prompts."""
        file = Path(folder).expanduser() / SCORE_HEAD
        what = f"cannot read {folder!r}"
        with reading(what, folder=file.parent, files=(file.name,)), safe_open(file, framework="pt") as opened:
            kept = (opened.metadata() or {}).get(TEXT_FORMAT)
        return None if kept is None else cls._read(kept, str(file))

    def metadata(self) -> dict[str, str]:
        """For the score head's safetensors file."""
        return {TEXT_FORMAT: json.dumps(asdict(self))}

    @classmethod
    def _read(cls, kept: Any, where: str) -> TextFormat:
        """What was kept, as JSON or its value."""
        text = kept if isinstance(kept, str) else json.dumps({} if kept is None else kept)
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError:
            raise ValueError(
                f"{where}: {TEXT_FORMAT} must hold `chat` (auto, true, false), `system_prompt` (text) and "
                "`chat_template` (variables)"
            ) from None


def reward_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt | None,
    answer: Side,
    *,
    text_format: TextFormat,
    max_tokens: int,
    adapter: bool = False,
) -> list[int]:
    """Tokenise an answer behind its prompt (None: a text alone) as a reward model reads it: its last `max_tokens`
    tokens, at least one. Of an answer in messages the last one's text is judged, and the others join the prompt.

    An adapter reads the tokens that the policy would have sampled. For a classification model a chat template brings
    its own special tokens, and plain text gets those that the tokenizer adds. A BOS stands once, and stays when the
    beginning is cut off. Raises ValueError for an answer that no policy writes and messages that the template refuses.
    """
    if prompt is None:
        assert isinstance(answer, str)
        if uses_template(tokenizer, text_format):
            raise ValueError(
                "the rows hold texts without a prompt, and the model's chat template writes prompts and answers; "
                "task.chat=false reads the texts as they are, or give `prompt` and `completion`"
            )
        prompt, answer = answer, ""
    elif not isinstance(answer, str):
        *before, last = answer
        prompt, answer = [*as_messages(prompt), *before] if before else prompt, _written(last)
    variables = text_format.chat_template
    if adapter:
        rendered = text_format.render(tokenizer, prompt)
        sampled = answer_tokens(tokenizer, rendered, answer, chat=text_format.chat, variables=variables)
        return end_of(tokenizer, [*rendered.tokens, *sampled], max_tokens)
    if uses_template(tokenizer, text_format):
        messages = asked_messages(prompt, text_format.system_prompt)
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        messages.append({"role": "assistant", "content": begun + answer})
        text = template_text(tokenizer, messages, variables=variables)
        tokens = end_of(tokenizer, token_ids(tokenizer, text), max_tokens)
    else:
        text = _plain_prompt(prompt, text_format) + disguised(tokenizer, answer)
        bare, (before, after), bos = token_ids(tokenizer, text), added_around(tokenizer), [tokenizer.bos_token_id]
        if bare[:1] == bos:  # the text brings its own
            bare, before = bare[1:], before if before[-1:] == bos else before + bare[:1]
        room = max(1, max_tokens - len(before) - len(after))
        tokens = before + bare[max(0, len(bare) - room) :] + after
    return tokens or [int(tokenizer.eos_token_id or 0)]  # pyright: ignore[reportArgumentType]


def uses_template(tokenizer: PreTrainedTokenizerBase, text_format: TextFormat) -> bool:
    """Return whether texts go through the tokenizer's chat template. Raises ValueError where they should and it has
    none.
    """
    if text_format.chat is True and not tokenizer.chat_template:
        raise ValueError("task.chat=true, but this reward model's tokenizer has no chat template")
    return in_chat(tokenizer, text_format.chat)


def adapter_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    completions: list[list[int]],
    *,
    end: int,
    max_tokens: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and sampled completions as an adapter learnt to read them: also those that were cut off have an `end`,
    and a prompt loses its beginning where there is no room.
    """
    answers = [as_ended(tokenizer, sampled, end=end) for sampled in completions]
    rooms = [max(1, max_tokens - len(answer)) for answer in answers]
    return [end_of(tokenizer, prompt, room) for prompt, room in zip(prompts, rooms, strict=True)], answers


def _written(message: Message) -> str:
    """The text of an answer's last message. Raises ValueError where the template would write more than that text."""
    more = [key for key in ("tool_calls", "reasoning_content", "thinking") if message.get(key)]
    if message["role"] != "assistant" or more:
        what = f"has `{more[0]}`" if more else f"is from the role {message['role']!r:.40}"
        raise ValueError(
            f"the last message of an answer {what}; a reward model reads what a policy writes: a message of the "
            "assistant with all of it in `content`"
        )
    return message["content"]


def end_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int], max_tokens: int) -> list[int]:
    """The end of a text that is too long, behind its BOS where it begins with one: the completion is at the end."""
    if len(tokens) <= max_tokens:
        return tokens
    bos = tokens[:1] if tokens[0] == tokenizer.bos_token_id and max_tokens > 1 else []
    return bos + tokens[len(tokens) - max_tokens + len(bos) :]


def _plain_prompt(prompt: Prompt, text_format: TextFormat) -> str:
    """What stands before the completion where there is no template."""
    if isinstance(prompt, str):
        return f"{text_format.system_prompt}\n\n{prompt}" if text_format.system_prompt else prompt
    return "".join(f"{message['content']}\n\n" for message in asked_messages(prompt, text_format.system_prompt))
