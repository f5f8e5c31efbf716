"""Tokens that a reward model reads of a prompt and its answer, the same in training and in scoring.

A reward model reads a finished turn. A classification model reads it through its own chat template, closing tokens
included, or without a template as plain text; an adapter on the policy's base reads the tokens that the policy saw and
sampled. How the prompts were written (`TextFormat`) is stored with the weights, so a model that learnt with a system
prompt is asked with it, whatever the policy's is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.images import images_of, is_image_id
from tinyrl.data.messages import Prompt, as_messages
from tinyrl.data.turns import Side
from tinyrl.models.reading import reading
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.models.tokens import added_around, disguised, template_text, token_ids
from tinyrl.tasks.answers import answer_end, answer_tokens
from tinyrl.tasks.prompts import LongText, Rendered, asked_messages, check_written, in_chat, render_prompt

if TYPE_CHECKING:
    from tinyrl.models.image_inputs import ImageExpander

TEXT_FORMAT = "tinyrl_text_format"  # in a classification model's config, and in the metadata of an adapter's score head


@dataclass(frozen=True)
class TextFormat:
    """task.chat, .system_prompt and .chat_template of the run that trained a reward model; the defaults for others."""

    chat: Literal["auto"] | bool = "auto"
    system_prompt: str | None = None
    chat_template: dict[str, Any] = field(default_factory=dict)

    def render(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, images: ImageExpander | None = None
    ) -> Rendered:
        """Render a prompt as for a policy, which may read images."""
        return render_prompt(
            tokenizer,
            prompt,
            chat=self.chat,
            system_prompt=self.system_prompt,
            variables=self.chat_template,
            images=images,
        )

    def end(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the token that ends an answer of a policy behind such a prompt."""
        return answer_end(tokenizer, chat=self.chat, variables=self.chat_template)

    @classmethod
    def of_run(cls, config: Config) -> TextFormat:
        return cls(config.task.chat, config.task.system_prompt, config.task.chat_template_kwargs)

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> TextFormat:
        """Read the format from a classification model's config; the defaults where it has none."""
        return TypeAdapter(cls).validate_python(getattr(config, TEXT_FORMAT, None) or {})

    @classmethod
    def of_adapter(cls, folder: str) -> TextFormat:
        """Read the format from the metadata of an adapter's score head."""
        file = Path(folder).expanduser() / SCORE_HEAD
        with reading(f"cannot read {str(file)!r}"), safe_open(file, framework="pt") as opened:
            return TypeAdapter(cls).validate_json((opened.metadata() or {}).get(TEXT_FORMAT, "{}"))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the score head's safetensors file."""
        return {TEXT_FORMAT: json.dumps(asdict(self))}


def reward_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt | None,
    answer: Side,
    *,
    text_format: TextFormat,
    max_tokens: int,
    adapter: bool = False,
    images: ImageExpander | None = None,
) -> list[int]:
    """Tokenise an answer behind its prompt (None: a text alone) as a reward model reads it: its last `max_tokens`
    tokens, at least one.

    An adapter reads the tokens that the policy would have sampled, and `images` where the policy does. For a
    classification model a chat template brings its own special tokens, and plain text gets those that the tokenizer
    adds. A BOS stands once, and stays when the beginning is cut off. Raises ValueError for an answer that no policy
    writes and messages that the template refuses.
    """
    chat = text_format.chat
    variables = text_format.chat_template
    system = text_format.system_prompt
    templated = in_chat(tokenizer, chat)
    if prompt is None and templated:
        raise ValueError(
            "the rows hold texts without a prompt, and the model has a chat template: task.chat=false reads the "
            "texts as they are, or give `prompt` and `completion`"
        )
    prompt, text = judged(prompt, answer)
    if adapter:
        rendered = text_format.render(tokenizer, prompt, images=images)
        sampled = answer_tokens(tokenizer, rendered, text, chat=chat, variables=variables)
        asked, sampled = within(tokenizer, rendered.tokens, sampled, max_tokens)
        return asked + sampled
    if images_of(prompt):
        raise ValueError("the prompt has images, which a classification model does not read")
    if templated:
        messages = asked_messages(prompt, system)
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        messages.append({"role": "assistant", "content": begun + text})
        whole = template_text(tokenizer, messages, variables=variables)
        check_written(tokenizer, messages, whole, variables=variables)
        tokens, _ = within(tokenizer, token_ids(tokenizer, whole), [], max_tokens)
    else:
        tokens = plain_tokens(tokenizer, prompt, text, system=system, max_tokens=max_tokens)
    end = tokenizer.eos_token_id
    return tokens or [end if isinstance(end, int) else 0]


def judged(prompt: Prompt | None, answer: Side) -> tuple[Prompt, str]:
    """Return the prompt and the text that is judged behind it. Of an answer in messages that is the last one's text,
    and the others join the prompt; a text alone is its own prompt. Raises ValueError for an answer that no policy
    writes.
    """
    if prompt is None:
        assert isinstance(answer, str)
        return answer, ""
    if isinstance(answer, str):
        return prompt, answer
    *before, last = answer
    more = [f" with `{key}`" for key in ("tool_calls", "reasoning_content", "thinking") if last.get(key)]
    if last["role"] != "assistant" or more:
        what = f"not one of the role {last['role']!r:.40}{''.join(more)}"
        raise ValueError(f"an answer ends with a message of the assistant, all of it in `content`, {what}")
    return ([*as_messages(prompt), *before] if before else prompt), str(last["content"])


def plain_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str, *, system: str | None, max_tokens: int
) -> list[int]:
    """Tokenise a text behind its prompt without a chat template, between the special tokens that the tokenizer adds."""
    asked = f"{system}\n\n{prompt}" if system and isinstance(prompt, str) else prompt
    if not isinstance(asked, str):
        asked = "".join(f"{message['content']}\n\n" for message in asked_messages(asked, system))
    before, after = added_around(tokenizer)
    tokens = token_ids(tokenizer, asked + disguised(tokenizer, text))
    tokens = tokens[1:] if tokens[:1] == before[-1:] else tokens  # the text brings its own BOS
    room = max(1, max_tokens - len(before) - len(after))
    return before + tokens[-room:] + after


def within(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """Return the end of a prompt and its answer, `max_tokens` in all; a BOS that the prompt begins with stays. At
    least one token is the prompt's, if need be the answer's first. Raises LongText where an image would be cut off.
    """
    cut = len(prompt) + len(answer) - max_tokens
    tokens = [*prompt, *answer]
    if cut <= 0:
        return prompt, answer
    if any(map(is_image_id, tokens[: cut + 1])):
        raise LongText(f"it has {len(tokens):,} tokens with its images, and {max_tokens:,} are read")
    bos = prompt[:1] if prompt[:1] == [tokenizer.bos_token_id] and max_tokens > 1 else []
    tokens = bos + tokens[cut + len(bos) :]
    border = max(1, max_tokens - len(answer))
    return tokens[:border], tokens[border:]
