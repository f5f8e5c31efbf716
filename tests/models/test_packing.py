"""Packed rows behind shared prompts: the states, log-probabilities and gradients of padded rows."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.building import full_roles, lora_roles, roles_with_critic, stir
from tests.models.live_bytes import LiveBytes
from tests.tiny_models import TinyModels
from tinyrl.models.batches import all_states, make_packed_batch
from tinyrl.models.packing import attending, pack, shared_start
from tinyrl.models.roles import Roles

PACKING = ("qwen3", "gpt2")
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


def test_layout_with_the_last_tokens():
    batch = make_packed_batch([[5, 6], [7], [5, 6]], [[8, 9], [], [13]], last_tokens=True)
    assert batch.input_ids.tolist() == [[5, 6, 8, 9, 13, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert batch.state_index.tolist() == [1, 2, 1]
    assert batch.last_index is not None
    assert batch.last_index.tolist() == [3, 5, 4]


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([range(9), [*range(9), 50], [*range(9), 51]], 8),  # the shortest has a token of its own
        ([[*range(12), 50], [*range(12), 51]], 12),
        ([[*range(7), 50], [*range(7), 51]], 0),
        ([[1]], 0),
    ],
)
def test_what_prompts_begin_with(prompts: list[list[int]], tokens: int):
    assert shared_start([list(prompt) for prompt in prompts]) == tokens


def both(roles: Roles, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What `run` gives with packed and with padded batches."""
    assert roles.packs
    ours = run()
    roles.packs = False
    theirs = run()
    roles.packs = True
    return ours, theirs


def scored(roles: Roles, rows: list[int] | None = None) -> tuple[Tensor, Tensor]:
    chosen = range(len(ROWS)) if rows is None else rows
    batch = roles.batch([PROMPTS[i] for i in chosen], [RESPONSES[i] for i in chosen])
    return roles.logprobs("policy", batch, temperature=0.7, entropy_grad=True)


def gradients(roles: Roles, role: str, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    with roles.acting(role):  # pyright: ignore[reportArgumentType]
        loss().backward()
    found = {}
    for name, parameter in roles.parameters[role].items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def policy_loss(roles: Roles, rows: list[int] | None = None) -> Tensor:
    """Weighs every token differently, so that no mistake cancels."""
    logprobs, entropy = scored(roles, rows)
    weights = torch.linspace(-1.0, 2.0, logprobs.numel()).view_as(logprobs) if rows is None else 1.0
    return (weights * logprobs).sum() + 0.3 * entropy.square().sum()


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert max(float(g.norm()) for g in theirs.values()) > 0
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_a_mask_changes_which_tokens_are_scored_and_not_how(tiny: TinyModels, packs: bool):
    roles = lora_roles(tiny("llama"))
    roles.packs = packs
    stir(roles.parameters["policy"])
    masks = [[(i + t) % 3 != 0 for t in range(len(response))] for i, response in enumerate(RESPONSES)]
    with torch.no_grad(), roles.acting("policy"):
        some = roles.batch(PROMPTS, RESPONSES, masks)
        kept = some.to_rows(torch.ones(len(some.targets))).bool()
        ours, theirs = roles.logprobs("policy", some, temperature=0.7)[0], scored(roles)[0]
    assert int(kept.sum()) == sum(map(sum, masks)) == len(some.targets)
    torch.testing.assert_close(ours, torch.where(kept, theirs, 0.0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", PACKING)
def test_gradients_are_those_of_padded_rows(tiny: TinyModels, kind: str):
    roles = full_roles(tiny(kind, pad_is_eos=True))
    stir(roles.parameters["policy"])
    assert_same_gradients(*both(roles, lambda: gradients(roles, "policy", lambda: policy_loss(roles))))


@pytest.mark.parametrize("kind", PACKING)
def test_behind_a_start_all_is_as_in_padded_rows(tiny: TinyModels, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Groups of several rows, single ones and rows without a response, all behind one system prompt."""
    start = list(range(60, 75))
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [[*start, *prompt] for prompt in PROMPTS])
    roles = lora_roles(tiny(kind))
    stir(roles.parameters["policy"])
    assert roles.batch(PROMPTS, RESPONSES).input_ids.shape[1] == 15 + sum(map(len, (A, B, C, D))) + 3 + 6 + 1 + 9 + 2
    with torch.no_grad(), roles.acting("policy"):
        ours, theirs = both(roles, lambda: scored(roles))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_same_gradients(*both(roles, lambda: gradients(roles, "policy", lambda: policy_loss(roles))))


def test_a_split_group_has_the_gradient_of_the_whole(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    stir(roles.parameters["policy"])
    rows = list(range(8))
    whole = gradients(roles, "policy", lambda: policy_loss(roles, rows))
    parts = gradients(roles, "policy", lambda: policy_loss(roles, [0, 6]) + policy_loss(roles, [4, 1, 2, 5, 7, 3]))
    assert_same_gradients(parts, whole)


def test_recomputed_layers_attend_as_they_did(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Backward comes after the forward pass, and here after the forward pass of another batch."""
    roles = lora_roles(tiny("gpt2"))
    stir(roles.parameters["policy"])

    def loss() -> Tensor:
        return policy_loss(roles, [0, 1, 4]) + policy_loss(roles, [3, 6]) + policy_loss(roles, [2])

    monkeypatch.setattr(
        "tinyrl.models.batches.supports_fused_layers", lambda backbone: False
    )  # which leaves such layers to the library
    kept = gradients(roles, "policy", loss)
    with roles.gradient_checkpointing():
        recomputed = gradients(roles, "policy", loss)
    for name, gradient in kept.items():
        assert torch.equal(recomputed[name], gradient), name
    assert roles.causal.config._attn_implementation == "sdpa"


def test_values_are_those_of_padded_rows(tiny: TinyModels):
    roles = roles_with_critic(tiny("qwen2"), with_lora=True, kind="adapter")
    stir(roles.parameters["critic"])

    def loss() -> Tensor:
        return roles.values(roles.batch(PROMPTS, RESPONSES)).square().sum()

    assert_same_gradients(*both(roles, lambda: gradients(roles, "critic", loss)))


def test_scores_are_those_of_padded_rows(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    roles.train_score_head()
    stir(roles.parameters["policy"])
    with torch.no_grad(), roles.acting("policy"):
        ours, theirs = both(roles, lambda: roles.scores(roles.batch(PROMPTS, RESPONSES, last_tokens=True)))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert theirs.unique().numel() == len(ROWS)
        with pytest.raises(AssertionError, match="without its last tokens"):
            roles.scores(roles.batch(PROMPTS, RESPONSES))


def test_attention_is_the_models_own_again_after_an_error(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    backbone = roles.backbone("policy")
    with pytest.raises(RuntimeError, match="stop"), attending(backbone, pack([(2, [1])])):
        raise RuntimeError("stop")
    assert roles.causal.config._attn_implementation == "sdpa"


def test_nothing_is_as_large_as_the_sequence_squared(tiny: TinyModels):
    backbone = lora_roles(tiny("llama")).backbone("policy")
    batch = make_packed_batch([[1 + i // 8, 2, 3, 4] for i in range(128)], [[5] * 12] * 128)
    n = batch.input_ids.shape[1]
    assert n == 16 * 4 + 128 * 11
    with LiveBytes() as live, torch.no_grad():
        all_states(backbone, batch)
    assert 4 * 64 * n <= live.most < 4 * n * n / 2  # a mask alone would take 4 n^2
