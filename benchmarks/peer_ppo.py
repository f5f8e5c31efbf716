"""TRL 1.12's side of the PPO benchmark (trl.experimental.ppo), run with the Python of its own virtual environment.

Policy with LoRA, reference by switching it off, a value model and a reward model of the policy's shape. The value
model gets the same LoRA as the policy's (TRL would train all of it, which takes longer), so that both sides train the
same matrices. stop_token is `eos`, as a user would set it; `generate` then ends when every row has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]

from benchmarks import measuring
from benchmarks.fixed_work import LORA, SPEED, texts
from benchmarks.our_recipe import PPO_EPOCHS, PPO_PROMPTS
from benchmarks.peer import StepEnds, arguments, tokenizer_of, tokens_sampled


def scoring_model(folder: Path, dtype: torch.dtype) -> Any:
    """The reward model."""
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)


def value_model(folder: Path, dtype: torch.dtype) -> Any:
    """The reward model's weights, of which LoRA and the score head train."""
    model = scoring_model(folder, dtype)
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA, exclude_modules=["score"]), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score"))
    return model


def make_trainer(settings: dict[str, Any], steps: measuring.Steps) -> Any:
    files = Path(settings["files"])
    tokenizer = tokenizer_of(files)
    prompts, new = settings.get("prompts", PPO_PROMPTS), settings.get("new", SPEED.max_new_tokens)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    args = PPOConfig(
        **arguments(settings, samples=prompts, learning_rate=SPEED.learning_rate),
        total_episodes=prompts * settings["steps"],
        num_mini_batches=1,
        num_ppo_epochs=PPO_EPOCHS,
        local_rollout_forward_batch_size=settings.get("scored_at_a_time", PPO_PROMPTS),
        response_length=new,
        stop_token="eos",
        kl_coef=0.05,
        cliprange=SPEED.clip_eps,
        num_sample_generations=0,
    )
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(files / "model", dtype=dtype),
        ref_model=None,
        reward_model=scoring_model(files / "reward_model", dtype),
        value_model=value_model(files / "reward_model", dtype),
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts(files)]),
        peft_config=peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
        callbacks=[StepEnds(steps)],
    )


def watch(trainer: Any, steps: measuring.Steps) -> None:
    """Time the functions that TRL's loop calls, and count tokens up to and including the first EOS of each row."""
    eos, generate = trainer.processing_class.eos_token_id, ppo_trainer.batch_generation

    def counted(model: Any, queries: torch.Tensor, *args: Any) -> Any:
        with steps.phase("generate"):
            result = generate(model, queries, *args)
        steps.sampled(tokens_sampled(result[0], prompt=queries.shape[1], eos=eos))
        return result

    ppo_trainer.batch_generation = counted
    steps.wrap(ppo_trainer, "forward", lambda *_: "train forward" if torch.is_grad_enabled() else "reference")
    steps.wrap(ppo_trainer, "get_reward", lambda model, *_: "reward" if model is trainer.reward_model else "values")
    steps.wrap(trainer.accelerator, "backward", lambda *_: "backward")


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    imports, steps = measuring.resident_mb(), measuring.Steps()
    torch.set_num_threads(settings["threads"])
    trainer = make_trainer(settings, steps)
    watch(trainer, steps)
    trainer.train()
    return {**steps.result(), "imports_mb": imports, "peak_mb": measuring.peak_mb()}


def main() -> None:
    settings = measuring.job()
    measuring.answer(settings, **measure(settings))


if __name__ == "__main__":
    main()
