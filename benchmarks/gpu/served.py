"""Sampling by vLLM in its own process, with the Python of an environment that has it; the same prompts and adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

from benchmarks.fixed_work import LORA, texts
from benchmarks.gpu.meter import timed
from benchmarks.gpu.shapes import Work
from benchmarks.sizes import EOS


def write_adapter(model: Path, folder: Path, dtype: torch.dtype) -> None:
    """A fresh adapter of the benchmarks' LoRA."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    get_peft_model(base, LoraConfig(**LORA, task_type="CAUSAL_LM")).save_pretrained(str(folder))


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens and seconds of each call. Memory is what vLLM takes at its start, so it says nothing here."""
    work, files = Work(**settings["work"]), Path(settings["files"])
    adapter = Path(settings["folder"]) / "adapter"
    write_adapter(files / "model", adapter, getattr(torch, settings["dtype"]))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files / "model")
    prompts: list[Any] = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in texts(files)[: work.prompts]]
    engine = LLM(
        model=str(files / "model"),
        dtype=settings["dtype"],
        enable_lora=True,
        max_lora_rank=LORA["r"],
        max_model_len=work.prompt + work.new,
        skip_tokenizer_init=True,
    )
    how = SamplingParams(
        n=work.group, temperature=1.0, max_tokens=work.new, logprobs=0, stop_token_ids=[EOS], detokenize=False
    )

    def once(number: int) -> int:
        request = LoRARequest(f"adapter-{number}", number + 1, str(adapter))  # a new one, as after each update
        answers = engine.generate(prompts, how, lora_request=request, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    return timed(once, torch.device("cpu"), repeats=settings["repeats"])  # a call returns when all is there
