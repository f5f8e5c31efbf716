"""TRL's side of on-policy distillation, run with the Python of TRL's own virtual environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]

from benchmarks import measuring
from benchmarks.fixed_work import LORA, Grpo, read_rows
from benchmarks.peer import StepEnds, arguments, model_options, tokenizer_of


def make_trainer(settings: dict[str, Any]) -> Any:
    """DistillationTrainer on the fixed work, `micro_batch` samples at a time."""
    files, work = Path(settings["files"]), Grpo(**settings["work"])
    torch.set_num_threads(settings["threads"])
    args = DistillationConfig(
        **arguments(settings, samples=work.num_prompts, learning_rate=work.learning_rate),
        max_steps=settings["steps"],
        max_completion_length=work.max_new_tokens,
        beta=1.0,
        model_init_kwargs=model_options(settings),
        teacher_model_init_kwargs=model_options(settings),
    )
    return DistillationTrainer(
        model=str(files / "model"),
        teacher_model=str(files / "model"),
        processing_class=tokenizer_of(files),
        args=args,
        train_dataset=Dataset.from_list(read_rows(files / "prompts.jsonl")),
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
    )


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    imports, steps = measuring.resident_mb(), measuring.Steps()
    trainer = make_trainer(settings)
    generate = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        with steps.phase("generate"):
            result = generate(*args, **kwargs)
        steps.sampled(sum(len(ids) for ids in result))
        return result

    trainer._generate_single_turn = counted
    steps.wrap(trainer, "compute_loss", lambda *_: "loss forward")
    steps.wrap(trainer.accelerator, "backward", lambda *_: "backward")
    trainer.add_callback(StepEnds(steps))
    trainer.train()
    return {**steps.result(), "imports_mb": imports, "peak_mb": measuring.peak_mb()}


def main() -> None:
    settings = measuring.job()
    measuring.answer(settings, **measure(settings))


if __name__ == "__main__":
    main()
