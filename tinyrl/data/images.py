"""Images of prompts: what a row has of one, its pixels, and the token ids that stand for it.

In text, IMAGE_MARK stands for each image of a message, whose `images` name them in order. In tokens, each place of an
image has an id of its own, made of the hash of the file and of the place's number in the image. So prompts that are
equal but for their images are different wherever prompts are compared, grouped, or share a start; a model reads the
placeholder's id there, and the image's features (models/image_inputs.py). No torch.

An image is always a file (image_files.py). Two deviations from a plain `PIL.Image.open(path).convert("RGB")`, both in
`opened`: transparent pixels become white, as Qwen's and Idefics' processing has it (PIL leaves the colour under them,
often black), and 16 bits and numbers from 0 to 1 are scaled to 8 bits (PIL cuts off at 255, and below 1).
tests/data/test_images.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from tinyrl.text import first_line, truncate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFile import ImageFile

IMAGE_MARK = "\ufffc"  # object replacement character
FIRST_IMAGE_ID = 1 << 62  # token ids from here on are places of images
PLACE_BITS = 20  # of a place's number in its image
HASH_BITS = 42  # of the file's hash that are in its ids
MOST_PIXELS = 80_000_000  # of an image that is decoded: a file of kilobytes may hold gigabytes
ORIENTATION = 0x0112  # tag of EXIF
PROGRAMS = ("EPS",)  # formats of files that are programs: PIL would have Ghostscript run them
TEXT_PARTS = ("text", "input_text", "output_text")  # types of the parts of a message
ENTRY = {"path", "sha256", "size"}  # keys of an image in a row


@dataclass(frozen=True)
class Image:
    """An image file by its content. path: where it is; size: width and height in pixels, upright."""

    sha256: str
    path: str
    size: tuple[int, int]

    @property
    def key(self) -> int:
        return image_key(self.sha256)

    @property
    def named(self) -> str:
        """Return what errors call the image."""
        return f"the image {truncate(self.path, 200)}"

    @property
    def entry(self) -> dict[str, Any]:
        """Return the image as rows and messages have it, in JSON."""
        return {"path": self.path, "sha256": self.sha256, "size": list(self.size)}

    @staticmethod
    def of_entry(entry: Mapping[str, Any]) -> Image:
        width, height = entry["size"]
        return Image(sha256=entry["sha256"], path=entry["path"], size=(width, height))


def is_entry(value: Any) -> bool:
    """Return whether a value is an image as rows and messages have it."""
    return isinstance(value, dict) and value.keys() == ENTRY


def images_of(prompt: Any) -> list[Image]:
    """Return the images of a prompt, or of an answer, in order."""
    if not isinstance(prompt, list):
        return []
    return [Image.of_entry(entry) for message in prompt for entry in message.get("images", ())]


def with_marks_shown(text: str) -> str:
    """Return a text for people, in which an image is "[image]"."""
    return text.replace(IMAGE_MARK, "[image]")


def shown_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message for people: an image is "[image]", and the same character in a message without
    images is what somebody wrote.
    """
    content = str(message["content"])
    return with_marks_shown(content) if message.get("images") else content


def without_paths(value: Any) -> Any:
    """Return a JSON value in which images are their hashes alone, wherever their files are."""
    if is_entry(value):
        return {"sha256": value["sha256"]}
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    return [without_paths(inner) for inner in value] if isinstance(value, list) else value


# ---- decoding ----


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raise ValueError for whatever PIL raises at a file that is damaged, or not an image at all."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a decoder may raise anything: OSError, SyntaxError, struct.error, ...
        if type(error).__name__ == "DecompressionBombError":
            raise ValueError(f"{what} has more than {MOST_PIXELS:,} pixels, which are not decoded") from error
        is_known = type(error).__name__ != "UnidentifiedImageError"
        why = truncate(first_line(error), 120) if is_known else "it is in no format of images that is known"
        raise ValueError(f"{what} cannot be read: {why}") from error


def open_picture(file: str | IO[bytes]) -> ImageFile:
    """Open an image without decoding it. Raises ValueError for a format of PROGRAMS, besides what PIL raises."""
    from PIL.Image import open as open_image

    picture = open_image(file)
    if picture.format in PROGRAMS:
        raise ValueError(f"it is {picture.format}, a program that draws an image, and it is not run")
    return picture


def orientation(picture: Picture) -> int:
    """Return the orientation that an image's header has; a PNG's behind its pixels would need all of it decoded."""
    has_exif = picture.format != "PNG" or "exif" in picture.info
    return int(picture.getexif().get(ORIENTATION, 1)) if has_exif else 1


def opened(image: Image, what: str | None = None) -> Picture:
    """Decode an image: upright, the first frame, in RGB. Raises ValueError, naming it (what; None: its file)."""
    from PIL import ImageOps

    with decoding(what or image.named), open_picture(image.path) as picture:
        is_turned = orientation(picture) != 1
        picture.load()
        return in_rgb(ImageOps.exif_transpose(picture) if is_turned else picture)


def in_rgb(picture: Picture) -> Picture:
    """Convert an image to RGB: transparent pixels on white, 16 bits and numbers from 0 to 1 scaled to 8 bits."""
    import numpy
    from PIL.Image import alpha_composite, fromarray
    from PIL.Image import new as new_image

    if picture.mode.startswith("I"):
        values = numpy.asarray(picture)
        scaled = values >> 8 if values.max(initial=0) > 255 else values
        return fromarray(scaled.clip(0, 255).astype("uint8")).convert("RGB")
    if picture.mode == "F":
        values = numpy.nan_to_num(numpy.asarray(picture))
        scaled = values * 255 if values.max(initial=0) <= 1 else values
        return fromarray(scaled.clip(0, 255).astype("uint8")).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        white = new_image("RGBA", picture.size, "white")
        return alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


# ---- token ids ----


def image_key(sha256: str) -> int:
    """Return the bits of a hash that tell an image from others in token ids."""
    return int(sha256, 16) >> (256 - HASH_BITS)


def image_ids(key: int, count: int) -> list[int]:
    """Return the token ids of the `count` places of an image."""
    assert count < 1 << PLACE_BITS
    first = FIRST_IMAGE_ID + (key << PLACE_BITS)
    return [*range(first, first + count)]


def is_image_id(token: int) -> bool:
    return token >= FIRST_IMAGE_ID


def key_of_id(token: int) -> int:
    """Return the key of the image that a token id is a place of."""
    return (token - FIRST_IMAGE_ID) >> PLACE_BITS


def place_of_id(token: int) -> int:
    """Return which place of its image a token id is, from 0."""
    return token & ((1 << PLACE_BITS) - 1)


def without_images(tokens: Iterable[int], placeholder: int) -> list[int]:
    """Return tokens with the model's placeholder in place of images."""
    return [placeholder if is_image_id(token) else token for token in tokens]
