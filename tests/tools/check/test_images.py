"""`tinyrl check` on rows with images."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_vision import tiny_vision
from tests.tools.check.test_first_row import quick
from tests.training.rows import loaded
from tests.training.test_vision_runs import settings
from tinyrl.data.images import IMAGE_MARK
from tinyrl.models.tokens import readable
from tinyrl.rollout.prepared import prepare
from tinyrl.tools.check import check_rows
from tinyrl.tools.check.loaded import check_parts, row_lines

FAMILY = "gemma3"  # whose tokens of images are among the first of the vocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(FAMILY, tmp_path_factory.mktemp("model") / FAMILY)


@pytest.fixture(scope="module")
def method(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with closing(loaded(settings(model, tmp_path_factory.mktemp("rows"), num_steps=1))) as method:
        method.check()
        yield method


def test_a_row_with_an_image_is_shown_without_its_tokens_counted(model: Path, tmp_path: Path) -> None:
    settings(model, tmp_path, num_steps=1)
    assert quick("grpo", model, tmp_path / "rows.jsonl")["tokens"] is None


def test_the_mark_of_an_image_is_not_shown_as_it_is(model: Path, tmp_path: Path) -> None:
    section = check_rows(prepare(settings(model, tmp_path, num_steps=1)), quick=False)
    assert any("[image]how green?" in line for line in section.lines)
    assert IMAGE_MARK not in "".join(section.lines)


def test_the_tokens_of_images_are_told(method: Any) -> None:
    assert "8 images take 4 to 4 tokens each, half of them at most 4" in row_lines(method)


def test_no_number_of_a_vision_model_is_wrong(method: Any) -> None:
    """Ordinary tokens that are tried may be the placeholder, which both passes read as the end of text."""
    results = {one.name: one.result for one in check_parts(method.policy, method.collector.engine)}
    assert [name for name, result in results.items() if result == "wrong"] == []


def test_an_image_among_tokens_is_read_by_people(method: Any) -> None:
    tokens = method.collector.train_prompts[0].tokens
    assert "[image, 4 tokens]" in readable(method.policy.tokenizer, tokens)
