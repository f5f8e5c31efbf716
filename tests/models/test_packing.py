"""Packed rows behind shared prompts: the states, log-probabilities and gradients of padded rows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.building import full_roles, lora_roles, roles_with_critic, stir
from tests.models.live_bytes import LiveBytes
from tests.tiny_models import TinyModels
from tinyrl.models import layers, packing
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.device import CHUNK_ELEMENTS, MICRO_BATCH_TOKENS
from tinyrl.models.packing import attending, pack, shared_start
from tinyrl.models.policy import Policy
from tinyrl.models.states import all_states

# A group of four (its last response empty, one of a single token), one of one, one of two with another row in between,
# a row without a response. Token 0 pads; where pad is EOS it is both.
A, B, C, D = [7, 8, 9], [0, 4], list(range(20, 40)), [5]
ROWS = [
    (A, [11, 0, 12, 0]),
    (A, [13]),
    (B, [14, 15, 16, 17, 18, 19, 20]),
    (C, [21, 22]),
    (A, [23, 24, 25, 26, 27, 28, 29, 30, 31, 0]),
    (A, []),
    (C, [32, 33, 34]),
    (D, []),
]
PROMPTS, RESPONSES = [p for p, _ in ROWS], [r for _, r in ROWS]
START = list(range(60, 75))


def test_layout_with_the_last_tokens():
    batch = batch_of(examples([[5, 6], [7], [5, 6]], [[8, 9], [], [13]]), packed=True, last_tokens=True)
    assert batch.input_ids.tolist() == [[5, 6, 8, 9, 13, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert batch.state_index.tolist() == [1, 2, 1]
    assert batch.last_index is not None
    assert batch.last_index.tolist() == [3, 5, 4]


def test_length_of_the_shared_start():
    """At least 8 tokens; the shortest prompt has one of its own."""
    starts = [[range(9), [*range(9), 50]], [[*range(12), 50], [*range(12), 51]], [[*range(7), 50], [*range(7), 51]]]
    assert [shared_start([list(prompt) for prompt in prompts]) for prompts in starts] == [8, 12, 0]


def both(roles: Policy, run: Callable[[], Any]) -> list[Any]:
    """Run with packed and with padded batches."""
    assert roles.packs
    found = []
    for roles.packs in (True, False):
        found.append(run())
    roles.packs = True
    return found


def gradients(roles: Policy, role: Any, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    with roles.acting(role):
        loss().backward()
    found = {}
    for name, parameter in roles.parameters[role].items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def policy_loss(roles: Policy, rows: Sequence[int] = range(len(ROWS)), *, start: Sequence[int] = ()) -> Tensor:
    """Weighs every token differently, so that no mistake cancels."""
    batch = roles.batch_of(examples([[*start, *PROMPTS[i]] for i in rows], [RESPONSES[i] for i in rows]))
    logprobs, entropy = roles.logprobs("policy", batch, temperature=0.7, entropy_grad=True)
    weights = torch.linspace(-1.0, 2.0, logprobs.numel()).view_as(logprobs)
    return (weights * logprobs).sum() + 0.3 * entropy.square().sum()


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert max(float(g.norm()) for g in theirs.values()) > 0
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(("kind", "start"), [("qwen3", START), ("gpt2", [])])
def test_gradients_are_those_of_padded_rows(tiny: TinyModels, kind: str, start: list[int]):
    """Groups of several rows, single ones and rows without a response, behind one system prompt or none."""
    roles = (lora_roles if start else full_roles)(tiny(kind, pad_is_eos=not start))
    stir(roles.parameters["policy"])
    packed = roles.batch_of(examples([[*start, *prompt] for prompt in PROMPTS], RESPONSES))
    assert packed.input_ids.shape[1] == len(start) + sum(map(len, (A, B, C, D))) + 3 + 6 + 1 + 9 + 2
    assert_same_gradients(*both(roles, lambda: gradients(roles, "policy", lambda: policy_loss(roles, start=start))))


def test_a_mask_changes_which_tokens_are_scored_and_not_how(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    stir(roles.parameters["policy"])
    masks = [[(i + t) % 3 != 0 for t in range(len(response))] for i, response in enumerate(RESPONSES)]
    with torch.no_grad(), roles.acting("policy"):
        some, every = (roles.batch_of(examples(PROMPTS, RESPONSES, m)) for m in (masks, None))
        ours, theirs = (roles.logprobs("policy", batch, temperature=0.7)[0] for batch in (some, every))
    assert int(some.mask.sum()) == sum(map(sum, masks)) == len(some.targets)
    torch.testing.assert_close(ours, torch.where(some.mask, theirs, 0.0), atol=1e-6, rtol=1e-6)


def test_recomputed_layers_attend_as_they_did(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Backward comes after the forward pass of another batch. The library's layers, since ours attend by themselves."""
    monkeypatch.setattr("tinyrl.models.states.supports_fused_layers", lambda backbone: False)
    roles = lora_roles(tiny("gpt2"))
    stir(roles.parameters["policy"])

    def loss() -> Tensor:
        return policy_loss(roles, [0, 1, 4]) + policy_loss(roles, [3, 6]) + policy_loss(roles, [2])

    stored = gradients(roles, "policy", loss)
    with roles.gradient_checkpointing():
        recomputed = gradients(roles, "policy", loss)
    torch.testing.assert_close(recomputed, stored, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="stop"), attending(roles.backbone("policy"), pack([(2, [1])])):
        raise RuntimeError("stop")
    assert roles.causal.config._attn_implementation == "sdpa"  # after an error too


def test_values_and_scores_are_those_of_padded_rows(tiny: TinyModels):
    roles = roles_with_critic(tiny("qwen2"), with_lora=True, kind="adapter")
    roles.train_score_head()
    stir(roles.parameters["critic"])
    stir(roles.parameters["policy"])

    def loss() -> Tensor:
        return roles.values(roles.batch_of(examples(PROMPTS, RESPONSES))).square().sum()

    assert_same_gradients(*both(roles, lambda: gradients(roles, "critic", loss)))
    with torch.no_grad(), roles.acting("policy"):
        ours, theirs = both(
            roles, lambda: roles.reward_scores(roles.batch_of(examples(PROMPTS, RESPONSES), last_tokens=True))
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert theirs.unique().numel() == len(ROWS)
        with pytest.raises(AssertionError, match="without its last tokens"):
            roles.reward_scores(roles.batch_of(examples(PROMPTS, RESPONSES)))


def test_nothing_is_as_large_as_the_sequence_squared(tiny: TinyModels):
    backbone = lora_roles(tiny("llama")).backbone("policy")
    batch = batch_of(examples([[1 + i // 8, 2, 3, 4] for i in range(128)], [[5] * 12] * 128), packed=True)
    n = batch.input_ids.shape[1]
    assert n == 16 * 4 + 128 * 11
    with LiveBytes() as live, torch.no_grad():
        all_states(backbone, batch)
    assert 4 * 64 * n <= live.most < 4 * n * n / 2  # a mask alone would take 4 n^2


def test_recomputed_layers_tiles_blocks_of_queries_and_chunks_change_no_gradient(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    """Behind 18 keys a mask of 64 numbers has 2 or 3 rows, and the longest response has 9 queries. Tiles have 7 tokens,
    and the last one fewer.
    """
    roles = lora_roles(tiny("qwen3"))
    stir(roles.parameters["policy"])
    calls: list[int] = []
    attend = packing.scaled_dot_product_attention

    def counted(query: Tensor, *given: Any, **options: Any) -> Tensor:
        calls.append(query.shape[2])
        return attend(query, *given, **options)

    monkeypatch.setattr(packing, "scaled_dot_product_attention", counted)

    def step() -> tuple[dict[str, Tensor], int]:
        calls.clear()
        return gradients(roles, "policy", lambda: policy_loss(roles, start=START)), max(calls)

    plain, longest = step()
    with roles.gradient_checkpointing():  # compares recomputed layers with the library's
        step()
    monkeypatch.setattr(packing, "MASK_ELEMENTS", 64)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 4 * roles.head("policy").weight.shape[0])
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 7)
    tiles: list[int] = []
    backward = layers.feed_forward_backward

    def tiled(dy: Tensor, *given: Any, **options: Any) -> Any:
        tiles.append(len(dy))
        return backward(dy, *given, **options)

    monkeypatch.setattr(layers, "feed_forward_backward", tiled)
    with roles.gradient_checkpointing():
        in_parts, _ = step()
    behind = [width for width in calls if width != len(START)]
    assert (longest, max(behind)) == (len(C), 3)
    assert (max(tiles), min(tiles) < 7) == (7, True)
    assert_same_gradients(in_parts, plain)


@pytest.mark.parametrize("responses", [2, 1])
@pytest.mark.wide
def test_memory_of_a_long_text_grows_with_its_length_and_not_the_square(
    tiny: TinyModels, responses: int, monkeypatch: pytest.MonkeyPatch
):
    """One causal row, and two behind the keys of their prompt, forward and backward, with recomputed layers."""
    monkeypatch.setattr(packing, "MASK_ELEMENTS", 1 << 20)  # a quarter of it, for texts of half its length
    roles = lora_roles(tiny("llama"))
    assert roles.packs

    def most(length: int) -> int:
        batch = roles.batch_of(examples([[1, 2, 3]] * responses, [[4] * length] * responses))
        with LiveBytes() as live, roles.acting("policy"), roles.gradient_checkpointing():
            roles.logprobs("policy", batch, temperature=1.0)[0].sum().backward()
        return live.most

    most(16)  # compares our layers with the library's
    assert most(2048) < 2.2 * most(1024)


class OnCard(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("flash", "key_heads"), [(False, 4), (True, 2)])
def test_shared_key_heads_are_repeated_on_a_gpu_where_flash_attention_cannot_run(
    monkeypatch: pytest.MonkeyPatch, flash: bool, key_heads: int
):
    """As for float16 on a T4: behind a start and a prompt, and alone. Outputs and gradients are those of a CPU."""
    sdpa = packing.scaled_dot_product_attention
    calls: list[tuple[int, int, bool]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool, **causal: Any) -> Tensor:
        assert len(causal) == 1
        calls.append((k.shape[1], v.shape[1], enable_gqa))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        plain = [x.as_subclass(Tensor) for x in (q, k, v)]
        return sdpa(plain[0], plain[1], plain[2], attn_mask=mask, scale=scale, enable_gqa=enable_gqa)

    layout = pack([(3, [2, 5]), (4, [1])], start=6)
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(21, heads, 8, generator=generator).half().requires_grad_()

    given = (drawn(4), drawn(2), drawn(2))
    weight = drawn(4).detach()

    def computed(*tensors: Tensor) -> list[Tensor]:
        out = packing.attend(tensors[0], tensors[1], tensors[2], layout, 0.3)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]

    expected = computed(*given)
    monkeypatch.setattr(packing, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(packing, "can_use_flash_attention", lambda params: flash, raising=False)
    found = computed(*(x.as_subclass(OnCard) for x in given))
    assert set(calls) == {(key_heads, key_heads, flash)}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.as_subclass(Tensor), theirs, atol=1e-2, rtol=1e-2)
