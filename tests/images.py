"""Pictures for tests: files of a few pixels, and rows that show them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL.Image import Image as Picture
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


@pytest.fixture
def image_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of images that came without a file, which is empty."""
    home = tmp_path / "huggingface"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home / "tinyrl" / "images"
