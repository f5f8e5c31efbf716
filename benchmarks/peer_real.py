"""TRL's five trainers on sums, as a recipe of tinyrl says them; run with the Python of TRL's own environments.

PPO is that of TRL 1.12. Prompts come rendered, so both sides read the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import measuring, rewards
from benchmarks.fixed_work import LORA, read_rows
from benchmarks.peer import StepEnds, arguments

PAD = "<|endoftext|>"  # the tokenizer's own pad ends turns, too: PPO would not see where the question ends


class ScoredText(torch.nn.Module):
    """A reward function where a classification model is asked for: the score of the text is at every position."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer: Any, answers: dict[str, int]) -> None:
        super().__init__()
        self.tokenizer, self.answers = tokenizer, answers
        self.score = torch.nn.Identity()

    def backbone(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        texts = [self.tokenizer.decode(row[m.bool()]) for row, m in zip(input_ids, attention_mask, strict=True)]
        asked = [next(prompt for prompt in self.answers if text.startswith(prompt)) for text in texts]
        said = [t.removeprefix(p).removesuffix(self.tokenizer.eos_token) for t, p in zip(texts, asked, strict=True)]
        scores = rewards.right_sums([], said, answer=[self.answers[prompt] for prompt in asked])
        hidden = torch.tensor(scores).view(-1, 1, 1).expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=(hidden,))


def tokenizer_of(files: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(files / "model", padding_side="left")
    tokenizer.pad_token = PAD
    return tokenizer


def judge(files: Path) -> Any:
    """A classification model whose head starts at zero, as here."""
    model = AutoModelForSequenceClassification.from_pretrained(files / "model", num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    model.config.pad_token_id = tokenizer_of(files).pad_token_id
    return model


def value_model(files: Path) -> Any:
    """The base with LoRA and a head of its own, which train."""
    model = judge(files)
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA, exclude_modules=["score"]), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score"))
    return model


def of_text(settings: dict[str, Any], given: dict[str, Any], common: dict[str, Any]) -> Any:
    """The trainer of SFT, reward models or DPO."""
    files, recipe, method = Path(settings["files"]), settings["recipe"], settings["recipe"]["method"]
    del given["temperature"]
    given["max_length"] = 96
    if method == "reward":
        given |= {"per_device_eval_batch_size": 16}
        lora = peft.LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"])
        return trl.RewardTrainer(model=judge(files), args=trl.RewardConfig(**given), peft_config=lora, **common)
    lora = peft.LoraConfig(**LORA, task_type="CAUSAL_LM")
    kwargs = {"model": str(files / "model"), "peft_config": lora, **common}
    given["model_init_kwargs"] = {"dtype": "float32"}
    if method == "sft":
        return trl.SFTTrainer(args=trl.SFTConfig(**given), **kwargs)
    return trl.DPOTrainer(args=trl.DPOConfig(**given, beta=recipe["dpo"]["beta"]), **kwargs)


def of_samples(settings: dict[str, Any], given: dict[str, Any], common: dict[str, Any]) -> Any:
    """The trainer of GRPO or PPO."""
    files, recipe = Path(settings["files"]), settings["recipe"]
    new, section = recipe["generation"]["max_new_tokens"], recipe[recipe["method"]]
    lora = peft.LoraConfig(**LORA, task_type="CAUSAL_LM")
    if recipe["method"] == "grpo":
        given |= {"max_steps": settings["steps"], "num_generations": section["group_size"], "beta": 0.0}
        given |= {"max_completion_length": new, "epsilon": 0.2, "epsilon_high": settings["clip_eps_high"]}
        given |= {"loss_type": "dapo", "scale_rewards": "group", "model_init_kwargs": {"dtype": "float32"}}
        return trl.GRPOTrainer(
            model=str(files / "model"),
            reward_funcs=rewards.right_sums,
            args=trl.GRPOConfig(**given),
            peft_config=lora,
            **common,
        )
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

    tokenizer, rows = common["processing_class"], common["train_dataset"]
    answers = {row["prompt"]: row["answer"] for row in rows}
    given |= {"total_episodes": section["num_prompts"] * settings["steps"], "num_mini_batches": 1}
    given |= {"num_ppo_epochs": section["num_epochs"], "local_rollout_forward_batch_size": section["num_prompts"]}
    given |= {"response_length": new, "stop_token": "eos", "kl_coef": section["kl_coef"], "num_sample_generations": 0}
    ids = [{"input_ids": tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]} for row in rows]
    return PPOTrainer(
        args=PPOConfig(**given),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32),
        ref_model=None,
        reward_model=ScoredText(tokenizer, answers),
        value_model=value_model(files),
        train_dataset=Dataset.from_list(ids),
        peft_config=lora,
    )


def samples_of(recipe: dict[str, Any]) -> int:
    """Samples, rows or pairs of a step."""
    section = recipe["reward_model" if recipe["method"] == "reward" else recipe["method"]]
    return section["num_prompts"] * section.get("group_size", 1) if "num_prompts" in section else section["batch_size"]


def main() -> None:
    imports, settings, steps = measuring.resident_mb(), measuring.job(), measuring.Steps()
    torch.set_num_threads(settings["threads"])
    recipe, files = settings["recipe"], Path(settings["files"])
    given = arguments(settings, samples=samples_of(recipe), learning_rate=recipe["optim"]["learning_rate"])
    given["lr_scheduler_type"] = recipe["optim"].get("schedule", "constant")
    on_policy = recipe["method"] in ("grpo", "ppo")
    if not on_policy:
        given["max_steps"] = settings["steps"]
    common: dict[str, Any] = {"processing_class": tokenizer_of(files)}
    common["train_dataset"] = Dataset.from_list(read_rows(files / settings["rows"]))
    if not on_policy:
        common["eval_dataset"] = Dataset.from_list(read_rows(files / settings["held_out"])[: settings["eval_prompts"]])
    trainer = (of_samples if on_policy else of_text)(settings, given, common)
    trainer.add_callback(StepEnds(steps))
    trainer.train()
    peak, adapter = measuring.peak_mb(), Path(settings["folder"]) / "adapter"
    if recipe["method"] == "ppo":
        trainer.accelerator.unwrap_model(trainer.model).policy.save_pretrained(str(adapter))
    else:
        trainer.save_model(str(adapter))
    found = trainer.evaluate() if recipe["method"] in ("reward", "dpo") else {}
    names = {"eval_loss": "loss", "eval_accuracy": "accuracy", "eval_rewards/accuracies": "accuracy"}
    held_out = {short: found[name] for name, short in names.items() if name in found}
    answer = {"adapter": str(adapter), "held_out": held_out, "imports_mb": imports, "peak_mb": peak}
    measuring.answer(settings, **steps.result(), **answer)


if __name__ == "__main__":
    main()
