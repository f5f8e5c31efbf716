"""Image files: found by what a row has, checked, and kept by content where they came without a file of their own.

What comes as bytes, as an object of PIL, in a data URL or from an address is written once to a cache, under its hash.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from tinyrl.data.images import MOST_PIXELS, Image, decoding, in_rgb, is_entry, open_picture, opened, orientation
from tinyrl.runs.folders import write_atomic
from tinyrl.text import first_line, truncate
from tinyrl.urls import is_address, mask_url

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_BYTES = 1 << 29  # of an image file
MOST_FETCHED = 1 << 26  # bytes of an image at an address
FEWEST_BYTES = 64  # of an image in base64
FETCH_S = 60.0  # for an image at an address
SIDEWAYS = (5, 6, 7, 8)  # orientations in which width and height are swapped
SENT_SIDES = (("PNG", 2048), *(("JPEG", side) for side in (2048, 1024, 512, 256, 128)))  # what is tried, in pixels
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # which PIL writes as PNG


class ReadsImages(Protocol):
    """What returns the image that a value of a row or a request is, or raises ValueError."""

    def image_of(self, value: Any) -> Image: ...


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
            return stored(png_of(value))
        raise ValueError(f"an image is a path, an address, bytes or an object of PIL, not a {type(value).__name__}")

    def _of_text(self, text: str) -> Image:
        if text.startswith("data:"):
            return stored(data_of_url(text))
        if is_address(text):
            if not self.fetch:
                address = truncate(mask_url(text), 120)
                raise ValueError(f"{address} is an address, and images are fetched with task.fetch_images=true only")
            return _fetched(text)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        path = os.path.abspath(self.base / os.path.expanduser(text))
        shown = truncate(path, 200)
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a null character
            hint = "; base64 is read behind data:image/png;base64," if _is_base64(text) else ""
            raise ValueError(f"there is no image file {shown}{hint}") from None
        if not S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise ValueError(f"the image {shown} cannot be read: it is a folder, a pipe or a device, not a file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"the image {shown} has {status.st_size:,} bytes, and at most {MOST_BYTES:,} are read")
        return _file_at(path, status.st_mtime_ns, status.st_size)


def _is_base64(text: str) -> bool:
    """Return whether a text is base64 of so many bytes that it is hardly a file's name."""
    try:
        return len(base64.b64decode(text, validate=True)) > FEWEST_BYTES
    except ValueError:
        return False


def cache_folder() -> Path:
    """Return the folder of images that came without a file."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "tinyrl" / "images"


def stored(content: bytes, what: str = "the image") -> Image:
    """Write an image to the cache, unless it is there, and return it. Raises ValueError for what is no image."""
    return stored_in(cache_folder(), content, what)


def stored_in(folder: Path, content: bytes, what: str = "the image") -> Image:
    """Write an image to a folder, under its hash, as `stored` does. what: its name in errors."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / sha256[:2] / sha256
    if path.is_file() and (status := path.stat()).st_size == len(content):
        return _file_at(str(path), status.st_mtime_ns, status.st_size)
    size = _size_of(content, what)  # refused before it is written
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return Image(sha256=sha256, path=str(path), size=size)


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
    """Return width and height of an upright image. Raises ValueError for what PIL cannot read, and too many pixels.

    A file that was cut off is found here, so that it is refused with its row: PIL checks the sums of a PNG and the
    lengths in a WebP; others are decoded (a JPEG at an eighth of its size, 2 ms for 1024 x 768 pixels on one core).
    """
    with decoding(what):
        picture = open_picture(io.BytesIO(content))
        width, height = picture.size
        is_turned = picture.format != "TIFF" and orientation(picture) in SIDEWAYS  # PIL turns a TIFF itself
        has_frames = getattr(picture, "is_animated", False)
    if width * height > MOST_PIXELS:
        raise ValueError(f"{what} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded")
    if has_frames:  # the same words for every file, so that they are said once
        warnings.warn("of an image with several frames (GIF, APNG, WebP, TIFF) the first one is read", stacklevel=2)
    with decoding(what):
        if picture.format in ("PNG", "WEBP"):
            picture.verify()
        else:
            picture.draft("L", (1, 1))
            picture.load()
    return (height, width) if is_turned else (width, height)


def png_of(picture: Picture) -> bytes:
    """Return an object of PIL as a PNG file, upright."""
    from PIL import ImageOps

    file = io.BytesIO()
    with decoding("the image"):
        upright = ImageOps.exif_transpose(picture)
        writable = upright if upright.mode in PNG_MODES else in_rgb(upright)
        writable.save(file, format="PNG")
    return file.getvalue()


def data_url_of(image: Image) -> str:
    """Return an image's file as a data URL. Raises ValueError where it cannot be read."""
    from PIL.Image import MIME

    with decoding(image.named):
        content = Path(image.path).read_bytes()
        kind = MIME.get(str(open_picture(io.BytesIO(content)).format), "image/png")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@lru_cache(maxsize=16)
def bounded_data_url(image: Image, most: int) -> str:
    """Return an image as a data URL that has at most `most` bytes in base64: the file itself, if it is a PNG or JPEG
    that everybody shows alike, else its pixels as a policy sees them, as PNG or JPEG, made smaller until they fit.
    Raises ValueError where it cannot be read, has changed, or does not fit.
    """
    from PIL.Image import open as open_image

    what = image.named
    with decoding(what):
        content = Path(image.path).read_bytes()
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise ValueError(f"{what} has changed: its SHA-256 is no longer {image.sha256}")
    with decoding(what), open_image(io.BytesIO(content)) as picture:
        kind = str(picture.format)
        is_plain = kind in ("PNG", "JPEG") and picture.mode in ("RGB", "L") and "transparency" not in picture.info
        is_upright = orientation(picture) == 1
    room = most * 3 // 4  # of which base64 makes four bytes of three
    if not (is_plain and is_upright and len(content) <= room):
        kind, content = _fitting(image, room)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


def _fitting(image: Image, room: int) -> tuple[str, bytes]:
    """Return the format and the bytes of an image, made smaller until it has at most so many. Raises ValueError."""
    picture = opened(image)
    for kind, side in SENT_SIDES:
        picture.thumbnail((side, side))
        file = io.BytesIO()
        picture.save(file, format=kind)
        if file.tell() <= room:
            return kind, file.getvalue()
    raise ValueError(f"{image.named} does not fit into {room:,} bytes")


def data_of_url(url: str, what: str = "an image") -> bytes:
    """Decode a data URL. what: its name in errors. Raises ValueError for one that holds no image in base64."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"the data URL of {what} begins with data:image/TYPE;base64, and not with {head!r:.60}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URL of {what} is not base64: {error}") from None


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
