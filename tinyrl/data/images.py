"""Images of prompts: their files, and the token ids that stand for an image.

In text, IMAGE_MARK stands for each image of a message, whose `images` name them in order. In tokens, each place of an
image has an id of its own, made of the hash of the file and of the place's number in the image. So prompts that are
equal but for their images are different wherever prompts are compared, grouped, or share a start; a model reads the
placeholder's id there, and the image's features (models/image_inputs.py). No torch.

An image is always a file: what comes as bytes, as an object of PIL or from an address is written to a cache once, under
its hash. Two deviations from a plain `PIL.Image.open(path).convert("RGB")`, both in `opened`: transparent pixels become
white, as Qwen's and Idefics' processing has it (PIL leaves the colour under them, often black), and 16 bits are scaled
to 8 (PIL cuts them off at 255). tests/data/test_images.py
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tinyrl.runs.folders import write_atomic
from tinyrl.text import first_line, is_address, mask_url, truncate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IMAGE_MARK = "\ufffc"  # object replacement character
FIRST_IMAGE_ID = 1 << 62  # token ids from here on are places of images
PLACE_BITS = 20  # of a place's number in its image
HASH_BITS = 42  # of the file's hash that are in its ids
MOST_PIXELS = 80_000_000  # of an image that is decoded: a file of kilobytes may hold gigabytes
MOST_FETCHED = 1 << 26  # bytes of an image at an address
FETCH_S = 60.0  # for an image at an address
ORIENTATION = 0x0112  # tag of EXIF
SIDEWAYS = (5, 6, 7, 8)  # orientations in which width and height are swapped
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # which PIL writes as PNG
OTHER_MEDIA = ("data:video/", "data:audio/")
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


def without_paths(value: Any) -> Any:
    """Return a JSON value in which images are their hashes alone, wherever their files are."""
    if is_entry(value):
        return {"sha256": value["sha256"]}
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    return [without_paths(inner) for inner in value] if isinstance(value, list) else value


# ---- files ----


@dataclass(frozen=True)
class ImageFiles:
    """Where the images of some rows are. base: the folder that relative paths are in; fetch: read addresses too
    (task.fetch_images).
    """

    base: Path
    fetch: bool = False

    def image_of(self, value: Any) -> Image:
        """Return the image that a value is: a path, a data URL, an address, bytes, an object of PIL, or an object with
        one of these, as tables have it ({"bytes", "path"}). Raises ValueError for what is no image, or is not there.
        """
        if is_entry(value):
            found = self.image_of(value["path"])
            if found.sha256 != value["sha256"]:
                raise ValueError(f"the image {value['path']} has changed: its SHA-256 is no longer {value['sha256']}")
            return found
        if isinstance(value, Mapping):
            given = next((value[key] for key in ("bytes", "image", "path", "url") if value.get(key) is not None), None)
            if given is None or isinstance(given, Mapping):
                raise ValueError(f"an image is a path, an address, bytes, or an object with one, not {value!r:.80}")
            return self.image_of(given)
        if isinstance(value, bytes | bytearray | memoryview):
            return stored(bytes(value))
        if isinstance(value, str | os.PathLike):
            return self._of_text(os.fspath(value))
        if hasattr(value, "getexif") and hasattr(value, "convert"):  # PIL, which is imported where it is needed
            return stored(_png(value))
        raise ValueError(f"an image is a path, an address, bytes or an object of PIL, not a {type(value).__name__}")

    def _of_text(self, text: str) -> Image:
        if text.startswith("data:"):
            return stored(_data_of(text))
        if is_address(text):
            if not self.fetch:
                address = truncate(mask_url(text), 120)
                raise ValueError(f"{address} is an address, and images are fetched with task.fetch_images=true only")
            return _fetched(text)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        path = os.path.abspath(self.base / os.path.expanduser(text))
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a null character
            raise ValueError(f"there is no image file {truncate(path, 200)}") from None
        return _file_at(path, status.st_mtime_ns, status.st_size)


def cache_folder() -> Path:
    """Return the folder of images that came without a file."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "tinyrl" / "images"


def stored(content: bytes) -> Image:
    """Write an image to the cache, unless it is there, and return it. Raises ValueError for what is no image."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = cache_folder() / sha256[:2] / sha256
    if not path.is_file() or path.stat().st_size != len(content):
        _size_of(content, "the image")  # refused before it is written
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    status = path.stat()
    return _file_at(str(path), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1 << 16)
def _file_at(path: str, changed_ns: int, length: int) -> Image:
    """Read an image file, once while its time and length stay. Raises ValueError for what is no image."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the image {truncate(path, 200)} cannot be read: {error.strerror}") from None
    size = _size_of(content, f"the image {truncate(path, 200)}")
    return Image(sha256=hashlib.sha256(content).hexdigest(), path=path, size=size)


def _size_of(content: bytes, what: str) -> tuple[int, int]:
    """Return width and height of an upright image. Raises ValueError for what PIL cannot read, and too many pixels."""
    from PIL.Image import open as open_image

    with _decoding(what):
        picture = open_image(io.BytesIO(content))
        width, height = picture.size
        is_turned = picture.format != "TIFF" and _orientation(picture) in SIDEWAYS  # PIL turns a TIFF itself
    if width * height > MOST_PIXELS:
        raise ValueError(f"{what} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded")
    with _decoding(what):
        picture.verify()
    return (height, width) if is_turned else (width, height)


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Raise ValueError for whatever PIL raises at a file that is damaged, or not an image at all."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a decoder may raise anything: OSError, SyntaxError, struct.error, ...
        if type(error).__name__ == "DecompressionBombError":
            raise ValueError(f"{what} has more than {MOST_PIXELS:,} pixels, which are not decoded") from error
        kind = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({truncate(first_line(error), 120)})"
        raise ValueError(f"{what} is not an image that can be read{kind}") from error


def _orientation(picture: Picture) -> int:
    """Return the orientation that an image's header has; a PNG's behind its pixels would need all of it decoded."""
    has_exif = picture.format != "PNG" or "exif" in picture.info
    return int(picture.getexif().get(ORIENTATION, 1)) if has_exif else 1


def opened(image: Image) -> Picture:
    """Decode an image: upright, the first frame, in RGB. Raises ValueError, naming the file."""
    from PIL import ImageOps
    from PIL.Image import open as open_image

    with _decoding(f"the image {truncate(image.path, 200)}"), open_image(image.path) as picture:
        is_turned = _orientation(picture) != 1
        picture.load()
        return _rgb(ImageOps.exif_transpose(picture) if is_turned else picture)


def _rgb(picture: Picture) -> Picture:
    """Convert an image to RGB: transparent pixels on white, 16 bits scaled to 8."""
    import numpy
    from PIL.Image import alpha_composite, fromarray
    from PIL.Image import new as new_image

    if picture.mode.startswith("I"):
        values = numpy.asarray(picture)
        scaled = values >> 8 if values.max(initial=0) > 255 else values
        return fromarray(scaled.clip(0, 255).astype("uint8")).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        white = new_image("RGBA", picture.size, "white")
        return alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _png(picture: Picture) -> bytes:
    """Return an object of PIL as a PNG file, upright."""
    from PIL import ImageOps

    file = io.BytesIO()
    with _decoding("the image"):
        upright = ImageOps.exif_transpose(picture)
        writable = upright if upright.mode in PNG_MODES else _rgb(upright)
        writable.save(file, format="PNG")
    return file.getvalue()


def _data_of(url: str) -> bytes:
    """Decode a data URL. Raises ValueError for one that holds no image in base64."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"a data URL of an image begins with data:image/TYPE;base64, and not with {head!r:.60}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URL of an image is not base64: {error}") from None


def _fetched(url: str) -> Image:
    """Return the image at an address, from the cache if it was fetched before. Raises ValueError where it is not."""
    noted = cache_folder() / "addresses" / hashlib.sha256(url.encode()).hexdigest()
    if noted.is_file():
        path = Path(noted.read_text(encoding="utf-8"))
        if path.is_file():
            status = path.stat()
            return _file_at(str(path), status.st_mtime_ns, status.st_size)
    try:
        image = stored(_body_of(url))
    except ValueError as error:
        raise ValueError(f"{truncate(mask_url(url), 120)}: {error}") from None
    noted.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(noted, image.path)
    return image


def _body_of(url: str) -> bytes:
    """Fetch what is at an address. Raises ValueError for an error, too many bytes, and too much time."""
    import httpx2

    body = bytearray()
    end = time.monotonic() + FETCH_S
    try:
        with httpx2.stream("GET", url, timeout=FETCH_S, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise ValueError(f"not fetched: HTTP {answer.status_code}")
            for block in answer.iter_bytes():
                body += block
                if len(body) > MOST_FETCHED or time.monotonic() > end:
                    raise ValueError(f"not fetched: more than {MOST_FETCHED:,} bytes, or {FETCH_S:g} seconds")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ValueError(f"not fetched: {mask_url(first_line(error))}") from None
    return bytes(body)


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
