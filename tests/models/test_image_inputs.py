"""Images in passes of the policy, against plain transformers, which runs the tower from pixels in every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image as Pil
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.tiny_vision import FAMILIES, tiny_vision
from tinyrl.data.image_files import ImageFiles
from tinyrl.data.images import Image, image_ids, without_images
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.models.batch import Example, batch_of, by_axis, examples
from tinyrl.models.checks import check_images, decodes_exactly, packs_images_exactly
from tinyrl.models.image_inputs import ImageExpander, ImageInputs, pieces_of, within
from tinyrl.models.logprobs import head_of
from tinyrl.models.processors import load_processor
from tinyrl.models.states import response_states

FAST = "qwen2_5_vl"  # positions of several axes; the other families are `wide`
OWN_MASKS = ("gemma4", "gemma4-large", "lfm2_vl")  # whose decoders are not like others'
LARGE = 10**7  # pixels


def each_family(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test on FAST, and as `wide` on the other families."""
    return pytest.mark.wide(
        pytest.mark.parametrize("family", [FAST, *(name for name in FAMILIES if name != FAST), *OWN_MASKS])(test)
    )


@dataclass(frozen=True)
class Vision:
    """A small vision-language model and two pictures. conversations: with one picture, with both, and with none."""

    folder: Path
    model: Any
    processor: Any
    tokenizer: Any
    images: ImageInputs
    pictures: list[Image]

    def rendered(self, *parts: str | None) -> str:
        """Render a message; None: a picture."""
        content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        messages = [{"role": "user", "content": content}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    @property
    def conversations(self) -> list[tuple[str, list[Image]]]:
        first, second = self.pictures
        return [
            (self.rendered(None, "what is it?"), [first]),
            (self.rendered("first", None, "second", None, "same?"), [first, second]),
            (self.rendered("nothing here"), []),
        ]

    @property
    def prompts(self) -> list[list[int]]:
        texts, images = zip(*self.conversations, strict=True)
        return self.images.expander.tokenised(texts, images)

    def pixels(self, text: str, images: list[Image], **options: Any) -> Any:
        """Process a prompt as a user of transformers does."""
        pictures = [[Pil.open(image.path) for image in images]] if images else None
        return self.processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False, **options)


def picture(folder: Path, name: str, size: tuple[int, int], seed: int) -> Image:
    values = numpy.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=numpy.uint8)
    Pil.fromarray(values).save(folder / name)
    return ImageFiles(base=folder).image_of(name)


def vision_of(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Vision:
    path = tiny_vision(family, folder / family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
    processor = load_processor(str(path), tokenizer=tokenizer)
    expander = ImageExpander(processor, tokenizer, placeholder=model.config.image_token_id, max_pixels=LARGE)
    images = ImageInputs(model.model, expander, cache_bytes=1 << 20, unread=tokenizer.eos_token_id)
    pictures = [picture(folder, "a.png", (32, 32), 1), picture(folder, "b.png", (48, 32), 2)]
    return Vision(path, model, processor, tokenizer, images, pictures)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Vision:
    return vision_of(FAST, tmp_path_factory.mktemp("vision"))


@pytest.fixture
def vision(family: str, fast: Vision, tmp_path: Path) -> Vision:
    return fast if family == FAST else vision_of(family, tmp_path)


def library_states(vision: Vision, text: str, images: list[Image]) -> Tensor:
    """The states of a prompt by plain transformers."""
    if hasattr(vision.model.model, "rope_deltas"):
        vision.model.model.rope_deltas = None
    return vision.model.model(**vision.pixels(text, images)).last_hidden_state[0]


# ---- tokens ----


@each_family
def test_tokens_are_those_of_the_models_own_processor(vision: Vision) -> None:
    for (text, images), ids in zip(vision.conversations, vision.prompts, strict=True):
        placeholder = vision.images.expander.placeholder
        assert without_images(ids, placeholder) == vision.pixels(text, images)["input_ids"][0].tolist()


def test_prompts_that_differ_in_an_image_of_the_same_size_have_different_tokens(fast: Vision, tmp_path: Path) -> None:
    other = picture(tmp_path, "c.png", (32, 32), 3)
    text, [image] = fast.conversations[0]
    one, two = fast.images.expander.tokenised([text, text], [[image], [other]])
    assert len(one) == len(two)
    assert one != two
    placeholder = fast.images.expander.placeholder
    assert without_images(one, placeholder) == without_images(two, placeholder)


@pytest.mark.parametrize("count", [0, 2])
def test_a_prompt_with_more_or_fewer_places_than_images_is_refused(fast: Vision, count: int) -> None:
    text, _ = fast.conversations[0]
    with pytest.raises(ValueError, match=f"1 times for {count} images"):
        fast.images.expander.tokenised([text], [fast.pictures[:count]])


def test_an_image_with_more_pixels_than_allowed_is_scaled_down_in_both_directions_alike() -> None:
    assert within(Pil.new("RGB", (400, 100)), 10_000).size == (200, 50)
    assert within(Pil.new("RGB", (40, 10)), 400).size == (40, 10)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_image_whose_hash_begins_as_anothers_is_refused(fast: Vision, tmp_path: Path, is_forgotten: bool) -> None:
    """Rows of an image that a server has let go of are still cached, by token ids that would be the same."""
    expander = fast.images.expander
    first = picture(tmp_path, "first.png", (32, 32), 6)
    alike = replace(first, sha256=first.sha256[:32] + "0" * 32)
    assert alike.key == first.key
    expander.expansion(first)
    if is_forgotten:
        expander.forget(first)
    with pytest.raises(ValueError, match="begin alike"):
        expander.expansion(alike)
    expander.expansion(first)


def test_the_pieces_of_images_are_found_in_their_order() -> None:
    row = [1, *image_ids(7, 3), 2, *image_ids(9, 4)[2:], 3]
    assert [(piece.key, piece.start, piece.stop) for piece in pieces_of(row)] == [(7, 0, 3), (9, 2, 4)]


@pytest.mark.wide
@pytest.mark.parametrize(("max_pixels", "tiles"), [(2 * 32 * 32, 1), (64 * 64, 5), (LARGE, 17)])
def test_a_processor_that_cuts_images_into_tiles_is_bounded_by_the_pixels_allowed(
    max_pixels: int, tiles: int, tmp_path: Path
) -> None:
    vision = vision_of("smolvlm", tmp_path)
    splitting = vision.processor.image_processor
    splitting.do_image_splitting = True
    splitting.size = {"longest_edge": 4 * 32}
    expander = ImageExpander(
        vision.processor,
        vision.tokenizer,
        placeholder=vision.model.config.image_token_id,
        max_pixels=max_pixels,
    )
    image = picture(tmp_path, "large.png", (32, 32), 5)
    assert expander.process(image).pixels["pixel_values"].shape[1] == tiles  # with the whole image, if it is cut


# ---- numbers ----


@each_family
@torch.no_grad()
def test_states_are_the_librarys_of_one_image_two_and_none(vision: Vision) -> None:
    for (text, images), prompt in zip(vision.conversations, vision.prompts, strict=True):
        batch = batch_of([Example(prompt, [[5, 6]])], images=vision.images)
        ours = response_states(vision.model.model, batch)[0]
        torch.testing.assert_close(ours, library_states(vision, text, images)[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@each_family
@torch.no_grad()
def test_in_half_precision_states_of_a_row_are_those_of_the_library(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    vision = vision_of(family, tmp_path, dtype=dtype)
    (text, images), prompt = vision.conversations[1], vision.prompts[1]
    batch = batch_of([Example(prompt, [[5]])], images=vision.images, last_tokens=True)
    ours = response_states(vision.model.model, batch)[0].float()
    theirs = library_states(vision, text, images)[-1].float()
    assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@each_family
def test_gradients_are_those_of_plain_transformers_with_a_frozen_tower(vision: Vision) -> None:
    (text, images), prompt = vision.conversations[1], vision.prompts[1]
    answer = [5, 6, 7, 8]
    batch = batch_of([Example(prompt, [answer])], images=vision.images)
    language = vision.model.model.language_model if hasattr(vision.model.model, "language_model") else None
    trained = [*(language or vision.model.model.text_model).parameters()]

    def gradients(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    head = head_of(vision.model)
    logits = head.logits(response_states(vision.model.model, batch))
    ours = gradients(torch.nn.functional.cross_entropy(logits, batch.targets))
    given = vision.pixels(text, images)
    ids = torch.cat([given["input_ids"], torch.tensor([answer])], 1)
    behind = torch.zeros(1, len(answer), dtype=torch.long)
    marks = {
        name: torch.cat([given[name], behind], 1) for name in ("mm_token_type_ids", "token_type_ids") if name in given
    }
    if hasattr(vision.model.model, "rope_deltas"):
        vision.model.model.rope_deltas = None
    logits = vision.model(**{**given, **marks, "input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits[0]
    theirs = gradients(torch.nn.functional.cross_entropy(logits[-len(answer) - 1 : -1], torch.tensor(answer)))
    assert len(ours) == len(theirs) > 0
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-5, rtol=2e-4)


@each_family
@torch.no_grad()
def test_padded_rows_with_and_without_images_are_those_of_each_row_alone(vision: Vision) -> None:
    prompts = vision.prompts
    items = examples([prompts[0], prompts[0], *prompts], [[5, 6, 7], [8], [9, 10], [11], [5, 6, 7]])
    together = response_states(vision.model.model, batch_of(items, images=vision.images))
    alone = [response_states(vision.model.model, batch_of([item], images=vision.images)) for item in items]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packed_rows_of_one_text_and_two_images_are_those_of_each_row_alone(fast: Vision, tmp_path: Path) -> None:
    text, [image] = fast.conversations[0]
    other = picture(tmp_path, "c.png", (32, 32), 3)
    one, two = fast.images.expander.tokenised([text, text], [[image], [other]])
    items = examples([one, one, two, fast.prompts[1]], [[5, 6], [7, 8, 9], [5, 6], [4, 4]])
    packed = batch_of(items, packed=True, images=fast.images)
    alone = [response_states(fast.model.model, batch_of([item], images=fast.images)) for item in items]
    torch.testing.assert_close(response_states(fast.model.model, packed), torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(alone[0], alone[2], atol=0.01)  # the images differ


@torch.no_grad()
def test_a_response_that_holds_a_later_turns_image_has_the_positions_of_the_whole_row(fast: Vision) -> None:
    prompts = fast.prompts
    joined = [Example(prompts[0], [[5, 6, *prompts[1], 7, 8]])]
    whole = [Example([*prompts[0], 5, 6, *prompts[1]], [[7, 8]])]
    for packed in (False, True):
        ours, theirs = (
            response_states(fast.model.model, batch_of(items, packed=packed, images=fast.images))[-2:]
            for items in (joined, whole)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_sampled_placeholder_is_read_as_the_end_of_text(fast: Vision) -> None:
    placeholder = fast.images.expander.placeholder
    rows = [[5, token, 6] for token in (placeholder, fast.tokenizer.eos_token_id)]
    ours, theirs = (
        response_states(fast.model.model, batch_of([Example(fast.prompts[0], [row])], images=fast.images))
        for row in rows
    )
    assert torch.equal(ours, theirs)


# ---- the tower ----


@torch.no_grad()
def test_an_image_goes_through_the_tower_once_however_many_rows_and_passes_read_it(fast: Vision) -> None:
    images = ImageInputs(fast.model.model, fast.images.expander, cache_bytes=1 << 20, unread=1)
    for _ in range(3):
        batch_of(examples([fast.prompts[0]] * 4, [[5]] * 4), images=images)
    batch_of(examples([fast.prompts[1]], [[5]]), images=images)
    assert images.tower_passes == 2


@torch.no_grad()
def test_features_that_were_evicted_come_back_with_the_same_bits(fast: Vision) -> None:
    kept, forgetful = (
        ImageInputs(fast.model.model, fast.images.expander, cache_bytes=size, unread=1) for size in (1 << 20, 0)
    )
    items = examples([fast.prompts[1], fast.prompts[0]], [[5], [6]])
    first = [batch_of(items, images=images).images for images in (kept, forgetful)]
    again = batch_of(items, images=forgetful).images
    assert first[0] is not None
    assert again is not None
    assert forgetful.tower_passes > kept.tower_passes
    assert torch.equal(first[0].features, again.features)


def test_a_model_that_reads_features_otherwise_is_refused(fast: Vision) -> None:
    check_images(fast.images, fast.model.model)
    wrong = ImageInputs(fast.model.model, fast.images.expander, cache_bytes=1 << 20, unread=1)
    first = fast.pictures[0]
    right = wrong.features(first.key)
    wrong._features[first.sha256] = replace(right, pooled=1.5 * right.pooled)
    with pytest.raises(ValueError, match="differ"):
        check_images(wrong, fast.model.model)


# ---- sampling ----


@each_family
@torch.no_grad()
def test_the_trials_of_packing_and_of_the_decoder_pass_with_an_image(vision: Vision) -> None:
    assert vision.prompts  # so that images are known
    decoder = LibraryDecoder(vision.model, dtype=torch.float32, layout="merged", images=vision.images)
    decoder.sync(None)
    assert decodes_exactly(vision.model.model, decoder, longest=60, images=vision.images)
    has_own_masks = vision.folder.name in OWN_MASKS or vision.images.sees_ahead
    assert packs_images_exactly(vision.model.model, vision.images) == (not has_own_masks)


@torch.no_grad()
def test_the_decoders_trial_sees_positions_that_forget_the_image(fast: Vision) -> None:
    assert fast.prompts
    decoder = LibraryDecoder(fast.model, dtype=torch.float32, layout="merged", images=fast.images)
    decoder.sync(None)
    new_cache = decoder.new_cache

    def without_shift(rows: int, width: int) -> Any:
        cache = new_cache(rows, width)
        cache.shift = None
        return cache

    decoder.new_cache = without_shift
    assert not decodes_exactly(fast.model.model, decoder, longest=60, images=fast.images)


@torch.no_grad()
def test_a_row_of_text_is_continued_by_a_prompt_with_images(fast: Vision) -> None:
    decoder = LibraryDecoder(fast.model, dtype=torch.float32, layout="merged", images=fast.images)
    decoder.sync(None)
    before, behind = fast.prompts[2], fast.prompts[1]
    cache = decoder.new_cache(1, 256)
    decoder.prefill(torch.tensor([before]), torch.tensor([len(before)]), cache=cache, rows=[range(1)])
    start = torch.tensor([len(before)])
    decoder.extend(torch.tensor([behind]), torch.tensor([len(behind)]), start, cache=cache, rows=[0], width=256)
    row = [*before, *behind, 9]
    state = decoder.step(torch.tensor([9]), torch.tensor([len(row) - 1]), cache=cache, width=256)
    batch = batch_of([Example(row, [[5]])], images=fast.images)
    torch.testing.assert_close(state, response_states(fast.model.model, batch), atol=1e-5, rtol=1e-5)
    assert by_axis(fast.images.positions(row).prompt.unsqueeze(1)).shape == (3, 1, len(row))


def test_a_picture_that_a_processor_refuses_is_named(tmp_path: Path) -> None:
    """Qwen's takes none that is 200 times as wide as high."""
    expander = vision_of("qwen2_5_vl", tmp_path).images.expander
    with pytest.raises(ValueError, match=r"line\.png \(300 x 1 pixels\)"):
        expander.expansion(picture(tmp_path, "line.png", (300, 1), 0))
    assert not expander.images


def test_a_picture_of_a_request_that_a_processor_refuses_is_named_by_its_part(tmp_path: Path) -> None:
    expander = vision_of("qwen2_5_vl", tmp_path).images.expander
    with pytest.raises(ValueError, match=r"^the image at messages\[0\]\.content\[1\] \(300 x 1 pixels\)") as refused:
        expander.expansion(picture(tmp_path, "line.png", (300, 1), 0), "the image at messages[0].content[1]")
    assert str(tmp_path) not in str(refused.value)
