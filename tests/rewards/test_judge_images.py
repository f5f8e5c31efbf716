"""Images of prompts before a judge: in their places where it asks for them, bounded, and noted where it does not."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from tests import running
from tests.images import BLUE, RED, image_file
from tests.rewards.judge_server import Judge, reward
from tests.tiny_vision import tiny_vision
from tests.training.test_vision_runs import settings
from tinyrl.data.image_files import ImageFiles, bounded_data_url
from tinyrl.data.image_rows import with_images
from tinyrl.data.images import IMAGE_MARK, Image

FIVE = '{"score": 5}'


def image_at(path: Path) -> Image:
    return ImageFiles(base=path.parent).image_of(str(path))


def prompt_with(*files: Path) -> list[dict[str, Any]]:
    """A question with pictures before, between and behind its words."""
    words = [{"type": "text", "text": text} for text in ("left", "right")]
    parts = [{"type": "image", "image": str(file)} for file in files]
    content = [parts[0], words[0], *parts[1:], words[1]]
    row = with_images({"prompt": [{"role": "user", "content": content}]}, ImageFiles(base=files[0].parent))
    return row["prompt"]


def decoded(url: str) -> PILImage.Image:
    return PILImage.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_judge_that_asks_for_images_gets_them_in_their_places(serving: Any, tmp_path: Path) -> None:
    judge: Judge = serving(lambda system, answers: FIVE)
    red = image_file(tmp_path / "red.png", RED)
    blue = image_file(tmp_path / "blue.png", BLUE)
    call = reward(judge.url, tmp_path, images=True)([prompt_with(red, blue)], ["an answer"], {})
    assert call.values == [0.5]
    parts = judge.asked[0]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text", "image_url", "text"]
    files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts if part["type"] != "text"]
    assert files == [red.read_bytes(), blue.read_bytes()]
    assert parts[2]["text"] == "left"
    assert parts[4]["text"].startswith("right")
    assert "an answer" in parts[4]["text"]


def test_a_judge_that_does_not_gets_the_words_alone(serving: Any, tmp_path: Path) -> None:
    judge: Judge = serving(lambda system, answers: FIVE)
    reward(judge.url, tmp_path)([prompt_with(image_file(tmp_path / "red.png"))], ["x"], {})
    content = judge.asked[0]["messages"][1]["content"]
    assert "[image]left" in content
    assert IMAGE_MARK not in content


def test_a_mark_of_an_image_in_an_answer_is_a_character(serving: Any, tmp_path: Path) -> None:
    judge: Judge = serving(lambda system, answers: FIVE)
    with_judge = reward(judge.url, tmp_path, images=True)
    asked = [{"role": "system", "content": f"say {IMAGE_MARK}"}, *prompt_with(image_file(tmp_path / "red.png"))]
    assert with_judge([asked], [f"x{IMAGE_MARK}"], {}).values == [0.5]
    parts = judge.asked[0]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    assert f"x{IMAGE_MARK}" in parts[2]["text"]


def test_the_cache_knows_a_picture_by_its_content(serving: Any, tmp_path: Path) -> None:
    """The same words beside another picture are another question; the same picture elsewhere is not."""
    judge: Judge = serving(lambda system, answers: FIVE)
    red = image_file(tmp_path / "red.png", RED)
    blue = image_file(tmp_path / "blue.png", BLUE)
    copied = image_file(tmp_path / "copy" / "red.png", RED)
    for file in (red, blue, copied):
        reward(judge.url, tmp_path, images=True)([prompt_with(file)], ["x"], {})
    assert len(judge.asked) == 2
    assert b"base64" not in (tmp_path / "cache.sqlite").read_bytes()


def test_a_picture_that_has_changed_drops_its_row_with_the_reason(serving: Any, tmp_path: Path) -> None:
    judge: Judge = serving(lambda system, answers: FIVE)
    red = image_file(tmp_path / "red.png", RED)
    blue = image_file(tmp_path / "blue.png", BLUE)
    prompts = [prompt_with(red), prompt_with(blue)]
    red.write_bytes(blue.read_bytes())
    call = reward(judge.url, tmp_path, images=True)(prompts, ["x", "x"], {})
    [failure] = call.failures
    assert failure.row == 0
    assert "changed" in failure.reason


# ---- what is sent of a file ----


def noise(path: Path, side: int, **options: Any) -> Path:
    pixels = random.Random(0).randbytes(3 * side * side)
    PILImage.frombytes("RGB", (side, side), pixels).save(path, **options)
    return path


@pytest.mark.parametrize("most", [1_000_000, 100_000, 8_000])
def test_a_large_picture_is_made_smaller_until_it_fits(most: int, tmp_path: Path) -> None:
    file = noise(tmp_path / "noise.png", 600)
    assert file.stat().st_size > 1_000_000
    url = bounded_data_url(image_at(file), most)
    assert len(url.partition(",")[2]) <= most
    assert decoded(url).size <= (600, 600)


def test_a_picture_that_cannot_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fit"):
        bounded_data_url(image_at(noise(tmp_path / "noise.png", 600)), 100)


def test_what_is_sent_looks_as_the_policy_sees_it(tmp_path: Path) -> None:
    """Transparent pixels are white, and a photo that its header turns is upright."""
    clear = tmp_path / "clear.png"
    PILImage.new("RGBA", (2, 2), (255, 0, 0, 0)).save(clear)
    shown = decoded(bounded_data_url(image_at(clear), 100_000))
    assert (shown.mode, shown.getpixel((0, 0))) == ("RGB", (255, 255, 255))
    turned = tmp_path / "turned.jpg"
    header = PILImage.Exif()
    header[0x0112] = 6
    PILImage.new("RGB", (8, 4), BLUE).save(turned, exif=header)
    assert decoded(bounded_data_url(image_at(turned), 100_000)).size == (4, 8)


# ---- runs ----


@pytest.mark.wide
@pytest.mark.parametrize("images", [True, False])
def test_a_run_shows_its_judge_the_pictures_that_the_policy_sees(images: bool, serving: Any, tmp_path: Path) -> None:
    seen = set[str]()
    judge: Judge = serving(lambda system, answers: json.dumps({"score": min(10, len(answers[0]))}))
    model = tiny_vision("smolvlm", tmp_path / "smolvlm")
    (tmp_path / "rubric.md").write_text("Long.", encoding="utf-8")
    values = {"use": "judge", "url": judge.url, "model": "m", "rubric": str(tmp_path / "rubric.md"), "images": images}
    functions = [{**values, "cache": str(tmp_path / "cache.sqlite"), "allow_weak": True}]
    code, run, _ = running.train(
        settings(model, tmp_path / "rows", num_steps=1, reward={"functions": functions}), tmp_path
    )
    assert code == 0
    for body in judge.asked:
        content = body["messages"][1]["content"]
        parts = [part for part in content if part["type"] == "image_url"] if isinstance(content, list) else []
        seen |= {hashlib.sha256(base64.b64decode(p["image_url"]["url"].partition(",")[2])).hexdigest() for p in parts}
    files = {hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "rows").glob("*.png")}
    assert (seen and seen <= files) if images else not seen
    assert running.metrics(run)[-1]["reward/judge"] > 0
