"""A tokenizer as its folder has it, read by tokenizers and jinja2 alone: transformers takes seconds to import.

It has what models/tokens.py and tasks/prompts.py take of transformers' tokenizer, by the same names. Templates are
rendered in an environment as transformers makes it (utils/chat_template_utils.py). Differences: tokens are those of
tokenizer.json, whatever class tokenizer_config.json names; special tokens that only such a class knows are missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
CUT_HERE = "CONTINUE_FINAL_MESSAGE_TAG "

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """A template by its name ("default", "tool_use"), and the file that has it."""

    name: str
    file: str
    text: str


class FolderTokenizer:
    """The tokenizer of a folder. name: what messages call it. Raises OSError, ValueError or AttributeError for files
    that are missing or damaged.
    """

    def __init__(self, folder: Path, *, name: str = "") -> None:
        self.folder = folder
        self.name_or_path = name
        file = folder / TOKENIZER_CONFIG
        self.config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        tokens = {key: _content(value) for key, value in self.config.items() if key.endswith("_token")}
        self.special_tokens = {key: token for key, token in tokens.items() if token is not None}
        self.templates = self._templates()

    # ---- templates ----

    def _templates(self) -> list[ChatTemplate]:
        """Read the templates: files come before what tokenizer_config.json has."""
        files = [("default", TEMPLATE_FILE)] if (self.folder / TEMPLATE_FILE).is_file() else []
        more = sorted((self.folder / MORE_TEMPLATES).glob("*.jinja"))
        files += [(file.stem, f"{MORE_TEMPLATES}/{file.name}") for file in more]
        if files:
            return [ChatTemplate(name, file, (self.folder / file).read_text("utf-8")) for name, file in files]
        written = self.config.get("chat_template")
        if isinstance(written, str):
            return [ChatTemplate("default", TOKENIZER_CONFIG, written)]
        return [ChatTemplate(one["name"], TOKENIZER_CONFIG, one["template"]) for one in written or []]

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """Return the template, or those of several names."""
        named = {template.name: template.text for template in self.templates}
        return named["default"] if named.keys() == {"default"} else named or None

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template of that name or text; without one, that for tools where there are some, or the default.
        Raises ValueError where there is none.
        """
        named = {template.name: template.text for template in self.templates}
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        if tools and "tool_use" in named:
            return named["tool_use"]
        if "default" not in named:
            raise ValueError("the tokenizer has no chat template that is the default")
        return named["default"]

    def apply_chat_template(
        self,
        conversation: list[Any],
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[str]:
        """Render a conversation, a list of messages, or each of a list of them. Raises what the template raises."""
        assert not tokenize, "texts are tokenised by models/tokens.py"
        template = compiled(self.get_chat_template(chat_template, tools))
        given: dict[str, Any] = {**self.special_tokens, **variables}
        given |= {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        if not isinstance(conversation[0], list):
            return _rendered(template, conversation, given, continued=continue_final_message)
        return [_rendered(template, one, given, continued=continue_final_message) for one in conversation]

    # ---- tokens ----

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER_FILE))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def decode(self, tokens: Sequence[int]) -> str:
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=False)

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Encode a text, or each of a list of them."""
        if isinstance(text, str):
            return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        encoded = self.backend_tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encoded]}


def _content(token: Any) -> str | None:
    """Return the text of a special token, which tokenizer_config.json has as a text or with settings around it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _rendered(template: Template, messages: Messages, given: dict[str, Any], *, continued: bool) -> str:
    """Render messages; `continued`: through the content of the last one, with nothing behind it."""
    if not continued:
        return template.render(messages=messages, **given)
    *before, last = messages
    text = template.render(messages=[*before, {**last, "content": last["content"] + CUT_HERE}], **given)
    tag = CUT_HERE.strip()
    if tag not in text:
        raise ValueError("the final message, which is continued, is not in the rendering")
    at = text.rindex(tag)
    is_whole = text[at : at + len(CUT_HERE)] == CUT_HERE
    return text[:at] if is_whole else text[:at].rstrip()


# ---- the environment of templates ----


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %}, which marks what a model writes; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateDict:
    """`dict` in a template: no class, whose attributes would lead out of the sandbox."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class TemplateNamespace(Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:  # a template may name an attribute `self`
        self, *rest = given
        values = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(template: str) -> Template:
    """Compile a chat template. Raises jinja2's TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    return environment.from_string(template)
