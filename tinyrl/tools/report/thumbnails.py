"""Small pictures of the images in prompts, as data URLs in the page itself: nothing is loaded from elsewhere.

An image is shown if its file is there and has the hash that was recorded, so that a run from somewhere else shows no
file of this machine that it only names.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.data.images import Image, is_entry, opened

SIDE = 96  # pixels of the longer side
MOST_IMAGES = 4  # of a prompt
MOST_THUMBNAILS = 48  # of a page
MOST_BYTES = 16_384  # of one
MOST_READ = 1 << 26  # bytes of a file


@dataclass(frozen=True)
class Thumbnail:
    """An image of a prompt. name: of its file; url: of its small picture, None where it cannot be shown."""

    name: str
    url: str | None


class Thumbnails:
    """The thumbnails of a page, one for each different image."""

    def __init__(self) -> None:
        self._urls = dict[str, str | None]()  # by hash

    def __call__(self, entries: Sequence[Any]) -> list[Thumbnail]:
        """Return those of a sample's images as they are recorded, at most MOST_IMAGES."""
        images = images_in(entries[:MOST_IMAGES])
        for image in images:
            if image.sha256 not in self._urls and len(self._urls) < MOST_THUMBNAILS:
                self._urls[image.sha256] = thumbnail_url(image)
        return [Thumbnail(Path(image.path).name, self._urls.get(image.sha256)) for image in images]


def images_in(entries: Sequence[Any]) -> list[Image]:
    """Return recorded images, without those that cannot be read."""
    found = list[Image]()
    for entry in filter(is_entry, entries):
        if isinstance(entry["path"], str) and isinstance(entry["sha256"], str):
            with suppress(TypeError, ValueError):
                found.append(Image.of_entry(entry))
    return found


def thumbnail_url(image: Image) -> str | None:
    """Return a small picture of an image, upright; None where its file is gone, or another one by now."""
    try:
        path = Path(image.path)
        if path.stat().st_size > MOST_READ or hashlib.sha256(path.read_bytes()).hexdigest() != image.sha256:
            return None
        picture = opened(image)
    except (OSError, ValueError):
        return None
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=80)
    content = file.getvalue()
    return None if len(content) > MOST_BYTES else f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
