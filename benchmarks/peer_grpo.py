"""TRL's side of GRPO, for speed and for learning, run with the Python of TRL's own virtual environment.

LoRA is made by TRL from a peft configuration, so that the reference is the base with the adapter off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks import measuring, rewards
from benchmarks.fixed_work import LORA, Grpo, read_rows
from benchmarks.peer import StepEnds, arguments, model_options, tokenizer_of


def make_trainer(settings: dict[str, Any]) -> Any:
    """GRPOTrainer on the fixed work, `micro_batch` samples at a time."""
    files, work = Path(settings["files"]), Grpo(**settings["work"])
    torch.set_num_threads(settings["threads"])
    args = GRPOConfig(
        **arguments(settings, samples=work.num_prompts * work.group_size, learning_rate=work.learning_rate),
        max_steps=settings["steps"],
        num_generations=work.group_size,
        max_completion_length=work.max_new_tokens,
        beta=work.kl_coef,
        use_bias_correction_kl=False,  # its default weights the KL term by the ratio; ours is kl_ratio_weight, off
        epsilon=work.clip_eps,
        loss_type="dapo",
        model_init_kwargs=model_options(settings),
        scale_rewards="group",
    )
    return GRPOTrainer(
        model=str(files / "model"),
        processing_class=tokenizer_of(files),
        reward_funcs=getattr(rewards, work.reward),
        args=args,
        train_dataset=Dataset.from_list(read_rows(files / "prompts.jsonl")),
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


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    imports, steps = measuring.resident_mb(), measuring.Steps()
    trainer = make_trainer(settings)
    watch(trainer, steps)
    trainer.train()
    peak = measuring.peak_mb()
    adapter = Path(settings["folder"]) / "adapter"
    trainer.save_model(str(adapter))
    return {
        **steps.result(),
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        "adapter": str(adapter),
        "imports_mb": imports,
        "peak_mb": peak,
    }


def main() -> None:
    settings = measuring.job()
    measuring.answer(settings, **measure(settings))


if __name__ == "__main__":
    main()
