"""TRL's GRPO on rows with images, run with the Python of TRL's own environment (needs pillow, not torchvision).

A question has `files` (as examples/digits_images.py writes them: rows.jsonl, images/, model/), settings as those of
peer.py, or `batch`: a folder whose loss is asked for (tests/training/test_peer_loss_on_images.py has it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks import measuring, peer
from benchmarks.work import LORA, read_rows

LANGUAGE = r".*text_model.*_proj"  # the layers that tinyrl adapts too; all-linear would take the tower's as well


def is_right(prompts: list[Any], completions: list[Any], *, answer: list[str], **columns: Any) -> list[float]:
    """1.0 where a completion is the answer, else 0.0."""
    return [float(said[0]["content"].strip() == right) for said, right in zip(completions, answer, strict=True)]


def rows_of(files: Path) -> Dataset:
    rows = list[dict[str, Any]]()
    for row in read_rows(files / "rows.jsonl"):
        with Image.open(files / row["image"]) as picture:
            picture.load()
        messages = [{"role": "user", "content": row["prompt"]}]
        rows.append({"prompt": messages, "answer": row["answer"], "image": picture})
    return Dataset.from_list(rows)


def make_trainer(settings: dict[str, Any]) -> Any:
    files = Path(settings["files"])
    return trl.GRPOTrainer(
        model=str(files / "model"),
        args=trl.GRPOConfig(
            **{**peer.arguments(settings), **settings["config"]}, model_init_kwargs={"dtype": "float32"}
        ),
        reward_funcs=is_right,
        train_dataset=rows_of(files),
        processing_class=AutoProcessor.from_pretrained(files / "model", padding_side="left"),
        peft_config=LoraConfig(**{**LORA, "target_modules": LANGUAGE}, task_type="CAUSAL_LM"),
    )


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    if "batch" in settings:
        return losses(Path(settings["batch"]), Path(settings["folder"]))
    imports, steps = measuring.resident_mb(), measuring.Steps()
    torch.set_num_threads(settings["threads"])
    trainer = make_trainer(settings)
    peer.watch(trainer, "grpo", steps)
    trainer.add_callback(peer.Watched(steps, None))
    with measuring.tower_images() as counted:
        trainer.train()
    return {
        **steps.result(),
        "tower_images": len(counted),
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        "imports_mb": imports,
        "peak_mb": measuring.peak_mb(),
    }


# ---- the loss of one batch ----


def losses(folder: Path, out: Path) -> dict[str, Any]:
    """Compute TRL's loss of the batch in a folder and the norm of the language part's gradient, by old log-probability
    (null: the policy's own).
    """
    batch = json.loads((folder / "batch.json").read_text())
    model = AutoModelForImageTextToText.from_pretrained(folder / "smolvlm", dtype=torch.float32)
    processor: Any = AutoProcessor.from_pretrained(folder / "smolvlm", padding_side="left")
    pictures = [Image.open(folder / name) for name in ("a.png", "b.png")]
    parts = [{"type": "image"}, {"type": "text", "text": batch["question"]}]
    prompt = [{"role": "user", "content": parts}]
    config = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 1}
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(str(out), **config, use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": prompt, "image": picture} for picture in pictures]),
        processing_class=processor,
    )
    text = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    each = [[picture] for picture in pictures for _ in range(2)]
    given = processor(text=[text] * 4, images=each, padding=True, return_tensors="pt", add_special_tokens=False)
    longest = max(map(len, batch["responses"]))
    rows = [torch.tensor([*row, *[0] * (longest - len(row))]) for row in batch["responses"]]
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch["responses"]])
    inputs = {
        "prompt_ids": given["input_ids"],
        "prompt_mask": given["attention_mask"],
        "completion_ids": torch.stack(rows),
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]),
        "num_items_in_batch": mask.sum(),
        "num_images": [1] * 4,
        "pixel_values": given["pixel_values"],
        "pixel_attention_mask": given.get("pixel_attention_mask"),
    }
    trainer.current_gradient_accumulation_steps = 1
    found = dict[str, list[float]]()
    for old in (None, batch["old"]):
        own = inputs if old is None else {**inputs, "old_per_token_logps": torch.full(mask.shape, old)}
        model.zero_grad()
        model.train()
        loss = trainer._compute_loss(model, own)
        loss.backward()
        trained = [p.grad for name, p in model.named_parameters() if name in batch["names"] and p.grad is not None]
        norm = torch.cat([grad.flatten() for grad in trained]).double().norm()
        found[str(old)] = [float(loss.detach()), float(norm)]
    return {"losses": found}


if __name__ == "__main__":
    measuring.serve(measure)
