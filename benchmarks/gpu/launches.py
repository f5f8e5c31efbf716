"""Kernels that a decoded token launches, counted on a CPU at the depth of each shape (width does not matter).

A graph launches all of them at once. Counted are operations that compute; a fused kernel or a split one counts as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.sizes import Shape
from tests.gpu.waits import counting_kernels
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import SamplingSettings
from tinyrl.generation.slots import Slots
from tinyrl.models.lora import lora_config, wrap_in_lora

WIDTH, ROWS = 64, 4
CPU = torch.device("cpu")


def narrow(shape: Shape) -> Any:
    """A model of the same depth and heads with an adapter."""
    thin = replace(shape, hidden=shape.heads * 8, head_size=8, intermediate=16, vocabulary=64)
    config = thin.qwen2(tie_word_embeddings=True)
    adapter = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    return wrap_in_lora(Qwen2ForCausalLM(config).eval(), adapter).get_base_model()


@torch.inference_mode()
def of_the_decoder(model: Any, dtype: torch.dtype) -> int:
    """Of one step of tinyrl's own decoder, with the draw of the next token."""
    decoder = Decoder(model.to(dtype), dtype=dtype, held="merged" if dtype == torch.float32 else "apart")
    decoder.sync("default")
    settings = SamplingSettings(temperature=1.0, max_new_tokens=4)
    slots = Slots(decoder, settings, capacity=ROWS, width=WIDTH, columns=4, greedy=False, device=CPU)
    slots.enter([list(range(ROWS))], [[5, 6]], uniforms=torch.rand(ROWS, 4).double())
    with counting_kernels() as kernels:
        slots.advance(ROWS, WIDTH)
    return kernels.total()


@torch.inference_mode()
def of_the_library(model: Any, dtype: torch.dtype) -> int:
    """Of one forward pass of the library's modules with LoRA beside the weights, over a cache that grows."""
    ids = torch.full((ROWS, 1), 5)
    cache = model.to(dtype)(input_ids=ids, use_cache=True).past_key_values
    with counting_kernels() as kernels:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return kernels.total()


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Kernels of a token by dtype."""
    shape = Shape(**settings["shape"])
    found = {}
    for name in ("float32", "bfloat16"):
        model, dtype = narrow(shape), getattr(torch, name)
        found[name] = {"decoder": of_the_decoder(model, dtype), "library": of_the_library(model, dtype)}
    return {"kernels": found}
