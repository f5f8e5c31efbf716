"""What TRL's two trainers are given alike, and counts of what `generate` returns; for the peer's processes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks import measuring


class StepEnds(transformers.TrainerCallback):
    """Tells a stopwatch when a step (a rollout and what is learnt from it) is over."""

    def __init__(self, steps: measuring.Steps) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.end()


def arguments(settings: dict[str, Any], *, samples: int, learning_rate: float) -> dict[str, Any]:
    """One optimizer step over `samples` samples, settings["micro_batch"] at a time; nothing saved. On the CPU in
    float32, unless settings say otherwise.

    No gradient checkpointing: TRL's default is to recompute, which takes less memory and more time.
    """
    return {
        "output_dir": settings["folder"],
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": samples // settings["micro_batch"],
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": settings.get("dtype") == "bfloat16",
        "use_cpu": settings.get("device", "cpu") == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": settings["seed"],
        "report_to": [],
        "disable_tqdm": True,
    }


def model_options(settings: dict[str, Any]) -> dict[str, Any]:
    """How a model is loaded: in float32, unless settings say otherwise."""
    dtype = settings.get("dtype", "float32")
    four = settings.get("quantization") == "4bit"
    return {"dtype": dtype, **({"quantization_config": four_bits(getattr(torch, dtype))} if four else {})}


def four_bits(dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """A base in 4 bits as tinyrl loads it."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def tokenizer_of(files: Path) -> Any:
    """The tokenizer as its file says. (AutoTokenizer reads any tokenizer beside Qwen2 as Qwen's own BPE.)"""
    return PreTrainedTokenizerFast.from_pretrained(files / "model", padding_side="left")


def tokens_sampled(ids: Tensor, *, prompt: int, eos: int) -> int:
    """Tokens of completions up to and including the first EOS of each row; `prompt` columns come before them."""
    ended = ids[:, prompt:] == eos
    return int((ended.cumsum(1) - ended.int() == 0).sum())
