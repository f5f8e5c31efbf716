"""Image files: what an image may be, which are refused, how they are decoded; ids of their places."""

import base64
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL.Image import Transpose, fromarray
from PIL.Image import new as new_image

from tests.images import BLUE, RED, cut_jpeg, image_cache, image_file, picture, png  # noqa: F401 a fixture
from tinyrl.data import image_files, images
from tinyrl.data.formats import beginning
from tinyrl.data.image_files import ImageFiles
from tinyrl.data.images import (
    IMAGE_MARK,
    Image,
    image_ids,
    image_key,
    key_of_id,
    opened,
    place_of_id,
    shown_text,
    without_paths,
)

DATA_URL = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


def saved(path: Path, image: Any, **options: Any) -> Image:
    image.save(path, **options)
    return ImageFiles(path.parent).image_of(path.name)


# ---- what an image may be ----


@pytest.mark.parametrize(("text", "is_said"), [(DATA_URL.partition(",")[2], True), ("pictures/" * 9 + "a.png", False)])
def test_base64_without_its_head_is_refused_with_what_to_write_before_it(text: str, is_said: bool) -> None:
    with pytest.raises(ValueError, match="no image file") as refused:
        ImageFiles(Path("/")).image_of(text)
    assert ("data:image/png;base64," in str(refused.value)) is is_said


def test_a_path_is_relative_to_the_rows(tmp_path: Path) -> None:
    file = image_file(tmp_path / "pictures" / "a.png", size=(5, 3))
    found = ImageFiles(tmp_path).image_of("pictures/a.png")
    assert (found.path, found.size) == (str(file), (5, 3))
    assert ImageFiles(Path("/")).image_of(str(file)) == found
    assert ImageFiles(Path("/")).image_of(f"file://{file}") == found


@pytest.mark.parametrize("value", [
    png(), bytearray(png()), DATA_URL, {"url": DATA_URL}, {"bytes": png(), "path": "gone.png"}, {"image": png()},
])  # fmt: skip
def test_bytes_become_a_file_named_by_their_hash(image_cache: Path, value: Any) -> None:  # noqa: F811
    found = ImageFiles(Path("/")).image_of(value)
    assert Path(found.path) == image_cache / found.sha256[:2] / found.sha256
    assert Path(found.path).read_bytes() == png()


def test_embedded_rows_without_bytes_have_a_path(tmp_path: Path) -> None:
    image_file(tmp_path / "a.png")
    assert ImageFiles(tmp_path).image_of({"bytes": None, "path": "a.png"}).path == str(tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "P", "F", "LA"])
def test_an_object_of_pil_becomes_a_png(image_cache: Path, mode: str) -> None:  # noqa: F811
    found = ImageFiles(Path("/")).image_of(picture(size=(5, 3)).convert(mode))
    assert Path(found.path).is_relative_to(image_cache)
    assert (opened(found).format, opened(found).size) == (None, (5, 3))


def test_equal_files_are_one_image_wherever_they_are(tmp_path: Path) -> None:
    first, second, other = (
        ImageFiles(tmp_path).image_of(str(image_file(tmp_path / name, color)))
        for name, color in (("a.png", RED), ("b.png", RED), ("c.png", BLUE))
    )
    assert first.key == second.key != other.key
    assert without_paths([first.entry]) == without_paths([second.entry]) != without_paths([other.entry])


# ---- what is refused ----


@pytest.mark.parametrize(("content", "named"), [
    (b"not an image", "no format"), (png()[:40], ""), (png()[:-20] + b"x" * 20, ""), (cut_jpeg(), "truncated"),
])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.png cannot be read: .*{named}"):
        ImageFiles(tmp_path).image_of("a.png")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


def test_a_file_that_is_a_program_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(ValueError, match=r"a\.png .*EPS.*not run"):
        ImageFiles(tmp_path).image_of("a.png")
    with pytest.raises(ValueError, match="not run"):
        opened(Image(sha256="0", path=str(tmp_path / "a.png"), size=(9, 9)))


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for name, named in (("pipe", "a pipe"), ("link", "a device"), ("loop", "")):
        with pytest.raises(ValueError, match=rf"{name}\.png.*{named}"):
            ImageFiles(tmp_path).image_of(f"{name}.png")
    image_file(tmp_path / "a.png")
    (tmp_path / "good.png").symlink_to("a.png")
    assert ImageFiles(tmp_path).image_of("good.png").size == (4, 2)


def test_a_file_of_too_many_bytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.write(png())
        file.truncate(image_files.MOST_BYTES + 1)
    with pytest.raises(ValueError, match=r"a\.png has 536,870,913 bytes"):
        ImageFiles(tmp_path).image_of("a.png")


@pytest.mark.parametrize(("value", "named"), [
    ("gone.png", r"no image file /\S*gone\.png"), ("x" * 5000, "no image file"), ("a\0b", "no image file"),
    ({"path": None}, "an image is"), (3, "not a int"), ([png()], "not a list"),
    ("data:video/mp4;base64,AA==", "data:video"), ("data:image/png;base64,?", "not base64"), (".", "cannot be read"),
    ("http://pictures.example/a.png", r"task\.fetch_images"), (b"nothing", "cannot be read"),
])  # fmt: skip
def test_what_is_no_image_is_refused(tmp_path: Path, image_cache: Path, value: Any, named: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=named):
        ImageFiles(tmp_path).image_of(value)
    assert not image_cache.exists()


def test_more_pixels_than_the_bound_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_file(tmp_path / "a.png", size=(5, 4))
    image_file(tmp_path / "b.png", size=(5, 5))
    monkeypatch.setattr(image_files, "MOST_PIXELS", 24)
    assert ImageFiles(tmp_path).image_of("a.png").size == (5, 4)
    with pytest.raises(ValueError, match=r"b\.png has 5 x 5 pixels.* 24 "):
        ImageFiles(tmp_path).image_of("b.png")


def test_a_file_that_changed_is_read_anew_and_refused_where_its_hash_was_noted(tmp_path: Path) -> None:
    file = image_file(tmp_path / "a.png")
    before = ImageFiles(tmp_path).image_of("a.png")
    assert ImageFiles(tmp_path).image_of(before.entry) == before
    image_file(file, BLUE)
    assert ImageFiles(tmp_path).image_of("a.png").sha256 != before.sha256
    with pytest.raises(ValueError, match=r"a\.png has changed"):
        ImageFiles(tmp_path).image_of(before.entry)


# ---- addresses ----


@pytest.fixture
def address() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            redirected = {"/moved.png": "/a.png", "/round.png": "/round.png", "/local.png": "file:///etc/hostname"}
            if self.path in redirected:
                self.send_response(302)
                self.send_header("Location", redirected[self.path])
                self.end_headers()
                return
            is_there = self.path.startswith(("/a.png", "/page.png", "/short.png"))
            self.send_response(200 if is_there else 404)
            if self.path == "/short.png":
                self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"<html>sign in</html>" if self.path == "/page.png" else png())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_address_is_fetched_once(image_cache: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    files = ImageFiles(Path("/"), fetch=True)
    first = files.image_of(f"{address}/a.png")
    assert Path(first.path).read_bytes() == png()
    monkeypatch.setattr(image_files, "MOST_FETCHED", 0)  # nothing can be fetched any more
    assert files.image_of(f"{address}/a.png") == first
    with pytest.raises(ValueError, match=r"a\.png\?.*not fetched: more than 0"):
        files.image_of(f"{address}/a.png?x")
    with pytest.raises(ValueError, match=r"b\.png.*not fetched.*404"):
        files.image_of(f"{address}/b.png")


def test_a_redirect_is_followed(image_cache: Path, address: str) -> None:  # noqa: F811
    files = ImageFiles(Path("/"), fetch=True)
    assert files.image_of(f"{address}/moved.png").sha256 == files.image_of(f"{address}/a.png").sha256


@pytest.mark.parametrize(("name", "named"), [
    ("page", "no format"), ("short", "not fetched"), ("round", "not fetched"), ("local", "not fetched.*file"),
])  # fmt: skip
def test_what_is_no_image_at_an_address_is_refused_by_it(
    image_cache: Path,  # noqa: F811
    address: str,
    name: str,
    named: str,
) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.png: .*{named}"):
        ImageFiles(Path("/"), fetch=True).image_of(f"{address}/{name}.png")
    assert not image_cache.exists()


# ---- decoding ----


def marked(size: tuple[int, int] = (4, 2)) -> Any:
    """Return a black image whose first pixel is red."""
    image = new_image("RGB", size)
    image.putpixel((0, 0), RED)
    return image


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tiff"])
def test_an_image_is_turned_as_its_exif_says(tmp_path: Path, name: str) -> None:
    sideways = marked()
    exif = sideways.getexif()
    exif[images.ORIENTATION] = 6  # to be turned by 90 degrees clockwise
    options = {"lossless": True} if name == "a.webp" else {}
    found = saved(tmp_path / name, sideways, exif=exif, **options)
    assert found.size == opened(found).size == (2, 4)
    assert opened(found).tobytes() == sideways.transpose(Transpose.ROTATE_270).tobytes()


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    clear = new_image("RGBA", (1, 1), (0, 0, 0, 0))
    assert opened(saved(tmp_path / "a.png", clear)).getpixel((0, 0)) == (255, 255, 255)
    indexed = new_image("P", (1, 1), 0)
    assert opened(saved(tmp_path / "b.gif", indexed, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    deep = fromarray(numpy.array([[0, 256 * 128, 65535]], dtype=numpy.uint16))
    pixels = opened(saved(tmp_path / "a.png", deep))
    assert [pixels.getpixel((x, 0)) for x in range(3)] == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]


@pytest.mark.parametrize("most", [1.0, 255.0])
def test_floating_point_numbers_are_of_0_to_1_or_of_0_to_255(tmp_path: Path, most: float) -> None:
    values = fromarray(numpy.array([[0, most / 2, most, numpy.nan]], dtype=numpy.float32))
    pixels = opened(saved(tmp_path / "a.tiff", values))
    assert [pixels.getpixel((x, 0)) for x in range(4)] == [(0, 0, 0), (127, 127, 127), (255, 255, 255), (0, 0, 0)]


def test_of_an_animation_the_first_frame_is_shown(tmp_path: Path) -> None:
    frames = [new_image("RGB", (2, 2), color) for color in (RED, BLUE)]
    found = saved(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert opened(found).getpixel((0, 0)) == RED


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    found = saved(tmp_path / "a.tiff", new_image("CMYK", (1, 1), (0, 255, 255, 0)))
    assert opened(found).getpixel((0, 0)) == RED


# ---- token ids ----


def test_ids_of_an_image_name_it_and_their_place() -> None:
    first, second = image_ids(5, 2), image_ids(6, 2)
    assert [key_of_id(token) for token in first + second] == [5, 5, 6, 6]
    assert [place_of_id(token) for token in first + second] == [0, 1, 0, 1]


def test_ids_have_42_bits_of_the_hash_and_fit_into_63() -> None:
    zero = image_key("0" * 64)
    assert [image_key(f"{start:0<64}") - zero for start in ("8", "00000000004", "00000000002")] == [1 << 41, 1, 0]
    assert image_ids(image_key("f" * 64), (1 << 20) - 1)[-1] == (1 << 63) - 2


def test_the_mark_is_an_image_where_there_are_images_and_somebodys_text_elsewhere() -> None:
    text = f"{IMAGE_MARK}what?"
    assert beginning({"prompt": text, "images": [{}]}) == "{'prompt': '[image]what?', 'images': [{}]}"
    assert beginning({"prompt": text}) == f"{{'prompt': '{text}'}}"
    assert shown_text({"content": text, "images": [{}]}) == "[image]what?"
    assert shown_text({"content": text}) == text
