"""Processors of images: loaded without torchvision, around the run's tokenizer, copied as they are."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from tests.tiny_vision import FAMILIES, tiny_vision
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.processors import load_processor, save_processor

# Places of a picture of 32 x 32 in the prompt's tokens.
PLACES = {"qwen2_5_vl": 16, "qwen3_vl": 16, "smolvlm": 4, "gemma3": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: tiny_vision(family, root / family) for family in FAMILIES}


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_without_videos_expands_an_image(folders: dict[str, Path], family: str) -> None:
    tokenizer = load_tokenizer(str(folders[family]))
    processor: Any = load_processor(str(folders[family]), tokenizer=tokenizer)
    parts = [{"type": "image"}, {"type": "text", "text": "hi"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    picture = PILImage.effect_noise((32, 32), 50).convert("RGB")
    ids = processor(text=[text], images=[picture], return_tensors="pt")["input_ids"][0].tolist()
    token = getattr(processor.tokenizer, "image_token", None) or processor.image_token
    assert ids.count(tokenizer.convert_tokens_to_ids(token)) == PLACES[family]


def test_a_processor_leaves_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    folder = tiny_vision("smolvlm", tmp_path)
    tokenizer = load_tokenizer(str(folder))
    before = dict(tokenizer.special_tokens_map)
    load_processor(str(folder), tokenizer=tokenizer)
    assert dict(tokenizer.special_tokens_map) == before


def test_a_model_without_processor_files_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision("smolvlm", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        load_processor(str(folder), tokenizer=load_tokenizer(str(folder)))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_what_is_not_installed_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = tiny_vision("smolvlm", tmp_path)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_processor_type": "Lfm2VlImageProcessor"}))
    with pytest.raises(ValueError, match=r"[tT]orchvision"):
        load_processor(str(folder), tokenizer=load_tokenizer(str(folder)))


def test_processor_files_are_copied_as_they_are(tmp_path: Path) -> None:
    folder = tiny_vision("gemma3", tmp_path / "base")
    (tmp_path / "copy").mkdir()
    save_processor(str(folder), tmp_path / "copy")
    names = sorted(file.name for file in (tmp_path / "copy").iterdir())
    assert names == ["preprocessor_config.json", "processor_config.json"]
    assert all((tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes() for name in names)
