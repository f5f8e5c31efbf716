"""TRL's SFT, reward model and DPO trainers on the fixed work of text, run with the Python of TRL's own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # pyright: ignore

from benchmarks import measuring
from benchmarks.fixed_work import LORA, read_rows
from benchmarks.peer import StepEnds, arguments, tokenizer_of
from benchmarks.text_work import BETA, CHECKED_STEP, LONGEST_ROW, RATE, ROWS, rows_file


def make_trainer(settings: dict[str, Any]) -> Any:
    """The trainer of a method, from the adapter in files/start; a reward model's head starts at zero, as here."""
    files, method = Path(settings["files"]), settings["method"]
    torch.set_num_threads(settings["threads"])
    given = arguments(settings, samples=ROWS, learning_rate=RATE)
    del given["temperature"]
    given |= {"max_steps": settings["steps"], "max_grad_norm": 1e6, "max_length": LONGEST_ROW}
    common: dict[str, Any] = {
        "processing_class": tokenizer_of(files),
        "train_dataset": Dataset.from_list(read_rows(rows_file(files, method))),
    }
    if method == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(files / "model", num_labels=1)
        torch.nn.init.zeros_(model.score.weight)
        lora = LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"])
        trainer = RewardTrainer(model=model, args=RewardConfig(**given), peft_config=lora, **common)
    else:
        lora = LoraConfig(**LORA, task_type="CAUSAL_LM")
        made = (
            (SFTTrainer, SFTConfig(**given))
            if method == "sft"
            else (DPOTrainer, DPOConfig(**given, beta=BETA, precompute_ref_log_probs=True))
        )
        trainer = made[0](model=str(files / "model"), args=made[1], peft_config=lora, **common)
    weights = load_file(files / "start" / "adapter_model.safetensors")
    if method == "reward":
        weights["base_model.model.score.weight"] = torch.zeros(1, trainer.model.config.hidden_size)
    set_peft_model_state_dict(trainer.model, weights)
    return trainer


class KeepGradients(transformers.TrainerCallback):
    """Write the LoRA gradients of one optimizer step to a file, by their names in the base model."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == CHECKED_STEP:
            found = {
                name.removeprefix("base_model.model."): p.grad
                for name, p in kwargs["model"].named_parameters()
                if p.grad is not None and "lora_" in name
            }
            save_file(found, self.path)


def main() -> None:
    imports, settings, steps = measuring.resident_mb(), measuring.job(), measuring.Steps()
    trainer = make_trainer(settings)
    losses: list[float] = []
    compute = trainer.compute_loss

    def counted(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        losses.append(float(loss[0] if isinstance(loss, tuple) else loss) * settings["micro_batch"] / ROWS)
        return loss

    trainer.compute_loss = counted
    trainer.add_callback(KeepGradients(settings["gradients"]))
    trainer.add_callback(StepEnds(steps))
    trainer.train()
    parts = ROWS // settings["micro_batch"]
    summed = [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)]
    measuring.answer(settings, **steps.result(), losses=summed, imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
