"""A run on pictures as people have them: odd kinds of files, odd sizes, bytes, and one file in many rows."""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL.Image import Exif, fromarray

from tests import running
from tests.images import image_cache  # noqa: F401 a fixture
from tests.tiny_vision import tiny_vision
from tests.training.rows import write_rows
from tinyrl.data import image_files
from tinyrl.data.images import ORIENTATION
from tinyrl.workers.loading import use_of


def characters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


def noise(width: int, height: int) -> Any:
    values = numpy.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return fromarray(values)


def odd_files(folder: Path) -> list[str]:
    """Write pictures of many kinds into a folder and return their names."""
    plain = noise(40, 20)
    sideways = Exif()
    sideways[ORIENTATION] = 6
    deep = fromarray(numpy.arange(800, dtype=numpy.uint16).reshape(20, 40) * 80)
    indexed = plain.convert("P")
    files: dict[str, tuple[Any, dict[str, Any]]] = {
        "cmyk.jpg": (plain.convert("CMYK"), {}),
        "sideways.jpg": (plain, {"exif": sideways}),
        "deep.png": (deep, {}),
        "palette.png": (indexed, {"transparency": bytes([0] * 128 + [255] * 128)}),
        "pixel.png": (noise(1, 1), {}),
        "wide.png": (noise(900, 1), {}),
        "animation.gif": (indexed, {"save_all": True, "append_images": [plain.convert("L").convert("P")]}),
        "two.png": (plain.convert("1"), {}),
    }
    for name, (image, options) in files.items():
        image.save(folder / name, **options)
    (folder / "link.png").symlink_to("deep.png")
    return [*files, "link.png"]


def test_a_run_on_odd_pictures_trains_and_reads_each_file_once(tmp_path: Path, image_cache: Path) -> None:  # noqa: F811
    names = odd_files(tmp_path)
    file = io.BytesIO()
    noise(30, 30).save(file, "WEBP")
    url = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    values = [*names, url, str(tmp_path / "cmyk.jpg"), *["deep.png"] * 5]
    rows = [{"prompt": f"what is {i}?", "image": value, "answer": "a"} for i, value in enumerate(values)]
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    task = {"name": "rows", "data": data, "eval_data": data}
    config = running.config(
        "grpo",
        tiny_vision("smolvlm", tmp_path / "model"),
        task=task,
        generation={"max_prompt_tokens": 256},
        grpo={"num_prompts": len(rows), "group_size": 2},
        reward={"functions": [{"use": use_of(partial(characters))}]},
        run={"num_steps": 1, "eval_every": 0},
    )
    image_files._file_at.cache_clear()
    with pytest.warns(UserWarning, match="the first one is read"):
        code, run, _ = running.train(config, tmp_path, name="run")
    assert code == 0
    assert image_files._file_at.cache_info().misses == len(names) + 1  # with the one of the data URL
    assert image_cache.is_dir()
    shown = [json.loads(line)["images"] for line in run.samples.read_text().splitlines()]
    assert {Path(image["path"]).name for [image] in shown} >= {"cmyk.jpg", "pixel.png", "wide.png", "animation.gif"}
