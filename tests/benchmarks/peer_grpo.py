"""TRL's side of the GRPO benchmark, run with the Python of TRL's own virtual environment.

float32, no gradient checkpointing (TRL's default is to recompute: less memory, more time), LoRA made by TRL from a
peft configuration, so that the reference is the base with the adapter off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from tests.benchmarks import measuring
from tests.benchmarks.fixed_work import (
    CLIP_EPS,
    GROUP_SIZE,
    KL_COEF,
    LEARNING_RATE,
    LORA,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    load_work,
    read_words_beside_qwen2,
)


class StepEnds(transformers.TrainerCallback):
    """Tells a stopwatch when an optimizer step is over."""

    def __init__(self, steps: measuring.Steps) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.end()


def make_trainer(settings: dict[str, Any]) -> Any:
    """GRPOTrainer on the fixed work, `micro_batch` samples at a time."""
    files, micro_batch = Path(settings["files"]), settings["micro_batch"]
    torch.set_num_threads(settings["threads"])
    read_words_beside_qwen2()
    args = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=NUM_PROMPTS * GROUP_SIZE // micro_batch,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        beta=KL_COEF,
        use_bias_correction_kl=False,  # its default weights the KL term by the ratio; ours is kl_ratio_weight, off
        epsilon=CLIP_EPS,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        seed=settings["seed"],
        report_to=[],
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in (files / "prompts.jsonl").read_text().splitlines()]
    return GRPOTrainer(
        model=str(files / "model"),
        reward_funcs=load_work(str(files / "reward.py")).reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
    )


def watch(trainer: Any, steps: measuring.Steps) -> None:
    """Time TRL's phases, and count the sampled tokens that it keeps."""
    generate = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        with steps.phase("generate"):
            result = generate(*args, **kwargs)
        steps.sampled(sum(len(ids) for ids in result[0]))
        return result

    trainer._generate_single_turn = counted
    steps.wrap(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *_: None if torch.is_grad_enabled() else "reference",
    )
    steps.wrap(trainer, "compute_loss", lambda *_: "loss forward")
    steps.wrap(trainer.accelerator, "backward", lambda *_: "backward")
    trainer.add_callback(StepEnds(steps))


def main() -> None:
    imports, settings, steps = measuring.resident_mb(), measuring.job(), measuring.Steps()
    trainer = make_trainer(settings)
    watch(trainer, steps)
    trainer.train()
    measuring.answer(settings, **steps.result(), imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
