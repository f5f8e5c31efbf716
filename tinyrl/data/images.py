"""Images of prompts: what a row refers to, and the token ids that stand for an image.

In text, IMAGE_MARK stands for each image of a message, whose `images` name them in order. In tokens, each place of an
image has an id of its own, made of the hash of the file and of the place's number in the image. So prompts that are
equal but for their images are different wherever prompts are compared, grouped, or share a start; a model reads the
placeholder's id there, and the image's features (models/image_inputs.py). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IMAGE_MARK = "\ufffc"  # object replacement character
FIRST_IMAGE_ID = 1 << 62  # token ids from here on are places of images
PLACE_BITS = 20  # of a place's number in its image
HASH_BITS = 42  # of the file's hash that are in its ids


@dataclass(frozen=True)
class Image:
    """An image file by its content. path: where it is; size: width and height in pixels."""

    sha256: str
    path: str
    size: tuple[int, int]

    @property
    def key(self) -> int:
        return image_key(self.sha256)


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


def before_image(tokens: list[int], count: int) -> int:
    """Return the length of the longest prefix, of at most `count` tokens, that does not end inside an image."""
    while 0 < count < len(tokens) and is_image_id(tokens[count]) and tokens[count] == tokens[count - 1] + 1:
        count -= 1
    return count


def opened(image: Image, *, max_pixels: int | None = None):
    from PIL import Image as Pil
    from PIL import ImageOps

    with Pil.open(image.path) as file:
        picture = ImageOps.exif_transpose(file).convert("RGB")
    return picture
