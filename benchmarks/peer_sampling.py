"""transformers' generate as TRL's GRPOTrainer calls it: 64 left-padded rows, LoRA beside the weights, not merged."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks import measuring
from benchmarks.fixed_work import SPEED, texts
from benchmarks.peer import tokenizer_of, tokens_sampled


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    files = Path(settings["files"])
    tokenizer = tokenizer_of(files)
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    model = PeftModel.from_pretrained(base, str(files / "adapter")).eval()
    repeated = [text for text in texts(files)[: SPEED.num_prompts] for _ in range(SPEED.group_size)]
    inputs = tokenizer(repeated, return_tensors="pt", padding=True)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    how = GenerationConfig(
        max_new_tokens=SPEED.max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=eos,
        pad_token_id=pad,
        disable_compile=True,
    )
    seconds, tokens = [], []
    for _ in range(settings["steps"]):
        start = time.perf_counter()
        with torch.no_grad():
            ids = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=how
            )
        seconds.append(time.perf_counter() - start)
        tokens.append(tokens_sampled(ids, prompt=inputs["input_ids"].shape[1], eos=eos))
    measuring.answer(settings, seconds=seconds[1:], tokens=tokens[1:], imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
