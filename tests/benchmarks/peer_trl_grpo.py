"""GRPO with TRL on rows and settings given as JSON.

Run by grpo_vs_trl.py with the Python of TRL's own virtual environment:

python peer_trl_grpo.py SETTINGS.json     writes <out>/curve.json and the adapter into <out>
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def exact(completions, answer, **columns):
    return [float("".join(c.split()) == a) for c, a in zip(completions, answer, strict=True)]


def main(settings: dict) -> None:
    torch.set_num_threads(1)
    out = Path(settings["out"])
    args = GRPOConfig(
        output_dir=str(out / "trainer"),
        max_steps=settings["num_steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        num_generations=settings["group_size"],
        per_device_train_batch_size=64,
        gradient_accumulation_steps=settings["num_prompts"] * settings["group_size"] // 64,
        temperature=1.0,
        beta=0.0,
        max_completion_length=settings["max_new_tokens"],
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=exact,
        args=args,
        train_dataset=Dataset.from_list(settings["rows"]),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model(str(out))
    curve = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    (out / "curve.json").write_text(json.dumps({"reward": curve, "seconds": seconds}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
