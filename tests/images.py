"""Pictures for tests: files of a few pixels, and rows that show them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import pytest
from PIL.Image import Image as Picture
from PIL.Image import fromarray
from PIL.Image import new as new_image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture(color: tuple[int, int, int] = RED, size: tuple[int, int] = (4, 2)) -> Picture:
    return new_image("RGB", size, color)


def png(color: tuple[int, int, int] = RED, size: tuple[int, int] = (4, 2)) -> bytes:
    file = io.BytesIO()
    picture(color, size).save(file, format="PNG")
    return file.getvalue()


def image_file(path: Path, color: tuple[int, int, int] = RED, size: tuple[int, int] = (4, 2)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(color, size))
    return path


def cut_jpeg(size: tuple[int, int] = (64, 64)) -> bytes:
    """Return the beginning of a JPEG of random pixels."""
    values = numpy.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=numpy.uint8)
    file = io.BytesIO()
    fromarray(values).save(file, format="JPEG")
    return file.getvalue()[: file.tell() * 3 // 4]


@pytest.fixture
def image_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of images that came without a file, which is empty."""
    home = tmp_path / "huggingface"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home / "tinyrl" / "images"
