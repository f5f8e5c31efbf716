"""Images of rows: the forms that people have, turned into one that everything else reads.

    TRL             {"type": "image"} in messages, or no place at all, beside a column `image` or `images`
    OpenAI          {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, {"type": "input_image"}
    Anthropic       {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
    ms-swift, verl  <image> in texts beside a column `images`

In a row as it is read, the column `images` has each image once a place, in order ({"path", "sha256", "size"}), and a
message with images is a text with IMAGE_MARK at each place, and `images` of its own. A row in this form stays as it is;
that its files have not changed is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tinyrl.data.image_files import ImageFiles, ReadsImages, data_url_of
from tinyrl.data.images import IMAGE_MARK, TEXT_PARTS, Image, images_of, is_entry
from tinyrl.text import truncate

Row = dict[str, Any]

IMAGE_COLUMNS = ("image", "images")
CHATS = (("prompt", "completion"), ("messages",), ("conversations",))  # columns that are one conversation
PAIR = (("chosen",), ("rejected",))  # which are conversations where there is no `prompt`
CHAT_COLUMNS = tuple(name for columns in (*CHATS, *PAIR) for name in columns)
IMAGE_PARTS = ("image", "image_url", "input_image")
VALUE_KEYS = ("image", "image_url", "url", "path", "bytes")  # of a part of one of these types
IGNORED_KEYS = ("type", "detail", "cache_control")
TAG = "<image>"  # a place in a text, where the row has a column of images
# What data sets write in a text for an image besides TAG: a model's own placeholder, ms-swift's <img>FILE</img>.
OTHER_PLACE = re.compile(r"<\|image_pad\|>|<\|image\|>|<start_of_image>|<IMG_CONTEXT>|<img>[^<>\n]+</img>")
WRITTEN_PLACE = re.compile(f"{TAG}|{OTHER_PLACE.pattern}")
OF_POLICY = ("assistant", "gpt", "chatgpt", "model", "function_call")  # whose texts have no places
FILE_ENDS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")  # of image files
MARKDOWN_IMAGE = re.compile(r"!\[[^\[\]\n]{0,200}\]\(([^()\s]{1,4096})")  # ![what it shows](FILE
LONGEST_END = max(map(len, FILE_ENDS))
LONGEST_NAME = 4096  # characters of a text that may name a file
OTHER_COLUMNS = (*CHAT_COLUMNS, *IMAGE_COLUMNS, "text", "answer", "label", "tools", "system", "id", "unused")


@dataclass
class ImagePlaces:
    """The places of images in a conversation, as they are found. given: the row's images, which places without one of
    their own take in order; found: those of all places.
    """

    files: ReadsImages
    given: list[Image]
    tags: bool = False  # TAG is a place
    taken: int = 0
    found: list[Image] = field(default_factory=list)

    def take(self) -> Image:
        """Return the next image of the row. Raises ValueError where none is left."""
        if not self.given:
            raise ValueError("a part of a message is an image and names none, and none is given beside the messages")
        if self.taken == len(self.given):
            raise ValueError(f"the messages have more places of images than the row has images ({len(self.given)})")
        self.taken += 1
        return self.given[self.taken - 1]

    def check(self) -> None:
        """Raise ValueError where an image of the row has no place."""
        repeats = [image.sha256 for image in self.found] == [image.sha256 for image in self.given]
        if self.taken < len(self.given) and not repeats:
            raise ValueError(
                f"the row has {len(self.given)} images, and its messages have places for {self.taken} of them"
            )


def with_images(row: Row, files: ImageFiles) -> Row:
    """Return a row in the form above; the row itself where it has no images. Raises ValueError for an image that cannot
    be read, and where images and places are not equally many.
    """
    may_hold = any(_may_hold(row[name]) for name in CHAT_COLUMNS if name in row)
    if not may_hold and "image" not in row and "images" not in row:
        return row
    values = {name: _listed(row[name]) for name in IMAGE_COLUMNS if name in row}
    given = [(name, value) for name, listed in values.items() for value in listed]
    if len({name for name, _ in given}) > 1:
        raise ValueError("both `image` and `images` hold something; leave one out")
    if not given and not may_hold:
        return row
    images = [_of_column(name, value, files) for name, value in given]
    changed = Row()
    shown: list[Image] = []
    for columns in CHATS if _is_there(row, "prompt") else (*CHATS, *PAIR):
        places = ImagePlaces(files=files, given=images)
        parts = {name: _with_chat(row[name]) for name in columns if _is_there(row, name)}
        if columns in PAIR and not isinstance(parts.get(columns[0]), list | tuple):  # texts have no places
            continue
        if columns[0] in parts:
            placed = _placed_chat(parts, places)
            _refuse_other_places(placed, places)
            changed |= placed
        shown = shown or places.found
    if not images and not shown:
        return row
    others = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    return {**others, **changed, "images": [image.entry for image in shown or images]}


def _is_there(row: Row, name: str) -> bool:
    return row.get(name) not in (None, "", [])


def placed_prompt(prompt: Any, row: Row, files: ReadsImages) -> Any:
    """Return the prompt that a task's code made of a row with its images in place, as `with_images` has it."""
    images = [Image.of_entry(entry) for entry in row.get("images") or [] if is_entry(entry)]
    if not images and not _may_hold(prompt):
        return prompt
    places = ImagePlaces(files=files, given=images)
    placed = _placed_chat({"prompt": prompt}, places)
    if images:
        _refuse_other_places(placed, places)
    return placed["prompt"]


def written_place(row: Row) -> str | None:
    """Return what the first text of a row that is not the policy's has for an image; None where none has any."""
    found = next(filter(None, map(WRITTEN_PLACE.search, _asked_texts(row))), None)
    return None if found is None else found.group()


def markdown_image(row: Row) -> str | None:
    """Return the first image file that a text of a row shows in Markdown, ![](FILE), and that is not the policy's text;
    None where none does.
    """
    for text in _asked_texts(row):
        named = (found.group(1) for found in MARKDOWN_IMAGE.finditer(text))
        first = next(filter(_names_image, named), None)
        if first is not None:
            return first
    return None


def _asked_texts(row: Row) -> Iterator[str]:
    """Yield the texts of a row's conversations that are not the policy's."""
    for name in CHAT_COLUMNS:
        value = _with_chat(row.get(name))
        if isinstance(value, list | tuple):
            yield from map(_tagged_text, value)
        elif name == "prompt" and isinstance(value, str):
            yield value


def unshown_columns(row: Row) -> list[str]:
    """Return the columns of a row that name image files, or hold one as a data URL, where no prompt shows them: all but
    the columns of images, and those of texts. A name with dots is a key inside a column.
    """
    found = list[str]()
    for name, value in row.items():
        if name in OTHER_COLUMNS:
            continue
        if _names_image(value):
            found.append(name)
        elif isinstance(value, dict):
            found += [f"{name}.{key}" for key, inner in value.items() if _names_image(inner)]
    return found


def _names_image(value: Any) -> bool:
    """Return whether a value, or the first of several, is the name of an image file, a data URL of one, or an object
    with one of these.
    """
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, dict):
        return any(_names_image(first[key]) for key in VALUE_KEYS if isinstance(first.get(key), str))
    if not isinstance(first, str):
        return False
    if first.startswith("data:image/"):
        return True
    ends_so = first[-LONGEST_END:].lower().endswith(FILE_ENDS)
    return ends_so and len(first) <= LONGEST_NAME and not any(map(str.isspace, first))


def with_parts(prompt: Any) -> Any:
    """Return a prompt as chat templates and TRL's rewards have it: messages with images have parts for content."""
    if not images_of(prompt):
        return prompt
    return [_message_with_parts(message) if message.get("images") else message for message in prompt]


def with_data_urls(prompt: Any) -> Any:
    """Return a prompt as clients of OpenAI's chat completions send it: its images are parts with data URLs."""
    if not images_of(prompt):
        return prompt
    found = list[Row]()
    for message in prompt:
        urls = [data_url_of(image) for image in images_of([message])]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        found.append(_message_with_parts(message, parts) if parts else message)
    return found


def _message_with_parts(message: Mapping[str, Any], images: list[Row] | None = None) -> Row:
    """Return a message with parts for content. images: their parts (None: the same for each, without a value)."""
    parts = list[Row]()
    for number, text in enumerate(message["content"].split(IMAGE_MARK)):
        if number > 0:
            parts.append({"type": "image"} if images is None else images[number - 1])
        if text:
            parts.append({"type": "text", "text": text})
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


# ---- columns ----


def _listed(value: Any) -> list[Any]:
    """Return the values of a column of images, which may be one alone, and JSON text in a .csv."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError, RecursionError):
            value = json.loads(value)
    value = _of_array(value)
    if isinstance(value, list | tuple):
        return [*value]
    is_empty = value is None or value == "" or value == {}
    return [] if is_empty else [value]


def _of_column(name: str, value: Any, files: ImageFiles) -> Image:
    try:
        return files.image_of(value)
    except ValueError as error:
        hint = f"(task.columns.unused={name} leaves the column out, if it holds no images to show)"
        raise ValueError(f"column '{name}': {error} {hint}") from error


def _with_chat(value: Any) -> Any:
    """Return messages that a table without nested columns has as JSON text, and other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
                return found
    return _of_array(value)


def _of_array(value: Any) -> Any:
    """Return the list that a data frame has as an array, and other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


# ---- messages ----


def _may_hold(value: Any) -> bool:
    """Return whether a column may have messages with images of their own, as most rows have not."""
    if isinstance(value, str):
        return value.lstrip().startswith("[") and "image" in value
    messages = value if isinstance(value, list) else _of_array(value)
    if not isinstance(messages, list | tuple):
        return False
    for message in messages:
        if isinstance(message, dict) and (message.get("images") or isinstance(message.get("content"), list | tuple)):
            return True
    return False


def _placed_chat(columns: Row, places: ImagePlaces) -> Row:
    """Return the columns of a conversation with its images in place: of parts, of tags, or before the first text that
    the user writes. Raises ValueError where images and places are not equally many.
    """
    chats = {name: [*value] for name, value in columns.items() if isinstance(value, list | tuple)}
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    if places.given and "prompt" in texts:
        chats = {"prompt": [{"role": "user", "content": texts["prompt"]}], **chats}
    has_parts = any(_has_images(message) for messages in chats.values() for message in messages)
    has_tags = any(TAG in _tagged_text(message) for messages in chats.values() for message in messages)
    places.tags = bool(places.given) and has_tags and not has_parts
    if places.given and not has_parts and not has_tags:
        return {**columns, **_before_text(chats, places)}
    placed = {name: [_placed(message, places) for message in messages] for name, messages in chats.items()}
    places.check()
    return {**columns, **placed} if places.found else columns


def _before_text(chats: Row, places: ImagePlaces) -> Row:
    """Put all images before the first text of the user. Raises ValueError where there is none."""
    for name, messages in chats.items():
        for number, message in enumerate(messages):
            if isinstance(message, dict) and (message.get("role") or message.get("from")) in ("user", "human"):
                images = [{"type": "image"} for _ in places.given]
                key = _content_key(message)
                content = message.get(key)
                text = [{"type": "text", "text": content}] if isinstance(content, str) else [*(content or [])]
                placed = _placed({**message, key: [*images, *text]}, places)
                return {**chats, name: [*messages[:number], placed, *messages[number + 1 :]]}
    raise ValueError("the row has images, and no message of the user to show them in")


def _refuse_other_places(columns: Row, places: ImagePlaces) -> None:
    """Raise ValueError for a conversation with images in which a text has another place of one than TAG, since that
    would stay text beside the images.
    """
    found = next(filter(None, map(OTHER_PLACE.search, _asked_texts(columns))), None) if places.found else None
    if found is not None:
        raise ValueError(
            f"a text beside images has {truncate(found.group(), 60)}, no place of one here: write {TAG} and "
            'give the images in a column `images`, or write a part {"type": "image"}, or leave it out'
        )


def _content_key(message: Mapping[str, Any]) -> str:
    return "value" if "from" in message and "content" not in message else "content"


def _has_images(message: Any) -> bool:
    """Return whether a message has parts that are images, or images in their places."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else []
    return bool(message.get("images")) or any(map(_is_image, parts))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _tagged_text(message: Any) -> str:
    """Return the text of a message in which TAG may be a place; "" for others, and for those of the policy."""
    if not isinstance(message, dict) or (message.get("role") or message.get("from")) in OF_POLICY:
        return ""
    content = message.get(_content_key(message))
    return content if isinstance(content, str) else ""


def _placed(message: Any, places: ImagePlaces) -> Any:
    """Return a message with its images in place; messages without images as they are."""
    if not isinstance(message, dict):
        return message
    key = _content_key(message)
    if message.get("images"):
        return _reread(message, places)
    if places.tags and TAG in _tagged_text(message):
        content = message[key]
        _refuse_mark(content)
        images = [places.take() for _ in range(content.count(TAG))]
        content = content.replace(TAG, IMAGE_MARK)
    elif _has_images(message) or any(map(_is_image, _parts(message, key))):
        parts = _parts(message, key)
        images = [_of_part(part, places) for part in parts if _is_image(part)]
        content = "".join(IMAGE_MARK if _is_image(part) else _text_of(part) for part in parts)
    else:
        return message
    places.found += images
    return {**message, key: content, "images": [image.entry for image in images]}


def _parts(message: Row, key: str) -> list[Any]:
    content = message.get(key)
    return [*content] if isinstance(content, list | tuple) else []


def _reread(message: Row, places: ImagePlaces) -> Row:
    """Return a message that has its images in place already. Raises ValueError where an image's file has changed."""
    entries = message["images"]
    content = str(message.get(_content_key(message)) or "")
    is_placed = isinstance(entries, list) and all(map(is_entry, entries))
    if not is_placed or content.count(IMAGE_MARK) != len(entries):
        what = 'a message has `images`; write them as parts of its content, {"type": "image"}'
        raise ValueError(f"{what}: {message!r:.80}")
    images = [places.files.image_of(entry) for entry in entries]
    places.found += images
    return {**message, "images": [image.entry for image in images]}


def _of_part(part: Row, places: ImagePlaces) -> Image:
    """Return the image of a part, or the row's next one where it names none."""
    given = {name: value for name, value in part.items() if value not in (None, "") and name not in IGNORED_KEYS}
    unread = [name for name in given if name not in (*VALUE_KEYS, "source")]
    if unread:
        hint = "a text is a part of its own, and task.max_pixels is the size of all images"
        raise ValueError(
            f"a part of the type {part['type']} has `{truncate(str(unread[0]), 40)}`, which is not read; {hint}"
        )
    values = [given[name] for name in VALUE_KEYS if name in given]
    values += [address_of_source(given["source"])] if "source" in given else []
    return places.files.image_of(values[0]) if values else places.take()


def address_of_source(source: Any) -> Any:
    """Return the address, or the data URL, that a `source` of Anthropic's is. Raises ValueError for another source."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return source.get("url")
    if kind != "base64":
        raise ValueError(f"an image has the source {source!r:.60}; sources of the types base64 and url are read")
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _text_of(part: Any) -> str:
    """Return the text of a part beside images. Raises ValueError for another kind of part."""
    text = part.get("text") if isinstance(part, dict) else part
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind not in TEXT_PARTS or not isinstance(text, str | None):
        raise ValueError(
            f"a message has a part of the type {kind!r:.30}, and only text and images are read: {part!r:.60}"
        )
    _refuse_mark(text or "")
    return text or ""


def _refuse_mark(text: str) -> None:
    """Raise ValueError for a text beside images that has the character which stands for an image."""
    if IMAGE_MARK in text:
        raise ValueError(
            "a text beside images has U+FFFC, the object replacement character, which is the mark of an image here; "
            f"leave it out: {truncate(text, 60)!r}"
        )
