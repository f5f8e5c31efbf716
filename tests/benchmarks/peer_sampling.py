"""transformers' generate as TRL's GRPOTrainer calls it: 64 left-padded rows, LoRA beside the weights, not merged."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.benchmarks import measuring
from tests.benchmarks.fixed_work import GROUP_SIZE, MAX_NEW_TOKENS, NUM_PROMPTS, read_words_beside_qwen2


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    read_words_beside_qwen2()
    files = Path(settings["files"])
    tokenizer = AutoTokenizer.from_pretrained(files / "model", padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    model = PeftModel.from_pretrained(base, str(files / "adapter")).eval()
    texts = [json.loads(line)["prompt"] for line in (files / "prompts.jsonl").read_text().splitlines()]
    repeated = [text for text in texts[:NUM_PROMPTS] for _ in range(GROUP_SIZE)]
    inputs = tokenizer(repeated, return_tensors="pt", padding=True)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    how = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
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
        ended = ids[:, inputs["input_ids"].shape[1] :] == eos
        tokens.append(int((ended.cumsum(1) - ended.int() == 0).sum()))
    measuring.answer(settings, seconds=seconds[1:], tokens=tokens[1:], imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
