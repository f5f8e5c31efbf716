"""Images as a vision-language model reads them: their tokens in a prompt, and the features that stand in their places.

The tower is frozen, so the features of an image are constants. They are computed once, one image at a time, so that no
batch and no eviction changes a bit of them, and every pass of policy, reference and sampling reads the same ones: in
the place of embeddings, or as `mm_encoder_outputs`, which the library's models take in place of `pixel_values`.

Differences from the library's own call, each pinned in tests/models/test_image_inputs.py:
- positions are always given, also behind the prompt: models with rotary positions of several axes (2409.12191, section
  2.1) keep the shift behind the images of the last prompt that they have seen, of whatever batch;
- a placeholder that the policy samples stands for no image, and is read as the end of text.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import new as new_image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from tinyrl.data.image_files import png_of, stored_in
from tinyrl.data.images import FIRST_IMAGE_ID, Image, image_ids, is_image_id, key_of_id, opened, place_of_id
from tinyrl.models.batch import RowPositions
from tinyrl.models.device import to_device
from tinyrl.models.tokens import token_ids, token_ids_of
from tinyrl.text import first_line

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_HASHES = 1 << 16  # of images that were forgotten: more than rows that a server caches
GRID = "image_grid_thw"  # of an image, in patches: what several axes of positions are made of
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")


@dataclass(frozen=True)
class Processed:
    """An image as the processor hands it over. replacement: the text in place of the processor's image token; count: of
    places for features in it; pixels: the tensors that the tower reads, by name.
    """

    replacement: str
    count: int
    pixels: dict[str, Tensor]


class ImageExpander:
    """Puts images into rendered prompts: tokens with an id of its own for each place of an image.

    placeholder: the token at which the model puts a feature; mark: the text of an image in a rendered prompt. It knows
    every image that it has put into a prompt, until it is to `forget` it. Threads may share it.
    """

    def __init__(
        self, processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase, *, placeholder: int, max_pixels: int
    ) -> None:
        self.processor: Any = processor
        self.tokenizer = tokenizer
        self.placeholder = placeholder
        self.max_pixels = max_pixels
        self.mark = str(self.processor.image_token)
        self.images = dict[int, Image]()
        self._hashes: OrderedDict[int, str] = OrderedDict()  # by key, also of images that were forgotten
        self._expansions = dict[int, Processed]()  # without pixels
        self._processing = threading.Lock()  # a processor changes its tokenizer at every call

    def process(self, image: Image, what: str | None = None) -> Processed:
        """Run the processor on an image. what: its name in errors (None: its file). Raises ValueError where it cannot
        be read, or the processor refuses it, as Qwen's does one that is 200 times as wide as high.
        """
        picture = within(opened(image, what), self.max_pixels)
        try:
            with self._processing:
                processed = self.processor(
                    images=[picture],
                    text=[self.mark],
                    **self._tiles(),
                    return_text_replacement_offsets=True,
                    return_tensors="pt",
                    add_special_tokens=False,
                )
        except ValueError as error:
            size = " x ".join(map(str, picture.size))
            why = f"({size} pixels) is refused by the model's processor: {first_line(error)}"
            raise ValueError(f"{what or image.named} {why}") from error
        [[offsets]] = processed["text_replacement_offsets"]
        replacement = str(offsets["replacement"])
        return Processed(
            replacement=replacement,
            count=token_ids(self.tokenizer, replacement).count(self.placeholder),
            pixels={name: value for name, value in processed.items() if name not in TEXT_INPUTS},
        )

    def _tiles(self) -> dict[str, Any]:
        """Return the option that bounds the pixels of a processor which scales every image up and cuts it into tiles
        (SmolVLM, Idefics 3): the longer side in pixels, of whole tiles, at least one.
        """
        images = self.processor.image_processor
        cuts = getattr(images, "do_image_splitting", False)
        scales_up = hasattr(images, "max_image_size")  # unlike LFM2-VL's, which cuts only what is large as it is
        if not (cuts and scales_up):
            return {}
        side = int(images.max_image_size["longest_edge"])
        most = side * max(1, math.isqrt(self.max_pixels) // side)
        return {"size": {"longest_edge": min(int(images.size["longest_edge"]), most)}}

    def expansion(self, image: Image, what: str | None = None) -> Processed:
        """Return what stands for an image, without its pixels. Raises ValueError for one that cannot be processed, or
        whose ids are another's. what: its name in errors (None: its file).
        """
        self._check_key(image, what)
        if image.key not in self._expansions:
            done = self.process(image, what)
            self._expansions[image.key] = Processed(done.replacement, done.count, pixels={})
        self.images.setdefault(image.key, image)
        return self._expansions[image.key]

    def token_counts(self) -> list[int]:
        """Return how many tokens of features each image takes that is known."""
        return [self.expansion(image).count for image in self.images.values()]

    def _check_key(self, image: Image, what: str | None) -> None:
        """Raise ValueError for an image whose hash begins as that of another one. Their token ids would be equal, and
        rows of an image that was forgotten may be cached still.
        """
        known = self.images.get(image.key)
        sha256 = self._hashes.setdefault(image.key, image.sha256 if known is None else known.sha256)
        if sha256 != image.sha256:
            other = "an image that was here before" if known is None or what is not None else known.named
            raise ValueError(f"{what or image.named} and {other} have hashes that begin alike; leave one of them out")
        self._hashes.move_to_end(image.key)
        if len(self._hashes) > len(self.images) + MOST_HASHES:
            self._hashes.popitem(last=False)

    def forget(self, image: Image) -> None:
        """Drop an image that no prompt has any more."""
        self.images.pop(image.key, None)
        self._expansions.pop(image.key, None)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Know a small picture inside, for trials of a model that no prompt has shown an image yet."""
        with TemporaryDirectory() as folder:
            image = stored_in(Path(folder), png_of(new_image("RGB", (64, 48), "teal")))
            self.expansion(image)
            try:
                yield
            finally:
                self.forget(image)

    def tokens_of(self, image: Image) -> list[int]:
        """Return the tokens of an image alone."""
        [row] = self.tokenised([self.mark], [[image]])
        return row

    def tokenised(self, texts: Sequence[str], images: Sequence[Sequence[Image]]) -> list[list[int]]:
        """Tokenise rendered prompts, each with the mark in place of every image of its own. Raises ValueError where a
        prompt has more or fewer marks than images.
        """
        expanded = list[str]()
        for text, own in zip(texts, images, strict=True):
            pieces = text.split(self.mark)
            if len(pieces) != len(own) + 1:
                raise ValueError(
                    f"the chat template writes {self.mark!r} {len(pieces) - 1} times for {len(own)} images of a prompt"
                )
            whole = pieces[0]
            for image, piece in zip(own, pieces[1:], strict=True):
                whole += self.expansion(image).replacement + piece
            expanded.append(whole)
        rows = token_ids_of(self.tokenizer, expanded)
        return [self._with_places(row, own) for row, own in zip(rows, images, strict=True)]

    def _with_places(self, row: list[int], images: Sequence[Image]) -> list[int]:
        """Replace placeholders by the ids of the images' places, in order."""
        places = [place for image in images for place in image_ids(image.key, self.expansion(image).count)]
        count = row.count(self.placeholder)
        if count != len(places):
            raise ValueError(f"a prompt has {count} places for features, and its images have {len(places)}")
        ids = iter(places)
        return [next(ids) if token == self.placeholder else token for token in row]


@dataclass(frozen=True)
class Features:
    """The tower's output for an image of n places: `pooled` (n, H), and `deep` (n, H) of each layer that adds them to
    its states (Qwen3-VL). grid: (1, 3) frames, rows and columns of patches, where the model's positions need it.
    """

    pooled: Tensor
    deep: tuple[Tensor, ...]
    grid: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.pooled, *self.deep))


@dataclass(frozen=True)
class Piece:
    """Places `start` to `stop` of an image, as they follow one another in a row."""

    key: int
    start: int
    stop: int


@dataclass(frozen=True)
class ImagePass:
    """The images of a pass over tokens (b, L). places (b, L): where an image is; features (n, H): of these, row by row.

    encoded: the same in the shape of the library's output, for a model that reads features or ids in its layers too;
    place_names: the arguments that tell the model the places, since those of an image see one another.
    """

    places: Tensor
    features: Tensor
    encoded: Any
    place_names: tuple[str, ...]

    def run(self, backbone: Any, ids: Tensor, **options: Any) -> Any:
        """Run the backbone over ids (b, L) with features in the places of images. Only the embedding's other rows have
        a gradient.
        """
        options |= {name: self.places.long() for name in self.place_names}
        if self.encoded is not None:
            return backbone(input_ids=ids, mm_encoder_outputs={"image": self.encoded}, **options)
        embedded = backbone.get_input_embeddings()(ids)
        features = self.features.to(embedded.dtype)
        return backbone(inputs_embeds=embedded.masked_scatter(self.places.unsqueeze(-1), features), **options)


class ImageInputs:
    """The images of prompts for the backbone of a vision-language model.

    cache_bytes: of features that are kept, on the model's device; more are computed again. tower_passes: how often an
    image went through the tower.
    """

    def __init__(self, backbone: nn.Module, expander: ImageExpander, *, cache_bytes: int, unread: int) -> None:
        self.backbone: Any = backbone
        self.expander = expander
        self.cache_bytes = cache_bytes
        self.unread = unread  # the token that a sampled placeholder is read as
        self.device: torch.device = next(backbone.parameters()).device
        self.axes = 3 if hasattr(backbone, "get_rope_index") else 1  # of positions: frame, row, column (2409.12191)
        # The arguments that tell the places of images where these see one another.
        self.place_names = place_names(self.backbone)
        # Whether layers read ids beside embeddings (Gemma 4's embeddings of each layer).
        self.reads_ids = "per_layer_inputs" in inspect.signature(self.backbone.forward).parameters
        self.tower_passes = 0
        self._output_class: Any = None  # of the tower's output
        self._in_lists = False  # whether it has lists of tensors
        self._features: OrderedDict[str, Features] = OrderedDict()  # by the whole hash, the oldest first
        self._kept_bytes = 0

    @property
    def sees_ahead(self) -> bool:
        """Return whether the places of an image see one another, so that it cannot be read in two passes."""
        return bool(self.place_names)

    # ---- features ----

    def features(self, key: int) -> Features:
        """Return the features of an image; they are computed where they are not kept."""
        image = self.expander.images[key]
        if image.sha256 not in self._features:
            found = self._computed(image)
            self._features[image.sha256] = found
            self._kept_bytes += found.nbytes
            while len(self._features) > 1 and self._kept_bytes > self.cache_bytes:
                _, evicted = self._features.popitem(last=False)
                self._kept_bytes -= evicted.nbytes
        self._features.move_to_end(image.sha256)
        return self._features[image.sha256]

    def _computed(self, image: Image) -> Features:
        pixels = self.expander.process(image).pixels
        given = self._read_by(self.backbone.get_image_features, pixels)
        self.tower_passes += 1
        # The same bits whatever pass asks: outside of autocast, and usable by passes with and without gradients.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            output = self.backbone.get_image_features(**given, return_dict=True)
        self._output_class = type(output)
        self._in_lists = isinstance(output.pooler_output, list | tuple)
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(_rows(output.pooler_output), tuple(map(_rows, deep)), pixels.get(GRID))

    def _read_by(self, function: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a function of the model takes, on its device."""
        names = {*inspect.signature(function).parameters}
        return {name: to_device(value, self.device) for name, value in tensors.items() if name in names}

    def library_states(self, tokens: list[int]) -> Tensor:
        """Compute the states (n, H) of a row with one image as the library does it, from pixels."""
        keys = {piece.key for piece in pieces_of(tokens)}
        [key] = keys
        ids = torch.tensor([tokens])
        is_image = (ids >= FIRST_IMAGE_ID).long()
        given = {
            **self.expander.process(self.expander.images[key]).pixels,
            "input_ids": self.plain(ids),
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": is_image,
            "token_type_ids": is_image,
        }
        states = self.backbone(**self._read_by(self.backbone.forward, given), use_cache=False).last_hidden_state[0]
        if hasattr(self.backbone, "rope_deltas"):
            self.backbone.rope_deltas = None
        return states

    def _encoded(self, pooled: Tensor, deep: list[Tensor]) -> Any:
        """Return features in the shape of the library's output."""
        whole = [pooled] if self._in_lists else pooled
        layers = {"deepstack_features": [[each] for each in deep]} if deep else {}
        return self._output_class(pooler_output=whole, **layers)

    # ---- passes ----

    def plain(self, ids: Tensor) -> Tensor:
        """Return ids as the embedding reads them."""
        ids = torch.where(ids == self.expander.placeholder, self.unread, ids)
        return torch.where(ids >= FIRST_IMAGE_ID, self.expander.placeholder, ids)

    def of_pass(self, rows: Iterable[list[int]], ids: Tensor) -> ImagePass | None:
        """Return the images of a pass over tokens ids (b, L); None where there are none. rows: the same tokens without
        padding.
        """
        pieces = [piece for row in rows for piece in pieces_of(row)]
        if not pieces:
            return None
        found = [(self.features(piece.key), slice(piece.start, piece.stop)) for piece in pieces]
        places = to_device(ids >= FIRST_IMAGE_ID, self.device)
        pooled = torch.cat([features.pooled[where] for features, where in found])
        layers = range(len(found[0][0].deep))
        deep = [torch.cat([features.deep[layer][where] for features, where in found]) for layer in layers]
        encoded = self._encoded(pooled, deep) if deep or self.reads_ids else None
        return ImagePass(places, pooled, encoded, place_names=self.place_names)

    def positions(self, row: list[int]) -> RowPositions:
        """Return the positions of the tokens of a prompt, or of what comes first in a row."""
        pieces = pieces_of(row) if self.axes > 1 else []
        own = torch.arange(len(row)).expand(self.axes, -1)
        if not pieces:
            return RowPositions(own, shift=0)
        assert all(piece.start == 0 for piece in pieces), "a prompt was cut inside an image"
        grids = [grid for piece in pieces if (grid := self.features(piece.key).grid) is not None]
        is_image = torch.tensor([[is_image_id(token) for token in row]])
        ids = torch.where(is_image, self.expander.placeholder, 0)
        found, _ = self.backbone.get_rope_index(
            ids, mm_token_type_ids=is_image.long(), image_grid_thw=torch.cat(grids), attention_mask=torch.ones_like(ids)
        )
        return RowPositions(found[:, 0], shift=int(found.max()) + 1 - len(row))


def place_names(backbone: Any) -> tuple[str, ...]:
    """Return the arguments of a model in which the places of an image see one another: Gemma 3 in every layer, the
    larger ones of Gemma 4 in layers with a window. Qwen's take `mm_token_type_ids` for positions, which are given.
    """
    config = backbone.config.get_text_config()
    if getattr(config, "use_bidirectional_attention", None) == "vision":
        return ("mm_token_type_ids",)
    return ("token_type_ids",) if "token_type_ids" in inspect.signature(backbone.forward).parameters else ()


def within(picture: Picture, max_pixels: int) -> Picture:
    """Scale an image down to at most `max_pixels`, by the same factor in both directions; a smaller one stays."""
    width, height = picture.size
    if width * height <= max_pixels:
        return picture
    factor = math.sqrt(max_pixels / (width * height))
    return picture.resize((max(1, math.floor(width * factor)), max(1, math.floor(height * factor))))


def pieces_of(row: list[int]) -> list[Piece]:
    """Find the pieces of images in the tokens of a row, in order."""
    pieces = list[Piece]()
    places = [(at, token) for at, token in enumerate(row) if is_image_id(token)]
    for _, run in groupby(places, key=lambda placed: placed[1] - placed[0]):
        tokens = [token for _, token in run]
        start = place_of_id(tokens[0])
        pieces.append(Piece(key_of_id(tokens[0]), start, start + len(tokens)))
    return pieces


def _rows(value: Any) -> Tensor:
    """Return features (n, H) of what the library gives as a tensor or as a list of them."""
    whole = torch.cat([*value]) if isinstance(value, list | tuple) else value
    return whole.reshape(-1, whole.shape[-1]).contiguous()
