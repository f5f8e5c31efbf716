"""TRL's tool loop (`GRPOTrainer._generate` in training mode, vLLM off) on the episodes of the benchmark of turns.

A random model writes no call, so what reads calls says that every turn holds one; TRL's limit of calls ends episodes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer import grpo_trainer  # pyright: ignore[reportMissingImports]

from benchmarks import measuring, rewards
from benchmarks.fixed_work import SPEED, texts
from benchmarks.peer import arguments, tokenizer_of
from benchmarks.scripted_tool import TURNS, look_up

MICRO_BATCH = 8  # of updates, which do not happen here
SAMPLES = SPEED.num_prompts * SPEED.group_size


def always_a_call(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """A turn as TRL's parse_response gives it: its text, and a call of the tool."""
    call = {"type": "function", "function": {"name": look_up.__name__, "arguments": {}}}
    content = tokenizer.decode(ids, skip_special_tokens=True)
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def make_trainer(settings: dict[str, Any], prompts: list[Any]) -> Any:
    """GRPOTrainer with the tool, on the model with its LoRA adapter; every turn has our limit, three of them fit."""
    files = Path(settings["files"])
    tokenizer = tokenizer_of(files)
    tokenizer.response_template = {}  # it has one, so TRL does not look for one by the chat template; nothing reads it
    args = GRPOConfig(
        **arguments({**settings, "micro_batch": MICRO_BATCH}, samples=SAMPLES, learning_rate=SPEED.learning_rate),
        num_generations=SPEED.group_size,
        max_completion_length=settings["longest"],
        generation_kwargs={"max_new_tokens": SPEED.max_new_tokens},
        max_tool_calling_iterations=TURNS - 1,
        beta=0.0,
    )
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    trainer = GRPOTrainer(
        model=PeftModel.from_pretrained(base, str(files / "adapter"), is_trainable=True),
        processing_class=tokenizer,
        reward_funcs=getattr(rewards, SPEED.reward),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        tools=[look_up],
    )
    # What `_generate_and_score_completions` sets before it calls `_generate`.
    trainer._sync_tool_dicts = [{look_up.__name__: look_up} for _ in range(SAMPLES)]
    trainer._async_tool_dicts = [{} for _ in range(SAMPLES)]
    trainer.model.train()
    return trainer


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    torch.set_num_threads(settings["threads"])
    grpo_trainer.parse_response = always_a_call
    prompts = [[{"role": "user", "content": text}] for text in texts(Path(settings["files"]))[: SPEED.num_prompts]]
    trainer = make_trainer(settings, prompts)
    repeated = [prompt for prompt in prompts for _ in range(SPEED.group_size)]
    seconds, tokens, read = [], [], []
    for _ in range(settings["steps"]):
        start = time.perf_counter()
        _, _, chosen, completions, *_ = trainer._generate(repeated)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(sum(mask) for mask in chosen))
        read.append(sum(len(mask) for mask in chosen) - tokens[-1])
        assert all([m["role"] for m in c] == ["assistant", *["tool", "assistant"] * (TURNS - 1)] for c in completions)
    measuring.answer(
        settings,
        seconds=seconds[1:],
        tokens=tokens[1:],
        read=read[1:],
        imports_mb=imports,
        peak_mb=measuring.peak_mb(),
    )


if __name__ == "__main__":
    main()
