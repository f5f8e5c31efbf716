"""Sampling by transformers alone: `generate` as TRL calls it, and its continuous batching over paged attention.

LoRA stands beside the weights, as in a trainer. Runs with the Python of any environment that has transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from benchmarks import measuring
from benchmarks.fixed_work import LORA, texts
from benchmarks.gpu.meter import peak_gb, timed
from benchmarks.gpu.shapes import Work
from benchmarks.peer import four_bits
from benchmarks.sizes import EOS, PAD

CPU_BLOCKS = 64  # of a tiny cache; on a GPU the library takes what it finds


def load(settings: dict[str, Any]) -> Any:
    """The model with LoRA on the device, in the cell's dtype, or its base in 4 bits."""
    dtype = getattr(torch, settings["dtype"])
    four = {}
    if settings["quantization"] == "4bit":
        four = {"quantization_config": four_bits(dtype), "device_map": {"": settings["device"]}}
    base = AutoModelForCausalLM.from_pretrained(Path(settings["files"]) / "model", dtype=dtype, **four)
    model = get_peft_model(base, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    return (model if four else model.to(settings["device"])).eval()


def generate(model: Any, ids: list[list[int]], how: GenerationConfig) -> list[list[int]]:
    """The rows of a batch until the last has ended; prompts are of one length, so nothing is padded."""
    inputs = torch.tensor(ids, device=model.device)
    out = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=how)
    return out[:, inputs.shape[1] :].tolist()


def continuous(model: Any, ids: list[list[int]], how: GenerationConfig) -> list[list[int]]:
    """Rows enter and leave as they end, over a paged cache; equal prompts share their pages."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    small: dict[str, Any] = {"num_blocks": CPU_BLOCKS, "max_batch_tokens": 256} if model.device.type == "cpu" else {}
    out = model.base_model.model.generate_batch(
        ids,
        generation_config=how,
        continuous_batching_config=ContinuousBatchingConfig(**small),
        persistent_manager=True,  # as in a trainer: cache and graphs are made in the first call, which is not counted
    )
    if len(out) < len(ids):
        raise RuntimeError(f"generate_batch answered {len(out)} of {len(ids)} requests")
    return [request.generated_tokens for request in out.values()]


WAYS = {"generate": generate, "continuous batching": continuous}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """engine: one of WAYS."""
    imports, work = measuring.resident_mb(), Work(**settings["work"])
    torch.manual_seed(0)
    model = load(settings)
    files = Path(settings["files"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files / "model")
    ids: list[Any] = [tokenizer(text)["input_ids"] for text in texts(files)[: work.prompts]]
    repeated = [tokens for tokens in ids for _ in range(work.group)]
    how = GenerationConfig(
        max_new_tokens=work.new,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
        disable_compile=True,
    )

    def once(number: int) -> int:
        with torch.no_grad():
            rows = WAYS[settings["engine"]](model, repeated, how)
        return sum(row.index(EOS) + 1 if EOS in row else len(row) for row in rows)

    device = torch.device(settings["device"])
    result = timed(once, device, repeats=settings["repeats"])
    return {**result, "peak_gb": peak_gb(device, imports)}
