"""Images of requests: data URLs alone, since a client must not have the server fetch an address or read a file.

Those of `serve` are files in a folder of its own as long as a request with them is answered, and a little longer: a
conversation sends its images again with every message. Those of agents are kept, since training reads them later.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinyrl.data.image_files import data_of_url, stored_in
from tinyrl.data.image_rows import IMAGE_PARTS
from tinyrl.data.images import MOST_PIXELS, Image
from tinyrl.endpoint.dialect import JSON, Refused
from tinyrl.models.image_inputs import ImageExpander
from tinyrl.text import truncate
from tinyrl.urls import mask_url

MOST_IMAGES = 128  # of a request
MOST_KEPT = 256  # images that no request has any more
MOST_BYTES = 1 << 30  # of the images of all requests that are being answered, and of all that are kept


class ImageShelf:
    """The images of the requests of a server, as files. expander: what knows them as long as they are here."""

    def __init__(self, expander: ImageExpander) -> None:
        self.expander = expander
        self._folder = TemporaryDirectory(prefix="tinyrl-images-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._held = Counter[Image]()  # by how many places of requests
        self._sizes = dict[Image, int]()  # bytes of the files
        self._kept: OrderedDict[Image, None] = OrderedDict()  # that none holds, oldest first

    def __len__(self) -> int:
        return len(self._sizes)

    def hold(self, content: bytes, what: str = "the image") -> Image:
        """Write an image, unless it is here, and keep it until it is released. what: its name in errors. Raises
        ValueError for what is no image, and Refused where requests under way have too many bytes of images.
        """
        with self._lock:
            held = sum(self._sizes[image] for image in self._held)
            if held + len(content) > MOST_BYTES:
                raise Refused(429, f"requests that are being answered have {held:,} bytes of images: too many now")
            image = stored_in(Path(self._folder.name), content, what)
            self._sizes[image] = len(content)
            self._held[image] += 1
            self._kept.pop(image, None)
        return image

    def release(self, images: list[Image]) -> None:
        """Let images go that were held, each as often as it was; the last MOST_KEPT stay."""
        with self._lock:
            for image in images:
                self._held[image] -= 1
                if not self._held[image]:
                    del self._held[image]
                    self._kept[image] = None
            while self._kept and (len(self._kept) > MOST_KEPT or sum(self._sizes.values()) > MOST_BYTES):
                image, _ = self._kept.popitem(last=False)
                del self._sizes[image]
                self.expander.forget(image)
                Path(image.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._folder.cleanup()


@dataclass
class RequestImages:
    """The images of one request, each tried as it is read, so that an error names the part that the client sent, and no
    file of the server's.

    keep: makes a file of the bytes of one, which errors call by a name; expander: of the model (None: it reads no
    images); places: of the parts that are images; found: all so far.
    """

    keep: Callable[[bytes, str], Image]
    expander: ImageExpander | None = None
    places: list[str] = field(default_factory=list)
    found: list[Image] = field(default_factory=list)

    def image_of(self, value: Any) -> Image:
        """Return the image of a part of a message. Raises ValueError for anything but a data URL of an image, for too
        many images or pixels, and for one that cannot be decoded or that the model's processor refuses.
        """
        what = "the image"
        if len(self.found) < len(self.places):
            what = f"the image at {self.places[len(self.found)]}"
        url = value.get("url") if isinstance(value, dict) and value.keys() <= {"url", "detail"} else value
        if not isinstance(url, str) or not url.startswith("data:"):
            shown = truncate(mask_url(url) if isinstance(url, str) else repr(url), 60)
            raise ValueError(f"{what} must be a data URL (data:image/png;base64,...), and not {shown}")
        if len(self.found) == MOST_IMAGES:
            raise ValueError(f"a request has at most {MOST_IMAGES} images")
        image = self.keep(data_of_url(url, what), what)
        self.found.append(image)
        pixels = sum(image.size[0] * image.size[1] for image in self.found)
        if pixels > MOST_PIXELS:
            raise ValueError(f"the images of a request have at most {MOST_PIXELS:,} pixels, and these {pixels:,}")
        if self.expander is not None:
            self.expander.expansion(image, what)
        return image


def image_places(asked: JSON) -> list[str]:
    """Return the places of the parts of a request that are images, in order: `messages[0].content[1]`. Results of tools
    have parts too.
    """

    def found(value: Any, place: str) -> Iterator[str]:
        if isinstance(value, list):
            for number, part in enumerate(value):
                yield from found(part, f"{place}[{number}]")
        elif isinstance(value, dict) and value.get("type") in IMAGE_PARTS:
            yield place
        elif isinstance(value, dict):
            for name in ("content", "output"):
                yield from found(value.get(name), f"{place}.{name}")

    return [place for name in ("messages", "input") for place in found(asked.get(name), name)]


def refuse(content: bytes, what: str) -> Image:
    """Raise ValueError: the model has no vision tower."""
    raise ValueError(
        "this model reads no images; one with a vision tower that is served with model.with_images=true, and a run "
        "that was trained on images, do"
    )
