"""`tinyrl check` on rows with images."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_vision import tiny_vision
from tests.tools.check.test_first_row import quick
from tests.training.rows import loaded
from tests.training.test_vision_runs import settings
from tinyrl.data.images import IMAGE_MARK, is_image_id
from tinyrl.data.kinds import Texts
from tinyrl.models.tokens import readable
from tinyrl.rewards.holes import find_holes, known_answers
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.finding import found_by
from tinyrl.tools.check import check_rows
from tinyrl.tools.check.images import FINDINGS, Look, Looks, compare_without_images, image_section, without_images
from tinyrl.tools.check.loaded import Answer, answers, check_parts

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


def test_the_mark_of_an_image_is_in_no_line_about_rows_and_no_text_that_a_reward_gets(
    model: Path, tmp_path: Path
) -> None:
    prepared = prepare(settings(model, tmp_path, num_steps=1))
    prompt = prepared.rows.train[0]["prompt"]
    lines = Texts().described([{"prompt": prompt, "completion": "very"}])
    tried = list[str]()

    def score(where: list[int], texts: list[str]) -> list[float]:
        tried.extend(texts)
        return [0.0] * len(texts)

    task = prepared.task
    find_holes(score, task, prepared.rows.train[:2], known_answers(task, prepared.rows.train[:2]))
    assert "[image]how green?" in lines[1]
    assert "[image]how green?" in tried
    assert IMAGE_MARK not in "".join([*lines, *tried])


def test_what_images_take_is_told(method: Any) -> None:
    """Their tokens, and the bytes of all features, beside what the cache may hold."""
    section = image_section(method.policy, None)
    assert section is not None
    assert section.lines[0] == "8 images take 4 tokens each"
    features = [method.policy.images.features(key) for key in method.policy.image_expander.images]
    assert section.facts["feature_bytes"] == sum(one.nbytes for one in features)
    assert section.facts["cache_bytes"] == 1e9
    assert section.findings == []


def test_features_that_the_cache_cannot_hold_are_told_with_what_would(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method.policy.images, "cache_bytes", 0)
    section = image_section(method.policy, None)
    assert section is not None
    assert "model.image_cache_gb=0 keeps 0%" in section.lines[1]


def test_prompts_are_asked_once_more_without_their_images(method: Any) -> None:
    collector = method.collector
    prompts = collector.train_prompts
    blind = [without_images(collector, prompt) for prompt in prompts]
    assert not any(is_image_id(token) for prompt in blind for token in prompt.tokens)
    assert len({prompt.text for prompt in blind}) == 1  # the same question of each image
    seen = answers(collector, prompts, 1, greedy=True)
    looks = compare_without_images(collector, prompts, seen)
    assert [look.seen for look in looks] == seen
    assert len({look.withheld.text for look in looks}) == 1
    assert any(look.changed for look in looks)


def looks_of(seen: list[float], withheld: list[float], *, changed: int) -> Looks:
    """Looks of so many rewards with images and without, of which the first `changed` have another answer."""
    answer = Answer("a", 0.0, score=0.0, tokens=1, cut=False, gold=None, row="", failed=None)
    pairs = zip(seen, withheld, strict=True)
    made = [Look(answer._replace(score=a), answer._replace(score=b), i < changed) for i, (a, b) in enumerate(pairs)]
    return Looks(made, solved=1.0)


HALF = [1.0, 0.0] * 8


@pytest.mark.parametrize(
    ("looks", "name"),
    [
        (looks_of(HALF, HALF, changed=16), "answered without looking"),
        (looks_of(HALF, [0.0] * 16, changed=16), None),
        (looks_of([1.0] * 16, HALF, changed=8), None),  # a guess between two is right in half of the rows
        (looks_of(HALF, [0.0] * 16, changed=2), "images change no answer"),
        (looks_of(HALF[:8], HALF[:8], changed=8), "answered without looking"),
        (looks_of(HALF[:7], HALF[:7], changed=7), None),  # too few to tell
        (looks_of(HALF[:4], HALF[:4], changed=0), None),
    ],
)
def test_answers_that_do_not_depend_on_images_are_found(looks: Looks, name: str | None) -> None:
    found = found_by(FINDINGS, looks)
    assert [one.name for one in found] == ([] if name is None else [name])
    assert all(one.is_harmless for one in found)


def test_no_number_of_a_vision_model_is_wrong(method: Any) -> None:
    """Ordinary tokens that are tried may be the placeholder, which both passes read as the end of text."""
    results = {one.name: one.result for one in check_parts(method.policy, method.collector.engine)}
    assert [name for name, result in results.items() if result == "wrong"] == []


def test_an_image_among_tokens_is_read_by_people(method: Any) -> None:
    tokens = method.collector.train_prompts[0].tokens
    assert "[image, 4 tokens]" in readable(method.policy.tokenizer, tokens)
