"""The library's modules over rows of a static cache, beside the library's pass over each whole text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generation.sampling import in_lora, stir_policy
from tests.tiny_models import TinyModels
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.models.experts import expert_targets
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of

FEW = ["gemma3", "gemma4", "gpt-oss", "qwen3.5", "lfm2", "gpt2", "qwen3-moe"]
MORE = ["llama", "gemma2", "granite", "phi3", "olmo3", "smollm3", "falcon-h1"]
LENGTHS = (30, 19, 24, 35)
PROMPT = (10, 5, 17, 12)  # tokens that are prefilled
NEXT = (3, 7, 1, 5)  # tokens that extend a row at once


def adapted(folder: Path, *, dtype: torch.dtype = torch.float32, targets: Any = "all-linear") -> Policy:
    policy = in_lora(load_causal_lm(str(folder), dtype=dtype), target_modules=targets)
    stir_policy(policy)
    return policy


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def prefill(decoder: LibraryDecoder, cache: Any, prompts: list[list[int]], rows: list[range]) -> Tensor:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return decoder.prefill(padded(prompts), lengths, cache=cache, rows=rows)


@torch.no_grad()
def decoded(decoder: LibraryDecoder) -> list[list[tuple[int, Tensor]]]:
    """Decode texts in a cache whose rows held others: prefill, extend rows that are not adjacent, move rows, decode all
    and then only the first rows. Returns (position, state) pairs of each text.
    """
    all_texts = texts()
    cache = decoder.new_cache(6, 48)
    prefill(decoder, cache, [text[::-1] for text in all_texts], [range(i, i + 1) for i in range(4)])
    rows = [range(1), range(1, 3), range(3, 4), range(4, 5)]
    states = prefill(decoder, cache, [text[:n] for text, n in zip(all_texts, PROMPT, strict=True)], rows)
    found = [[(n - 1, state)] for n, state in zip(PROMPT, states, strict=True)]
    at = [n + more for n, more in zip(PROMPT, NEXT, strict=True)]
    new = [text[n:end] for text, n, end in zip(all_texts, PROMPT, at, strict=True)]
    where = {"cache": cache, "rows": [0, 1, 3, 4], "width": max(at)}
    states = decoder.extend(padded(new), torch.tensor(NEXT), torch.tensor(PROMPT), **where)
    for i, state in enumerate(states):
        found[i].append((at[i] - 1, state))
    cache.exchange(3, 5, 30)
    cache.copy(5, 2, 30)
    cache.exchange(4, 3, 30)  # text i is in row i now
    for rows_live in (4, 4, 4, 2):
        position = torch.tensor(at[:rows_live])
        token = torch.tensor([text[i] for text, i in zip(all_texts, at[:rows_live], strict=False)])
        states = decoder.step(token, position, cache=cache, width=max(at) + 1)
        for i, state in enumerate(states):
            found[i].append((at[i], state))
            at[i] += 1
    return found


@torch.no_grad()
def library(policy: Policy) -> list[Tensor]:
    backbone = backbone_of(policy.causal)
    return [backbone(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0] for text in texts()]


def gap(decoder: LibraryDecoder, policy: Policy) -> float:
    """The largest error of a state, relative to its norm."""
    gaps = [
        float((state - whole[position]).norm() / whole[position].norm())
        for one, whole in zip(decoded(decoder), library(policy), strict=True)
        for position, state in one
    ]
    assert len(gaps) == 4 * 5 + 2
    return max(gaps)


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.wide) for kind in MORE)])
def test_states_are_those_of_a_pass_over_the_whole_text(tiny: TinyModels, kind: str):
    """Under an adapter; windows of 8, sinks, experts, shared keys, learned positions, states of four kinds."""
    policy = adapted(tiny(kind))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout="merged")
    with policy.acting("policy"):
        decoder.sync("default")
        assert gap(decoder, policy) < 1e-4


@pytest.mark.parametrize("layout", ["merged", "separate_lora", None])
def test_every_layout_of_the_weights_gives_the_same_states(tiny: TinyModels, layout: Any):
    policy = adapted(tiny("gemma3"))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout=layout)
    assert decoder.adapts == (layout is None)
    with policy.acting("policy"):
        decoder.sync("default")
        assert gap(decoder, policy) < 1e-5


@pytest.mark.parametrize("layout", ["merged", "separate_lora"])
def test_weights_are_copied_into_the_same_memory(tiny: TinyModels, layout: Any):
    """As they are under each adapter: a CUDA graph holds their addresses."""
    policy = adapted(tiny("gemma3"))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout=layout)
    addresses = set[tuple[int, ...]]()
    states = list[Tensor]()
    for adapter in ("default", None, "default"):
        decoder.sync(adapter)
        projections: list[Any] = [layer.projection for _, layer in decoder.sampled]
        tensors = [t for p in projections for t in (p.matrix, p.lora_b) if t is not None]
        addresses.add(tuple(t.data_ptr() for t in tensors))
        states.append(decoded(decoder)[0][-1][1])
        stir_policy(policy)
    assert len(addresses) == 1
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def adapted_experts(folder: Path, *, dtype: torch.dtype = torch.float32) -> Policy:
    base = load_causal_lm(str(folder), dtype=dtype)
    policy = in_lora(base, target_parameters=expert_targets(base, "experts"), target_modules=["q_proj"])
    stir_policy(policy)
    return policy


@pytest.mark.parametrize("layout", ["merged", "separate_lora", None])
@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss", pytest.param("qwen3.5-moe", marks=pytest.mark.wide)])
def test_every_layout_of_adapted_experts_gives_the_same_states(tiny: TinyModels, kind: str, layout: Any):
    policy = adapted_experts(tiny(kind))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout=layout)
    assert decoder.adapts == (layout is None)
    with policy.acting("policy"):
        decoder.sync("default")
        assert gap(decoder, policy) < 1e-5


@pytest.mark.parametrize("layout", ["merged", "separate_lora"])
def test_experts_are_copied_into_the_same_memory_and_counted(tiny: TinyModels, layout: Any):
    """As they are under each adapter. Copied are 2 layers' matrices of 8 experts, 32 x 32 and 32 x 16, in float32; or
    their branches of 4 columns, padded to 8.
    """
    policy = adapted_experts(tiny("qwen3-moe"))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout=layout)
    addresses = set[tuple[int, ...]]()
    states = list[Tensor]()
    for adapter in ("default", None, "default"):
        decoder.sync(adapter)
        copies = [tensor for experts in decoder.sampled_experts for tensor in experts.own_tensors]
        addresses.add(tuple(tensor.data_ptr() for tensor in copies))
        states.append(decoded(decoder)[0][-1][1])
        stir_policy(policy)
    assert len(addresses) == 1
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    size = 32 * 32 + 32 * 16 if layout == "merged" else 8 * (32 + 32 + 32 + 16)
    attention = {"merged": 32 * 32, "separate_lora": 8 * (32 + 32)}[layout]
    assert decoder.weight_bytes == 4 * 2 * (8 * size + attention)
    decoder.release()
    assert decoder.weight_bytes == 0
    assert not any(experts.own_tensors for experts in decoder.sampled_experts)


def test_an_adapter_that_no_matrix_holds_stays_with_the_model(tiny: TinyModels):
    """On the embedding; its role has to act."""
    policy = adapted(tiny("gpt-oss"), targets=["embed_tokens", "q_proj"])
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout="merged")
    assert decoder.adapts
    with policy.acting("policy"):
        decoder.sync("default")
        assert gap(decoder, policy) < 1e-4


def test_a_row_counts_its_states(tiny: TinyModels):
    """Qwen3.5's, of two linear layers of four: 4 heads of 8 x 8, and 4 inputs of a convolution over 2 * 2 * 8 + 4 * 8
    channels; and keys and values of 2 heads of 8 in the two others, with a column for padding.
    """
    decoder = LibraryDecoder(adapted(tiny("qwen3.5")).causal, dtype=torch.float32, layout="merged")
    states = 2 * (4 * 8 * 8 + 4 * 64)
    keys = 2 * 2 * 2 * 8 * (100 + 1)
    assert decoder.row_bytes(100) == 4 * (states + keys)
    assert not decoder.new_cache(1, 8).can_truncate
