"""Images of prompts on the page: small, inside the page, and of no other file than the recorded one."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import open as open_image

from tests.images import BLUE, image_file, picture
from tests.tools.report.runs import PageReader, page, sample, write_run
from tinyrl.data.images import ORIENTATION, Image
from tinyrl.tools.report import thumbnails
from tinyrl.tools.report.thumbnails import SIDE, Thumbnails, thumbnail_url

BROKEN = [[{"path": 1, "sha256": 2, "size": [4, 2]}], [{"path": "a", "sha256": "b", "size": 3}]]  # right keys


def image_of(path: Path, size: tuple[int, int] = (4, 2)) -> Image:
    return Image(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), path=str(path), size=size)


def sources(folder: Path, images: list[Any], record: str = "samples") -> list[str]:
    """The addresses of pictures on the page of a run whose prompt in this record has these images."""
    line = sample(1, 0, "what?", "a dog", 1.0, images=images, tokens=[{"piece": "a dog", "chosen": True, "old": -1.0}])
    run = write_run(folder, [{"step": 1, "reward/mean": 1.0}])
    (run / f"{record}.jsonl").write_text(json.dumps(line) + "\n")
    html = page(run)
    assert "what?" in html
    return [str(attributes["src"]) for tag, attributes in PageReader(html).tags if tag == "img"]


@pytest.mark.parametrize("record", ["samples", "tokens"])
def test_a_prompt_s_image_is_inside_the_page(record: str, tmp_path: Path) -> None:
    found = sources(tmp_path / "run", [image_of(image_file(tmp_path / "a.png")).entry], record)
    assert found
    assert all(source.startswith("data:image/jpeg;base64,") for source in found)


@pytest.mark.parametrize("images", [[{"path": "/etc/hosts"}], "x", [3], *BROKEN])
@pytest.mark.parametrize("record", ["samples", "tokens"])
def test_a_broken_record_shows_no_image(record: str, images: Any, tmp_path: Path) -> None:
    assert sources(tmp_path / "run", images, record) == []


def test_another_file_than_the_recorded_one_is_not_shown(tmp_path: Path) -> None:
    image = image_of(image_file(tmp_path / "a.png"))
    assert thumbnail_url(image) is not None
    image_file(tmp_path / "a.png", BLUE)
    assert thumbnail_url(image) is None
    (tmp_path / "a.png").unlink()
    assert thumbnail_url(image) is None


def test_a_thumbnail_is_small_and_upright(tmp_path: Path) -> None:
    exif = picture().getexif()
    exif[ORIENTATION] = 6  # lies on its side
    picture(size=(800, 400)).save(tmp_path / "a.jpg", exif=exif)
    url = thumbnail_url(image_of(tmp_path / "a.jpg", (400, 800)))
    assert url is not None
    assert open_image(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (SIDE // 2, SIDE)


def test_thumbnails_of_a_page_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MOST_THUMBNAILS", 1)
    images = tuple(image_of(image_file(tmp_path / f"{n}.png", (n, 0, 0))) for n in range(2))
    shown = Thumbnails()([image.entry for image in (*images, images[0])])
    assert [one.url is not None for one in shown] == [True, False, True]
