"""TRL's five trainers, run with the Python of TRL's own environments (PPO: that of TRL 1.12).

A question names the method, the folder and its rows, the samples of a step, and what TRL's configuration gets besides
`arguments`. LoRA is made by TRL from a peft configuration, so that the reference is the base with the adapter off. The
value model of PPO gets the same LoRA (TRL would train all of it, which takes longer), so that both sides train the same
matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from benchmarks import measuring, rewards
from benchmarks.work import CHECKED_STEP, LORA, read_rows

NAMES = {"sft": "SFT", "reward": "Reward", "dpo": "DPO", "grpo": "GRPO"}
HELD_OUT = {"eval_loss": "loss", "eval_accuracy": "accuracy", "eval_rewards/accuracies": "accuracy"}


def classes(method: str) -> tuple[Any, Any]:
    """Import TRL's trainer of a method and its configuration."""
    if method == "ppo":
        from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

        return PPOTrainer, PPOConfig
    return getattr(trl, f"{NAMES[method]}Trainer"), getattr(trl, f"{NAMES[method]}Config")


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step over settings["samples"], settings["micro_batch"] at a time; nothing saved. On the CPU in
    float32, unless settings say otherwise.

    No gradient checkpointing: TRL's default is to recompute, which takes less memory and more time.
    """
    return {
        "output_dir": settings["folder"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": settings.get("schedule", "constant"),
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": settings["samples"] // settings["micro_batch"],
        "gradient_checkpointing": False,
        "bf16": settings.get("dtype") == "bfloat16",
        "use_cpu": settings.get("device", "cpu") == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": settings["seed"],
        "report_to": [],
        "disable_tqdm": True,
    }


def model_options(settings: dict[str, Any]) -> dict[str, Any]:
    """How a model is loaded: in float32, unless settings say otherwise; a base in 4 bits as tinyrl loads it."""
    dtype = settings.get("dtype", "float32")
    if settings.get("quantization") != "4bit":
        return {"dtype": dtype}
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
    return {"dtype": dtype, "quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True, **four)}


class ScoredText(torch.nn.Module):
    """A reward function where a classification model is asked for: the score of the text is at every position."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer: Any, answers: dict[str, int], reward: str) -> None:
        super().__init__()
        self.tokenizer, self.answers, self.reward = tokenizer, answers, getattr(rewards, reward)
        self.score = torch.nn.Identity()

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Any:
        texts = [self.tokenizer.decode(row[m.bool()]) for row, m in zip(input_ids, attention_mask, strict=True)]
        asked = [next(prompt for prompt in self.answers if text.startswith(prompt)) for text in texts]
        said = [t.removeprefix(p).removesuffix(self.tokenizer.eos_token) for t, p in zip(texts, asked, strict=True)]
        scores = self.reward([], said, answer=[self.answers[prompt] for prompt in asked])
        hidden = torch.tensor(scores).view(-1, 1, 1).expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=(hidden,))


def classifier(folder: Path, tokenizer: Any, settings: dict[str, Any], *, from_zero: bool) -> Any:
    """A classification model with one label; from_zero: its head starts at zero, as here."""
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)
    model.config.pad_token_id = tokenizer.pad_token_id
    if from_zero:
        torch.nn.init.zeros_(model.score.weight)
    return model


def ppo_models(files: Path, tokenizer: Any, rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Policy, reward model (or the reward function that takes its place), and a value model with LoRA and a head."""
    by_function = "reward" in settings
    folder = files / ("model" if by_function else "reward_model")
    value = classifier(folder, tokenizer, settings, from_zero=by_function)
    peft.inject_adapter_in_model(LoraConfig(**LORA, exclude_modules=["score"]), value)
    for name, parameter in value.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score"))
    if by_function:
        scores = ScoredText(tokenizer, {row["prompt"]: row["answer"] for row in rows}, settings["reward"])
    else:
        scores = classifier(folder, tokenizer, settings, from_zero=False)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    policy = AutoModelForCausalLM.from_pretrained(files / "model", dtype=dtype)
    return {"model": policy, "ref_model": None, "reward_model": scores, "value_model": value}


def rollout_of(groups: list[dict[str, Any]], tokenizer: Any) -> Callable[..., dict[str, Any]]:
    """Return a rollout function for GRPO: the next completions of each prompt in `groups` instead of samples."""
    completions = {group["prompt"]: cycle(group["completions"]) for group in groups}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts],
            "completion_ids": [next(completions[prompt]) for prompt in prompts],
            "logprobs": None,
        }

    return rollout


def make_trainer(settings: dict[str, Any], trainer: Any, config: Any) -> Any:
    files, method = Path(settings["files"]), settings["method"]
    # Its file alone: AutoTokenizer reads any tokenizer beside Qwen2 as Qwen's own BPE.
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(files / "model", padding_side="left")
    tokenizer.pad_token = settings.get("pad") or tokenizer.pad_token
    rows = read_rows(files / settings["rows"])
    given = {**arguments(settings), **settings["config"]}
    kwargs: dict[str, Any] = {"processing_class": tokenizer, "peft_config": LoraConfig(**LORA, task_type="CAUSAL_LM")}
    if method == "ppo":
        kwargs |= ppo_models(files, tokenizer, rows, settings)
        rows = [{"input_ids": tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]} for row in rows]
    elif method == "reward":
        kwargs["model"] = classifier(files / "model", tokenizer, settings, from_zero=True)
        kwargs["peft_config"] = LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"])
    else:
        kwargs["model"], given["model_init_kwargs"] = str(files / "model"), model_options(settings)
    if method == "grpo":
        kwargs["reward_funcs"] = getattr(rewards, settings["reward"])
    if "given" in settings:
        kwargs["rollout_func"] = rollout_of(read_rows(files / settings["given"]), tokenizer)
    if "held_out" in settings:
        kwargs["eval_dataset"] = Dataset.from_list(read_rows(files / settings["held_out"])[: settings["eval_prompts"]])
    made = trainer(args=config(**given), train_dataset=Dataset.from_list(rows), **kwargs)
    if "start" in settings:
        weights = load_file(Path(settings["start"]) / "adapter_model.safetensors")
        if method == "reward":
            weights["base_model.model.score.weight"] = torch.zeros(1, made.model.config.hidden_size)
        peft.set_peft_model_state_dict(made.model, weights)
    return made


# ---- what is measured ----


class Watched(transformers.TrainerCallback):
    """Tell a stopwatch when a step (a rollout and what is learnt from it) is over; write the LoRA gradients of one
    optimizer step to the file `gradients`, where one is given, by their names in the base model.
    """

    def __init__(self, steps: measuring.Steps, gradients: str | None) -> None:
        self.steps, self.gradients = steps, gradients

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.end()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.gradients is not None and state.global_step + 1 == CHECKED_STEP:
            named = kwargs["model"].named_parameters()
            found = {n.removeprefix("base_model.model."): p.grad for n, p in named if "lora_" in n}
            save_file({name: grad for name, grad in found.items() if grad is not None}, self.gradients)


def watch(trainer: Any, method: str, steps: measuring.Steps) -> None:
    """Time the phases of TRL's loop, and count the sampled tokens: in PPO up to the first EOS of each row."""
    if method == "grpo":
        generate = trainer._generate_single_turn

        def counted(*args: Any, **kwargs: Any) -> Any:
            with steps.phase("generate"):
                result = generate(*args, **kwargs)
            steps.sampled(sum(len(ids) for ids in result[0]))
            return result

        trainer._generate_single_turn = counted
        reference = "_get_per_token_logps_and_entropies"
        steps.wrap(trainer, reference, lambda *_: None if torch.is_grad_enabled() else "reference")
        steps.wrap(trainer, "compute_loss", lambda *_: "loss forward")
    else:
        from trl.experimental.ppo import ppo_trainer  # pyright: ignore[reportMissingImports]

        batch_generation, eos = ppo_trainer.batch_generation, trainer.processing_class.eos_token_id

        def counted_batch(model: Any, queries: Tensor, *args: Any) -> Any:
            with steps.phase("generate"):
                result = batch_generation(model, queries, *args)
            ended = result[0][:, queries.shape[1] :] == eos
            steps.sampled(int((ended.cumsum(1) - ended.int() == 0).sum()))
            return result

        ppo_trainer.batch_generation = counted_batch
        steps.wrap(ppo_trainer, "forward", lambda *_: "train forward" if torch.is_grad_enabled() else "reference")
        steps.wrap(ppo_trainer, "get_reward", lambda model, *_: "reward" if model is trainer.reward_model else "values")
    steps.wrap(trainer.accelerator, "backward", lambda *_: "backward")


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    method = settings["method"]
    trainer_class, config = classes(method)
    imports, steps, losses = measuring.resident_mb(), measuring.Steps(), list[float]()
    torch.set_num_threads(settings["threads"])
    trainer = make_trainer(settings, trainer_class, config)
    if method in ("grpo", "ppo"):
        watch(trainer, method, steps)
    elif "gradients" in settings:
        compute, share = trainer.compute_loss, settings["micro_batch"] / settings["samples"]

        def counted(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss) * share)
            return loss

        trainer.compute_loss = counted
    trainer.add_callback(Watched(steps, settings.get("gradients")))
    trainer.train()
    peak, adapter = measuring.peak_mb(), Path(settings["folder"]) / "adapter"
    if method == "ppo":
        trainer.accelerator.unwrap_model(trainer.model).policy.save_pretrained(str(adapter))
    else:
        trainer.save_model(str(adapter))
    parts = settings["samples"] // settings["micro_batch"]
    found = trainer.evaluate() if "held_out" in settings and method in ("reward", "dpo") else {}
    return {
        **steps.result(),
        "losses": [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)],
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        "held_out": {short: found[name] for name, short in HELD_OUT.items() if name in found},
        "adapter": str(adapter),
        "imports_mb": imports,
        "peak_mb": peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else peak / 1e3,
    }


if __name__ == "__main__":
    measuring.serve(measure)
