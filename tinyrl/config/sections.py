"""Sections of the configuration that are not one method's own: model, data, rewards, sampling, optimizer, run.

Types are strict: 1 is not true, "3" is not 3 and true is not a number, so a wrong type is never taken for something
else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from tinyrl.text import is_address

LARGEST = 1_000_000  # of a coefficient, clip, cap or penalty: more is a slip, and overflows in float32 sooner or later

Positive = Annotated[int, Field(ge=1)]
NumPrompts = Annotated[int, Field(ge=1, le=1_000_000)]  # more would be minutes of counting, and no memory
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Weight = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=10**18)]
Temperature = Annotated[float, Field(ge=0.01, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
AutoOrCount = Literal["auto"] | Positive
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Modules = Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)]
CriticKind = Literal["adapter", "shared", "shared-detached", "separate"]
Variables = dict[str, bool | int | float | str | None]
Truncated = Literal["keep", "mask", "penalize"]
Engine = Literal["auto", "fused", "hf-merged", "hf", "server"]
Schedule = Literal["constant", "linear", "cosine"]

EMBEDDED = {  # models by name; tinyrl/starter has their weights
    "starter": "model", "starter-reward": "reward_model", "starter-teacher": "teacher", "lookup": "lookup_model"
}  # fmt: skip
BUILT_IN_ENVIRONMENTS = ("search", "python")
URL_SETTINGS = (("generation", "url"), ("environment", "corpus"))  # shown and kept without what is secret in a URL


def starter_path(name: str) -> Path | None:
    """The folder of the embedded model called `name`, one of EMBEDDED; None for every other name."""
    return Path(__file__).parents[1] / "starter" / EMBEDDED[name] if name in EMBEDDED else None


class Section(BaseModel):
    """A group of fields; a field it does not know is an error, and so are NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class ModelConfig(Section):
    path: Text = Field(default="starter", description="folder with safetensors, hub name, or embedded: starter, lookup")
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub model; null: the newest")
    dtype: Dtype = Field(default="auto", description="of weights and autocast; auto: float32, on a GPU bfloat16")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    quantization: Literal["4bit"] | None = Field(default=None, description="hold the frozen base in 4 bits; needs LoRA")
    adapter: Text | None = Field(default=None, description="LoRA adapter to start from; a frozen copy is the reference")
    random_init: bool = Field(default=False, description="draw the weights from run.seed: a model trained from nothing")


class LoraSection(Section):
    enabled: bool = Field(default=True, description="train low-rank adapters; false: train every weight")
    r: Annotated[int, Field(ge=1, le=16_384)] = Field(default=16, description="rank of the adapters")
    alpha: PositiveFloat = Field(default=32, description="scale: an adapter's output is multiplied by alpha / r")
    dropout: Dropout = Field(default=0.0, description="in the adapters; only sft, reward and dpo allow it")
    target_modules: Modules = Field(default="all-linear", description="modules that get an adapter")


class ReferenceConfig(Section):
    kind: Literal["auto", "none"] = Field(default="auto", description="auto: the policy at the start, frozen")


class CriticConfig(Section):
    kind: CriticKind | None = Field(default=None, description="null: as at critic.path, or by lora.enabled")
    path: Text | None = Field(default=None, description="a ppo or reward run, or a model; null: model.path")
    warmup: NonNegative = Field(default=1, description="first steps, which train only the critic")


class TeacherConfig(Section):
    path: Text | None = Field(default=None, description="a run, adapter or model, a server, self, or start")
    hint: Text | None = Field(
        default=None, description="extra text shown to the teacher only, such as 'Answer: {answer}'"
    )
    divergence: Share = Field(default=1.0, description="0: forward KL, 1: reverse KL, between: Jensen-Shannon")
    top_k: Positive | None = Field(
        default=None, description="distil on its top-k tokens and one bucket for the rest; null: full vocabulary"
    )
    coef: NonNegativeFloat = Field(default=0.0, description="of the distance to it, in the loss of grpo and ppo")
    quantization: Literal["4bit", "8bit"] | None = Field(default=None, description="hold its own model in few bits")

    @property
    def kind(self) -> str:
        """What `path` names: none, self, start, server, adapter or model."""
        if self.path is None or self.path in ("self", "start"):
            return self.path or "none"
        if is_address(self.path):
            return "server"
        folder = starter_path(self.path) or Path(self.path).expanduser()
        return "adapter" if os.path.isfile(folder / "adapter_config.json") else "model"


class TaskConfig(Section):
    name: Text | None = Field(default=None, description="a task of `tinyrl list tasks`; null: `rows`, your own rows")
    data: Text | None = Field(default=None, description="rows: a file, save_to_disk folder, or owner/name:config@split")
    eval_data: Text | None = Field(default=None, description="held-out rows; null: a tenth of the prompts of task.data")
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub data set; null: the newest")
    columns: dict[str, str] = Field(default_factory=dict, description="columns to rename, as {new: old}")
    system_prompt: str | None = Field(default=None, description="put before every prompt; replaces the data's own")
    max_samples: Positive | None = Field(default=None, description="use at most so many rows of each split")
    chat: Literal["auto"] | bool = Field(default="auto", description="use the chat template; auto: where there is one")
    chat_template: Variables = Field(default_factory=dict, description="its variables: {enable_thinking: false}")
    long_prompts: Literal["error", "drop"] = Field(default="error", description="prompts, or texts, that are too long")
    sampler: Literal["uniform", "difficulty"] = Field(
        default="uniform", description="prompts in epochs; difficulty: those whose pass rate is near a half more often"
    )
    solved_reward: Weight = Field(
        default=1.0, description="reward from which a prompt is solved, for sampler and teacher.hint"
    )
    grading: Literal["task", "math"] = Field(default="task", description="the verifier; math: formulas, by math-verify")


class RewardFunctionConfig(Section):
    use: Text = Field(description="FILE.py:FUNCTION, or judge")
    weight: Weight = Field(default=1.0, description="weight of its score in the sum")
    url: Text | None = Field(default=None, description="of judge: an OpenAI endpoint, such as http://127.0.0.1:8000/v1")
    model: Text | None = Field(default=None, description="of judge: its name there")
    rubric: Text | None = Field(default=None, description="of judge: a text file; {column} stands for the row's own")
    mode: Literal["score", "rank"] = Field(default="score", description="each answer alone, or a group in order")
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(
        default=[0.0, 10.0], description="worst and best score of mode=score; the reward is 0 to 1"
    )
    key_env: Text | None = Field(default=None, description="environment variable with the endpoint's key")
    max_tokens: Positive = Field(default=1024, description="of a judge's reply")
    at_once: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="requests under way at a time")
    cache: Text | None = Field(default=None, description="file of replies; null: ~/.cache/tinyrl/judge.sqlite")
    most_requests: Positive | None = Field(default=None, description="refuse a run that might ask more often")
    allow_weak: bool = Field(default=False, description="train although it does not tell gold answers from others")

    @property
    def is_judge(self) -> bool:
        return self.use == "judge"

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = whole(self)
        return values if self.is_judge else {"use": self.use, "weight": self.weight}

    @model_validator(mode="after")
    def _judge_is_whole(self) -> Self:
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        given = [name for name in given if name not in ("use", "weight")]
        if not self.is_judge and given:
            raise ValueError(f"{', '.join(given)}: only use=judge has this")
        missing = [name for name in ("url", "model", "rubric") if self.is_judge and getattr(self, name) is None]
        if missing:
            raise ValueError(f"use=judge needs {', '.join(missing)}")
        if self.url is not None and (not is_address(self.url) or "@" in self.url or "?" in self.url):
            raise ValueError("url: an http address without a password; its key is in the environment: key_env")
        if self.scale[0] >= self.scale[1]:
            raise ValueError("scale: the worst score, then the best")
        return self


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(default_factory=list, description="in place of the task's verifier")
    model: Text | None = Field(default=None, description="a classifier, or an adapter of `tinyrl train reward`")
    model_label: int | str | None = Field(default=None, description="index or name of the label whose score counts")
    timeout_s: PositiveFloat = Field(default=60.0, description="seconds a call of the reward functions may take")
    truncated: Truncated = Field(
        default="keep", description="cut-off completions: keep them, leave them out of the loss, or subtract 1"
    )
    overlong_tokens: NonNegative = Field(default=0, description="DAPO's soft penalty over the last N tokens; 0: none")

    @property
    def is_verifier(self) -> bool:
        """Whether the reward is the task's verifier: it is where nothing else is named."""
        return not self.functions and self.model is None


class EnvironmentConfig(Section):
    use: Text | None = Field(
        default=None, description="environment of episodes: search, python, FILE.py:NAME; null: the task's own"
    )
    tools: list[Text] = Field(default_factory=list, description="FILE.py:FUNCTION of tools that the model may call")
    agent: Text | Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None, description="plays episodes by URL: FILE.py:FUNCTION, or the words of a command"
    )
    at_once: Annotated[int, Field(ge=1, le=1024)] = Field(default=8, description="agents that play at a time")
    max_turns: Annotated[int, Field(ge=1, le=1000)] = Field(default=4, description="turns of the policy in an episode")
    max_observation_tokens: Positive = Field(default=256, description="an answer is cut after so many tokens")
    timeout_s: PositiveFloat | None = Field(default=None, description="of a call, cell, agent; null: 30, 5, 300")
    corpus: Text | None = Field(default=None, description="of search: a .jsonl or .parquet file, or a server's URL")
    top_k: Annotated[int, Field(ge=1, le=100)] = Field(default=3, description="passages that a search gives")

    @property
    def seconds(self) -> float:
        return self.timeout_s or (300.0 if self.agent is not None else 5.0 if self.use == "python" else 30.0)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The fields that name people's code, each with what it names."""
        own = [("environment.use", self.use)] if self.use and self.use not in BUILT_IN_ENVIRONMENTS else []
        agent = [("environment.agent", self.agent)] if isinstance(self.agent, str) else []
        return [*own, *(("environment.tools", use) for use in self.tools), *agent]


class GenerationConfig(Section):
    max_new_tokens: Positive = Field(default=256, description="longest completion, in tokens of the policy's own")
    max_prompt_tokens: Positive = Field(default=1024, description="longest prompt")
    temperature: Temperature = Field(default=1.0, description="of sampling, and of all log-probabilities")
    top_p: TopP = Field(default=1.0, description="sample from the likeliest tokens of this total probability; 1: all")
    top_k: NonNegative = Field(default=0, description="sample from the k likeliest tokens; 0: all")
    stop: list[Text] = Field(default_factory=list, description="texts that end a completion")
    engine: Engine = Field(default="auto", description="tinyrl's decoder, the library's modules, or a server")
    url: Text | None = Field(default=None, description="of engine=server: vLLM on this machine, http://127.0.0.1:8000")
    server_sleep: bool = Field(default=False, description="a server on the same GPU, which sleeps unless it samples")
    max_rows: Positive | None = Field(default=None, description="completions decoded at a time; null: all")


class OptimConfig(Section):
    optimizer: Literal["adamw", "adamw8bit"] = Field(default="adamw", description="AdamW, with 32- or 8-bit state")
    learning_rate: LearningRate | None = Field(default=None, description="of the policy; null: LoRA 5e-5, full 1e-6")
    critic_learning_rate: LearningRate | None = Field(default=None, description="null: LoRA 1e-4, full 1e-5")
    schedule: Schedule = Field(default="constant", description="of the rates, after the warm-up")
    warmup_steps: NonNegative = Field(default=0, description="steps over which the rates rise from 0")
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(default=0.0, description="decoupled weight decay")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="gradients of each role are scaled down to this norm")


class RunConfig(Section):
    num_steps: Positive = Field(default=200, description="steps of the run: rollout and update, or one batch")
    seed: Seed = Field(default=0, description="of all random numbers")
    micro_batch_tokens: AutoOrCount = Field(default="auto", description="of a forward-backward pass; auto: by memory")
    eval_every: NonNegative = Field(default=25, description="evaluate every N steps; always first and last")
    eval_prompts: NonNegative = Field(default=64, description="held-out prompts an evaluation takes; 0: no evaluation")
    save_every: NonNegative = Field(default=25, description="save every N steps; always last")
    keep_checkpoints: Positive = Field(default=3, description="newest checkpoints that are kept, beside the best")
    deterministic: bool = Field(default=False, description="deterministic kernels on a GPU, at a cost in speed")
    threads: AutoOrCount = Field(default="auto", description="CPU threads; auto: by the model's width and the cores")
    trackers: list[Text] = Field(default_factory=list, description="tensorboard, trackio, wandb, mlflow ...")
    forked_from: Text | None = Field(default=None, description="RUN@STEP of `tinyrl train --from`, which writes it")
