"""Text to token ids: markers are tokens only where a chat template wrote them (huggingface/transformers#29279).

A marker is an added token such as <|im_end|> or <tool_call>. `disguised` replaces the markers in contents by stand-ins
before rendering, and `token_ids` encodes the rendered text in one piece: a stand-in becomes ordinary text, the
template's own markers become their ids. A text without a stand-in is encoded as the tokenizer does it.

A chat template is a program that comes with a model, run in the library's sandbox. The size of a rendering is limited
here; its time and memory only in a trial before the first one (trial.py).
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyrl.data.image_rows import with_parts
from tinyrl.data.images import is_image_id
from tinyrl.models.reading import is_panic, reading
from tinyrl.text import did_you_mean, truncate

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

THOUGHTS = ("<think>", "</think>")
STAND_IN = f"xx{secrets.token_hex(8)}"
NAME = f"yy{secrets.token_hex(8)}"  # nobody can write them into a content
_SURROGATE = re.compile("[\ud800-\udfff]")
_STAND_IN = re.compile(rf"{STAND_IN}(\d+)z")
PARALLEL = "TOKENIZERS_PARALLELISM"  # read by the library at each call
CONTEXT = 64  # characters before a text that may change its tokens
MOST_CHARACTERS = 1_000_000  # of a template (the longest in use have 20,000), and of what it adds to the messages
DATE = "strftime_now"  # the template's clock; as a variable of task.chat_template_kwargs, the day that it shows


_NAMED_OPENING = re.compile(
    r"[<\[{]\|?(?:(?:start|begin)(?:_of)?_)?(?:\w+:)?(?:think|thinking|thought|thoughts|reasoning)\|?[>\]}]",
    re.IGNORECASE,
)
# Of messages in channels, as of gpt-oss: <|start|>assistant<|channel|>analysis<|message|>...<|end|>
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
ASKED_WORD = "usersaid"
THOUGHT_WORD = "policythought"
ANSWER_WORD = "policysaid"  # contents that are rendered to see what a template writes around a thought


@dataclass(frozen=True)
class ThoughtMarkers:
    """The markers of a model's thoughts, other than <think> and </think>.

    texts: (opening, closing) of each pair; pairs: the tokens of these, with THOUGHTS for each; channel, message, start,
    ends: those of messages in channels (None, and no ends, where the model has none).
    """

    texts: tuple[tuple[str, str], ...] = ()
    pairs: dict[int, str] = field(default_factory=dict)
    channel: int | None = None
    message: int | None = None
    start: int | None = None
    ends: frozenset[int] = frozenset()
    tokens: frozenset[int] = frozenset()


@lru_cache(maxsize=8)
def thought_markers(tokenizer: PreTrainedTokenizerBase) -> ThoughtMarkers:
    """Find the markers of thoughts: added tokens that are named so ([THINK] and [/THINK]), channels, or those that the
    chat template writes around the thought of a turn.
    """
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    if CHANNEL in ids and MESSAGE in ids:
        ends = frozenset(ids[end] for end in MESSAGE_ENDS if end in ids)
        channels = {ids[text] for text in (CHANNEL, MESSAGE, START) if text in ids}
        return ThoughtMarkers(
            channel=ids[CHANNEL],
            message=ids[MESSAGE],
            start=ids.get(START),
            ends=ends,
            tokens=ends | channels,
        )
    texts = named_thoughts(tokenizer)
    if not texts and THOUGHTS[0] not in ids and tokenizer.chat_template:
        texts = _written_thoughts(tokenizer)
    pairs = dict[int, str]()
    for opening, closing in texts:
        pairs |= {ids[opening]: THOUGHTS[0], ids[closing]: THOUGHTS[1]}
    return ThoughtMarkers(texts, pairs, tokens=frozenset(pairs))


def thought_openings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts that open a thought: <think>, and the model's own."""
    return (THOUGHTS[0], *(opening for opening, _ in thought_markers(tokenizer).texts))


def named_thoughts(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[str, str], ...]:
    """Return the pairs of added tokens whose names say that a thought is between them, other than THOUGHTS."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} - {*THOUGHTS}
    found = list[tuple[str, str]]()
    for opening in sorted(text for text in added if _NAMED_OPENING.fullmatch(text)):
        bracket = re.match(r"[<\[{]\|?", opening)
        assert bracket is not None, "an opening begins with one"
        ended = re.sub("start|begin", "end", opening, count=1, flags=re.IGNORECASE)
        closings = (f"{bracket[0]}/{opening[bracket.end() :]}", f"{opening[0]}/{opening[1:]}", ended, ended.upper())
        closing = next((text for text in closings if text in added and text != opening), None)
        if closing is not None:
            found.append((opening, closing))
    return tuple(found)


def _written_thoughts(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[str, str], ...]:
    """Return the added tokens that the chat template writes around a turn's thought, if it writes a thought."""
    asked = {"role": "user", "content": ASKED_WORD}
    answer = {"role": "assistant", "content": ANSWER_WORD}
    names = ("reasoning_content", "reasoning", "thinking")
    thought = {**answer, **dict.fromkeys(names, THOUGHT_WORD)}
    with suppress(ValueError), reading("the chat template refuses a thought"):
        plain, text = (str(tokenizer.apply_chat_template([asked, last], tokenize=False)) for last in (answer, thought))
        before, _, behind = text.partition(THOUGHT_WORD)
        between = behind.partition(ANSWER_WORD)[0] if ANSWER_WORD in behind else ""
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        opening = max(added, key=before.rfind, default="")
        closings = [mark for mark in added if mark in between]
        closing = min(closings, key=between.find, default="")
        is_new = bool(opening) and text.count(opening) == plain.count(opening) + 1
        if opening in before and closing and opening != closing and is_new:
            return ((opening, closing),)
    return ()


class Markers(NamedTuple):
    """`everywhere` matches markers that are text in any content, `own` those that are text in the policy's too."""

    ids: dict[str, int]
    texts: dict[int, str]
    everywhere: re.Pattern[str]
    own: re.Pattern[str]


@lru_cache(maxsize=8)
def markers_of(tokenizer: PreTrainedTokenizerBase) -> Markers:
    """Collect the markers: special tokens, and added ones in brackets that the chat template writes or that are not in
    the vocabulary; other added tokens are text (runs of spaces, <table>). A policy may write markers that are not
    special, and those around thoughts.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = backend.get_vocab(with_added_tokens=False) if backend else {}
    template = str(tokenizer.chat_template)

    def marks(text: str) -> bool:
        bracketed = re.fullmatch(r"[<\[{|]\S*[>\]}|]", text)
        return bool(bracketed) and (text not in own or text in template or text.startswith("<|"))

    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    ids = {token.content: i for i, token in added.items() if token.special or marks(token.content)}
    thoughts = {*THOUGHTS, *(text for pair in named_thoughts(tokenizer) for text in pair)}
    special = [text for text, i in ids.items() if added[i].special and text not in thoughts]
    return Markers(ids, {i: text for text, i in ids.items()}, _any_of(ids), _any_of(special))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def disguised(tokenizer: PreTrainedTokenizerBase, value: Any, *, own: bool = False) -> Any:
    """Replace the markers in the texts of `value` (a text, messages, tools, ...) by stand-ins. In texts of the policy
    (`own`, and messages of the assistant) the markers that it may write stay.
    """
    if isinstance(value, str):
        markers = markers_of(tokenizer)
        return (markers.own if own else markers.everywhere).sub(lambda m: f"{STAND_IN}{markers.ids[m[0]]}z", value)
    if isinstance(value, list):
        return [disguised(tokenizer, inner, own=own) for inner in value]
    if isinstance(value, dict):
        own = own or value.get("role") == "assistant"
        return {disguised(tokenizer, key): disguised(tokenizer, inner, own=own) for key, inner in value.items()}
    return value


def undisguised(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Replace stand-ins by their markers."""
    return _STAND_IN.sub(lambda m: markers_of(tokenizer).texts[int(m[1])], text) if STAND_IN in text else text


def readable(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Decode tokens for display; as pieces where decoding would hide a space. The places of an image are one piece."""
    shown = list[str]()
    for is_image, run in groupby(tokens, key=is_image_id):
        part = [*run]
        if is_image:
            shown.append(f"[image, {len(part)} tokens]")
        elif reads_parts_alike(tokenizer):
            shown.append(str(tokenizer.decode(part)))
        else:
            shown.append(" ".join(map(str, tokenizer.convert_ids_to_tokens(part))))
    return ("" if reads_parts_alike(tokenizer) else " ").join(shown)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode `text` without the special tokens that a tokenizer adds around it."""
    return token_ids_of(tokenizer, [text])[0]


def token_ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode each of some texts as `token_ids` does, those without stand-ins in one call."""
    plain = [text for text in texts if STAND_IN not in text]
    options: dict[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    with no_panic(tokenizer):
        encoded: Any = tokenizer(plain, add_special_tokens=False, **options)["input_ids"] if plain else []
    ids = iter(encoded)
    return [_with_stand_ins(tokenizer, text) if STAND_IN in text else [*map(int, next(ids))] for text in texts]


@contextmanager
def no_panic(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise ValueError for a panic of the tokenizer's library inside."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        owner = repr(tokenizer.name_or_path) if tokenizer.name_or_path else "the model"
        raise ValueError(f"the tokenizer of {owner} cannot encode a text: {truncate(str(error))}") from error


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Encode many texts of a call on all cores inside; elsewhere on one, as a process that forks must not."""
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLEL]
        else:
            os.environ[PARALLEL] = before


def _with_stand_ins(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text in which stand-ins become ordinary text, and the markers beside them their ids."""
    markers = markers_of(tokenizer)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        named = markers.everywhere.sub(lambda m: f"{NAME}{markers.ids[m[0]]}z", text)
        renamed = _renamed(tokenizer, tuple(markers.ids.items()))
        return renamed.encode(undisguised(tokenizer, named), add_special_tokens=False).ids
    # A tokenizer in Python: a marker that is encoded in two parts is none.
    parted = _STAND_IN.sub(lambda m: f"{markers.texts[int(m[1])][0]}{STAND_IN}{markers.texts[int(m[1])][1:]}", text)
    return [token for ids in token_ids_of(tokenizer, parted.split(STAND_IN)) for token in ids]


@lru_cache(maxsize=8)
def added_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and behind a text."""
    full = [int(i) for i in tokenizer("a")["input_ids"]]
    bare = token_ids(tokenizer, "a")  # pyright: ignore
    starts = (at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare)
    start = next(starts, None)
    return ([], []) if start is None else (full[:start], full[start + len(bare) :])


@lru_cache(maxsize=2)
def _renamed(tokenizer: Any, markers: tuple[tuple[str, int], ...]) -> Tokenizer:
    """Copy the tokenizer with names in place of its markers, with the same ids, so that the markers are text."""
    from tokenizers import Tokenizer

    names = {text: f"{NAME}{i}z" for text, i in markers}
    kept = json.loads(tokenizer.backend_tokenizer.to_str())
    kept |= {"post_processor": None, "truncation": None, "padding": None}
    for token in kept["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = kept["model"]
    vocab = kept["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: the place is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    return Tokenizer.from_str(json.dumps(kept))


def tokens_behind(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Encode `text` where it follows `before`: the tokens behind those of `before` in the encoding of both. Encoded
    alone it would begin with a space under some tokenizers (SentencePiece's).
    """
    if before and not reads_parts_alike(tokenizer):
        for context in (before[-CONTEXT:], "\n"):  # a token may lie across the border
            left = token_ids(tokenizer, context)
            both = token_ids(tokenizer, context + text)
            if both[: len(left)] == left:
                return both[len(left) :]
    return token_ids(tokenizer, text)


@lru_cache(maxsize=8)
def reads_parts_alike(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text has the same tokens alone as behind another, as under byte-level tokenizers."""
    pairs = [(token_ids(tokenizer, left), token_ids(tokenizer, left + "a")) for left in ("\n", "1", "(")]
    return any(left and both == [*left, *token_ids(tokenizer, "a")] for left, both in pairs)


# ---- chat templates ----


def template_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, variables: dict[str, Any], **options: Any
) -> str:
    """Render messages through the tokenizer's chat template, with stand-ins for the markers in their contents. Raises
    ValueError where the template refuses them, renders nothing or too much, or does not mention one of the `variables`.
    """
    return template_texts(tokenizer, [messages], variables=variables, **options)[0]


def unknown_variable(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> str | None:
    """Say which of some variables the chat template does not mention, so that it would have no effect; None: none."""
    for name in variables:
        known = {*re.findall(r"\b[^\W\d]\w*", tokenizer.get_chat_template())}
        if name not in known:
            meant = did_you_mean(name, sorted(known))
            return f"the model's template has no variable `{truncate(name)}`.{meant}"
    return None


def template_texts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, Any]]],
    *,
    variables: dict[str, Any],
    **options: Any,
) -> list[str]:
    """Render each of some conversations as `template_text` does, in one call. A refusal may be of any of them."""
    if not conversations:
        return []
    template = tokenizer.chat_template
    roles = ", ".join(message["role"] for message in conversations[0][:8])
    problem = unknown_variable(tokenizer, variables)
    if problem is not None:
        raise ValueError(f"task.chat_template_kwargs: {problem}")
    if DATE in variables:
        options["chat_template"] = _clock(variables[DATE]) + tokenizer.get_chat_template(tools=variables.get("tools"))
        variables = {name: value for name, value in variables.items() if name != DATE}
    owner = repr(tokenizer.name_or_path) if tokenizer.name_or_path else "the model"
    with reading(f"the chat template of {owner} refuses messages with the roles {roles}"):
        if isinstance(template, str) and len(template) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(template):,} characters; at most {MOST_CHARACTERS:,} are read")
        hidden = disguised(tokenizer, [with_parts(messages) for messages in conversations])
        variables = disguised(tokenizer, variables)
        if any(message.get("tool_calls") for messages in conversations for message in messages):
            tools = variables.get("tools") or options.get("tools")
            if takes_text_arguments(tokenizer, tokenizer.get_chat_template(tools=tools)):
                hidden = [[_with_text_arguments(message) for message in messages] for messages in hidden]
        try:
            texts = [*map(str, tokenizer.apply_chat_template(hidden, tokenize=False, **options, **variables))]
        except MemoryError:
            raise ValueError("it takes more memory than there is") from None
        for messages, text in zip(conversations, texts, strict=True):
            if _SURROGATE.search(text):
                raise ValueError("it renders half of a surrogate pair, which no tokenizer takes")
            longest = sum(len(str(message.get("content") or "")) for message in messages) * 4 + MOST_CHARACTERS
            if not 0 < len(text.strip()) <= longest:
                raise ValueError(f"it renders {len(text.strip()):,} characters; 1 to {longest:,} are allowed")
    return texts


_ARGUMENTS = {"place": "Oslo"}
_FUNCTION = {"name": "look_up", "arguments": _ARGUMENTS}
_CALL = {"id": "call00001", "type": "function", "function": _FUNCTION}  # Mistral's ids have nine characters
_CALLING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


@lru_cache(maxsize=16)
def takes_text_arguments(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a chat template writes the arguments of a call as JSON only if it gets them as JSON text: it
    refuses an object, as DeepSeek-V3's does, or writes Python's form of it.
    """
    as_object = _rendered_call(tokenizer, template, _CALLING)
    if as_object is not None and str(_ARGUMENTS) not in as_object:
        return False
    as_text = _rendered_call(tokenizer, template, [_with_text_arguments(message) for message in _CALLING])
    return as_text is not None and json.dumps(_ARGUMENTS) in as_text


def _rendered_call(tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]]) -> str | None:
    """Return the rendering of a call; None if the template refuses it."""
    with suppress(ValueError), reading("the chat template refuses a call"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template))
    return None


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_as_text_call(call) for call in message["tool_calls"]]}


def _as_text_call(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _as_text_call(call["function"])}
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def asks_for_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template asks for today's date."""
    return DATE in str(tokenizer.chat_template)


def _clock(day: Any) -> str:
    """Return the start of a template in which strftime_now shows this day (2026-11-25), since the library passes a
    template no function. Raises ValueError for anything else.
    """
    try:
        shown = date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(
            f"task.chat_template_kwargs: {DATE}={truncate(str(day))} is not a date such as 2026-11-25"
        ) from None
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdeDFHIjmMpSTuUVwWxXyY"]
    filters = "".join(f"|replace('{code}', {json.dumps(shown.strftime(code))})" for code in codes)
    return f"{{% macro {DATE}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"
