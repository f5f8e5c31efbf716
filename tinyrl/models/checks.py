"""Compare our numbers with the library's: the head, packed rows, our layers, the sampler, policy and reference.

In float32 they must be equal up to rounding. In half precision two correct computations are far apart where logits are
sharp (a real model of 135M parameters: 0.06 to 0.18 nats on average), so each is compared with float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import DynamicCache, PreTrainedModel

from tinyrl.data.images import is_image_id
from tinyrl.models.batch import Batch, Example, batch_of, examples, library_states
from tinyrl.models.device import HALVES, autocast_dtype
from tinyrl.models.layers import can_run_now, fused_states, has_known_parts, recomputes
from tinyrl.models.loading import embedding_rows, reading
from tinyrl.models.packing import CannotPack

if TYPE_CHECKING:
    from tinyrl.models.image_inputs import ImageInputs
    from tinyrl.models.logprobs import Head

MOST_IN_FLOAT32 = 1e-4  # nats, or relative error of a state, between two computations in float32
SAME_IN_HALF = 0.02  # relative error of a state between two computations that round in half precision alike
TIMES_THE_LIBRARY = 1.5  # how much larger our mean error may be than that of the library's modules
SMALL = 1e-3  # share of the largest norm: the least norm that an error is relative to
COMPARED_LAYERS = 2  # whose derivatives are compared
DECODED = 7  # tokens of each text that the sampler decodes one by one
NOT_LIKE_LLAMA = (AttributeError, CannotPack, LookupError, RuntimeError, TypeError, ValueError)


def as_exact(error: float, library: float) -> bool:
    """Return whether a computation with this mean error is as good as the library's, whose mean error is `library`."""
    return error <= max(TIMES_THE_LIBRARY * library, MOST_IN_FLOAT32)  # False for NaN


def ordinary_ids(vocabulary: int, count: int, *, start: int = 0) -> list[int]:
    """Return token ids spread over the middle of a vocabulary: special tokens stand at its ends."""
    middle = max(1, vocabulary // 2)
    return [(vocabulary // 4 + (7919 * (start + i) + 1009) % middle) % vocabulary for i in range(count)]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Have a half-precision model compute in float32 inside; the weights of a layer are widened while it runs."""
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(layer: nn.Module, _: object) -> None:
        for parameter in _read_by(layer):
            if parameter.dtype in HALVES:
                originals[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(layer: nn.Module, *_: object) -> None:
        for parameter in _read_by(layer):
            if parameter in originals:
                parameter.data = originals.pop(parameter)

    four_bit: dict[Any, torch.dtype] = {m: m.compute_dtype for m in model.modules() if hasattr(m, "compute_dtype")}  # pyright: ignore
    for layer in four_bit:
        layer.compute_dtype = torch.float32
    layers = [m for m in model.modules() if any(p.dtype in HALVES for p in _read_by(m))]
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, dtype in four_bit.items():
            layer.compute_dtype = dtype
        for parameter, data in originals.items():  # of a layer that raised
            parameter.data = data


def _read_by(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a layer reads when it runs. PEFT's wrapper of bare parameters (experts, a router) reads
    those of the layer inside it, to add its branches in their dtype, before that layer runs.
    """
    owner = layer.get_base_layer() if isinstance(layer, ParamWrapper) else layer
    return owner.parameters(recurse=False)


# ---- the head ----


@torch.no_grad()
def few_tokens(model: PreTrainedModel, *, path: str) -> Tensor:
    """Run a model on eight tokens; return float32 logits (8, V), a classifier's (labels,), or states (8, H). Raises
    ValueError where it cannot be computed (by settings that only its forward pass reads), or is not finite.
    """
    with reading(f"the model of {path!r} cannot be computed"):
        output = model(input_ids=_few_ids(model))
    numbers = output.logits if hasattr(output, "logits") else output.last_hidden_state
    bias = getattr(model.get_output_embeddings(), "bias", None)
    never = False if bias is None else bias == -torch.inf  # tokens that a head rules out
    if not (numbers.isfinite() | never).all():
        raise ValueError(f"{path!r} gives numbers that are not finite: its weights are damaged")
    return numbers[0].float()


def _few_ids(model: PreTrainedModel) -> Tensor:
    """Return eight ids (1, 8) without padding: a classifier is scored at its last token that is none."""
    padding = model.config.get_text_config().pad_token_id
    ids = [number for number in range(1, 10) if number != padding][:8]
    return torch.tensor([ids], device=next(model.parameters()).device) % embedding_rows(model)


def check_head(model: PreTrainedModel, head: Head, backbone: nn.Module) -> None:
    """Raise ValueError unless head(states) are the model's own logits on a few tokens (a classifier's at the last one):
    a model that changes its logits in an unknown way would silently train on wrong probabilities, or on wrong scores.
    """
    path = str(model.config.name_or_path)
    own = few_tokens(model, path=path)
    with torch.no_grad():
        ours = head.logits(backbone(input_ids=_few_ids(model)).last_hidden_state[0])
    ours = ours if own.dim() == 2 else ours[-1]
    tolerance = 1e-4 if head.weight.dtype == torch.float32 else 0.02  # a bfloat16 logit is rounded by up to 0.004
    there = own.isfinite()  # a bias of -inf rules a token out
    gap = (own - ours)[there].abs().max().item() / max(1.0, own[there].abs().max().item())
    if not (gap < tolerance and torch.equal(there, ours.isfinite())):
        unknown = f"changes its logits in a way tinyrl does not know (relative difference {gap:.2g})"
        raise ValueError(f"{path!r}: {type(model).__name__} {unknown}")


# ---- packed rows and our layers ----


def _with_image(images: ImageInputs, vocabulary: int) -> list[int]:
    """Return ordinary tokens around those of an image."""
    first = next(iter(images.expander.images.values()))
    return [*ordinary_ids(vocabulary, 3), *images.expander.tokens_of(first), *ordinary_ids(vocabulary, 24, start=3)]


def check_images(images: ImageInputs, backbone: Any) -> None:
    """Raise ValueError unless states behind an image are the library's, which runs the tower in every pass."""
    tokens = _with_image(images, embedding_rows(backbone))
    batch = batch_of(examples([tokens], [[]]), device=images.device, images=images)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        ours = library_states(backbone, batch).float()
        theirs = images.library_states(tokens).float()
    error = float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).mean())  # both computed in the model's dtype
    if not error <= (SAME_IN_HALF if backbone.dtype in HALVES else MOST_IN_FLOAT32):
        kind = type(backbone).__name__
        raise ValueError(
            f"{kind} reads image features otherwise than tinyrl gives them: states differ by {error:.2g} of their norm"
        )


def _few_rows(backbone: Any) -> tuple[Batch, list[list[int]]]:
    """Pack four rows: a prompt with three responses and another with one; return them one by one as well."""
    ids = ordinary_ids(backbone.config.get_text_config().vocab_size, 14)
    prompts = [ids[:4]] * 3 + [ids[4:6]]
    responses = [ids[6:9], ids[9:10], ids[2:8], ids[10:14]]
    items = examples(prompts, responses)
    device = next(backbone.parameters()).device
    return batch_of(items, packed=True, device=device, last_tokens=True), [*chain(*(item.texts for item in items))]


@torch.no_grad()
def packs_exactly(backbone: Any) -> bool:
    """Return whether the library's states of a few packed tokens are those of the rows one by one. False for eager
    attention, and for attention windows, which are longer than the few tokens.
    """
    config = backbone.config.get_text_config(decoder=True)
    windows = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if windows or not getattr(backbone, "_supports_attention_backend", False) or config._attn_implementation == "eager":
        return False
    batch, rows = _few_rows(backbone)

    def one_by_one() -> list[Tensor]:
        """Compute the states of the tokens that each row adds to the packed ones."""
        new = (7, 1, 6, 6)
        ids = (batch.input_ids.new_tensor([row]) for row in rows)
        states = [backbone(input_ids=row, use_cache=False).last_hidden_state[0] for row in ids]
        return [torch.cat([row[-n:] for row, n in zip(states, new, strict=True)])]

    try:
        return _alike([library_states(backbone, batch)], one_by_one, backbone)
    except CannotPack:
        return False


@torch.no_grad()
def packs_images_exactly(backbone: Any, images: ImageInputs) -> bool:
    """Return whether the states of packed rows behind a prompt with an image are those of the rows one by one."""
    tokens = _with_image(images, embedding_rows(backbone))
    ids = ordinary_ids(embedding_rows(backbone), 12, start=50)
    items = examples([tokens, tokens, tokens[1:]], [ids[:4], ids[4:9], ids[9:]])

    def states_of(items: list[Example], *, packed: bool) -> Tensor:
        batch = batch_of(items, packed=packed, device=images.device, images=images)
        return library_states(backbone, batch)[batch.state_index]

    def one_by_one() -> list[Tensor]:
        return [torch.cat([states_of([item], packed=False) for item in items])]

    try:
        return _alike([states_of(items, packed=True)], one_by_one, backbone)
    except CannotPack:
        return False


@dataclass(frozen=True)
class Computation:
    """How our layers compute: the dtype of autocast, and whether layers are recomputed in backward, which is another
    function with derivatives of its own.
    """

    low: torch.dtype | None
    recomputes: bool


_compared: WeakKeyDictionary[nn.Module, dict[Computation, bool]] = WeakKeyDictionary()


def supports_fused_layers(backbone: Any) -> bool:
    """Return whether layers.py currently computes what the decoder does; compared once for each computation."""
    known = _compared.setdefault(backbone, {})
    now = Computation(autocast_dtype(next(backbone.parameters()).device.type), recomputes(backbone))
    if now not in known and not has_known_parts(backbone):
        known[now] = False
    if not known.get(now, True) or not can_run_now(backbone):
        return False
    if now not in known:
        with torch.inference_mode(False):  # where autograd refuses tensors, no derivative could be compared
            known[now] = _same_as_the_library(backbone, now)
    return known[now]


@torch.no_grad()
def _same_as_the_library(backbone: Any, now: Computation) -> bool:
    """Compare the states of all layers on a few packed tokens, and the derivatives of the first layers."""
    batch, _ = _few_rows(backbone)
    few = copy.copy(backbone)
    layers: list[Any] = [copy.copy(layer) for layer in backbone.layers[:COMPARED_LAYERS]]
    few._modules = {**backbone._modules, "layers": nn.ModuleList(layers)}

    def our_gradients() -> list[Tensor]:
        for layer in layers:
            layer.gradient_checkpointing = now.recomputes
        return _gradients(fused_states, few, batch)

    def library_gradients() -> list[Tensor]:
        for layer in layers:
            layer.gradient_checkpointing = False
        return _gradients(library_states, few, batch)

    try:
        states = _alike([fused_states(backbone, batch)], lambda: [library_states(backbone, batch)], backbone)
        return states and _alike(our_gradients(), library_gradients, few)
    except torch.OutOfMemoryError:
        raise
    except NOT_LIKE_LLAMA:  # parts of the same names and another shape
        return False


def _gradients(states: Callable[[nn.Module, Batch], Tensor], backbone: Any, batch: Batch) -> list[Tensor]:
    """Return the gradients of a weighted sum of the hidden states with respect to the embedded tokens and the trainable
    parameters, each (1, n).
    """
    leaves: list[Tensor] = []

    def as_leaf(_layer: nn.Module, _ids: object, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    hook = backbone.embed_tokens.register_forward_hook(as_leaf)
    try:  # saved_tensors_hooks: in_float32 changes weights after a layer has run
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda saved: saved):
            found = states(backbone, batch).float()
            loss = (found * torch.arange(found.numel(), device=found.device).cos().view_as(found)).sum()
    finally:
        hook.remove()
    trained = [p for p in backbone.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [*leaves, *trained], allow_unused=True)
    return [gradient.float().reshape(1, -1) for gradient in gradients if gradient is not None]


def _alike(ours: list[Tensor], library: Callable[[], list[Tensor]], backbone: nn.Module) -> bool:
    """Return whether `ours` are the library's numbers: equal in float32, as near to float32 in half precision. Tensors
    are (K, n); the error of a row is relative to its norm.
    """

    def errors(found: list[Tensor], exact: list[Tensor]) -> Tensor:
        gaps = torch.cat([(x.float() - y.float()).norm(dim=1) for x, y in zip(found, exact, strict=True)])
        norms = torch.cat([x.float().norm(dim=1) for x in exact])
        return gaps / norms.clamp(min=SMALL * float(norms.max()))  # what should be zero is what rounding leaves

    kind = ours[0].device.type
    theirs = library()
    if autocast_dtype(kind) is None and ours[0].dtype == torch.float32:
        return bool((errors(ours, theirs) <= MOST_IN_FLOAT32).all())
    with torch.autocast(kind, enabled=False), in_float32(backbone):
        exact = library()
    return as_exact(float(errors(ours, exact).mean()), float(errors(theirs, exact).mean()))


# ---- the samplers ----


class SamplersDecoder(Protocol):
    """A decoder of generation/, as far as it is compared here; its cache has a method exchange(row, row, tokens)."""

    dtype: torch.dtype
    device: torch.device

    @property
    def embedding(self) -> Tensor: ...

    def new_cache(self, rows: int, width: int) -> Any: ...

    def prefill(self, ids: Tensor, lengths: Tensor, *, cache: Any, rows: list[range]) -> Tensor: ...

    def extend(
        self, ids: Tensor, lengths: Tensor, start: Tensor, *, cache: Any, rows: list[int], width: int
    ) -> Tensor: ...

    def step(self, token: Tensor, position: Tensor, *, cache: Any, width: int) -> Tensor: ...


@torch.no_grad()
def decodes_exactly(
    backbone: nn.Module, decoder: SamplersDecoder, *, longest: int, images: ImageInputs | None = None
) -> bool:
    """Return whether a decoder computes the library's states at the end of texts of different lengths, one of `longest`
    tokens (a scale of positions, a window or a mask may go wrong late). Half precision is judged by more texts:
    rounding is much the same inside one. images: of a model that reads them; one of these is in a further text.
    """
    half = decoder.dtype in HALVES
    vocabulary = len(decoder.embedding)
    short = [ordinary_ids(vocabulary, 12 + 8 * (i % 2), start=100 * i) for i in range(8 if half else 2)]
    long = [ordinary_ids(vocabulary, longest)] if longest > max(map(len, short)) else []
    shown = [] if images is None or not images.expander.images else [_with_image(images, vocabulary), short[0]]
    parts = [texts for texts in (short, long, shown) if texts]
    ours = [states for texts in parts for states in decoded_states(decoder, texts)]
    return _are_the_librarys(backbone, [*chain(*parts)], ours, dtype=decoder.dtype, images=images)


def decoded_states(decoder: SamplersDecoder, texts: list[list[int]]) -> list[dict[int, Tensor]]:
    """Decode the last DECODED tokens of each text as a scheduler does, and return states by position. Rows have held
    other texts; prompts and what extends them have different lengths; a row moves; then all rows are decoded token by
    token, and at the end fewer of them.
    """
    device = decoder.device
    count = len(texts)
    longest = max(map(len, texts))
    cache = decoder.new_cache(count + 1, longest)
    slots = [count, *range(1, count)]  # the first text moves to row 0 later
    rows = [range(slot, slot + 1) for slot in slots]

    def padded(parts: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(part) for part in parts], batch_first=True)
        return ids.to(device), torch.tensor([len(part) for part in parts], device=device)

    backwards = [[token for token in text[::-1] if not is_image_id(token)] for text in texts]
    decoder.prefill(*padded([text[: DECODED - 1 + i % 2] for i, text in enumerate(backwards)]), cache=cache, rows=rows)
    at = [len(text) - DECODED for text in texts]
    prompts = padded([text[:end] for text, end in zip(texts, at, strict=True)])
    states = decoder.prefill(*prompts, cache=cache, rows=rows)
    found = [{end - 1: state} for end, state in zip(at, states, strict=True)]
    few = (count + 1) // 2
    new = [text[end : end + (2 if i < few else 3)] for i, (text, end) in enumerate(zip(texts, at, strict=True))]
    states = decoder.extend(*padded(new), torch.tensor(at, device=device), cache=cache, rows=slots, width=longest)
    at = [end + len(more) for end, more in zip(at, new, strict=True)]
    for of_text, end, state in zip(found, at, states, strict=True):
        of_text[end - 1] = state
    cache.exchange(count, 0, longest)
    for live in [*[count] * (DECODED - 3), few]:
        token = torch.tensor([text[end] for text, end in zip(texts[:live], at[:live], strict=True)], device=device)
        states = decoder.step(token, torch.tensor(at[:live], device=device), cache=cache, width=longest)
        for i, state in enumerate(states):
            found[i][at[i]] = state
            at[i] += 1
    return found


@torch.no_grad()
def continues_exactly(
    backbone: nn.Module,
    forward: Callable[[Tensor, DynamicCache], Tensor],
    *,
    vocabulary: int,
    longest: int,
) -> bool:
    """Return whether `forward`, over prompts of one length and then token by token, computes the library's states of
    texts, one of them of `longest` tokens. It runs the library's modules, so all that can be wrong shows in float32.
    """
    device = next(backbone.parameters()).device
    short = [ordinary_ids(vocabulary, 20, start=100 * i) for i in range(2)]
    long = [ordinary_ids(vocabulary, longest)] if longest > 20 else []
    ours = list[dict[int, Tensor]]()
    for texts in (short, long):
        if not texts:
            continue
        ids = torch.tensor(texts, device=device)
        cache = DynamicCache(config=backbone.config)  # pyright: ignore[reportArgumentType]
        end = ids.shape[1] - DECODED
        with in_float32(backbone):
            states = {end - 1: forward(ids[:, :end], cache)}
            for position in range(end, ids.shape[1]):
                states[position] = forward(ids[:, position : position + 1], cache)
        ours += [{position: state[i] for position, state in states.items()} for i in range(len(texts))]
    with in_float32(backbone):
        return _are_the_librarys(backbone, [*short, *long], ours, dtype=torch.float32)


def _are_the_librarys(
    backbone: nn.Module,
    texts: list[list[int]],
    ours: list[dict[int, Tensor]],
    *,
    dtype: torch.dtype,
    images: ImageInputs | None = None,
) -> bool:
    """Compare states by position with those of a pass over each text."""
    device = next(backbone.parameters()).device

    def library() -> list[Tensor]:
        states = list[Tensor]()
        for text in texts:
            if any(map(is_image_id, text)):
                batch = batch_of(examples([text], [[]]), device=device, images=images)
                states.append(library_states(backbone, batch))
            else:
                ids = torch.tensor([text], device=device)
                states.append(backbone(input_ids=ids, use_cache=False).last_hidden_state[0])
        return [state[[*at]] for state, at in zip(states, ours, strict=True)]

    with torch.autocast(device.type, dtype=dtype, enabled=dtype in HALVES):
        return _alike([torch.stack([*at.values()]) for at in ours], library, backbone)
