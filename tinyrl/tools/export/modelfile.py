"""A Modelfile beside a merged model, from which `ollama create` makes a model with the policy's prompts and sampling.

A TEMPLATE is written only where it renders conversations as the model's chat template does. Each family has its Go
template (`go_template`) and the same in Python (`rendered`), which is compared with the chat template;
tests/tools/test_modelfile.py compares the two by Go itself. Ollama merges successive messages of one role, and a Go
template cannot trim: conversations alternate here, and their contents begin and end without white space.

What Ollama reads from a folder is that of its source of August 2026 (convert/convert.go, convert/tokenizer.go):
architectures and tokenizers that it does not know go through llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.models.tokens import template_text
from tinyrl.tasks.prompts import in_chat

MODELFILE = "Modelfile"
# Architectures that Ollama converts from a folder, and whose configuration it reads whole.
CONVERTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM")
# SHA-256 of the patterns by which tokenizer.json splits a text, for those that Ollama knows.
SPLITS = {
    "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f": "Llama 3",
    "03df5c5863ad70781dcfdef491ead25140f895fe8010964be0daefe27be32b02": "DeepSeek",
    "21cde974d587f0d54dc8d56b183cc1e6239600172035c68fbd6d4b9f8da0576e": "DeepSeek Coder",
    "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e": "Qwen 2",
}
LEAST_CONTEXT = 4096
PROMPT_ALONE = "{{ .Prompt }}"
SYSTEM: dict[str, Any] = {"role": "system", "content": "Answer with a number.\nNothing else."}
USER: dict[str, Any] = {"role": "user", "content": "What is 7 + 5?\n\n{{ x }} <b>é</b>"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "12.\n\nBecause 7 + 5 = 12."}
MORE: dict[str, Any] = {"role": "user", "content": "And 7 - 5?"}
WITHOUT_SYSTEM = ([USER], [USER, ANSWER, MORE], [MORE, ANSWER, USER, ANSWER, MORE])
WITH_SYSTEM = ([SYSTEM, USER], [SYSTEM, USER, ANSWER, MORE])


@dataclass(frozen=True)
class Family:
    """How chat templates write a turn: `opening`, with the role in it, the content, `closing`. answers: the role of
    the policy's turns; system_in_user: the system message is the beginning of the first turn of the user.
    """

    name: str
    opening: str
    closing: str
    answers: str = "assistant"
    system_in_user: bool = False

    def opened(self, role: str) -> str:
        return self.opening.format(role=role)


FAMILIES = (
    Family("ChatML", "<|im_start|>{role}\n", "<|im_end|>\n"),
    Family("Llama 3", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    Family("Gemma", "<start_of_turn>{role}\n", "<end_of_turn>\n", answers="model", system_in_user=True),
    Family("Phi-3", "<|{role}|>\n", "<|end|>\n"),
    Family("Phi-4", "<|im_start|>{role}<|im_sep|>", "<|im_end|>"),
    Family("Phi-4-mini", "<|{role}|>", "<|end|>"),
)


@dataclass(frozen=True)
class FixedTexts:
    """What a chat template writes beside the turns. start: before everything; no_system: where there is no system
    message; before_system: at the beginning of a system message; before_answer: where the answer begins.
    """

    start: str = ""
    no_system: str = ""
    before_system: str = ""
    before_answer: str = ""

    @property
    def can_be_written(self) -> bool:
        """Return whether Go reads these texts as text, and Ollama's parser keeps their characters."""
        text = self.start + self.no_system + self.before_system + self.before_answer
        return "{{" not in text and is_kept(text)


def go_template(family: Family, fixed: FixedTexts) -> str:
    """Return the Go template of a family, executed by Ollama with .System and .Messages."""
    answer = family.opened(family.answers) + fixed.before_answer
    if family.system_in_user:
        user = family.opened("user") + '{{ if $system }}{{ $system }}\n\n{{ $system = "" }}{{ end }}'
        turn = (
            f'{{{{ if eq .Role "user" }}}}{user}{{{{ .Content }}}}{family.closing}'
            f'{{{{ else if eq .Role "assistant" }}}}{family.opened(family.answers)}{{{{ .Content }}}}{family.closing}'
            "{{ end }}"
        )
        return f"{fixed.start}{{{{ $system := .System }}}}{{{{ range .Messages }}}}{turn}{{{{ end }}}}{answer}"
    no_system = f"{{{{ if not .System }}}}{fixed.no_system}{{{{ end }}}}" if fixed.no_system else ""
    before = f'{{{{ if eq .Role "system" }}}}{fixed.before_system}{{{{ end }}}}' if fixed.before_system else ""
    turn = f"{family.opened('{{ .Role }}')}{before}{{{{ .Content }}}}{family.closing}"
    return f"{fixed.start}{no_system}{{{{ range .Messages }}}}{turn}{{{{ end }}}}{answer}"


def rendered(family: Family, fixed: FixedTexts, messages: list[dict[str, Any]]) -> str:
    """Return what `go_template` gives for these messages."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    answer = family.opened(family.answers) + fixed.before_answer
    text = fixed.start
    if family.system_in_user:
        for message in messages:
            if message["role"] == "user":
                text += family.opened("user")
                if system:
                    text += f"{system}\n\n"
                    system = ""
                text += message["content"] + family.closing
            elif message["role"] == "assistant":
                text += family.opened(family.answers) + message["content"] + family.closing
        return text + answer
    if not system:
        text += fixed.no_system
    for message in messages:
        text += family.opened(message["role"])
        if message["role"] == "system":
            text += fixed.before_system
        text += message["content"] + family.closing
    return text + answer


# ---- which family a chat template is of ----


@dataclass(frozen=True)
class OllamaTemplate:
    """A template of Ollama that renders as a model's chat template does; family: for people."""

    text: str
    family: str


@dataclass(frozen=True)
class ChatRenderings:
    """What a chat template renders for WITHOUT_SYSTEM, and for WITH_SYSTEM (none where it refuses that role), without
    the token that begins a text, if the tokenizer of Ollama adds it.
    """

    without_system: list[str]
    with_system: list[str]
    bos: str = ""  # written by the chat template, and not added by a tokenizer


def chat_renderings(tokenizer: PreTrainedTokenizerBase, folder: Path, variables: dict[str, Any]) -> ChatRenderings:
    """Render the conversations. Raises ValueError where the chat template refuses one without a system message."""

    def render(messages: list[dict[str, Any]]) -> str:
        return template_text(tokenizer, messages, variables=variables, add_generation_prompt=True)

    without_system = [render(messages) for messages in WITHOUT_SYSTEM]
    with_system: list[str] = []
    with suppress(ValueError):
        with_system = [render(messages) for messages in WITH_SYSTEM]
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    is_added = settings.get("add_bos_token")
    bos = str(tokenizer.bos_token or "")
    opens_turns = any(family.opening.startswith(bos) for family in FAMILIES)  # SmolLM2's <|im_start|>
    is_written = bool(bos) and not opens_turns and without_system[0].startswith(bos)
    if not is_written:
        if is_added is True:
            raise ValueError(f"Ollama would begin each text with {bos!r}, as tokenizer_config.json has it")
        return ChatRenderings(without_system, with_system)
    return ChatRenderings(
        without_system=[text.removeprefix(bos) for text in without_system],
        with_system=[text.removeprefix(bos) for text in with_system],
        bos=bos if is_added is False else "",
    )


def ollama_template(found: ChatRenderings) -> OllamaTemplate | None:
    """Return the template of the family whose renderings equal those of a chat template, or None."""
    for family in FAMILIES:
        fixed = fixed_texts(family, found)
        if fixed is None or not fixed.can_be_written:
            continue
        own = [rendered(family, fixed, messages) for messages in WITHOUT_SYSTEM]
        own_with = [rendered(family, fixed, messages) for messages in WITH_SYSTEM] if found.with_system else []
        if own == [found.bos + text for text in found.without_system] and own_with == [
            found.bos + text for text in found.with_system
        ]:
            return OllamaTemplate(text=go_template(family, fixed), family=family.name)
    return None


def fixed_texts(family: Family, found: ChatRenderings) -> FixedTexts | None:
    """Return what is between the turns of a family in the renderings of [USER] and [SYSTEM, USER]; None where its
    turns are not in them.
    """
    turn = family.opened("user") + USER["content"] + family.closing + family.opened(family.answers)
    no_system, is_there, before_answer = found.without_system[0].partition(turn)
    if not is_there:
        return None
    before_system = ""
    if found.with_system and not family.system_in_user:
        opening = family.opened("system")
        before, _, _ = found.with_system[0].partition(SYSTEM["content"])
        if not before.startswith(opening):
            return None
        before_system = before.removeprefix(opening)
    return FixedTexts(start=found.bos, no_system=no_system, before_system=before_system, before_answer=before_answer)


# ---- the file ----


@dataclass(frozen=True)
class Modelfile:
    """The text of a Modelfile, notes on what it leaves to do, and the name that its model gets."""

    text: str
    notes: list[str]
    name: str

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """Return the commands that make the model and run it, by purpose."""
        create = ["ollama", "create", self.name, "-f", str(folder / MODELFILE)]
        return {"ollama": create, "then": ["ollama", "run", self.name]}


@dataclass
class _Lines:
    """The lines of a Modelfile, and notes for people."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, instruction: str, text: str) -> None:
        """Add an instruction with a text, or a note where Ollama's parser would change the text."""
        quotes = '"' if not set(text) & {'"', "\n"} else '"""'
        if is_kept(text):
            self.lines.append(f"{instruction} {quotes}{text}{quotes}")
        else:
            self.notes.append(f"Modelfile: {instruction} {text!r} is left out: Ollama's parser drops its characters")


def modelfile(folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase, *, name: str) -> Modelfile:
    """Return the Modelfile for a merged model in `folder`."""
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written = _Lines(lines=["FROM ."])
    if not can_be_converted(folder, facts):
        written = _Lines(lines=[f"FROM ./{name}.gguf"])
        written.notes.append(
            "Modelfile: Ollama does not convert this architecture or tokenizer; run llama.cpp's line before its own"
        )
    chat = in_chat(tokenizer, config.task.chat)
    template = _template(folder, config, tokenizer, notes=written.notes) if chat else PROMPT_ALONE
    if template is not None:
        written.lines.append(f'TEMPLATE """{template}"""')
    if chat and config.task.system_prompt is not None:
        written.add("SYSTEM", config.task.system_prompt)
    text_facts = facts.get("text_config") or facts
    longest = config.generation.max_prompt_tokens + config.generation.max_new_tokens
    context = min(max(LEAST_CONTEXT, longest), text_facts.get("max_position_embeddings") or LEAST_CONTEXT)
    written.lines.append(f"PARAMETER num_ctx {context}")
    if config.samples:
        written.lines += [f"PARAMETER {one}" for one in _as_sampled(config)]
    for stop in dict.fromkeys([*_ends(folder, tokenizer), *config.generation.stop]):
        written.add("PARAMETER stop", stop)
    own_name = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "policy"
    return Modelfile(text="\n".join(written.lines) + "\n", notes=written.notes, name=own_name)


def _template(folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase, *, notes: list[str]) -> str | None:
    """Return a template, or None with a note on what is left to do."""
    left = "Modelfile: no TEMPLATE; Ollama then takes the chat template of a GGUF file that llama.cpp made"
    environment = config.environment
    if environment.tools or environment.name or environment.agent:
        notes.append(f"{left}, which shows tools as in training")
        return None
    try:
        found = ollama_template(chat_renderings(tokenizer, folder, dict(config.task.chat_template_kwargs)))
    except ValueError as error:
        notes.append(f"{left} ({error})")
        return None
    if found is None:
        families = ", ".join(family.name for family in FAMILIES)
        notes.append(f"{left}: the chat template renders otherwise than {families}")
        return None
    notes.append(f"Modelfile: its TEMPLATE ({found.family}) renders conversations as the chat template does")
    return found.text


def _as_sampled(config: Config) -> Iterator[str]:
    """Yield the parameters with which Ollama samples as the run did: its own defaults cut and penalise tokens."""
    sampling = config.generation
    yield f"temperature {sampling.temperature:g}"
    yield f"top_p {sampling.top_p:g}"
    yield f"top_k {sampling.top_k}"
    yield "min_p 0"
    yield "repeat_penalty 1"


def _ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the tokens that end an answer, from generation_config.json."""
    file = folder / "generation_config.json"
    facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ids = facts.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    texts = [tokenizer.convert_ids_to_tokens(i) for i in listed if isinstance(i, int)]
    return [text for text in texts if isinstance(text, str)]


def is_kept(text: str) -> bool:
    """Return whether Ollama's parser keeps each character of a quoted text, and does not end it earlier."""
    return all(letter.isprintable() or letter in "\n\t" for letter in text) and '"""' not in text


def can_be_converted(folder: Path, facts: dict[str, Any]) -> bool:
    """Return whether Ollama makes a model from this folder whose tokens are the folder's: it knows the architecture,
    and reads tokenizer.model, or splits texts as tokenizer.json does.
    """
    rope = facts.get("rope_parameters") or {}
    is_partly_rotated = rope.get("partial_rotary_factor", 1.0) != 1.0  # Phi-4-mini: Ollama does not read it
    if is_partly_rotated or not set(facts.get("architectures") or ()) & {*CONVERTED}:
        return False
    if (folder / "tokenizer.model").is_file():
        return True
    file = folder / "tokenizer.json"
    if not file.is_file():
        return False
    first = json.loads(file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    patterns = [(one.get("pattern") or {}).get("Regex", "") for one in first.get("pretokenizers", ())]
    return hashlib.sha256("".join(patterns).encode()).hexdigest() in SPLITS


def with_older_names(folder: Path) -> None:
    """Add to config.json the names by which readers of folders of transformers 4, such as Ollama's, know the rotary
    base and its scaling: where `rope_theta` is missing they take a default, and the model writes nonsense.
    """
    file = folder / "config.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    rope = facts.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "rope_theta" in facts:
        return
    facts["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        facts["rope_scaling"] = {**scaling, "type": rope["rope_type"]}
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
